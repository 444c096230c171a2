//! DRAFT of the public interface, to code against until the engine lands. Bodies are missing.
#![allow(unused_variables, dead_code, missing_docs)]
use crate::{Buf, Device, Result, Runtime};
use std::rc::Rc;
use std::time::Duration;

/// 4 KiB: the unit of mapping and sharing.
pub const PAGE_SIZE: usize = 4096;
/// 1 MiB: the unit of free space.
pub const BLOCK_SIZE: usize = 1 << 20;
/// 1 PiB
pub const MAX_VOLUME_SIZE: u64 = 1 << 50;

/// How a new pool is laid out.
#[derive(Clone, Debug)]
pub struct FormatOptions {
    /// Bytes of the pool; the device must be at least this long (`set_len` is the caller's job).
    pub size: u64,
    pub uuid: [u8; 16],
    /// Seconds since 1970 (the engine has no clock).
    pub now: u64,
    /// Journal length in bytes; `None`: by size.
    pub journal: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /** Wait this long for space, then ENOSPC. */
    Wait(Duration),
    /** ENOSPC at once. */
    Error,
}

#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub read_only: bool,
    /// Bytes of clean metadata kept in memory (default 32 MiB).
    pub cache: usize,
    /// Most bytes of metadata changed but not yet in a checkpoint (default 64 MiB).
    pub dirty: usize,
    pub when_full: WhenFull,
    /// Freed space is discarded on the device (holes in a pool file). Default true.
    pub discard: bool,
}
impl Default for OpenOptions {
    fn default() -> Self {
        unimplemented!()
    }
}

#[derive(Clone, Debug)]
pub struct CreateOptions {
    pub size: u64,
    /** bytes, power of two, 4 KiB to 64 MiB (default 64 KiB) */
    pub chunk: u64,
    pub now: u64,
}
impl CreateOptions {
    pub fn new(size: u64, now: u64) -> Self {
        unimplemented!()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    ReadWrite,
    ReadOnly,
    OutOfDataSpace,
    Failed,
}

#[derive(Clone, Debug)]
pub struct PoolInfo {
    pub uuid: [u8; 16],
    pub created: u64,
    pub mode: Mode,
    /// Bytes of the pool, in use, free, and freed but not yet usable (deletions under way).
    pub size: u64,
    pub used: u64,
    pub free: u64,
    pub freeing: u64,
    /// of `used`: bytes of metadata (tables, counts, journal, superblock)
    pub metadata: u64,
    pub volumes: u64,
    pub snapshots: u64,
    /// Bytes of metadata changed since the last checkpoint.
    pub dirty: u64,
    pub journal_size: u64,
    pub journal_used: u64,
    pub generation: u64,
    pub clean: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(pub u64);

/// One volume or snapshot. `name` is `volume` or `volume@snapshot`.
#[derive(Clone, Debug)]
pub struct VolumeInfo {
    pub id: VolumeId,
    pub name: String,
    pub snapshot: bool,
    /// bytes
    pub size: u64,
    pub chunk: u64,
    /// bytes that reading it may touch (mapped pages)
    pub referenced: u64,
    /// name of the snapshot or volume it was cloned from, as it was then ("" if none)
    pub origin: String,
    pub created: u64,
    /// open handles
    pub in_use: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub referenced: u64,
    /** freed if only this one were deleted */
    pub exclusive: u64,
}

/// A run of a volume that is alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub len: u64,
    /** false: reads as zeroes, holds no space */
    pub data: bool,
    /** byte offset in the pool */
    pub physical: u64,
    pub shared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiffClass {
    Same,
    Different,
    LeftOnly,
    RightOnly,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffRun {
    pub offset: u64,
    pub len: u64,
    pub class: DiffClass,
}

#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /** what is damaged and where */
    pub damage: Vec<String>,
    /** pages counted but not referenced */
    pub leaked: u64,
    pub pages: u64,
    pub volumes: u64,
}

/// An open pool. Cheap to clone; all clones are the same pool. Lives on one thread.
/// Futures of its methods must be run to their end (spawn a task per request); one that is
/// dropped half-way makes the pool refuse further writes.
pub struct Pool<D: Device>(Rc<D>);
impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        unimplemented!()
    }
}
impl<D: Device> Pool<D> {
    pub async fn format(device: &D, options: &FormatOptions) -> Result<()> {
        unimplemented!()
    }
    /// Opens and, if it was not closed cleanly, recovers.
    pub async fn open(
        device: D,
        runtime: Rc<dyn Runtime>,
        options: OpenOptions,
    ) -> Result<Pool<D>> {
        unimplemented!()
    }
    /// Waits for what is in flight, writes a checkpoint and marks the pool clean.
    pub async fn close(&self) -> Result<()> {
        unimplemented!()
    }
    pub fn info(&self) -> PoolInfo {
        unimplemented!()
    }
    /// A buffer fit for the device; contents unspecified.
    pub fn buffer(&self, len: usize) -> Buf {
        unimplemented!()
    }
    /// All volumes and snapshots, by name.
    pub fn list(&self) -> Vec<VolumeInfo> {
        unimplemented!()
    }
    pub fn find(&self, name: &str) -> Result<VolumeInfo> {
        unimplemented!()
    }
    /// A handle for I/O; deletion is refused while there is one.
    pub fn volume(&self, name: &str) -> Result<Volume<D>> {
        unimplemented!()
    }
    pub async fn create(&self, name: &str, options: &CreateOptions) -> Result<VolumeInfo> {
        unimplemented!()
    }
    /// All of them at one instant, or none: `("a", "x")` makes `a@x`. Source must be a volume (not a snapshot).
    pub async fn snapshot(&self, sources: &[(&str, &str)], now: u64) -> Result<Vec<VolumeInfo>> {
        unimplemented!()
    }
    /// A new writable volume with the contents of a volume or snapshot.
    pub async fn clone_volume(&self, source: &str, name: &str, now: u64) -> Result<VolumeInfo> {
        unimplemented!()
    }
    /// `volume` gets the contents of its own snapshot `snapshot` (short name); snapshots stay.
    pub async fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> {
        unimplemented!()
    }
    pub async fn rename(&self, from: &str, to: &str) -> Result<()> {
        unimplemented!()
    }
    pub async fn resize(&self, name: &str, size: u64) -> Result<()> {
        unimplemented!()
    }
    pub async fn set_chunk(&self, name: &str, chunk: u64) -> Result<()> {
        unimplemented!()
    }
    /// Deletes all of them at once; a volume with snapshots that are not in the list is refused (Busy).
    /// Returns when the names are durably gone; space comes back in the background (`freeing`).
    pub async fn delete(&self, names: &[&str]) -> Result<()> {
        unimplemented!()
    }
    /// Waits until every deletion has given its space back.
    pub async fn settle(&self) -> Result<()> {
        unimplemented!()
    }
    /// Makes the pool `size` bytes; lengthens a pool file.
    pub async fn grow(&self, size: u64) -> Result<()> {
        unimplemented!()
    }
    pub async fn usage(&self, name: &str) -> Result<Usage> {
        unimplemented!()
    }
    /// Bytes that deleting all of `names` together would free.
    pub async fn freed_by(&self, names: &[&str]) -> Result<u64> {
        unimplemented!()
    }
    /// Walks only what is not shared; runs in rising order, neighbours of one class merged. `Same` runs include holes on both sides.
    pub async fn diff(&self, left: &str, right: &str) -> Result<Vec<DiffRun>> {
        unimplemented!()
    }
    pub async fn flush(&self) -> Result<()> {
        unimplemented!()
    }
    pub async fn checkpoint(&self) -> Result<()> {
        unimplemented!()
    }
    /// Counts every reference again and compares, online.
    pub async fn check(&self) -> Result<CheckReport> {
        unimplemented!()
    }
}

