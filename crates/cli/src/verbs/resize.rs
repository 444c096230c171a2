//! `resize`: changes how long a volume is.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::cli::Global;
use crate::output::print_if_json;
use crate::session::{Access, call};
use crate::size;

/// Change the size of a volume
///
/// Clients of a served volume can use its new size at once; most ask for it only when they connect again.
#[derive(Args)]
pub struct ResizeArgs {
    /// The volume
    #[arg(value_name = "POOL/VOLUME")]
    address: String,

    /// Its new size; what is added reads as zeroes
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,

    /// Allow a smaller size: what lies beyond it is lost
    #[arg(long)]
    allow_shrink: bool,

    /// Make a volume smaller although clients use it: what they do beyond its end fails
    #[arg(long)]
    force: bool,
}

/// Resizes; shrinking only when the user said so.
pub fn run(args: ResizeArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.address)?;
    let ResizeArgs { size, allow_shrink, force, .. } = args;
    let method = params::Resize { volume: address.name, size, allow_shrink, force };
    print_if_json(global, &call(global, &address.pool, Access::Write, method)?)
}
