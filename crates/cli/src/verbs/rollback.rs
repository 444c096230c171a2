//! `rollback`: gives a volume the contents of one of its snapshots.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::session::{Access, call};
use crate::verbs::examples::examples;

/// Give a volume the contents and the size of one of its snapshots, or of any other volume; its snapshots stay
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk rollback /srv/pool.img/vm1@monday",
    "forkdisk rollback -r /srv/pool.img/team@monday",
    "forkdisk rollback --live /srv/pool.img/vm1@clean",
    "forkdisk rollback -r --live /srv/pool.img/team@monday",
    "forkdisk rollback /srv/pool.img/vm2 --to /srv/pool.img/base@v2",
])]
pub struct RollbackArgs {
    /// The snapshot to go back to, as `volume@snapshot`; the volume, with --to or --to-origin
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    object: String,

    /// Take contents and size of any other volume or snapshot; the volume's name, properties and snapshots stay
    #[arg(long, value_name = "POOL/SOURCE[@SNAPSHOT]", conflicts_with_all = ["recursive", "to_origin"])]
    to: Option<String>,

    /// Take those of the snapshot that the volume was cloned from
    #[arg(long, conflicts_with = "recursive")]
    to_origin: bool,

    /// Roll back all volumes in a folder that have the snapshot, named as `folder@snapshot`: all of them or none
    #[arg(short, long)]
    recursive: bool,

    #[arg(long)]
    force: bool,

    #[arg(long, conflicts_with = "force")]
    live: bool,
}

/// Rolls back; changes since the snapshot are lost unless another snapshot holds them.
pub fn run(args: RollbackArgs, global: &Global) -> Result<()> {
    if args.to.is_some() || args.to_origin {
        return to_another(args, global);
    }
    let address = global.snapshot(&args.object)?;
    if args.recursive {
        let method = params::RollbackFolder { snapshot: address.name, force: args.force, live: args.live };
        let records = call(global, &address.pool, Access::Write, method)?;
        if let Some(why) = records.first().and_then(|record| record.waits.as_ref()) {
            tracing::warn!("{why}");
        }
        return global.print_if_json(&records);
    }
    let method = params::Rollback { snapshot: address.name, force: args.force, live: args.live };
    let record = call(global, &address.pool, Access::Write, method)?;
    if let Some(why) = &record.waits {
        tracing::warn!("{why}");
    }
    global.print_if_json(&record)
}

fn to_another(args: RollbackArgs, global: &Global) -> Result<()> {
    let mut addresses = vec![global.volume(&args.object)?];
    if let Some(to) = &args.to {
        addresses.push(global.object(to)?);
    }
    let pool = same_pool(&addresses)?;
    let mut names = names(addresses).into_iter();
    let (volume, to) = (names.next().unwrap_or_default(), names.next());
    let method = params::RollbackTo { volume, to, force: args.force, live: args.live };
    let record = call(global, &pool, Access::Write, method)?;
    if let Some(why) = &record.waits {
        tracing::warn!("{why}");
    }
    global.print_if_json(&record)
}
