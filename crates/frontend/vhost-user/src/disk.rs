//! Interface to the disks that the server serves.

use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Buf, Operation, Result, WriteFlags};
use forkdisk_uring::Turnstile;

/// Bytes of the serial number that a guest can read.
pub const SERIAL_BYTES: usize = 20;

/// A set of disks, found by name.
pub trait Disks: Clone + 'static {
    /// An open disk.
    type Disk: Disk;

    /// Opens a disk.
    ///
    /// # Errors
    /// `NotFound` if there is no such disk, otherwise why it cannot be opened.
    fn open(&self, name: &str) -> Result<Self::Disk>;

    /// As [`open`](Self::open), for a front end that came by the socket with this path.
    ///
    /// # Errors
    /// As those of `open`.
    fn open_at(&self, name: &str, _socket: &str) -> Result<Self::Disk> {
        self.open(name)
    }

    /// Allocates a buffer of `len` bytes that suits the disks; its contents are unspecified.
    fn buffer(&self, len: usize) -> Buf;
}

/// Properties of a disk.
#[derive(Clone, Debug)]
pub struct DiskInfo {
    /// Current name.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Serial number, padded with zeroes.
    pub serial: [u8; SERIAL_BYTES],
}

/// An open disk with a volatile write cache. Offsets and lengths are in bytes, multiples of 512; ranges lie inside the
/// last returned [`size`](Self::size).
pub trait Disk: 'static {
    /// Returns the properties as they are now.
    fn info(&self) -> DiskInfo;

    /// Returns the turnstile that requests pass, if the disk can be exchanged under its front end.
    fn turnstile(&self) -> Option<&Rc<Turnstile>> {
        None
    }

    /// Returns the current length in bytes.
    fn size(&self) -> u64;

    /// Returns whether writes are refused.
    fn read_only(&self) -> bool;

    /// Fills all of `buf` from `offset`.
    fn read(&self, offset: u64, buf: Buf) -> impl Future<Output = (Result<()>, Buf)>;

    /// Writes all of `buf`; with `flags.fua` it is durable when this returns.
    fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> impl Future<Output = (Result<()>, Buf)>;

    /// Makes the range read as zeroes.
    fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> impl Future<Output = Result<()>>;

    /// Discards the range.
    fn discard(&self, offset: u64, len: u64, fua: bool) -> impl Future<Output = Result<()>>;

    /// Makes every completed write to this disk durable.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Called after every request, successful or not, with its time since it was taken from its queue.
    fn took(&self, _operation: Operation, _time: Duration) {}
}
