//! The first steps: a pool in memory, a volume, a snapshot, a clone, and what each of them reads.
//!
//! `cargo run -p forkdisk --example first_pool`; the example `branch` of `forkdisk-uring` has a pool in a file.

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool, Result, Volume};

const POOL_BYTES: u64 = 16 << 20;
/// Larger than the pool: only what is written takes space.
const VOLUME_BYTES: u64 = 1 << 40;
/// Seconds since 1970; a program asks its clock.
const NOW_SECONDS: u64 = 1_700_000_000;

async fn write(volume: &Volume<MemoryDevice>, text: &str) -> Result<()> {
    volume.write(0, Buf::copy_of(text.as_bytes()), false).await.0
}

async fn read(pool: &Pool<MemoryDevice>, name: &str) -> Result<String> {
    let (result, buf) = pool.volume(name)?.read(0, pool.buffer(5)).await;
    result.map(|()| String::from_utf8_lossy(&buf).into_owned())
}

async fn run(runtime: Inline) -> Result<()> {
    let disk = MemoryDevice::new(POOL_BYTES);
    Pool::format(&disk, &FormatOptions::new(POOL_BYTES, *b"a first example!", NOW_SECONDS)).await?;
    let pool = Pool::open(disk, Rc::new(runtime), OpenOptions::default()).await?;

    pool.create("base", &CreateOptions::new(VOLUME_BYTES, NOW_SECONDS)).await?;
    let base = pool.volume("base")?;
    write(&base, "first").await?;
    base.flush().await?;

    pool.snapshot(&[("base", "before")], NOW_SECONDS).await?;
    write(&base, "later").await?;

    pool.clone_volume("base@before", "branch", NOW_SECONDS).await?;
    write(&pool.volume("branch")?, "other").await?;

    for name in ["base", "base@before", "branch"] {
        println!("{name:12} reads {:?}", read(&pool, name).await?);
    }
    println!("{} KiB are mapped", pool.info().referenced >> 10);
    drop(base);
    pool.close().await
}

fn main() -> Result<()> {
    let runtime = Inline::new();
    runtime.run(run(runtime.clone()))
}
