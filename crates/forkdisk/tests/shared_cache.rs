//! The shared cache: data that several volumes refer to is read from the device once.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::Buf;
use forkdisk::testing::{DelayingDevice, FailingDevice, Inline, MemoryDevice, RecordingDevice, RequestKind};
use forkdisk::{CreateOptions, FormatOptions, LocalFuture, OpenOptions, Pool, Result, SharedCacheStatistics, Volume};

const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;
const CLONES_COUNT: usize = 8;
const LATENCY: Duration = Duration::from_millis(5);

type Disk = RecordingDevice<DelayingDevice<FailingDevice<MemoryDevice>>>;

/// A pool with an image of 1 MiB and its clones.
struct Lab {
    clock: Inline,
    disk: Disk,
    pool: Pool<Disk>,
    clones: Vec<Volume<Disk>>,
    /// Reads that fail from now on.
    refused: Rc<Cell<u32>>,
}

impl Lab {
    fn new(shared_cache: u64) -> Lab {
        let (clock, refused) = (Inline::new(), Rc::new(Cell::new(0u32)));
        let left = refused.clone();
        let failing = FailingDevice::new(MemoryDevice::new(64 * MIB), move |request| {
            let fails = request.kind == RequestKind::Read && left.get() > 0;
            fails.then(|| {
                left.set(left.get() - 1);
                io::Error::other("refused")
            })
        });
        let disk = RecordingDevice::new(DelayingDevice::new(failing, Rc::new(clock.clone()), LATENCY), |_| true);
        let options = OpenOptions::default().with_shared_cache(shared_cache);
        let (pool, clones) = clock.run(async {
            Pool::format(&disk, &FormatOptions::new(64 * MIB, [1; 16], 1)).await.unwrap();
            let pool = Pool::open(disk.clone(), Rc::new(clock.clone()), options).await.unwrap();
            pool.create("image", &CreateOptions::new(MIB, 1)).await.unwrap();
            let image = pool.volume("image").unwrap();
            image.write(0, Buf::copy_of(&pattern(0, MIB)), false).await.0.unwrap();
            let mut clones = Vec::new();
            for i in 0..CLONES_COUNT {
                pool.clone_volume("image", &format!("c{i}"), 1).await.unwrap();
                clones.push(pool.volume(&format!("c{i}")).unwrap());
            }
            (pool, clones)
        });
        disk.take();
        Lab { clock, disk, pool, clones, refused }
    }

    /// Starts a read of a range by a clone.
    fn start(&self, clone: usize, offset: u64, len: u64) -> LocalFuture<Result<Vec<u8>>> {
        let volume = self.clones[clone].clone();
        self.clock.start(async move {
            let (result, buf) = volume.read(offset, Buf::zeroed(len as usize)).await;
            result.map(|()| buf.to_vec())
        })
    }

    fn read(&self, clone: usize, offset: u64, len: u64) -> Vec<u8> {
        self.clock.run(self.start(clone, offset, len)).unwrap()
    }

    fn write(&self, clone: usize, offset: u64, bytes: &[u8]) {
        self.clock.run(self.clones[clone].write(offset, Buf::copy_of(bytes), false)).0.unwrap();
    }

    /// Bytes that the device read since the last call.
    fn device_read(&self) -> u64 {
        self.disk.take().bytes(RequestKind::Read)
    }

    fn statistics(&self) -> SharedCacheStatistics {
        self.pool.statistics().shared_cache
    }
}

/// The contents of a range of the image.
fn pattern(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| (at / 512 + at) as u8).collect()
}

#[test]
fn clones_of_an_image_read_each_page_from_the_device_once() {
    let lab = Lab::new(16 * MIB);
    for clone in 0..CLONES_COUNT {
        assert!(lab.read(clone, 0, MIB) == pattern(0, MIB), "clone {clone}");
    }
    assert_eq!(lab.device_read(), MIB);
    let seen = lab.statistics();
    assert_eq!((seen.bytes, seen.misses, seen.hits), (MIB, 256, 7 * 256));
    assert_eq!(lab.pool.statistics().data.read.bytes, MIB, "the figures count what the device read");
    assert!(lab.read(3, 4096 + 512, 1024) == pattern(4096 + 512, 1024), "a part of a page");
    assert_eq!(lab.device_read(), 0);
}

#[test]
fn without_a_cache_each_clone_reads_the_device() {
    let lab = Lab::new(0);
    (0..CLONES_COUNT).for_each(|clone| assert!(lab.read(clone, 0, MIB) == pattern(0, MIB)));
    assert_eq!(lab.device_read(), CLONES_COUNT as u64 * MIB);
    assert_eq!(lab.statistics(), SharedCacheStatistics::default());
}

#[test]
fn what_is_not_shared_stays_out_of_the_cache() {
    let lab = Lab::new(16 * MIB);
    lab.write(0, 0, &[7; 65536]);
    lab.device_read();
    for _ in 0..3 {
        assert!(lab.read(0, 0, 65536) == [7; 65536]);
    }
    assert_eq!(lab.device_read(), 3 * 65536);
    assert_eq!(lab.statistics(), SharedCacheStatistics::default());
}

