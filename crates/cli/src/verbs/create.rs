//! `create`: makes empty volumes.

use anyhow::Result;
use clap::Args;
use forkdisk::CreateOptions;

use crate::address::{Address, same_pool};
use crate::cli::Global;
use crate::output::print_json;
use crate::record::VolumeRecord;
use crate::session::{Access, Session, now, with_pool};
use crate::size;

/// Make an empty volume
#[derive(Args)]
pub struct CreateArgs {
    /// The new volumes
    #[arg(required = true, value_name = "POOL/VOLUME")]
    addresses: Vec<String>,

    /// Size of each; it takes no space until it is written
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,

    #[command(flatten)]
    chunk: ChunkArg,
}

/// How much room a first write reserves.
#[derive(Args, Clone, Copy)]
pub struct ChunkArg {
    /// How much room a first write reserves, 4K to 64M, a power of two [default: 64K]
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    chunk: Option<u64>,
}

impl ChunkArg {
    /// What to create a volume of `size` bytes with.
    pub fn options(&self, size: u64) -> CreateOptions {
        let mut options = CreateOptions::new(size, now());
        if let Some(chunk) = self.chunk {
            options.chunk = chunk;
        }
        options
    }
}

/// Makes all of them, or none.
pub fn run(args: CreateArgs, global: &Global) -> Result<()> {
    let addresses: Vec<Address> = args.addresses.iter().map(|text| global.volume(text)).collect::<Result<_>>()?;
    let pool = same_pool(&addresses)?;
    let options = args.chunk.options(args.size);
    let made = with_pool(&pool, Access::Write, |session| create_all(session, addresses, options))?;
    if global.output.json() { print_json(&made) } else { Ok(()) }
}

async fn create_all(session: Session, addresses: Vec<Address>, options: CreateOptions) -> Result<Vec<VolumeRecord>> {
    let mut made = Vec::new();
    for address in &addresses {
        match session.pool.create(&address.name, &options).await {
            Ok(info) => made.push(info),
            Err(error) => {
                let names: Vec<&str> = made.iter().map(|info| info.name.as_str()).collect();
                if !names.is_empty() {
                    session.pool.delete(&names).await?;
                }
                return Err(anyhow::Error::from(error).context(address.show()));
            }
        }
    }
    Ok(made.iter().map(VolumeRecord::from).collect())
}
