//! The counters are exact to the byte: every figure is compared with known work, and the requests with what a
//! recording device saw.

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::Inline;
use forkdisk::testing::{MemoryDevice, RecordingDevice, RequestKind};
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Operation, Pool, Requests, VolumeStatistics};

const PAGE: u64 = 4096;

type Lab = Pool<RecordingDevice<MemoryDevice>>;

/// Pages that a client wrote begin with this.
const MARK: u8 = 0xda;

fn lab(tasks: &Inline) -> Lab {
    let disk = MemoryDevice::new(64 << 20);
    let options = FormatOptions::new(64 << 20, [3; 16], 1);
    tasks.run(Pool::format(&disk, &options)).expect("a pool");
    let device = RecordingDevice::new(disk, |bytes| bytes.first() == Some(&MARK));
    tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).expect("opened")
}

fn of(pool: &Lab, name: &str) -> VolumeStatistics {
    let all = pool.volume_statistics();
    let (_, statistics) = all.into_iter().find(|(info, _)| info.name == name).expect("listed");
    statistics.expect("it was opened")
}

fn data(len: u64) -> Buf {
    Buf::copy_of(&vec![MARK; len as usize])
}

#[test]
fn operations_are_counted_per_volume_as_clients_asked_for_them() {
    let tasks = Inline::default();
    tasks.run(async {
        let pool = lab(&tasks);
        pool.create("v", &CreateOptions::new(1 << 20, 1)).await.expect("created");
        assert_eq!(pool.volume_statistics()[0].1, None, "nobody has opened it");
        let v = pool.volume("v").expect("there");
        v.write(0, data(8 * PAGE), true).await.0.expect("written");
        v.read(100, pool.buffer(1000)).await.0.expect("read");
        v.read_sparse(0, pool.buffer(4096)).await.0.expect("read");
        v.read_sparse(7, pool.buffer(5)).await.0.expect("read around");
        assert!(v.read(1 << 20, pool.buffer(1)).await.0.is_err(), "past the end");
        v.write_zeroes(100, 200, true).await.expect("zeroed");
        v.discard(4 * PAGE, 2 * PAGE).await.expect("discarded");
        v.flush().await.expect("flushed");
        v.record_latency(Operation::Read, 5_000);
        let s = of(&pool, "v");
        let seen = Operation::ALL.map(|o| (s.of(o).operations, s.of(o).bytes, s.of(o).errors, s.of(o).in_flight));
        let expected = [(4, 5101, 1, 0), (1, 8 * PAGE, 0, 0), (1, 0, 0, 0), (1, 2 * PAGE, 0, 0), (1, 200, 0, 0)];
        assert_eq!(seen, expected, "zeroing an edge and FUA are no operations of their own");
        assert_eq!((s.of(Operation::Read).latency.count(), s.of(Operation::Read).latency.sum), (1, 5_000));
    });
}

#[test]
fn faults_are_told_apart_by_whether_others_have_the_page() {
    let tasks = Inline::default();
    tasks.run(async {
        let pool = lab(&tasks);
        pool.create("v", &CreateOptions::new(1 << 20, 1)).await.expect("created");
        let v = pool.volume("v").expect("there");
        v.write(0, data(4 * PAGE), false).await.0.expect("provisioned");
        v.write(0, data(4 * PAGE), false).await.0.expect("in place");
        pool.snapshot(&[("v", "s")], 2).await.expect("taken");
        v.write(PAGE, data(2 * PAGE), false).await.0.expect("broken");
        let faults = of(&pool, "v").faults;
        assert_eq!(faults.provision, Requests { count: 1, bytes: 4 * PAGE });
        assert_eq!(faults.r#break, Requests { count: 1, bytes: 2 * PAGE });
    });
}

#[test]
fn the_sum_over_the_pool_keeps_what_was_deleted() {
    let tasks = Inline::default();
    tasks.run(async {
        let pool = lab(&tasks);
        for name in ["a", "b"] {
            pool.create(name, &CreateOptions::new(1 << 20, 1)).await.expect("created");
            let volume = pool.volume(name).expect("there");
            volume.write(0, data(PAGE), false).await.0.expect("written");
        }
        let before = pool.statistics().volumes;
        pool.delete(&["a"]).await.expect("deleted");
        pool.wait_freed().await.expect("settled");
        let after = pool.statistics();
        assert_eq!(after.volumes, before, "totals never fall");
        assert_eq!(after.volumes.of(Operation::Write).bytes, 2 * PAGE);
        assert_eq!((after.reaped, after.reaping), (1, false));
        assert!(after.freed_bytes >= PAGE, "its page came back: {}", after.freed_bytes);
    });
}

#[test]
fn device_requests_are_what_the_device_saw() {
    let tasks = Inline::default();
    tasks.run(async {
        let pool = lab(&tasks);
        pool.create("v", &CreateOptions::new(8 << 20, 1)).await.expect("created");
        let v = pool.volume("v").expect("there");
        pool.device().take();
        let before = pool.statistics();
        for i in 0..20 {
            v.write(i * 7 * PAGE, data((i % 5 + 1) * PAGE), i % 4 == 0).await.0.expect("written");
        }
        v.write(5, data(10), false).await.0.expect("a page is completed");
        v.read(0, pool.buffer(1 << 20)).await.0.expect("read");
        v.discard(0, 1 << 20).await.expect("discarded");
        pool.checkpoint().await.expect("a checkpoint");
        let (after, seen) = (pool.statistics(), pool.device().take());
        let grown = |now: Requests, then: Requests| (now.count - then.count, now.bytes - then.bytes);
        let recorded = |kind| (seen.count(kind), seen.bytes(kind));
        assert_eq!(grown(after.data.write, before.data.write), recorded(RequestKind::WriteData));
        let metadata = grown(after.metadata.write, before.metadata.write);
        let journal = grown(after.journal, before.journal);
        let both = (metadata.0 + journal.0, metadata.1 + journal.1);
        assert_eq!(both, recorded(RequestKind::WriteMetadata));
        let reads = (grown(after.data.read, before.data.read), grown(after.metadata.read, before.metadata.read));
        assert_eq!((reads.0.0 + reads.1.0, reads.0.1 + reads.1.1), recorded(RequestKind::Read));
        assert_eq!(grown(after.discards, before.discards), recorded(RequestKind::Discard));
        assert_eq!(after.flushes - before.flushes, seen.count(RequestKind::Flush));
        assert_eq!(after.checkpoints - before.checkpoints, 1);
        let commits = after.commit_group.since(&before.commit_group);
        assert_eq!((commits.count(), commits.sum), (5, 5), "five writes with FUA, one after the other");
        assert!(after.cache_hits > before.cache_hits);
    });
}
