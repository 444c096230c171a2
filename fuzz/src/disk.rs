//! Disks in memory that take their time, in an order of their own, and have a page that cannot be
//! read.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use forkdisk::{Buf, Error, ErrorKind, Result, WriteFlags, WriteIntent};
use forkdisk_nbd::codec::StatusExtent;
use forkdisk_nbd::memory::{MemoryExport, MemoryExports};
use forkdisk_nbd::server::ALLOCATION;
use forkdisk_nbd::{Export, ExportInfo, Exports};
use forkdisk_uring::Rt;

/// Bytes of a disk; no multiple of anything.
pub const SIZE: u64 = 40_003;
pub const WRITABLE: &str = "disk";
pub const READ_ONLY: &str = "fixed";
/// A context of flags 0 and 1 in turn, and how many bytes have the same.
pub const STRIPES: &str = "fuzz:stripes";
pub const STRIPE: u64 = 16;
/// Of the writable disk, when it has one.
pub const BAD: Range<u64> = 20_480..24_576;
/// Zeroing less is not fast.
pub const FAST: u64 = 1000;

/// What one input makes of the disks.
#[derive(Default)]
pub struct Nature {
    pub is_bad: Cell<bool>,
    /// What the writable disk tells; never more than [`SIZE`].
    pub size: Cell<u64>,
    /// 0: requests end where they begin. Otherwise where the pauses come from.
    pub pauses: Cell<u32>,
}

#[derive(Clone)]
pub struct Disks {
    rt: Rt,
    nature: Rc<Nature>,
    memory: MemoryExports,
}

#[derive(Clone)]
pub struct Disk {
    rt: Rt,
    nature: Rc<Nature>,
    memory: MemoryExport,
    is_writable: bool,
}

impl Disks {
    pub fn new(rt: &Rt, nature: &Rc<Nature>) -> Disks {
        nature.size.set(SIZE);
        let memory = MemoryExports::new().with(WRITABLE, SIZE as usize, false).with(READ_ONLY, SIZE as usize, true);
        Disks { rt: rt.clone(), nature: nature.clone(), memory }
    }
}

impl Exports for Disks {
    type Export = Disk;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        self.memory.list(after, most)
    }

    fn open(&self, name: &str) -> Result<Disk> {
        let (rt, nature) = (self.rt.clone(), self.nature.clone());
        Ok(Disk { rt, nature, memory: self.memory.open(name)?, is_writable: name == WRITABLE })
    }

    fn buffer(&self, len: usize) -> Buf {
        self.memory.buffer(len)
    }
}

impl Disk {
    async fn pause(&self) {
        let mut state = self.nature.pauses.get();
        if state == 0 {
            return;
        }
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        self.nature.pauses.set(state);
        for _ in 0..state % 5 {
            self.rt.yield_now().await;
        }
    }

    fn fails(&self, offset: u64, len: u64) -> bool {
        self.is_writable && self.nature.is_bad.get() && offset < BAD.end && offset + len > BAD.start
    }
}

fn bad() -> Error {
    Error::new(ErrorKind::Io, "a page that cannot be read")
}

impl Export for Disk {
    /// Whether it is the stripes.
    type Context = bool;

    fn announce_write(&self, _offset: u64, _len: u64) -> Option<WriteIntent> {
        None
    }

    fn info(&self) -> ExportInfo {
        ExportInfo { size: self.size(), ..self.memory.info() }
    }

    fn size(&self) -> u64 {
        if self.is_writable { self.nature.size.get() } else { SIZE }
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        self.pause().await;
        if self.fails(offset, buf.len() as u64) {
            return (Err(bad()), buf);
        }
        let read = self.memory.read(offset, buf).await;
        self.pause().await;
        read
    }

    async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        self.pause().await;
        if self.fails(offset, buf.len() as u64) {
            return (Err(bad()), buf);
        }
        let read = self.memory.read_sparse(offset, buf).await;
        self.pause().await;
        read
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        self.pause().await;
        let written = self.memory.write(offset, buf, flags).await;
        self.pause().await;
        written
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> Result<()> {
        self.pause().await;
        self.memory.write_zeroes(offset, len, fua, no_hole).await
    }

    fn zeroing_is_fast(&self, _offset: u64, len: u64) -> bool {
        len >= FAST
    }

    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.pause().await;
        self.memory.trim(offset, len, fua).await
    }

    async fn flush(&self) -> Result<()> {
        self.pause().await;
        self.memory.flush().await
    }

    fn contexts(&self) -> Vec<String> {
        vec![ALLOCATION.to_owned(), STRIPES.to_owned()]
    }

    fn context(&self, name: &str) -> Option<bool> {
        match name {
            ALLOCATION => Some(false),
            STRIPES => Some(true),
            _ => None,
        }
    }

    async fn status(&self, stripes: &bool, offset: u64, len: u64, looks: usize) -> Result<Vec<StatusExtent>> {
        self.pause().await;
        if !stripes {
            return self.memory.status(&(), offset, len, looks).await;
        }
        let (mut extents, mut at) = (Vec::new(), offset);
        while at < offset + len && extents.len() < looks {
            let end = (at / STRIPE * STRIPE + STRIPE).min(offset + len);
            extents.push(StatusExtent { len: end - at, flags: (at / STRIPE % 2) as u32 });
            at = end;
        }
        Ok(extents)
    }
}
