//! `grow`: enlarges a pool.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::global::Global;
use crate::session::{Access, call};
use crate::size;
use crate::verbs::examples::examples;

/// Enlarge a pool
#[derive(Args)]
#[command(after_help = examples!["forkdisk grow /srv/pool.img --size 200G"])]
pub struct GrowArgs {
    /// The pool
    pool: Option<PathBuf>,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,
}

/// Grows the pool; a smaller size is refused.
pub fn run(args: GrowArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    global.print_if_json(&call(global, &path, Access::Write, params::Grow { size: args.size })?)
}
