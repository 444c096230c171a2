//! A simulated disk behind the engine's `Device` trait, according to crash model M.
//!
//! Requests start in the order of the calls and end in the order that the executor draws. [`Frozen`], a cheap
//! copy of the disk at one instant, tells what a crash leaves: any number of crashes can be tried from it
//! while the run continues. Faults are armed with [`SimDisk::arm`].
//!
//! A request that violates the device's contract (misaligned, out of range) fails with EINVAL and is
//! recorded, see [`SimDisk::misuse`].

mod cache;
mod crash;
mod fault;
mod host;
mod image;
mod lying;
mod masks;
mod order;

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forkdisk::Device;
use forkdisk::device::{Buf, IoResult, Segment, Segments};

pub use crash::{Crash, Frozen, Medium};
pub use fault::{Fault, ReadDamage, Request, When};
pub use image::{Fill, Image, PAGE, fill_bytes};
pub use lying::LyingDevice;
pub use masks::{ALL_PAIRS_WRITES, ALL_SUBSETS_WRITES, enumerated};
pub use order::Order;

use self::cache::{Cache, Change, Entry};
use self::fault::Faults;
use self::host::Host;
use crate::executor::Executor;
use crate::rng::Rng;

/// One in this many clones fails with `Unsupported`.
const CLONES_PER_UNSUPPORTED: u64 = 16;

/// Whether completed writes may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volatile {
    /// Until a flush covers them.
    Yes,
    /// Never: the device has no volatile cache.
    No,
}

/// The kind of disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// 512 or 4096: the unit that is never torn, and the device's block size.
    pub sector: usize,
    /// Whether it has a volatile cache.
    pub cache: Volatile,
}

/// Requests and bytes since the disk was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Counts {
    pub reads: u64,
    pub writes: u64,
    pub fua_writes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub set_lens: u64,
    pub clones: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
}

struct State {
    config: Config,
    cache: Cache,
    faults: Faults,
    counts: Counts,
    rng: Rng,
    misuse: Option<String>,
    slow: Option<Range<u64>>,
    host: Host,
}

/// Pseudo offset of flushes.
const FLUSHES_ID: u64 = u64::MAX - 1;

/// A simulated disk; clones are handles to the same one.
#[derive(Clone)]
pub struct SimDisk {
    state: Rc<RefCell<State>>,
    order: Rc<Order>,
    exec: Executor,
}

impl SimDisk {
    /// Creates a disk that starts with the contents of `medium`; its requests end on `exec`.
    pub fn new(medium: Medium, exec: &Executor, seed: u64) -> SimDisk {
        let host = Host::holding(medium.cache.current.pages(), medium.set_aside);
        let state = State {
            config: medium.config,
            cache: medium.cache,
            faults: Faults::default(),
            counts: Counts::default(),
            rng: Rng::new(seed),
            misuse: None,
            slow: None,
            host,
        };
        SimDisk { state: Rc::new(RefCell::new(state)), order: Rc::default(), exec: exec.clone() }
    }

    /// Returns the disk at this instant, to try crashes from.
    pub fn freeze(&self, crash: Crash) -> Frozen {
        let state = self.state.borrow();
        Frozen::new(state.config, state.cache.clone(), state.host.set_aside.clone(), crash)
    }

    /// Returns a number that changes whenever a crash could leave something new.
    pub fn version(&self) -> u64 {
        self.state.borrow().cache.version
    }

    /// Whether a write to this range of bytes is in flight.
    pub fn is_writing(&self, range: &Range<u64>) -> bool {
        let state = self.state.borrow();
        state.cache.flying.iter().any(|e| e.touches(range.start, (range.end - range.start) as usize))
    }

    /// Returns the record of the order in which writes reach it.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Returns the requests and bytes so far.
    pub fn counts(&self) -> Counts {
        self.state.borrow().counts
    }

    /// Arms a fault.
    pub fn arm(&self, fault: Fault) {
        self.state.borrow_mut().faults.arm(fault);
    }

