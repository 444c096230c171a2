//! `rename`: renames a volume or snapshot.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::address::same_pool;
use crate::global::Global;
use crate::session::{Access, call};
use crate::verbs::examples::examples;

/// Rename a volume or snapshot
///
/// The snapshots of a volume keep their own names under its new one. Clients of a served volume
/// keep their connections; new connections use its new name.
#[derive(Args)]
#[command(after_help = examples!["forkdisk rename /srv/pool.img/vm1 /srv/pool.img/old/vm1"])]
pub struct RenameArgs {
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    from: String,

    #[arg(value_name = "POOL/NEW-NAME[@SNAPSHOT]")]
    to: String,
}

/// Renames a volume with its snapshots, or a snapshot.
pub fn run(args: RenameArgs, global: &Global) -> Result<()> {
    let addresses = [global.object(&args.from)?, global.object(&args.to)?];
    let pool = same_pool(&addresses)?;
    let [from, to] = addresses.map(|address| address.name);
    global.print_if_json(&call(global, &pool, Access::Write, params::Rename { from, to })?)
}
