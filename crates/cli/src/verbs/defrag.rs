//! `defrag`: gathers the scattered pages of a volume.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{Gathering, params};

use crate::global::Global;
use crate::output::{percent_of, print_json, print_line};
use crate::session::{Access, call};
use crate::size::human;
use crate::verbs::examples::examples;

/// Gather the scattered pages of a volume or snapshot
///
/// Pages written at different times lie in different places. They are moved, a MiB of the volume at a time, to
/// one contiguous place. Nothing is unshared: pages that snapshots and clones share are moved for all of them,
/// and stay if they are shared in another arrangement. Clients can continue meanwhile; the copier's throttles
/// limit the load (`forkdisk copier`). The property `gather` does the same in the background (`forkdisk set`).
#[derive(Args)]
#[command(after_help = examples!["forkdisk defrag /srv/pool.img/vm1"])]
pub struct DefragArgs {
    #[arg(value_name = "POOL/VOLUME")]
    object: String,
}

/// Gathers and prints the result.
pub fn run(args: DefragArgs, global: &Global) -> Result<()> {
    let address = global.object(&args.object)?;
    let done = call(global, &address.pool, Access::Write, params::Defrag { object: address.name })?;
    if global.output.json() {
        return print_json(&done);
    }
    print_line(&told(&done))
}

fn told(done: &Gathering) -> String {
    let (before, after) = (percent_of(done.before, done.referenced), percent_of(done.after, done.referenced));
    let left = match done.left {
        0 => String::new(),
        n => format!("; {n} MiB of it are scattered still"),
    };
    let stopped = match done.host_full {
        false => "",
        true => {
            "; the rest stays as it lies, since the file system under the pool has no room to move it: give it some"
        }
    };
    format!("{}: {} moved, fragmentation {before} before and {after} now{left}{stopped}", done.name, human(done.moved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_of_it_is_one_line() {
        let name = "vm1".to_string();
        let (before, after, moved) = (1 << 19, 4096, 3 << 20);
        let done = Gathering { name, referenced: 1 << 20, before, after, moved, left: 1, host_full: false };
        let line = "vm1: 3M moved, fragmentation 50.0% before and 0.4% now; 1 MiB of it are scattered still";
        assert_eq!(told(&done), line);
        assert!(
            told(&Gathering { host_full: true, ..done }).starts_with(&format!("{line}; the rest stays as it lies"))
        );
    }
}
