//! `create`: creates empty volumes.

use anyhow::Result;
use clap::Args;
use forkdisk::GatherPolicy;
use forkdisk_control::params;

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::session::{Access, with_pool};
use crate::size;
use crate::verbs::examples::examples;
use crate::verbs::lifetime::{LeaseArg, NewVolumeArgs, created_by, make};

/// Create an empty volume
#[derive(Args)]
#[command(after_help = examples!["forkdisk create /srv/pool.img/vm1 --size 20G"])]
pub struct CreateArgs {
    #[arg(required = true, value_name = "POOL/VOLUME")]
    volumes: Vec<String>,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,

    #[command(flatten)]
    chunk: ChunkArg,

    #[arg(long = "break", value_name = "POLICY", value_parser = ["split", "copy"])]
    break_policy: Option<String>,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    quota: Option<u64>,

    #[arg(long, value_name = "POLICY")]
    gather: Option<GatherPolicy>,

    #[command(flatten)]
    new: NewVolumeArgs,

    #[command(flatten)]
    lease: LeaseArg,
}

/// Size that a first write reserves.
#[derive(Args, Clone, Copy)]
pub struct ChunkArg {
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    pub chunk: Option<u64>,
}

/// Creates all volumes, or none.
pub fn run(args: CreateArgs, global: &Global) -> Result<()> {
    let addresses = args.volumes.iter().map(|text| global.volume(text)).collect::<Result<Vec<_>>>()?;
    let pool = same_pool(&addresses)?;
    let (expires, labels, [diverge, reserve]) = args.new.given();
    let method = params::Create {
        volumes: names(addresses),
        size: args.size,
        chunk: args.chunk.chunk,
        break_policy: args.break_policy,
        quota: args.quota,
        gather: args.gather.map(|policy| policy.to_string()),
        diverge,
        reserve,
        expires,
        labels,
        lease: args.lease.lease.clone(),
        created_by: created_by(),
    };
    let show = |made: &_| global.print_if_json(made);
    with_pool(global, &pool, Access::Write, async |caller| make(caller, method, &args.lease, show).await)
}