/// A volume or snapshot open for I/O. Offsets and lengths are bytes, any alignment; 4 KiB-aligned is fastest.
/// A range past the end is `Invalid`.
pub struct Volume<D: Device>(Rc<D>);
impl<D: Device> Clone for Volume<D> {
    fn clone(&self) -> Self {
        unimplemented!()
    }
}
impl<D: Device> Volume<D> {
    pub fn id(&self) -> VolumeId {
        unimplemented!()
    }
    pub fn name(&self) -> String {
        unimplemented!()
    }
    pub fn size(&self) -> u64 {
        unimplemented!()
    }
    pub fn read_only(&self) -> bool {
        unimplemented!()
    }
    /// Fills all of `buf` from `offset`.
    pub async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        unimplemented!()
    }
    /// Writes all of `buf`; with `fua` it is durable when this returns.
    pub async fn write(&self, offset: u64, buf: Buf, fua: bool) -> (Result<()>, Buf) {
        unimplemented!()
    }
    /// Reads as zeroes afterwards, gives whole pages back.
    pub async fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        unimplemented!()
    }
    /// As `write_zeroes`, for whole pages only (the ragged edges stay as they are).
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        unimplemented!()
    }
    pub async fn flush(&self) -> Result<()> {
        unimplemented!()
    }
    pub async fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>> {
        unimplemented!()
    }
    /// Shares `len` bytes of `source` from `from` into this volume at `to`; page-aligned parts are shared, edges copied.
    pub async fn clone_range(
        &self,
        source: &Volume<D>,
        from: u64,
        to: u64,
        len: u64,
    ) -> Result<()> {
        unimplemented!()
    }
}
