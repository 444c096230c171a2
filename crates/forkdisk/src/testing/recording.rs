//! A decorator that records every request that reaches the device below, in the order of arrival.
//!
//! Counts are exact: one entry per segment, as the device gets them. It changes nothing and delays nothing. A
//! rule supplied by the user of the recording distinguishes data from metadata, because only the user knows
//! what its clients write.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;

use super::memory::is_zero;
use crate::device::{Buf, Device, IoResult, Segments};

/// How many requests back a neighbour is searched.
const MAX_NEIGHBOURS: usize = 256;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// A read.
    Read,
    /// A write that is a client's by the rule.
    WriteData,
    /// Any other write.
    WriteMetadata,
    /// A flush; it has no offset and no length.
    Flush,
    /// A discard.
    Discard,
    /// A range that was cloned to this place, without moving data.
    Clone,
    /// A range that was zeroed without being written.
    Zero,
}

impl RequestKind {
    /// Whether it moves data: a read or a write.
    pub fn is_transfer(self) -> bool {
        matches!(self, RequestKind::Read | RequestKind::WriteData | RequestKind::WriteMetadata)
    }
}

/// One request as the device received it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its kind.
    pub kind: RequestKind,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its length, in bytes.
    pub len: u64,
}

/// Everything that reached a device during a period, in order.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The requests in the order of their arrival.
    pub requests: Vec<Request>,
}

impl Recording {
    /// Returns the number of requests of this kind.
    pub fn count(&self, kind: RequestKind) -> u64 {
        self.requests.iter().filter(|r| r.kind == kind).count() as u64
    }

    /// Returns the bytes of all requests of this kind.
    pub fn bytes(&self, kind: RequestKind) -> u64 {
        self.requests.iter().filter(|r| r.kind == kind).map(|r| r.len).sum()
    }

    /// Returns the number of reads and writes, data and metadata.
    pub fn transfers(&self) -> u64 {
        self.requests.iter().filter(|r| r.kind.is_transfer()).count() as u64
    }

    /// Returns the number of inversions: data writes that end where one of the 256 data writes before them
    /// begins, so that a sequential writer has overtaken itself. Work that is itself in random or descending
    /// order has them by nature.
    pub fn inversions(&self) -> u64 {
        let writes: Vec<&Request> = self.requests.iter().filter(|r| r.kind == RequestKind::WriteData).collect();
        let overtook = |(i, write): (usize, &&Request)| {
            writes[i.saturating_sub(MAX_NEIGHBOURS)..i].iter().any(|earlier| earlier.offset == write.offset + write.len)
        };
        writes.iter().enumerate().filter(|&w| overtook(w)).count() as u64
    }
}

/// Decides from a segment's bytes whether a client wrote them.
pub type Rule = fn(&[u8]) -> bool;

/// A rule for work whose clients write only zeroes: metadata pages are never zero. Examines the first 4 KiB.
pub fn zeroes_are_data(bytes: &[u8]) -> bool {
    is_zero(&bytes[..bytes.len().min(4096)])
}

/// A device together with a record of its requests. Clones share both.
pub struct RecordingDevice<D> {
    inner: D,
    is_data: Rule,
    state: Rc<State>,
}

#[derive(Default)]
struct State {
    log: RefCell<Vec<Request>>,
    paused: Cell<bool>,
}

impl<D: Clone> Clone for RecordingDevice<D> {
    fn clone(&self) -> Self {
        RecordingDevice { inner: self.inner.clone(), is_data: self.is_data, state: self.state.clone() }
    }
}

impl<D: Device> RecordingDevice<D> {
    /// Records what reaches `inner` from now on.
    pub fn new(inner: D, is_data: Rule) -> RecordingDevice<D> {
        RecordingDevice { inner, is_data, state: Rc::default() }
    }

    /// Returns the device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Returns the record and starts an empty one.
    pub fn take(&self) -> Recording {
        Recording { requests: self.state.log.take() }
    }

    /// Pauses recording (for preparations that are not measured).
    pub fn pause(&self, paused: bool) {
        self.state.paused.set(paused);
    }

    fn note(&self, kind: RequestKind, offset: u64, len: u64) {
        if !self.state.paused.get() {
            self.state.log.borrow_mut().push(Request { kind, offset, len });
        }
    }
}

impl<D: Device> Device for RecordingDevice<D> {
    crate::forward_device! { inner: len block_size buffer cork stripe allocate can_clone set_len }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        segments.iter().for_each(|s| self.note(RequestKind::Read, s.offset, s.len as u64));
        self.inner.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        for s in &segments {
            let bytes = buf.get(s.at..s.at.saturating_add(s.len)).unwrap_or_default();
            let kind = if (self.is_data)(bytes) { RequestKind::WriteData } else { RequestKind::WriteMetadata };
            self.note(kind, s.offset, s.len as u64);
        }
        self.inner.write(buf, segments, fua)
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.note(RequestKind::Flush, 0, 0);
        self.inner.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.note(RequestKind::Discard, offset, len);
        self.inner.discard(offset, len)
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        self.note(RequestKind::Clone, to, len);
        self.inner.clone_range(&source.inner, from, to, len)
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.note(RequestKind::Zero, offset, len);
        self.inner.zero_range(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::super::MemoryDevice;
    use super::*;
    use crate::device::Segment;

    fn device() -> RecordingDevice<MemoryDevice> {
        RecordingDevice::new(MemoryDevice::new(1 << 30), zeroes_are_data)
    }

    fn write(device: &RecordingDevice<MemoryDevice>, offset: u64, fill: u8) {
        drop(device.write(Buf::copy_of(&[fill; 4096]), smallvec![Segment { offset, at: 0, len: 4096 }], false));
    }

    #[test]
    fn every_segment_is_a_request_and_data_is_told_from_metadata() {
        let device = device();
        let two = smallvec![Segment { offset: 0, at: 0, len: 4096 }, Segment { offset: 65536, at: 4096, len: 8192 }];
        drop(device.write(Buf::zeroed(12288), two, false));
        write(&device, 4096, 9);
        drop(device.flush());
        drop(device.read(Buf::zeroed(512), smallvec![Segment { offset: 512, at: 0, len: 512 }]));
        drop(device.discard(0, 1 << 20));
        let seen = device.take();
        assert_eq!((seen.count(RequestKind::WriteData), seen.bytes(RequestKind::WriteData)), (2, 12288));
        assert_eq!((seen.count(RequestKind::WriteMetadata), seen.count(RequestKind::Flush)), (1, 1));
        assert_eq!((seen.bytes(RequestKind::Read), seen.bytes(RequestKind::Discard)), (512, 1 << 20));
        assert_eq!(seen.transfers(), 4);
        assert!(device.take().requests.is_empty());
    }

    #[test]
    fn a_writer_that_overtook_itself_is_an_inversion() {
        let device = device();
        [0, 8192, 4096, 12288].iter().for_each(|&at| write(&device, at, 0));
        assert_eq!(device.take().inversions(), 1);
        [0, 4096, 8192, 1 << 20, 12288].iter().for_each(|&at| write(&device, at, 0));
        assert_eq!(device.take().inversions(), 0, "two writers, each in order");
        [8192, 4096].iter().for_each(|&at| write(&device, at, 1));
        assert_eq!(device.take().inversions(), 0, "metadata has an order of its own");
    }

    #[test]
    fn a_pause_records_nothing() {
        let device = device();
        device.pause(true);
        write(&device, 0, 0);
        device.pause(false);
        write(&device, 4096, 0);
        assert_eq!(device.take().requests.len(), 1);
    }
}
