//! `rename`: gives a volume or snapshot another name.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::address::same_pool;
use crate::cli::Global;
use crate::output::print_if_json;
use crate::session::{Access, call};

/// Give a volume or snapshot another name
///
/// The snapshots of a volume go with it. Clients of a served volume keep their connections; new ones ask for it by its
/// new name.
#[derive(Args)]
pub struct RenameArgs {
    /// What to rename
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    from: String,

    /// Its new address, in the same pool
    #[arg(value_name = "POOL/NEW-NAME[@SNAPSHOT]")]
    to: String,
}

/// Renames; the snapshots of a volume go with it.
pub fn run(args: RenameArgs, global: &Global) -> Result<()> {
    let addresses = [global.object(&args.from)?, global.object(&args.to)?];
    let pool = same_pool(&addresses)?;
    let [from, to] = addresses.map(|address| address.name);
    print_if_json(global, &call(global, &pool, Access::Write, params::Rename { from, to })?)
}
