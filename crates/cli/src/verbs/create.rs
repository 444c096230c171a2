//! `create`: creates empty volumes.

use anyhow::Result;
use clap::Args;
use forkdisk::GatherPolicy;
use forkdisk_control::params;

use crate::address::{names, same_pool};
use crate::cli::Global;
use crate::output::print_if_json;
use crate::session::{Access, call};
use crate::size;

/// Create an empty volume
#[derive(Args)]
pub struct CreateArgs {
    /// The new volumes
    #[arg(required = true, value_name = "POOL/VOLUME")]
    addresses: Vec<String>,

    /// Size of each volume; takes no space until it is written
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,

    #[command(flatten)]
    chunk: ChunkArg,

    /// What a first write to a shared chunk does: split (only the written pages move) or copy (the
    /// whole chunk moves to a new place in one piece) [default: split]
    #[arg(long = "break", value_name = "POLICY", value_parser = ["split", "copy"])]
    break_policy: Option<String>,

    /// Most bytes that each may have mapped, exclusive and shared; a write beyond it fails with
    /// ENOSPC [default: no limit]
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    quota: Option<u64>,

    /// When scattered pages are gathered in the background: off; auto (while the volume is idle, as
    /// long as few pages have to move); idle (while the volume is idle); or a percentage such as
    /// 20% (while the fragmentation is above it) [default: auto]
    #[arg(long, value_name = "POLICY")]
    gather: Option<GatherPolicy>,
}

/// Size that a first write reserves.
#[derive(Args, Clone, Copy)]
pub struct ChunkArg {
    /// Bytes that a first write reserves around itself, 4K to 64M, a power of two [default: 64K]
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    pub chunk: Option<u64>,
}

/// Creates all volumes, or none.
pub fn run(args: CreateArgs, global: &Global) -> Result<()> {
    let addresses = args.addresses.iter().map(|text| global.volume(text)).collect::<Result<Vec<_>>>()?;
    let pool = same_pool(&addresses)?;
    let method = params::Create {
        volumes: names(addresses),
        size: args.size,
        chunk: args.chunk.chunk,
        break_policy: args.break_policy,
        quota: args.quota,
        gather: args.gather.map(|policy| policy.to_string()),
    };
    print_if_json(global, &call(global, &pool, Access::Write, method)?)
}
