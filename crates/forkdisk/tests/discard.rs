//! When freed space is discarded on the device.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::{Inline, MemoryDevice, RecordingDevice, RequestKind, zeroes_are_data};
use forkdisk::{CreateOptions, Device, DiscardPolicy, FormatOptions, OpenOptions, Pool, Runtime};

const MIB: u64 = 1 << 20;
const NO_SPACE_ON_DEVICE: i32 = 28;
const MINUTE: Duration = Duration::from_secs(60);

/// A sparse file on a file system that may be full: then what is not allocated cannot be written.
#[derive(Clone)]
struct Sparse {
    inner: MemoryDevice,
    /// By MiB of the file.
    allocated: Rc<[Cell<bool>]>,
    is_full: Rc<Cell<bool>>,
    freed: Rc<Cell<bool>>,
}

impl Sparse {
    fn new(bytes: u64) -> Sparse {
        let allocated = (0..bytes / MIB).map(|_| Cell::new(false)).collect();
        Sparse { inner: MemoryDevice::new(bytes), allocated, is_full: Rc::default(), freed: Rc::default() }
    }

    fn allocated(&self) -> usize {
        self.allocated.iter().filter(|block| block.get()).count()
    }
}

impl Device for Sparse {
    forkdisk::forward_device! { inner: len block_size read flush set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        for block in offset.div_ceil(MIB)..(offset + len) / MIB {
            self.allocated[block as usize].set(false);
            self.freed.set(true);
        }
        self.inner.discard(offset, len)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        // Metadata is small, and finds space.
        let new = segments.iter().any(|s| s.len as u64 == MIB && !self.allocated[(s.offset / MIB) as usize].get());
        let is_refused = new && self.is_full.get() && !self.freed.get();
        if !is_refused {
            segments.iter().for_each(|s| self.allocated[(s.offset / MIB) as usize].set(true));
        }
        let inner = self.inner.clone();
        async move {
            match is_refused {
                true => (Err(io::Error::from_raw_os_error(NO_SPACE_ON_DEVICE)), buf),
                false => inner.write(buf, segments, fua).await,
            }
        }
    }
}

type Recorded = RecordingDevice<Sparse>;

/// A pool of 64 MiB.
struct Lab {
    tasks: Inline,
    device: Recorded,
    pool: Pool<Recorded>,
}

impl Lab {
    fn new(discard: DiscardPolicy) -> Lab {
        Lab::made(discard, false)
    }

    fn made(discard: DiscardPolicy, preallocated: bool) -> Lab {
        let (tasks, device) = (Inline::default(), RecordingDevice::new(Sparse::new(64 * MIB), zeroes_are_data));
        let format = FormatOptions::new(64 * MIB, [5; 16], 1).with_journal(MIB).with_preallocated(preallocated);
        tasks.run(Pool::format(&device, &format)).unwrap();
        let options = OpenOptions::default().with_discard(discard);
        let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), options)).unwrap();
        Lab { tasks, device, pool }
    }

    /// Creates a volume and writes its first `blocks` MiB.
    fn write(&self, name: &str, blocks: u64) {
        self.tasks.run(self.pool.create(name, &CreateOptions::new(64 * MIB, 1))).unwrap();
        let volume = self.pool.volume(name).unwrap();
        for block in 0..blocks {
            self.tasks.run(volume.write(block * MIB, Buf::zeroed(MIB as usize), false)).0.unwrap();
        }
        self.tasks.run(volume.flush()).unwrap();
    }

    fn delete(&self, name: &str) {
        self.tasks.run(self.pool.delete(&[name])).unwrap();
        self.tasks.run(self.pool.wait_freed()).unwrap();
    }

    /// Requests and bytes of discards since the last call.
    fn discards(&self) -> (u64, u64) {
        let recording = self.device.take();
        (recording.count(RequestKind::Discard), recording.bytes(RequestKind::Discard))
    }

    fn retained(&self) -> u64 {
        self.pool.statistics().retained_bytes
    }
}

fn later(bytes: u64, time: Duration) -> DiscardPolicy {
    DiscardPolicy::Later { bytes, time }
}

#[test]
fn freed_space_is_written_again_without_a_discard() {
    let lab = Lab::new(DiscardPolicy::LATER);
    lab.write("a", 16);
    let allocated = lab.device.inner().allocated();
    for _ in 0..8 {
        lab.delete("a");
        assert!(lab.retained() >= 16 * MIB);
        lab.write("a", 16);
    }
    assert_eq!(lab.discards(), (0, 0));
    assert!(lab.device.inner().allocated() <= allocated + 2, "nothing else is allocated");
    assert!(lab.retained() < 2 * MIB, "{}", lab.retained());
}

