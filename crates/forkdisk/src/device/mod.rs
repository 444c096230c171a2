//! The seam below the engine: byte ranges that can be read, written, flushed, discarded, zeroed and cloned.
//!
//! A device orders nothing by itself. One flush covers every write that had *completed* when the flush was
//! submitted; everything else may be lost, torn at sectors or reordered by a crash. Requests reach the device
//! in the order of the calls: a call submits at once and returns a future for the completion only.

mod buf;
mod cached;
mod forward;
mod in_flight;
mod shared_cache;
mod stripes;

use std::future::Future;
use std::io;

pub(crate) use buf::add_segment;
pub use buf::{BUF_ALIGN_BYTES, Buf, BufMemory, BufPool, IoResult, MemorySource, Segment, Segments};
pub(crate) use cached::CachedDevice;
pub use shared_cache::SharedCacheStatistics;
pub use stripes::{Array, StripedDevice, Stripes};

/// A disk as the engine sees it.
///
/// Every method submits its requests when it is **called** (not when the future is first polled),
/// one device request per segment in the order given. The future resolves when all of them have
/// ended. Dropping the future does not cancel anything: the device keeps the buffer until the
/// requests have ended.
pub trait Device: 'static {
    /// Returns the length in bytes.
    fn len(&self) -> u64;

    /// Whether the device has length 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Smallest unit of offsets and lengths that [`read`](Self::read) and [`write`](Self::write) accept, in
    /// bytes: a power of two from 512 to 4096. A write of one such unit is not torn.
    fn block_size(&self) -> usize;

    /// Returns a buffer of `len` bytes, contents unspecified, best suited to this device.
    fn buffer(&self, len: usize) -> Buf;

    /// Reads every segment into `buf`. On error the buffer's contents are unspecified.
    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static;

    /// Writes every segment from `buf`. With `fua` each is durable when the future resolves.
    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static;

    /// A hint for the writes that follow, until it changes: they come from clients that send more before they
    /// are answered. A device that wants whole stripes may then hold back the end of a write for a moment,
    /// and with it its completion.
    fn cork(&self, more: bool);

    /// Returns the bytes of a stripe, for a device that wants whole ones.
    fn stripe(&self) -> Option<u64>;

    /// Makes durable every write that completed before this call.
    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static;

    /// Tells the device that the range holds nothing of value; it may read as anything afterwards. A device
    /// that cannot discard succeeds and does nothing.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static;

    /// Allocates storage for the range, so that writing to it cannot fail for lack of space; its contents
    /// stay. A device that cannot or need not allocate succeeds and does nothing.
    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static;

    /// Whether [`clone_range`](Self::clone_range) from `source` and [`zero_range`](Self::zero_range) are
    /// worth trying. False once the device has returned `Unsupported`.
    fn can_clone(&self, source: &Self) -> bool;

    /// Clones `len` bytes at `from` on `source` (another device, or this one) to `to`, without moving them.
    /// Offsets and length are multiples of [`block_size`](Self::block_size), and the ranges do not overlap.
    /// On error the target may hold anything; a device that cannot clone returns `Unsupported`. Durable like
    /// a write.
    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static;

    /// Makes the range read as zeroes without writing it; its storage stays allocated. Alignment, errors and
    /// durability as for [`clone_range`](Self::clone_range).
    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static;

    /// Lengthens the device to `len` bytes (a pool file that grows). The new length is durable after the next
    /// flush. A device that cannot grow returns `Unsupported`.
    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static;
}
