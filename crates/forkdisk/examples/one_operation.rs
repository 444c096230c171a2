//! Runs one operation of the engine on a pool in memory, in the function [`measured`], for profilers that collect
//! within one function; `scripts/files-entered` counts the source files that each operation enters.
#![allow(clippy::unwrap_used, reason = "an example fails by a panic")]

use std::future::Future;
use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{
    CreateOptions, FormatOptions, OpenOptions, OriginFull, OriginPlace, PAGE_SIZE, Pool, ProtectOptions, Volume,
};

const OPERATIONS: &str = "first-write, write-in-place, read, flush, snapshot, origin-first-write, origin-write";
const SIZE_BYTES: u64 = 64 << 20;

/// The part that is measured.
#[inline(never)]
fn measured<T>(runtime: &Inline, operation: impl Future<Output = T>) -> T {
    runtime.run(operation)
}

fn page(byte: u8) -> Buf {
    Buf::copy_of(&[byte; PAGE_SIZE])
}

async fn write(volume: &Volume<MemoryDevice>, byte: u8) {
    volume.write(0, page(byte), false).await.0.unwrap();
}

fn main() {
    let operation = std::env::args().nth(1).unwrap_or_default();
    let (runtime, disk) = (Inline::new(), MemoryDevice::new(SIZE_BYTES));
    let options = FormatOptions::new(SIZE_BYTES, [7; 16], 1);
    runtime.run(Pool::format(&disk, &options)).unwrap();
    let pool = runtime.run(Pool::open(disk, Rc::new(runtime.clone()), OpenOptions::default())).unwrap();

    let is_of_origin = operation.starts_with("origin");
    let name = if is_of_origin { "disk" } else { "base" };
    runtime.run(async {
        if is_of_origin {
            let (place, when_full) = (OriginPlace::at("/dev/disk", 0), OriginFull::Error);
            let protect =
                ProtectOptions::new(place, 1).with_chunk(64 << 10).with_copy_ahead(0).with_when_full(when_full);
            pool.protect(name, MemoryDevice::new(SIZE_BYTES), &protect).await.unwrap();
        } else {
            pool.create(name, &CreateOptions::new(SIZE_BYTES, 1)).await.unwrap();
        }
        let volume = pool.volume(name).unwrap();
        // A full block, so that the map has a block entry; then everything is durable and shared.
        for at in (0..1 << 20).step_by(PAGE_SIZE) {
            volume.write(at, page(1), false).await.0.unwrap();
        }
        volume.flush().await.unwrap();
        pool.snapshot(&[(name, "before")], 1).await.unwrap();
        pool.checkpoint().await.unwrap();
    });
    let volume = pool.volume(name).unwrap();
    let write_first = || runtime.run(write(&volume, 2));
    match operation.as_str() {
        "first-write" | "origin-first-write" => measured(&runtime, write(&volume, 2)),
        "write-in-place" | "origin-write" => {
            write_first();
            runtime.run(pool.checkpoint()).unwrap();
            measured(&runtime, write(&volume, 3));
        }
        "read" => {
            measured(&runtime, volume.read(0, pool.buffer(PAGE_SIZE))).0.unwrap();
        }
        "flush" => {
            write_first();
            measured(&runtime, volume.flush()).unwrap();
        }
        "snapshot" => drop(measured(&runtime, pool.snapshot(&[(name, "after")], 2)).unwrap()),
        _ => panic!("unknown operation {operation:?}; one of: {OPERATIONS}"),
    }
}
