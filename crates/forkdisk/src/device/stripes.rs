//! Whole stripes for a device that wants them.
//!
//! An array with parity reads before it writes a part of a stripe. The requests of a sequential writer end
//! anywhere: the end of one and the beginning of the next share a stripe, and the array begins to read before
//! the next one arrives. So the end of a write that continues an earlier one is *held*, in a separate buffer,
//! until its successor fills the stripe; only then is it written, and only then is its write acknowledged.
//!
//! Ends are held only while the device is [corked](super::Device::cork): the client does not wait for the
//! answer before it sends more. And never for long. A held end is written after half of the time that its
//! stream has lasted, or three times the pause between its writes (at least [`MIN_HOLD`], at most
//! [`MAX_HOLD`]); before a flush; and before any other request near it. A stream whose successor did not
//! arrive in time is held less often: after two such misses only every fourth time.
//!
//! An array that has no memory left for more stripes delays a writer in the middle of one, which it then has
//! to read first, too. So no more bytes are in flight to it than it [can hold](Array::in_flight); further
//! writes wait here, in their order.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::in_flight::InFlightLimit;
use super::{Buf, Device, IoResult, Segment, Segments};
use crate::runtime::Runtime;
use crate::sync::Event;

/// Longest time that an end is held, and the shortest limit, which even a young stream has.
const MAX_HOLD: Duration = Duration::from_secs(2);
const MIN_HOLD: Duration = Duration::from_millis(200);
/// Streams that are tracked at a time.
const MAX_STREAMS: usize = 8;
/// A write elsewhere must not overtake a held end that is closer than this.
const RELEASE_DISTANCE_BYTES: u64 = 64 << 20;
/// After this many misses in succession a stream is held no less often: every fourth end.
const MAX_MISSES: u32 = 2;
/// Largest stripe that is filled.
const MAX_STRIPE_BYTES: u64 = 16 << 20;

/// Properties of an array with parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Bytes of data in a stripe.
    pub stripe: u64,
    /// Most bytes in flight to it.
    pub in_flight: u64,
}

/// Holds back ends of writes to `device`; see the module.
pub struct Stripes<D> {
    device: D,
    runtime: Rc<dyn Runtime>,
    stripe: u64,
    gate: Rc<InFlightLimit<D>>,
    corked: Cell<bool>,
    number: Cell<u64>,
    streams: RefCell<Vec<Stream>>,
}

/// Writes each of which continues where the one before ended.
struct Stream {
    /// Where the next one begins.
    next: u64,
    began: Duration,
    /// Time of the last write, as a number that ascends with each write.
    used: u64,
    held: Option<HeldEnd>,
    misses: u32,
    /// Writes that continued an earlier one.
    writes: u32,
    /// Number of ends that are not held before the next one is.
    skip: u32,
}

/// The beginning of a stripe, not yet written.
struct HeldEnd {
    number: u64,
    at: u64,
    len: usize,
    buf: Buf,
    done: Rc<EndOutcome>,
}

/// An error for several writes: its kind, its number and its text.
type Failed = (io::ErrorKind, Option<i32>, String);

/// The outcome of a held end, for all writes that have a part in it.
#[derive(Default)]
struct EndOutcome {
    outcome: RefCell<Option<Result<(), Failed>>>,
    changed: Event,
}

impl EndOutcome {
    fn set(&self, result: io::Result<()>) {
        let known = result.map_err(|e| (e.kind(), e.raw_os_error(), e.to_string()));
        *self.outcome.borrow_mut() = Some(known);
        self.changed.notify();
    }

    async fn wait(&self) -> io::Result<()> {
        loop {
            if let Some(outcome) = &*self.outcome.borrow() {
                return outcome.clone().map_err(|(kind, number, text)| match number {
                    Some(number) => io::Error::from_raw_os_error(number),
                    None => io::Error::new(kind, text),
                });
            }
            self.changed.wait().await;
        }
    }
}

impl<D: Device + Clone> Stripes<D> {
    /// Creates it for a device that is an `array`; `None` if its stripes cannot be filled.
    pub fn new(device: D, runtime: Rc<dyn Runtime>, array: Array) -> Option<Rc<Stripes<D>>> {
        let Array { stripe, in_flight } = array;
        let fits = (8192..=MAX_STRIPE_BYTES).contains(&stripe) && stripe.is_multiple_of(4096);
        let (corked, number, streams) = (Cell::new(false), Cell::new(0), RefCell::default());
        fits.then(|| {
            let gate = InFlightLimit::new(device.clone(), runtime.clone(), in_flight);
            Rc::new(Stripes { device, runtime, stripe, gate, corked, number, streams })
        })
    }

