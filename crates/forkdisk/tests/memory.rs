//! Memory of idle volumes and snapshots.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use allocation_counter::measure;
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, PAGE_SIZE, Pool};

const COUNT: u64 = 10_000;
/// Limit per snapshot, as stated in README and ARCHITECTURE, in bytes.
const MAX_BYTES: u64 = 600;
const MAX_ALLOCATIONS: u64 = 3;

fn pool(runtime: &Inline, disk: &MemoryDevice) -> Pool<MemoryDevice> {
    runtime.run(Pool::open(disk.clone(), Rc::new(runtime.clone()), OpenOptions::default())).unwrap()
}

fn formatted() -> (Inline, MemoryDevice) {
    let (runtime, disk) = (Inline::new(), MemoryDevice::new(256 << 20));
    let options = FormatOptions::new(256 << 20, [5; 16], 1);
    runtime.run(Pool::format(&disk, &options)).unwrap();
    (runtime, disk)
}

async fn snapshots(pool: &Pool<MemoryDevice>, range: std::ops::Range<u64>) {
    for i in range {
        pool.snapshot(&[("base", &format!("at-{i:06}"))], 1).await.unwrap();
    }
}

fn check(what: &str, bytes: i64, allocations: i64) {
    let (bytes, allocations) = (bytes as f64 / COUNT as f64, allocations as f64 / COUNT as f64);
    println!("an idle snapshot, {what}: {bytes:.0} bytes, {allocations:.2} allocations");
    assert!(bytes <= MAX_BYTES as f64, "{what}: {bytes} bytes");
    assert!(allocations <= MAX_ALLOCATIONS as f64, "{what}: {allocations} allocations");
}

#[test]
fn an_idle_snapshot_takes_little_memory_and_few_allocations() {
    let (runtime, disk) = formatted();
    let empty = measure(|| std::mem::forget(pool(&runtime, &disk)));
    let first = pool(&runtime, &disk);
    runtime.run(first.create("base", &CreateOptions::new(1 << 30, 1))).unwrap();
    // One-time allocations of the pool are made before the measured snapshots.
    runtime.run(snapshots(&first, COUNT..COUNT + 100));
    let before = disk.resident();
    let taken = measure(|| {
        runtime.run(async {
            snapshots(&first, 0..COUNT).await;
            first.checkpoint().await.unwrap();
        })
    });
    // The device is in memory, too: one allocation for each page.
    let device = disk.resident() as i64 - before as i64;
    check("taken", taken.bytes_current - device, taken.count_current - device / PAGE_SIZE as i64);

    // Counters of a snapshot that was read stay, its state as an open volume does not.
    let opened = measure(|| {
        runtime.run(async {
            for i in 0..COUNT {
                let snapshot = first.volume(&format!("base@at-{i:06}")).unwrap();
                let buf = first.buffer(4096);
                snapshot.read(0, buf).await.0.unwrap();
            }
        })
    });
    println!("once read and closed: {} bytes more", opened.bytes_current / COUNT as i64);
    runtime.run(first.close()).unwrap();
    drop(first);

    let full = measure(|| std::mem::forget(pool(&runtime, &disk)));
    check("after an open", full.bytes_current - empty.bytes_current, full.count_current - empty.count_current);
}
