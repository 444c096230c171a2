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
}

/// Takes all the snapshots or none.
pub fn run(args: SnapshotArgs, global: &Global) -> Result<()> {
    let addresses = args.addresses.iter().map(|text| global.snapshot(text)).collect::<Result<Vec<_>>>()?;
    let pool = same_pool(&addresses)?;
    let method = params::Snapshot { snapshots: names(addresses) };
    print_if_json(global, &call(global, &pool, Access::Write, method)?)
}