    /// Returns the bytes of a stripe.
    pub fn stripe(&self) -> u64 {
        self.stripe
    }

    /// See [`Device::cork`].
    pub fn cork(&self, more: bool) {
        self.corked.set(more);
    }

    /// As [`Device::write`].
    pub fn write(self: &Rc<Self>, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let mut straight = Segments::new();
        let mut parts: SmallVec<[Rc<EndOutcome>; 2]> = SmallVec::new();
        for segment in &segments {
            match fua {
                true => {
                    self.release_near(segment.offset, segment.len as u64);
                    straight.push(*segment);
                }
                false => self.take(&buf, *segment, &mut straight, &mut parts),
            }
        }
        let write = match straight.is_empty() {
            true => Err(buf),
            false => Ok(self.gate.write(buf, straight, fua)),
        };
        async move {
            let (mut result, buf) = match write {
                Ok(write) => write.await,
                Err(buf) => (Ok(()), buf),
            };
            for part in parts {
                result = result.and(part.wait().await);
            }
            (result, buf)
        }
    }

    /// Splits a segment: what fills the held end before it, what is written at once, what is held.
    fn take(
        self: &Rc<Self>,
        buf: &Buf,
        mut segment: Segment,
        straight: &mut Segments,
        parts: &mut SmallVec<[Rc<EndOutcome>; 2]>,
    ) {
        let (from, end) = (segment.offset, segment.offset + segment.len as u64);
        let known = self.streams.borrow().iter().position(|s| s.next == from);
        let Some(i) = known else {
            self.release_near(from, segment.len as u64);
            self.begin(end);
            // A large one most likely begins a stream.
            if segment.len as u64 >= self.stripe && self.corked.get() {
                let last = self.streams.borrow().len() - 1;
                self.hold_end(last, buf, &mut segment, parts);
            }
            straight.push(segment);
            return;
        };
        self.number.set(self.number.get() + 1);
        {
            let mut streams = self.streams.borrow_mut();
            (streams[i].next, streams[i].used) = (end, self.number.get());
            streams[i].writes = streams[i].writes.saturating_add(1);
        }
        let held = self.streams.borrow_mut()[i].held.take();
        if let Some(mut held) = held {
            let room = (self.stripe - held.at % self.stripe) as usize - held.len;
            let part = room.min(segment.len);
            held.buf[held.len..held.len + part].copy_from_slice(&buf[segment.at..segment.at + part]);
            held.len += part;
            parts.push(held.done.clone());
            segment = Segment { offset: from + part as u64, at: segment.at + part, len: segment.len - part };
            if part < room {
                self.streams.borrow_mut()[i].held = Some(held);
                return;
            }
            self.streams.borrow_mut()[i].misses = 0;
            self.submit(held);
        }
        if self.corked.get() {
            self.hold_end(i, buf, &mut segment, parts);
        }
        if segment.len > 0 {
            straight.push(segment);
        }
    }

    /// Cuts what does not fill a stripe off a segment of stream `i`, if that may be held.
    fn hold_end(
        self: &Rc<Self>,
        i: usize,
        buf: &Buf,
        segment: &mut Segment,
        parts: &mut SmallVec<[Rc<EndOutcome>; 2]>,
    ) {
        let end = segment.offset + segment.len as u64;
        let ragged = (end % self.stripe).min(segment.len as u64) as usize;
        if ragged > 0 && self.may_hold(i) {
            segment.len -= ragged;
            let at = segment.at + segment.len;
            parts.push(self.hold(i, end - ragged as u64, &buf[at..at + ragged]));
        }
    }

    fn begin(&self, next: u64) {
        self.number.set(self.number.get() + 1);
        let stream = Stream {
            next,
            began: self.runtime.now(),
            used: self.number.get(),
            held: None,
            misses: 0,
            writes: 0,
            skip: 0,
        };
        let oldest = {
            let mut streams = self.streams.borrow_mut();
            // Streams that ended there continue as this one.
            streams.retain(|s| s.next != next || s.held.is_some());
            streams.push(stream);
            let oldest = (streams.len() > MAX_STREAMS).then(|| (0..streams.len()).min_by_key(|&i| streams[i].used));
            oldest.flatten().and_then(|i| streams.remove(i).held)
        };
        if let Some(held) = oldest {
            self.submit(held);
        }
    }

    fn may_hold(&self, i: usize) -> bool {
        let stream = &mut self.streams.borrow_mut()[i];
        let may = stream.skip == 0;
        stream.skip = stream.skip.saturating_sub(1);
        may
    }

