//! `swap`: exchanges the names of two volumes or folders.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::address::same_pool;
use crate::global::Global;
use crate::session::{Access, call};
use crate::verbs::examples::examples;

/// Exchange the names of two volumes or folders
///
/// Both change at one instant, also across a crash. Snapshots, and everything in a folder, go with their volumes.
/// Clients keep their connections to the volumes that they have; new connections use the new names.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk swap /srv/pool.img/prod /srv/pool.img/branches/tested",
])]
pub struct SwapArgs {
    #[arg(value_name = "POOL/VOLUME|FOLDER")]
    first: String,

    #[arg(value_name = "POOL/VOLUME|FOLDER")]
    second: String,
}

/// Exchanges both names.
pub fn run(args: SwapArgs, global: &Global) -> Result<()> {
    let addresses = [global.object(&args.first)?, global.object(&args.second)?];
    let pool = same_pool(&addresses)?;
    let [first, second] = addresses.map(|address| address.name);
    global.print_if_json(&call(global, &pool, Access::Write, params::Swap { first, second })?)
}
