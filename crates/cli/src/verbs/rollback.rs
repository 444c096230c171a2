//! `rollback`: gives a volume the contents of one of its snapshots.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::global::Global;
use crate::session::{Access, call};
use crate::verbs::examples::examples;

/// Give a volume the contents and the size of one of its snapshots; newer snapshots stay
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk rollback /srv/pool.img/vm1@monday",
    "forkdisk rollback -r /srv/pool.img/team@monday",
])]
pub struct RollbackArgs {
    #[arg(value_name = "POOL/VOLUME@SNAPSHOT")]
    snapshot: String,

    /// Roll back all volumes in a folder that have the snapshot, named as `folder@snapshot`: all of them or none
    #[arg(short, long)]
    recursive: bool,

    #[arg(long)]
    force: bool,
}

/// Rolls back; changes since the snapshot are lost unless another snapshot holds them.
pub fn run(args: RollbackArgs, global: &Global) -> Result<()> {
    let address = global.snapshot(&args.snapshot)?;
    if args.recursive {
        let method = params::RollbackFolder { snapshot: address.name, force: args.force };
        let records = call(global, &address.pool, Access::Write, method)?;
        if let Some(why) = records.first().and_then(|record| record.waits.as_ref()) {
            tracing::warn!("{why}");
        }
        return global.print_if_json(&records);
    }
    let method = params::Rollback { snapshot: address.name, force: args.force };
    let record = call(global, &address.pool, Access::Write, method)?;
    if let Some(why) = &record.waits {
        tracing::warn!("{why}");
    }
    global.print_if_json(&record)
}
