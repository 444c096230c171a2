//! Requests in memory that others may change or take away at any time.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use forkdisk::device::{Buf, BufMemory, IoResult, Segments};
use forkdisk::testing::{Inline, MemoryDevice};
use forkdisk::{CreateOptions, Device, FormatOptions, OpenOptions, Pool, Volume};

const MIB: u64 = 1 << 20;
const LEN: usize = 64 << 10;

/// A device that counts the requests in shared memory.
#[derive(Clone)]
struct Counting {
    inner: MemoryDevice,
    shared: Rc<Cell<usize>>,
}

impl Device for Counting {
    forkdisk::forward_device! { inner: len block_size flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.shared.set(self.shared.get() + usize::from(buf.is_shared()));
        self.inner.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.shared.set(self.shared.get() + usize::from(buf.is_shared()));
        self.inner.write(buf, segments, fua)
    }
}

/// Memory of another process, which may take it away.
struct Foreign {
    bytes: Buf,
    is_lost: bool,
}

impl AsRef<[u8]> for Foreign {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsMut<[u8]> for Foreign {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl BufMemory for Foreign {
    fn is_lost(&self) -> bool {
        self.is_lost
    }
}

fn foreign(byte: u8, is_lost: bool) -> Buf {
    let mut bytes = Buf::zeroed(LEN);
    bytes.fill(byte);
    Buf::shared(Box::new(Foreign { bytes, is_lost }))
}

struct Lab {
    tasks: Inline,
    device: Counting,
    pool: Pool<Counting>,
    volume: Volume<Counting>,
}

impl Lab {
    fn new() -> Lab {
        let tasks = Inline::default();
        let device = Counting { inner: MemoryDevice::new(64 * MIB), shared: Rc::default() };
        tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [5; 16], 1))).unwrap();
        let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
        tasks.run(pool.create("v", &CreateOptions::new(MIB, 1))).unwrap();
        let volume = pool.volume("v").unwrap();
        Lab { tasks, device, pool, volume }
    }

    /// Writes from foreign memory; returns how many requests of the device were in it.
    fn write(&self, byte: u8) -> usize {
        self.device.shared.set(0);
        self.tasks.run(self.volume.write(0, foreign(byte, false), false)).0.unwrap();
        self.device.shared.get()
    }

    /// Reads into foreign memory by that many requests of the device in it; returns the byte that is everywhere.
    fn read(&self, requests: usize) -> u8 {
        self.device.shared.set(0);
        let (result, buf) = self.tasks.run(self.volume.read(0, foreign(0xee, false)));
        result.unwrap();
        assert!(buf.iter().all(|&byte| byte == buf[0]));
        assert_eq!(self.device.shared.get(), requests);
        buf[0]
    }
}

#[test]
fn a_write_in_place_takes_shared_memory_as_it_is_and_all_others_copy_it() {
    let lab = Lab::new();
    assert_eq!(lab.write(1), 0, "the first write to a place");
    assert_eq!(lab.read(1), 1, "without a copy");
    lab.tasks.run(lab.pool.flush()).unwrap();
    lab.tasks.run(lab.pool.checkpoint()).unwrap();
    assert_eq!(lab.write(2), 1, "in place");
    assert_eq!(lab.read(1), 2);
    lab.tasks.run(lab.pool.snapshot(&[("v", "s")], 2)).unwrap();
    assert_eq!(lab.write(3), 0, "shared with a snapshot");
    assert_eq!(lab.read(1), 3);
}

#[test]
fn memory_that_was_taken_away_is_not_written() {
    let lab = Lab::new();
    lab.write(1);
    lab.tasks.run(lab.pool.snapshot(&[("v", "s")], 2)).unwrap();
    let error = lab.tasks.run(lab.volume.write(0, foreign(2, true), false)).0.unwrap_err();
    assert!(error.to_string().contains("taken away"), "{error}");
    assert_eq!(lab.read(0), 1, "what goes to the shared cache is read aside");
    assert_eq!(lab.read(0), 1, "from the cache");
}
