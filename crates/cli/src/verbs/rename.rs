//! `rename`: gives a volume or snapshot another name.

use anyhow::{Result, bail};
use clap::Args;

use crate::address::same_pool;
use crate::cli::Global;
use crate::output::print_json;
use crate::record::VolumeRecord;
use crate::session::{Access, with_pool};

/// Give a volume or snapshot another name
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
    let [from, to] = addresses;
    let same_volume = from.snapshot().is_none() || from.volume() == to.volume();
    if from.snapshot().is_some() != to.snapshot().is_some() || !same_volume {
        bail!("{} cannot become {}: a volume stays a volume, a snapshot stays with its own", from.show(), to.show());
    }
    let info = with_pool(&pool, Access::Write, |session| async move {
        session.pool.rename(&from.name, &to.name).await?;
        Ok(session.pool.find(&to.name)?)
    })?;
    if global.output.json() { print_json(&VolumeRecord::from(&info)) } else { Ok(()) }
}