    /// Disarms all faults; the host has space again.
    pub fn disarm(&self) {
        let mut state = self.state.borrow_mut();
        state.faults.clear();
        state.host.leave(None);
    }

    /// Makes the disk a sparse file on a file system that has space for this many more pages of 4 KiB. A
    /// write without space ends with ENOSPC; a discard frees space.
    pub fn leave_room(&self, pages: u64) {
        self.state.borrow_mut().host.leave(Some(pages));
    }

    /// Whether writes may end with ENOSPC.
    pub fn may_lack_room(&self) -> bool {
        let state = self.state.borrow();
        state.host.room().is_some() || state.faults.is_armed(ReadDamage::Enospc)
    }

    /// Requests that begin in this range of bytes end late from now on.
    pub fn slow_down(&self, range: Range<u64>) {
        self.state.borrow_mut().slow = Some(range);
    }

    /// Flushes end late from now on.
    pub fn slow_flushes(&self) {
        self.slow_down(FLUSHES_ID..u64::MAX);
    }

    /// Returns the number of requests that a fault has hit so far.
    pub fn faults_hit(&self) -> u64 {
        self.state.borrow().faults.hits()
    }

    /// Returns the number of flushes that a fault has hit so far.
    pub fn flush_faults_hit(&self) -> u64 {
        self.state.borrow().faults.flush_hits()
    }

    /// Returns the first request that violated the device's contract.
    pub fn misuse(&self) -> Option<String> {
        self.state.borrow().misuse.clone()
    }

    /// Returns one request as a future: `end` runs when the executor ends it.
    fn request<T: 'static>(&self, offset: u64, end: impl FnOnce(&mut State) -> T + 'static) -> Answer<T> {
        let slot = Rc::new(RefCell::new(Slot { value: None, waker: None }));
        let (state, out) = (Rc::clone(&self.state), Rc::clone(&slot));
        let slow = self.state.borrow().slow.as_ref().is_some_and(|slow| slow.contains(&offset));
        self.exec.request(slow, move || {
            let value = end(&mut state.borrow_mut());
            let mut slot = out.borrow_mut();
            slot.value = Some(value);
            if let Some(waker) = slot.waker.take() {
                waker.wake();
            }
        });
        Answer(slot)
    }
}

impl State {
    /// Refuses what no disk with direct I/O would accept. `at` is the offset in the buffer.
    fn admit(&mut self, what: Request, offset: u64, at: usize, len: u64) -> io::Result<()> {
        let sector = self.config.sector as u64;
        let aligned = [offset, at as u64, len].iter().all(|n| n.is_multiple_of(sector)) && len > 0;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.cache.len);
        if aligned && inside {
            return Ok(());
        }
        let device = self.cache.len;
        let why = format!(
            "{what:?} of {len} bytes at {offset}, {at} bytes into its buffer, on a device of {device} bytes with \
             {sector}-byte sectors"
        );
        self.misuse.get_or_insert(why.clone());
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    /// Returns what happens to a write.
    fn strike_write(&mut self, offset: u64, len: u64) -> Option<ReadDamage> {
        let harm = self.faults.strike(Request::Write, offset, len);
        if harm.is_some() || self.host.hold(offset, len) {
            return harm;
        }
        self.faults.note_hit();
        Some(ReadDamage::Enospc)
    }

    fn end_read(&mut self, harm: Option<ReadDamage>, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let (rng, cache) = (&mut self.rng, &self.cache);
        cache.read(offset, out, || rng.one_in(2));
        match harm {
            None => {}
            Some(ReadDamage::BitFlip) => {
                let bit = rng.index(out.len() * 8);
                out[bit / 8] ^= 1 << (bit % 8);
            }
            Some(ReadDamage::Zeroed) => out.fill(0),
            Some(ReadDamage::Stale) => cache.durable.read(offset, out),
            Some(ReadDamage::Misdirected) => {
                let sectors = cache.len.saturating_sub(out.len() as u64) / cache.sector as u64;
                cache.current.read(rng.below(sectors + 1) * cache.sector as u64, out);
            }
            Some(error) => {
                out.fill(0xdb);
                return Err(error.error().unwrap_or_else(|| io::Error::from_raw_os_error(5)));
            }
        }
        Ok(())
    }

