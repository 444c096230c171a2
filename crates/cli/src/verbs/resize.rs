//! `resize`: changes how long a volume is.

use anyhow::{Result, bail};
use clap::Args;

use crate::cli::Global;
use crate::output::print_json;
use crate::record::VolumeRecord;
use crate::session::{Access, settle, with_pool};
use crate::size::{self, human};

/// Change the size of a volume
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
}

/// Resizes; shrinking only when the user said so.
pub fn run(args: ResizeArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.address)?;
    let pool = address.pool.clone();
    let info = with_pool(&pool, Access::Write, |session| async move {
        let old = session.pool.find(&address.name)?.size;
        if args.size < old && !args.allow_shrink {
            bail!(
                "{} is {} ({old} bytes) long: cutting it down to {} loses what lies beyond; \
                 --allow-shrink does it",
                address.show(),
                human(old),
                human(args.size)
            );
        }
        session.pool.resize(&address.name, args.size).await?;
        settle(&session).await?;
        Ok(session.pool.find(&address.name)?)
    })?;
    if global.output.json() { print_json(&VolumeRecord::from(&info)) } else { Ok(()) }
}
