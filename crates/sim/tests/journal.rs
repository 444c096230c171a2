//! Journals with more than fits: more records than they are long, and a record longer than what replay reads
//! at a time.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::{MemoryDevice, RecordingDevice, RequestKind, zeroes_are_data};
use forkdisk::{CreateOptions, Device, FormatOptions, OpenOptions, Pool, PoolInfo};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
/// Step limit of operations that must end.
const PATIENCE_STEPS: u64 = 3_000_000;

async fn pool(device: &MemoryDevice, exec: &Executor, journal: u64) -> Pool<MemoryDevice> {
    let options = FormatOptions::new(64 * MIB, [7; 16], 1).with_journal(Some(journal));
    Pool::format(device, &options).await.unwrap();
    open(device, exec).await
}

async fn open(device: &MemoryDevice, exec: &Executor) -> Pool<MemoryDevice> {
    Pool::open(device.clone(), Rc::new(exec.clone()), OpenOptions::default()).await.unwrap()
}

#[test]
fn more_records_than_the_journal_is_long_are_taken_by_a_checkpoint() {
    let exec = Executor::new(1);
    let (device, runtime) = (MemoryDevice::new(64 * MIB), exec.clone());
    let ran = exec.run(PATIENCE_STEPS, async move {
        let pool = pool(&device, &runtime, MIB).await;
        pool.create("a", &CreateOptions::new(1 << 30, 1)).await.unwrap();
        let volume = pool.volume("a").unwrap();
        volume.write(0, Buf::copy_of(b"kept"), false).await.0.unwrap();
        // 25 bytes of journal each, without a flush.
        for i in 0..50_000 {
            volume.discard((1 + i % 1000) * 8192, 4096).await.unwrap();
        }
        volume.flush().await.unwrap();
        let PoolInfo { journal_size, journal_used, generation, .. } = pool.info();
        assert!(journal_used <= journal_size, "{journal_used} of {journal_size}");
        assert!(generation < 1000, "{generation} checkpoints");
        // A crash: nothing is closed.
        let again = open(&device, &runtime).await;
        let (read, buf) = again.volume("a").unwrap().read(0, Buf::zeroed(4)).await;
        read.unwrap();
        assert_eq!(&buf[..], b"kept");
    });
    ran.unwrap();
}

#[test]
fn a_record_longer_than_what_replay_reads_at_once_is_replayed() {
    let exec = Executor::new(2);
    let (device, runtime) = (MemoryDevice::new(64 * MIB), exec.clone());
    let ran = exec.run(PATIENCE_STEPS, async move {
        let pool = pool(&device, &runtime, 8 * MIB).await;
        pool.create("a", &CreateOptions::new(1 << 30, 1)).await.unwrap();
        let names: Vec<String> = (0..5000).map(|i| format!("{i:0250}")).collect();
        let all: Vec<(&str, &str)> = names.iter().map(|name| ("a", name.as_str())).collect();
        pool.snapshot(&all, 1).await.unwrap();
        pool.create("b", &CreateOptions::new(1 << 30, 1)).await.unwrap();
        // A crash: nothing is closed.
        assert_eq!(open(&device, &runtime).await.list().len(), 5002);
    });
    ran.unwrap();
}

#[test]
fn a_group_longer_than_any_window_tells_that_one_before_it_is_damaged() {
    let exec = Executor::new(4);
    let (device, runtime) = (MemoryDevice::new(64 * MIB), exec.clone());
    let ran = exec.run(PATIENCE_STEPS, async move {
        let pool = pool(&device, &runtime, 8 * MIB).await;
        pool.create("a", &CreateOptions::new(1 << 30, 1)).await.unwrap();
        let names: Vec<String> = (0..5000).map(|i| format!("{i:0250}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        pool.create_all(&names, &CreateOptions::new(1 << 30, 1)).await.unwrap();
        // A crash: nothing is closed. The journal begins in block 2.
        assert_eq!(open(&device, &runtime).await.list().len(), 5001);
        let segment = forkdisk::device::Segment { offset: 2 * MIB, at: 0, len: 4096 };
        device.write(Buf::zeroed(4096), [segment].into_iter().collect(), false).await.0.unwrap();
        let refused = Pool::open(device.clone(), Rc::new(runtime), OpenOptions::default()).await.map(drop);
        assert_eq!(refused.unwrap_err().kind(), forkdisk::ErrorKind::Corrupt);
    });
    ran.unwrap();
}

#[test]
fn opening_reads_the_journal_once_and_its_end_twice() {
    let exec = Executor::new(3);
    let (device, runtime) = (MemoryDevice::new(64 * MIB), exec.clone());
    let ran = exec.run(PATIENCE_STEPS, async move {
        pool(&device, &runtime, 16 * MIB).await.create("a", &CreateOptions::new(1 << 30, 1)).await.unwrap();
        // A crash: nothing is closed.
        let seen = RecordingDevice::new(device, zeroes_are_data);
        Pool::open(seen.clone(), Rc::new(runtime), OpenOptions::default()).await.unwrap();
        let read = seen.take().bytes(RequestKind::Read);
        // And its end once more; the superblocks, counts and the directory.
        let more = (256 << 10)..(256 << 10) + 65536;
        assert!((16 * MIB + more.start..16 * MIB + more.end).contains(&read), "{read} bytes");
    });
    ran.unwrap();
}
