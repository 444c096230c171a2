//! `snapshot`: freezes one or several volumes at one instant.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::address::{names, same_pool};
use crate::cli::Global;
use crate::output::print_if_json;
use crate::session::{Access, call};

/// Take snapshots, all of them at one instant or none
#[derive(Args)]
pub struct SnapshotArgs {
    /// The new snapshots
    #[arg(required = true, value_name = "POOL/VOLUME@SNAPSHOT")]
    addresses: Vec<String>,

    /// Copies of their own instead of sharing those of other snapshots (origins only)
    #[arg(long)]
    independent: bool,

    /// They may be deleted when the pool is full and the origin's policy is drop-oldest
    #[arg(long)]
    droppable: bool,

    /// They can be written, and nobody else sees what is (origins only)
    #[arg(long)]
    writable: bool,
}

/// Takes all the snapshots or none.
pub fn run(args: SnapshotArgs, global: &Global) -> Result<()> {
    let addresses = args.addresses.iter().map(|text| global.snapshot(text)).collect::<Result<Vec<_>>>()?;
    let pool = same_pool(&addresses)?;
    let (independent, droppable, writable) = (args.independent, args.droppable, args.writable);
    let method = params::Snapshot { snapshots: names(addresses), independent, droppable, writable };
    print_if_json(global, &call(global, &pool, Access::Write, method)?)
}