    /// Ends a write or discard: it lands, or the part of it that the fault leaves.
    fn end_change(&mut self, order: u64, harm: Option<ReadDamage>, fua: bool) -> io::Result<()> {
        let mut entry = self.cache.take(order);
        let Some(error) = harm.and_then(ReadDamage::error) else {
            let durable = fua || self.config.cache == Volatile::No;
            self.cache.land(entry, durable);
            return Ok(());
        };
        let (sector, rng) = (self.config.sector, &mut self.rng);
        match harm {
            Some(ReadDamage::Eio) => {
                let density = rng.below(9);
                entry.thin(sector, || rng.below(8) < density);
            }
            Some(ReadDamage::Short) => {
                let mut left = rng.index(entry.units(sector).len());
                entry.thin(sector, || {
                    left = left.saturating_sub(1);
                    left > 0
                });
            }
            _ => entry.pieces.clear(),
        }
        self.land_failed(entry);
        Err(error)
    }

    /// Ends a clone: if the source has changed meanwhile, it may have got either contents.
    fn end_clone(&mut self, order: u64, harm: Option<ReadDamage>, from: u64) -> io::Result<()> {
        let at = self.cache.flying.iter().position(|e| e.order == order).expect("a request in flight");
        if let Change::Write(bytes) = &self.cache.flying[at].change {
            let mut now = vec![0; bytes.len()];
            let (rng, cache) = (&mut self.rng, &self.cache);
            cache.read(from, &mut now, || rng.one_in(2));
            if now != **bytes && self.rng.one_in(2) {
                self.cache.flying[at].change = Change::Write(now.into());
            }
        }
        self.end_change(order, harm, false)
    }

    /// Begins to write `bytes` as an offloaded request; returns the number of the request. Sometimes it is
    /// unsupported.
    fn begin_offload(&mut self, bytes: Vec<u8>, to: u64) -> io::Result<u64> {
        self.counts.clones += 1;
        let len = bytes.len();
        self.admit(Request::Write, to, 0, len as u64)?;
        if self.rng.one_in(CLONES_PER_UNSUPPORTED) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(self.cache.submit(Change::Write(bytes.into()), to, len))
    }

    fn land_failed(&mut self, entry: Entry) {
        if !entry.pieces.is_empty() && !matches!(entry.change, Change::Len(_)) {
            self.cache.land(entry, false);
        }
    }

    fn end_flush(&mut self, point: u64, harm: Option<ReadDamage>) -> io::Result<()> {
        match harm.and_then(ReadDamage::error) {
            None => {
                self.cache.flushed(point);
                Ok(())
            }
            Some(error) => {
                self.cache.flush_failed(point);
                Err(error)
            }
        }
    }
}

struct Slot<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

/// The future of one request.
struct Answer<T>(Rc<RefCell<Slot<T>>>);

