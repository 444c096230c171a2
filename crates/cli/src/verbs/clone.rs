//! `clone`: creates a writable volume from a volume or snapshot, in constant time for any size.

use anyhow::Result;
use clap::Args;
use forkdisk_control::params;

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::session::{Access, with_pool};
use crate::verbs::examples::examples;
use crate::verbs::lifetime::{LeaseArg, NewVolumeArgs, created_by, make};

/// Create writable clones that share everything with a volume or snapshot
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk clone /srv/pool.img/base@v1 /srv/pool.img/vm1 /srv/pool.img/vm2",
    "forkdisk clone -r /srv/pool.img/team@monday /srv/pool.img/test",
])]
pub struct CloneArgs {
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    source: String,

    #[arg(required = true, value_name = "POOL/VOLUME")]
    volumes: Vec<String>,

    #[arg(short, long)]
    recursive: bool,

    #[command(flatten)]
    new: NewVolumeArgs,

    #[command(flatten)]
    lease: LeaseArg,
}

/// Creates all clones, or none.
pub fn run(args: CloneArgs, global: &Global) -> Result<()> {
    let mut addresses = vec![global.object(&args.source)?];
    for volume in &args.volumes {
        addresses.push(global.volume(volume)?);
    }
    let pool = same_pool(&addresses)?;
    let source = addresses.remove(0).name;
    let (expires, labels, [diverge, reserve]) = args.new.given();
    let method = params::Clone {
        source,
        volumes: names(addresses),
        recursive: args.recursive,
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
