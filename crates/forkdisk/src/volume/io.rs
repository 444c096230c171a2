//! The verbs of clients; each counts as one operation.

use crate::counters::Operation;
use crate::device::{Buf, Device};
use crate::error::Result;
use crate::store::times;

use super::backing::Backing;
use super::{Volume, WriteFlags};

impl<D: Device> Volume<D> {
    /// Fills all of `buf` from `offset`.
    pub async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let running = self.activity.counters.begin(Operation::Read, buf.len() as u64);
        let (result, buf) = self.read_range(offset, buf).await;
        running.end(result.is_ok());
        (result, buf)
    }

    /// Like [`read`](Self::read), but may leave holes unwritten in `buf`; returns their offset in `buf` and
    /// length, in ascending order.
    pub async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let running = self.activity.counters.begin(Operation::Read, buf.len() as u64);
        let (result, buf) = self.read_range_sparse(offset, buf).await;
        running.end(result.is_ok());
        (result, buf)
    }

    /// Writes all of `buf` at `offset`. With [`fua`](WriteFlags::fua), or `true` as flags, the
    /// data is durable on return.
    pub async fn write(&self, offset: u64, buf: Buf, flags: impl Into<WriteFlags>) -> (Result<()>, Buf) {
        let WriteFlags { fua, more, intent } = flags.into();
        // No other task runs before the write is under way.
        drop(intent);
        let running = self.activity.counters.begin(Operation::Write, buf.len() as u64);
        let (mut result, buf) = self.write_range(offset, buf, fua, more).await;
        // This check avoids an await, which costs more than one percent of the instructions of a 4 KiB write.
        if !self.store.is_process_safe() {
            result = self.wait_process_safe(result).await;
        }
        running.end(result.is_ok());
        self.note_dirty();
        (result, buf)
    }

    /// Makes all acknowledged writes durable, of all volumes of the pool.
    ///
    /// # Errors
    /// `Failed`, now and from then on, if the data or the journal could not be made durable; `Io` if the
    /// device of an origin failed.
    pub async fn flush(&self) -> Result<()> {
        let running = self.activity.counters.begin(Operation::Flush, 0);
        let result = self.commit().await;
        running.end(result.is_ok());
        result
    }

    /// Whole pages within the range read as zeroes afterwards and their space is freed. Partial pages at the
    /// edges stay unchanged, except at the end of the volume. On a full pool some pages may stay.
    ///
    /// # Errors
    /// `Invalid` for a range past the end, `ReadOnly` for a snapshot; and those of [changing](crate#errors).
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let running = self.activity.counters.begin(Operation::Discard, len);
        let result = self.discard_range(offset, len).await;
        let result = self.wait_process_safe(result).await;
        running.end(result.is_ok());
        self.note_dirty();
        result
    }

    /// The range reads as zeroes afterwards; the space of whole pages is freed. With `fua` that is durable on
    /// return.
    ///
    /// # Errors
    /// `Invalid` for a range past the end, `ReadOnly` for a snapshot; and those of [changing](crate#errors).
    pub async fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        let running = self.activity.counters.begin(Operation::Zero, len);
        let result = self.zero_range(offset, len, fua).await;
        let result = self.wait_process_safe(result).await;
        running.end(result.is_ok());
        self.note_dirty();
        result
    }

    /// Waits until a successful change survives a crash of the process.
    pub(super) async fn wait_process_safe(&self, result: Result<()>) -> Result<()> {
        match result {
            Ok(()) => self.store.wait_process_safe().await,
            failed => failed,
        }
    }

    /// Records that a change was acknowledged that may not be durable.
    pub(super) fn note_dirty(&self) {
        if let Backing::Origin(origin) = self.backing() {
            origin.is_dirty.set(true);
        }
        self.store.note_dirty();
        times::mark_changed(&self.store, self.id, &self.live.last_change);
    }

    /// Records the time from admitting an operation to answering it, in nanoseconds, as measured by a front
    /// end; the engine has no clock.
    #[doc(hidden)]
    pub fn record_latency(&self, operation: Operation, nanoseconds: u64) {
        self.activity.counters.record_latency(operation, nanoseconds);
    }
}