impl<T> Future for Answer<T> {
    type Output = T;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut slot = self.0.borrow_mut();
        match slot.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                slot.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Device for SimDisk {
    forkdisk::plain_device! { buffer cork stripe }

    fn len(&self) -> u64 {
        self.state.borrow().cache.len
    }

    fn block_size(&self) -> usize {
        self.state.borrow().config.sector
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        let buf = Rc::new(RefCell::new(buf));
        let mut answers = Vec::new();
        for Segment { offset, at, len } in segments {
            let mut state = self.state.borrow_mut();
            state.counts.reads += 1;
            state.counts.bytes_read += len as u64;
            let admitted = state.admit(Request::Read, offset, at, len as u64);
            let harm = state.faults.strike(Request::Read, offset, len as u64);
            drop(state);
            let buf = Rc::clone(&buf);
            answers.push(self.request(offset, move |state| {
                admitted?;
                state.end_read(harm, offset, &mut buf.borrow_mut()[at..at + len])
            }));
        }
        finish(buf, answers)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let mut answers = Vec::new();
        for Segment { offset, at, len } in segments {
            let mut state = self.state.borrow_mut();
            state.counts.writes += 1;
            state.counts.fua_writes += u64::from(fua);
            state.counts.bytes_written += len as u64;
            let admitted = state.admit(Request::Write, offset, at, len as u64);
            let harm = state.strike_write(offset, len as u64);
            self.order.see(&buf[at..at + len]);
            let order = admitted.map(|()| {
                let bytes = Change::Write(crash::copy(&buf[at..at + len]));
                state.cache.submit(bytes, offset, len)
            });
            drop(state);
            answers.push(self.request(offset, move |state| state.end_change(order?, harm, fua)));
        }
        finish(Rc::new(RefCell::new(buf)), answers)
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        let mut state = self.state.borrow_mut();
        state.counts.flushes += 1;
        let harm = state.faults.strike(Request::Flush, 0, 0);
        let point = state.cache.flush_point();
        drop(state);
        self.request(FLUSHES_ID, move |state| state.end_flush(point, harm))
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let mut state = self.state.borrow_mut();
        state.counts.discards += 1;
        let admitted = state.admit(Request::Discard, offset, 0, len);
        let harm = state.faults.strike(Request::Discard, offset, len);
        let fill = if state.rng.one_in(2) { Fill::Zero } else { Fill::Garbage(state.rng.next()) };
        let order = admitted.map(|()| state.cache.submit(Change::Discard(fill), offset, len as usize));
        drop(state);
        self.request(offset, move |state| {
            state.end_change(order?, harm, false)?;
            state.host.let_go(offset, len);
            Ok(())
        })
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let held = self.state.borrow_mut().host.set_aside(offset, len);
        self.request(offset, move |_| if held { Ok(()) } else { Err(io::Error::from_raw_os_error(28)) })
    }

    fn can_clone(&self, source: &Self) -> bool {
        Rc::ptr_eq(&self.state, &source.state)
    }

    /// After a crash its target holds what it would hold if the same bytes had been written. Faults of writes
    /// hit it.
    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let mut state = self.state.borrow_mut();
        let mut bytes = vec![0; len as usize];
        let admitted = match self.can_clone(source) {
            true => state.admit(Request::Read, from, 0, len),
            false => Err(io::ErrorKind::Unsupported.into()),
        };
        let harm = state.strike_write(to, len);
        let order = admitted.and_then(|()| {
            let State { cache, rng, .. } = &mut *state;
            cache.read(from, &mut bytes, || rng.one_in(2));
            self.order.see(&bytes);
            state.begin_offload(bytes, to)
        });
        drop(state);
        self.request(to, move |state| state.end_clone(order?, harm, from))
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let mut state = self.state.borrow_mut();
        let harm = state.strike_write(offset, len);
        let order = state.begin_offload(vec![0; len as usize], offset);
        drop(state);
        self.request(offset, move |state| state.end_change(order?, harm, false))
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let mut state = self.state.borrow_mut();
        state.counts.set_lens += 1;
        let harm = state.faults.strike(Request::SetLen, 0, 0);
        let order = state.cache.submit(Change::Len(len), 0, 0);
        drop(state);
        self.request(u64::MAX, move |state| state.end_change(order, harm, false))
    }
}

/// Waits for all requests of one call; the outcome is the first error in the order of submission.
async fn finish(buf: Rc<RefCell<Buf>>, answers: Vec<Answer<io::Result<()>>>) -> IoResult {
    let mut outcome = Ok(());
    for answer in answers {
        let result = answer.await;
        if outcome.is_ok() {
            outcome = result;
        }
    }
    // Every request has ended and released the buffer.
    let buf = Rc::into_inner(buf).map_or_else(|| Buf::zeroed(0), RefCell::into_inner);
    (outcome, buf)
}

#[cfg(test)]
mod tests;