#[test]
fn reads_of_a_page_that_is_being_read_wait_for_that_read() {
    let lab = Lab::new(16 * MIB);
    // Each overlaps the one before it and reads something more.
    let reads: Vec<_> =
        (0..CLONES_COUNT as u64).map(|i| (i, lab.start(i as usize, i * PAGE_BYTES, 16 * PAGE_BYTES))).collect();
    lab.clock.run(async {
        for (i, read) in reads {
            assert!(read.await.unwrap() == pattern(i * PAGE_BYTES, 16 * PAGE_BYTES), "read {i}");
        }
    });
    assert_eq!(lab.device_read(), (16 + 7) * PAGE_BYTES);
    let seen = lab.statistics();
    assert_eq!((seen.misses, seen.joined, seen.hits), (16 + 7, 7 * 15, 0));
}

#[test]
fn reads_that_joined_a_read_which_fails_read_by_themselves() {
    let lab = Lab::new(16 * MIB);
    lab.refused.set(1);
    let reads: Vec<_> = (0..3).map(|clone| lab.start(clone, 0, 8192)).collect();
    let ended: Vec<bool> = lab.clock.run(async {
        let mut ended = Vec::new();
        for read in reads {
            ended.push(read.await.is_ok_and(|bytes| bytes == pattern(0, 8192)));
        }
        ended
    });
    assert_eq!(ended, [false, true, true], "an error is that of one request");
    assert_eq!(lab.statistics().bytes, 0, "and nothing of it is kept");
    assert!(lab.read(4, 0, 8192) == pattern(0, 8192));
    assert_eq!(lab.statistics().bytes, 8192);
}

#[test]
fn reads_that_joined_a_read_which_is_given_up_read_by_themselves() {
    let lab = Lab::new(16 * MIB);
    let volume = lab.clones[0].clone();
    let bytes = lab.clock.run(async {
        let mut given_up = Box::pin(volume.read(0, Buf::zeroed(8192)));
        std::future::poll_fn(|cx| {
            assert!(given_up.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        let joined = lab.start(1, 0, 8192);
        lab.clock.run_until_idle();
        drop(given_up);
        joined.await
    });
    assert!(bytes.unwrap() == pattern(0, 8192));
}

#[test]
fn the_cache_holds_no_more_than_its_bytes() {
    let lab = Lab::new(64 * PAGE_BYTES);
    for clone in 0..CLONES_COUNT {
        for at in (0..MIB).step_by(65536) {
            assert!(lab.read(clone, at, 65536) == pattern(at, 65536));
            assert!(lab.statistics().bytes <= 64 * PAGE_BYTES);
        }
    }
    let seen = lab.statistics();
    assert!(seen.bytes > 0 && seen.evictions > 0, "{seen:?}");
    assert_eq!(seen.misses - seen.evictions, seen.bytes / PAGE_BYTES);
    assert!(lab.read(0, 0, MIB) == pattern(0, MIB), "a read larger than the cache");
}

/// Deletes all but the clone `c0`, which is returned, and lets the pool free what only they had.
async fn alone(pool: &Pool<Disk>, mut clones: Vec<Volume<Disk>>) -> Volume<Disk> {
    clones.truncate(1);
    pool.delete(&["image", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]).await.unwrap();
    pool.wait_freed().await.unwrap();
    pool.checkpoint().await.unwrap();
    clones.remove(0)
}

#[test]
fn a_page_overwritten_by_its_last_sharer_is_read_anew() {
    let lab = Lab::new(16 * MIB);
    assert!(lab.read(0, 0, MIB) == pattern(0, MIB));
    let Lab { clock, disk, pool, clones, .. } = lab;
    clock.run(async {
        let volume = alone(&pool, clones).await;
        disk.take();
        volume.write(8192, Buf::copy_of(&[9; 4096]), false).await.0.unwrap();
        let (result, buf) = volume.read(4096, Buf::zeroed(12288)).await;
        result.unwrap();
        assert!(buf[..4096] == pattern(4096, 4096)[..] && buf[8192..] == pattern(12288, 4096)[..]);
        assert!(buf[4096..8192] == [9; 4096]);
        assert_eq!(pool.statistics().volumes.faults.r#break.count, 0, "it was written in place");
        assert_eq!(disk.take().bytes(RequestKind::Read), 4096, "the pages beside it are still in the cache");
    });
}

#[test]
fn a_read_in_flight_while_its_page_changes_leaves_nothing() {
    let Lab { clock, pool, clones, .. } = Lab::new(16 * MIB);
    clock.run(async {
        let volume = alone(&pool, clones).await;
        // The device has put the old contents into the buffer when the write reaches it.
        let (reader, writer) = (volume.clone(), volume.clone());
        let read = clock.start(async move { reader.read(0, Buf::zeroed(4096)).await });
        let write = clock.start(async move { writer.write(0, Buf::copy_of(&[9; 4096]), false).await });
        let (result, old) = read.await;
        result.unwrap();
        assert!(old[..] == pattern(0, 4096));
        write.await.0.unwrap();
        let (result, new) = volume.read(0, Buf::zeroed(4096)).await;
        result.unwrap();
        assert!(new[..] == [9; 4096]);
    });
}
