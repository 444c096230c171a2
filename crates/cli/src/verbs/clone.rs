//! `clone`: makes a writable volume out of a volume or snapshot, at once and whatever its size.

use anyhow::Result;
use clap::Args;

use crate::address::same_pool;
use crate::cli::Global;
use crate::output::print_json;
use crate::record::VolumeRecord;
use crate::session::{Access, now, with_pool};

/// Make writable volumes that share everything with a volume or snapshot
#[derive(Args)]
pub struct CloneArgs {
    /// What to clone
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    source: String,

    /// The new volumes
    #[arg(required = true, value_name = "POOL/VOLUME")]
    targets: Vec<String>,
}

/// Makes all the clones, or none.
pub fn run(args: CloneArgs, global: &Global) -> Result<()> {
    let mut addresses = vec![global.object(&args.source)?];
    for target in &args.targets {
        addresses.push(global.volume(target)?);
    }
    let pool = same_pool(&addresses)?;
    let made = with_pool(&pool, Access::Write, |session| async move {
        let source = &addresses[0];
        let mut made = Vec::new();
        for target in &addresses[1..] {
            match session.pool.clone_volume(&source.name, &target.name, now()).await {
                Ok(info) => made.push(info),
                Err(error) => {
                    let names: Vec<&str> = made.iter().map(|info| info.name.as_str()).collect();
                    if !names.is_empty() {
                        session.pool.delete(&names).await?;
                    }
                    return Err(anyhow::Error::from(error));
                }
            }
        }
        Ok(made.iter().map(VolumeRecord::from).collect::<Vec<_>>())
    })?;
    if global.output.json() { print_json(&made) } else { Ok(()) }
}