    fn hold(self: &Rc<Self>, i: usize, at: u64, bytes: &[u8]) -> Rc<EndOutcome> {
        let mut buf = self.device.buffer((self.stripe - at % self.stripe) as usize);
        buf[..bytes.len()].copy_from_slice(bytes);
        let (number, done) = (self.number.get(), Rc::new(EndOutcome::default()));
        let held = HeldEnd { number, at, len: bytes.len(), buf, done: done.clone() };
        let (began, writes) = {
            let stream = &mut self.streams.borrow_mut()[i];
            stream.held = Some(held);
            (stream.began, stream.writes)
        };
        let age = self.runtime.now().saturating_sub(began);
        let time = (age / 2).max(age * 3 / writes.max(1)).clamp(MIN_HOLD, MAX_HOLD);
        let (this, wait) = (self.clone(), self.runtime.sleep(time));
        self.runtime.spawn(Box::pin(async move {
            wait.await;
            this.expire(number);
        }));
        done
    }

    /// The successor has not arrived in time.
    fn expire(&self, number: u64) {
        let held = {
            let mut streams = self.streams.borrow_mut();
            let is_it = |s: &&mut Stream| s.held.as_ref().is_some_and(|held| held.number == number);
            let Some(stream) = streams.iter_mut().find(is_it) else { return };
            stream.skip = (1 << stream.misses) - 1;
            stream.misses = (stream.misses + 1).min(MAX_MISSES);
            stream.held.take()
        };
        if let Some(held) = held {
            self.submit(held);
        }
    }

    /// Writes everything held.
    pub fn release(&self) {
        self.release_where(|_| true);
    }

    /// Writes what is held near a range before another request to that range.
    pub fn release_near(&self, offset: u64, len: u64) {
        self.release_where(|held| {
            held.at < (offset + len).saturating_add(RELEASE_DISTANCE_BYTES)
                && offset < held.at + held.len as u64 + RELEASE_DISTANCE_BYTES
        });
    }

    /// Writes what is held of a range before it is read.
    pub fn release_of(&self, offset: u64, len: u64) {
        self.release_where(|held| held.at < offset + len && offset < held.at + held.len as u64);
    }

    fn release_where(&self, which: impl Fn(&HeldEnd) -> bool) {
        let mut held: SmallVec<[HeldEnd; 2]> = SmallVec::new();
        for stream in self.streams.borrow_mut().iter_mut() {
            if stream.held.as_ref().is_some_and(&which) {
                held.extend(stream.held.take());
            }
        }
        held.into_iter().for_each(|held| self.submit(held));
    }

    fn submit(&self, held: HeldEnd) {
        let HeldEnd { at, len, buf, done, .. } = held;
        let write = self.gate.write(buf, smallvec![Segment { offset: at, at: 0, len }], false);
        self.runtime.spawn(Box::pin(async move { done.set(write.await.0) }));
    }
}

/// A device whose writes arrive in whole stripes where possible.
#[derive(Clone)]
pub struct StripedDevice<D> {
    inner: D,
    stripes: Option<Rc<Stripes<D>>>,
}

impl<D: Device + Clone> StripedDevice<D> {
    /// See [`Stripes`].
    pub fn new(inner: D, runtime: Rc<dyn Runtime>, array: Array) -> StripedDevice<D> {
        StripedDevice { stripes: Stripes::new(inner.clone(), runtime, array), inner }
    }

    /// Returns the device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn release(&self) {
        self.stripes.iter().for_each(|stripes| stripes.release());
    }
}

impl<D: Device + Clone> Device for StripedDevice<D> {
    crate::forward_device! { inner: len block_size buffer allocate set_len }
    crate::plain_device! { can_clone clone_range zero_range }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        if let Some(stripes) = &self.stripes {
            segments.iter().for_each(|s| stripes.release_of(s.offset, s.len as u64));
        }
        self.inner.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let write = match &self.stripes {
            Some(stripes) => Ok(stripes.write(buf, segments, fua)),
            None => Err(self.inner.write(buf, segments, fua)),
        };
        async move {
            match write {
                Ok(write) => write.await,
                Err(write) => write.await,
            }
        }
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.release();
        self.inner.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.release();
        self.inner.discard(offset, len)
    }

    fn cork(&self, more: bool) {
        self.stripes.iter().for_each(|stripes| stripes.cork(more));
    }

    fn stripe(&self) -> Option<u64> {
        self.stripes.as_ref().map(|stripes| stripes.stripe())
    }
}