#[test]
fn a_close_gives_all_of_it_back_in_few_requests() {
    let lab = Lab::new(DiscardPolicy::LATER);
    lab.write("a", 16);
    lab.delete("a");
    assert_eq!(lab.discards(), (0, 0));
    let retained = lab.retained();
    lab.tasks.run(lab.pool.close()).unwrap();
    let (requests, bytes) = lab.discards();
    assert!(bytes >= retained && requests < 16, "{requests} requests, {bytes} bytes of {retained}");
    assert_eq!(lab.retained(), 0);
    assert!(lab.device.inner().allocated() <= 6, "{}", lab.device.inner().allocated());
}

#[test]
fn freed_space_is_given_back_after_a_time_and_then_nothing_wakes() {
    let lab = Lab::new(later(MIB << 10, MINUTE));
    lab.write("a", 16);
    lab.delete("a");
    assert_eq!(lab.discards(), (0, 0));
    lab.tasks.run(lab.tasks.sleep(MINUTE / 2));
    assert_eq!(lab.discards(), (0, 0));
    lab.tasks.run(lab.tasks.sleep(2 * MINUTE));
    let (requests, bytes) = lab.discards();
    assert!(bytes >= 16 * MIB && requests < 16, "{requests} requests, {bytes} bytes");
    assert_eq!(lab.retained(), 0);
    lab.tasks.run(lab.tasks.sleep(MINUTE));
    lab.tasks.run_until_idle();
    assert!(!lab.tasks.advance(), "a timer is left");
}

#[test]
fn what_exceeds_the_limit_is_discarded_at_once() {
    let lab = Lab::new(later(4 * MIB, MINUTE));
    lab.write("a", 16);
    lab.delete("a");
    let (_, bytes) = lab.discards();
    assert!(bytes >= 12 * MIB, "{bytes}");
    assert!((1..=4 * MIB).contains(&lab.retained()), "{}", lab.retained());
}

#[test]
fn at_once_and_never_retain_nothing() {
    for (policy, least) in [(true, 16 * MIB), (false, 0)] {
        let lab = Lab::new(policy.into());
        lab.write("a", 16);
        lab.delete("a");
        let (_, bytes) = lab.discards();
        assert!(bytes >= least && (policy || bytes == 0), "{policy}: {bytes}");
        assert_eq!(lab.retained(), 0);
        lab.tasks.run(lab.pool.close()).unwrap();
    }
}

#[test]
fn a_full_host_is_not_reported_while_freed_space_is_retained() {
    let lab = Lab::new(DiscardPolicy::LATER);
    lab.write("a", 8);
    lab.write("b", 1);
    lab.delete("a");
    assert!(lab.retained() >= 8 * MIB);
    let host = lab.device.inner();
    host.is_full.set(true);
    // Retained space is used, and then space that the host does not have yet.
    host.freed.set(false);
    let volume = lab.pool.volume("b").unwrap();
    for block in 1..16 {
        let (result, _) = lab.tasks.run(volume.write(block * MIB, Buf::zeroed(MIB as usize), false));
        result.unwrap_or_else(|e| panic!("MiB {block}, with {} retained: {e}", lab.retained()));
        lab.tasks.run(volume.flush()).unwrap();
    }
    assert_eq!(lab.retained(), 0);
    assert!(host.freed.get());
}

#[test]
fn a_preallocated_pool_discards_only_what_is_to_be_discarded_at_once() {
    for (policy, discards) in [(DiscardPolicy::LATER, false), (DiscardPolicy::AtOnce, true)] {
        let lab = Lab::made(policy, true);
        lab.write("a", 16);
        lab.delete("a");
        assert_eq!(lab.retained(), 0);
        lab.write("b", 16);
        lab.tasks.run(lab.pool.close()).unwrap();
        // A checkpoint keeps what the pool was made for.
        let options = OpenOptions::default().with_discard(policy);
        let pool = lab.tasks.run(Pool::open(lab.device.clone(), Rc::new(lab.tasks.clone()), options)).unwrap();
        lab.tasks.run(pool.delete(&["b"])).unwrap();
        lab.tasks.run(pool.wait_freed()).unwrap();
        lab.tasks.run(pool.close()).unwrap();
        assert_eq!(lab.discards().0 > 0, discards, "{policy:?}");
    }
}
