//! `snapshot`: freezes one or several volumes at one instant.

use anyhow::Result;
use clap::Args;

use crate::address::{Address, same_pool};
use crate::cli::Global;
use crate::output::print_json;
use crate::record::VolumeRecord;
use crate::session::{Access, Session, now, with_pool};

/// Take snapshots, all of them at one instant or none
#[derive(Args)]
pub struct SnapshotArgs {
    /// The new snapshots
    #[arg(required = true, value_name = "POOL/VOLUME@SNAPSHOT")]
    addresses: Vec<String>,
}

/// Takes all the snapshots or none.
pub fn run(args: SnapshotArgs, global: &Global) -> Result<()> {
    let addresses: Vec<Address> = args.addresses.iter().map(|text| global.snapshot(text)).collect::<Result<_>>()?;
    let pool = same_pool(&addresses)?;
    let made = with_pool(&pool, Access::Write, |session| take(session, addresses))?;
    if global.output.json() { print_json(&made) } else { Ok(()) }
}

async fn take(session: Session, addresses: Vec<Address>) -> Result<Vec<VolumeRecord>> {
    let sources: Vec<(&str, &str)> =
        addresses.iter().filter_map(|address| Some((address.volume(), address.snapshot()?))).collect();
    let made = session.pool.snapshot(&sources, now()).await?;
    Ok(made.iter().map(VolumeRecord::from).collect())
}
