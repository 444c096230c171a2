//! `grow`: makes a pool larger.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::cli::Global;
use crate::output::print_json;
use crate::session::{Access, with_pool};
use crate::size::{self, human};
use crate::verbs::stats::PoolRecord;

/// Make a pool larger
#[derive(Args)]
pub struct GrowArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Its new size; a pool file is lengthened
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,
}

/// Grows the pool; a smaller size is refused.
pub fn run(args: GrowArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let info = with_pool(&path, Access::Write, |session| async move {
        let old = session.pool.info().size;
        if args.size < old {
            bail!("the pool has {} ({old} bytes) already: it can only grow", human(old));
        }
        session.pool.grow(args.size).await?;
        Ok(session.pool.info())
    })?;
    if global.output.json() { print_json(&PoolRecord::from(&info)) } else { Ok(()) }
}
