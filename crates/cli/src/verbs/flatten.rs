//! `flatten`: makes a clone of an origin's snapshot independent of it.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{Flattening, params};

use crate::global::Global;
use crate::output::{print_json, print_line};
use crate::session::{Access, call};
use crate::size::human;
use crate::verbs::examples::examples;

/// Make a clone of an origin's snapshot independent of it
///
/// Such a clone shows the snapshot wherever it was not written, and holds it. Everything that shows through,
/// except zeroes, is copied into the pool; then the snapshot can be deleted, and the origin unprotected.
/// Clients can continue meanwhile. If there is no space, the clone stays dependent, and what was copied need
/// not be copied again. Snapshots and clones made of the clone before that still hold the snapshot.
#[derive(Args)]
#[command(after_help = examples!["forkdisk flatten /srv/pool.img/copy"])]
pub struct FlattenArgs {
    #[arg(value_name = "POOL/VOLUME")]
    volume: String,
}

/// Copies what shows through and prints how much that was.
pub fn run(args: FlattenArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.volume)?;
    let done = call(global, &address.pool, Access::Write, params::Flatten { volume: address.name })?;
    if global.output.json() {
        return print_json(&done);
    }
    print_line(&told(&done))
}

fn told(done: &Flattening) -> String {
    format!("{}: {} copied, depends on no origin any more", done.name, human(done.copied))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_of_it_is_one_line() {
        let done = Flattening { name: "test".into(), referenced: 4 << 20, copied: 3 << 20 };
        assert_eq!(told(&done), "test: 3M copied, depends on no origin any more");
    }
}
