//! `rollback`: gives a volume the contents of one of its snapshots.

use anyhow::{Result, bail};
use clap::Args;

use crate::cli::Global;
use crate::output::print_json;
use crate::record::VolumeRecord;
use crate::session::{Access, settle, with_pool};

/// Give a volume the contents of one of its snapshots; newer snapshots stay
#[derive(Args)]
pub struct RollbackArgs {
    /// The snapshot to go back to
    #[arg(value_name = "POOL/VOLUME@SNAPSHOT")]
    address: String,
}

/// Rolls back; what the volume held since is lost unless a snapshot holds it.
pub fn run(args: RollbackArgs, global: &Global) -> Result<()> {
    let address = global.snapshot(&args.address)?;
    let pool = address.pool.clone();
    let info = with_pool(&pool, Access::Write, |session| async move {
        let Some(snapshot) = address.snapshot() else { bail!("{} is not a snapshot", address.show()) };
        session.pool.rollback(address.volume(), snapshot).await?;
        settle(&session).await?;
        Ok(session.pool.find(address.volume())?)
    })?;
    if global.output.json() { print_json(&VolumeRecord::from(&info)) } else { Ok(()) }
}
