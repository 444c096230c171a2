//! Jobs: what is copied where, the gates that hold writes back, the progress so far, and the handle for the caller.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;

use smallvec::SmallVec;

use crate::device::Buf;
use crate::format::{DataChecksum, data_checksum};
use crate::planted::correct;
use crate::sync::Event;
use crate::types::{PAGE_BYTES, PageAddr};

use super::{Client, MAX_DESTINATIONS, Moved};

/// A place on a device.
pub struct Place<D> {
    /// The device.
    pub device: Rc<D>,
    /// Bytes from its start, a multiple of its block size.
    pub offset: u64,
}

impl<D> Clone for Place<D> {
    fn clone(&self) -> Self {
        Place { device: self.device.clone(), offset: self.offset }
    }
}

impl<D> Place<D> {
    /// Whether this is where `other` ends after `len` bytes.
    pub(super) fn follows(&self, other: &Place<D>, len: u64) -> bool {
        Rc::ptr_eq(&self.device, &other.device) && self.offset == other.offset + len
    }

    pub(super) fn after(&self, len: u64) -> Place<D> {
        Place { device: self.device.clone(), offset: self.offset + len }
    }
}

/// Where a piece of a source comes from.
pub enum CopySource<D> {
    /// A device.
    Device(Place<D>),
    /// The source is a hole: zeroes.
    Zeroes,
    /// The caller provides all of it (see [`JobHandle::give`]): nothing is read.
    Given,
}

impl<D> Clone for CopySource<D> {
    fn clone(&self) -> Self {
        match self {
            CopySource::Device(place) => CopySource::Device(place.clone()),
            CopySource::Zeroes => CopySource::Zeroes,
            CopySource::Given => CopySource::Given,
        }
    }
}

/// A piece of a source.
pub struct Piece<D> {
    /// Length in bytes, a multiple of the devices' block sizes, not 0.
    pub len: u64,
    /// Where it comes from.
    pub from: CopySource<D>,
}

/// A copy: all pieces of the source, contiguously, to each destination.
pub struct Job<D> {
    /// The source; usually one piece.
    pub source: Vec<Piece<D>>,
    /// Destinations: 1 to [`MAX_DESTINATIONS`] places.
    pub destinations: SmallVec<[Place<D>; 1]>,
    /// Jobs of one client whose ranges overlap are written and ended in the order of submission.
    pub near: Range<u64>,
    /// Jobs that fail together: when one fails, nothing more of the others is written.
    pub group: JobGroup,
    /// Where checksums of what is written are put, for each place in the pool that is a destination; none for what
    /// a device clones.
    pub checksums: Vec<(PageAddr, DataChecksums)>,
    /// The job is written only when this gate is open.
    pub hold: Option<GateHold>,
}

/// Checksums of pages in the pool that were written, in the order of the writes.
pub type DataChecksums = Rc<RefCell<Vec<DataChecksum>>>;

/// See [`Job::group`]. By default a job has a separate group.
#[derive(Clone, Default)]
pub struct JobGroup(Rc<Cell<bool>>);

/// Bytes that replace those of the source.
#[derive(Clone)]
pub struct ProvidedBytes {
    /// Where they go, in bytes from the start of the job.
    pub at: u64,
    /// Where they are in `bytes`.
    pub range: Range<usize>,
    /// The buffer that holds them.
    pub bytes: Rc<Buf>,
}

/// Why a job failed.
#[derive(Debug)]
pub enum CopyError {
    /// The source could not be read.
    Read(io::Error),
    /// A destination could not be written.
    Write(io::Error),
    /// It was cancelled.
    Cancelled,
}

/// The part of a job that does not depend on the kind of device.
pub(super) struct Progress {
    pub number: u64,
    pub client: Rc<Client>,
    pub near: Range<u64>,
    pub len: u64,
    /// Bytes that sub-jobs have been made of, from the start.
    pub started: Cell<u64>,
    /// Bytes whose write has been submitted, from the start.
    pub submitted: Cell<u64>,
    /// Bytes that have been read, or need not be.
    pub read: Cell<u64>,
    /// Sub-jobs in flight.
    pub in_flight: Cell<usize>,
    failure: RefCell<Option<CopyError>>,
    group: JobGroup,
    pub given: RefCell<Vec<ProvidedBytes>>,
    pub checksums: Vec<(PageAddr, DataChecksums)>,
    pub hold: Option<GateHold>,
    /// What its sub-jobs have done.
    pub moved: Cell<Moved>,
    /// It is over, and so are all jobs before it that lie near.
    pub ended: Cell<bool>,
    pub changed: Event,
    pub submitted_at: Duration,
    /// Since when it has been at the head of the queue without a buffer.
    pub starved: Cell<Option<Duration>>,
}

impl Progress {
    pub fn has_failed(&self) -> bool {
        self.failure.borrow().is_some() || self.group.0.get() && !self.is_written()
    }

    /// Notes a failure; the first one stays.
    pub fn fail(&self, error: CopyError) {
        self.failure.borrow_mut().get_or_insert(error);
        self.group.0.set(true);
        self.changed.notify();
    }

    /// Takes the failure, if there was one.
    pub fn take_failure(&self) -> Option<CopyError> {
        let failed = self.has_failed();
        self.failure.borrow_mut().take().or_else(|| failed.then_some(CopyError::Cancelled))
    }

    /// Whether it failed, and whether that is because it or its group was cancelled.
    pub fn end(&self) -> (bool, bool) {
        let given_up = matches!(*self.failure.borrow(), None | Some(CopyError::Cancelled));
        (self.has_failed(), self.has_failed() && given_up)
    }

    /// Whether all of it has been submitted to be written.
    fn is_written(&self) -> bool {
        self.submitted.get() == self.len
    }

    /// Notes the checksums of bytes that are written, from `at` bytes after the start of the job.
    pub fn note_checksums(&self, at: u64, bytes: &[u8]) {
        for (to, checksums) in &self.checksums {
            let to = PageAddr(to.0 + at / PAGE_BYTES);
            let pages = (bytes.len() as u64 / PAGE_BYTES) as u32;
            checksums.borrow_mut().push(DataChecksum { to, pages, sum: data_checksum(to, bytes) });
        }
    }

    /// Notes that everything before byte `end` has been submitted to be written.
    pub fn note_submitted(&self, end: u64) {
        self.submitted.set(self.submitted.get().max(end));
        if self.is_fully_submitted() {
            self.changed.notify();
        }
    }

    /// Notes that `bytes` more of it have been read.
    pub fn note_read(&self, bytes: u64) {
        self.read.set(self.read.get() + bytes);
        if self.read.get() == self.len {
            self.changed.notify();
        }
    }

    /// Whether nothing more of it will be submitted to a device.
    pub fn is_fully_submitted(&self) -> bool {
        self.is_written() || self.has_failed()
    }

    /// Whether none of its requests is in flight and none will be.
    pub fn is_over(&self) -> bool {
        self.in_flight.get() == 0 && (self.started.get() == self.len || self.has_failed())
    }

    pub fn is_near(&self, other: &Progress) -> bool {
        let overlap = self.near.start < other.near.end && other.near.start < self.near.end;
        overlap && Rc::ptr_eq(&self.client, &other.client)
    }

    /// Returns what was provided within `range` of the job: disjoint ranges in ascending order that do not
    /// touch.
    pub fn given_in(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let all = self.given.borrow();
        let counted = correct!(all.len(), Bug::JoinedBesideClone => all.len().min(1));
        let clip = |g: &ProvidedBytes| g.at.max(range.start)..(g.at + g.range.len() as u64).min(range.end);
        let mut parts: Vec<Range<u64>> = all[..counted].iter().map(clip).filter(|part| !part.is_empty()).collect();
        parts.sort_by_key(|part| part.start);
        let mut out: Vec<Range<u64>> = Vec::with_capacity(parts.len());
        for part in parts {
            match out.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => out.push(part),
            }
        }
        out
    }

    /// Overlays `buf`, which holds the job's bytes from `at` on, with the provided bytes.
    pub fn overlay(&self, at: u64, buf: &mut [u8]) {
        let end = at + buf.len() as u64;
        for given in self.given.borrow().iter() {
            let (from, to) = (given.at.max(at), (given.at + given.range.len() as u64).min(end));
            if from >= to {
                continue;
            }
            let bytes = &given.bytes[given.range.clone()][(from - given.at) as usize..(to - given.at) as usize];
            // The bug: as if every sub-job began where the job does.
            let place = correct!(
                (from - at) as usize,
                Bug::GivenBytesMisplaced => (from as usize).min(buf.len() - bytes.len())
            );
            buf[place..place + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// A job in the queue.
pub(super) struct Queued<D> {
    pub progress: Rc<Progress>,
    pub source: Vec<Piece<D>>,
    pub destinations: SmallVec<[Place<D>; 1]>,
}

impl<D> Job<D> {
    /// Returns the number of bytes copied to each destination.
    pub fn len(&self) -> u64 {
        self.source.iter().map(|piece| piece.len).sum()
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.source.is_empty()
    }

    pub(super) fn queued(self, number: u64, client: Rc<Client>, now: Duration) -> Queued<D> {
        assert!((1..=MAX_DESTINATIONS).contains(&self.destinations.len()), "a job has 1 to 8 destinations");
        let progress = Progress {
            number,
            client,
            near: self.near.clone(),
            len: self.len(),
            started: Cell::new(0),
            submitted: Cell::new(0),
            read: Cell::new(0),
            in_flight: Cell::new(0),
            failure: RefCell::new(None),
            group: self.group.clone(),
            given: RefCell::default(),
            checksums: self.checksums.clone(),
            hold: self.hold.clone(),
            moved: Cell::default(),
            ended: Cell::new(false),
            changed: Event::default(),
            submitted_at: now,
            starved: Cell::new(None),
        };
        Queued { progress: Rc::new(progress), source: self.source, destinations: self.destinations }
    }
}

impl<D> Queued<D> {
    /// Returns the source from `at` on, at most `len` bytes of it.
    pub fn pieces(&self, at: u64, len: u64) -> Vec<Piece<D>> {
        let (mut start, end, mut out) = (0, at + len, Vec::new());
        for piece in &self.source {
            let (from, to) = (start.max(at), (start + piece.len).min(end));
            if from < to {
                let source = match &piece.from {
                    CopySource::Device(place) => CopySource::Device(place.after(from - start)),
                    other => other.clone(),
                };
                out.push(Piece { len: to - from, from: source });
            }
            start += piece.len;
        }
        out
    }

    /// Whether this job continues where `before` ends: at every destination, and with `source` at the source, too.
    pub fn continues(&self, before: &Queued<D>, source: bool) -> bool {
        let source = !source
            || match (before.source.last(), self.source.first()) {
                (Some(Piece { len, from: CopySource::Device(a) }), Some(Piece { from: CopySource::Device(b), .. })) => {
                    b.follows(a, *len)
                }
                (Some(_), Some(_)) => true,
                _ => false,
            };
        let len = before.progress.len;
        let pairs = || before.destinations.iter().zip(&self.destinations);
        source && before.destinations.len() == self.destinations.len() && pairs().all(|(a, b)| b.follows(a, len))
    }
}

/// Checks the queues again.
pub(super) trait Pump {
    /// Starts what can start and ends what is over.
    fn pump(self: Rc<Self>);
    /// Called when a write may be admitted.
    fn recheck_order(&self);
}

/// A submitted job. Dropping it cancels nothing.
pub struct JobHandle {
    pub(super) progress: Rc<Progress>,
    pub(super) engine: Weak<dyn Pump>,
}

impl JobHandle {
    /// Provides bytes that replace those of the source, unless that part of the job has been written already
    /// or it has failed; then nothing changes and it returns false. Where provided bytes overlap, the later
    /// ones count.
    pub fn give(&self, given: ProvidedBytes) -> bool {
        let takes = self.takes(given.at);
        if takes {
            self.progress.given.borrow_mut().push(given);
        }
        takes
    }

    /// Whether bytes from `at` on can still be provided.
    pub fn takes(&self, at: u64) -> bool {
        at >= self.progress.submitted.get() && !self.progress.has_failed() && !self.progress.ended.get()
    }

    /// Starts nothing more of the job. What is in flight ends first.
    pub fn cancel(&self) {
        if !self.progress.ended.get() {
            self.progress.fail(CopyError::Cancelled);
            if let Some(engine) = self.engine.upgrade() {
                // The job may be waiting to write.
                engine.recheck_order();
                engine.pump();
            }
        }
    }

    /// Returns the length of the job in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.progress.len
    }

    /// Returns what has been done for it so far.
    pub fn moved(&self) -> Moved {
        self.progress.moved.get()
    }

    /// Resolves when all of it has been read, or nothing more will be.
    pub async fn wait_read(&self) {
        let progress = &self.progress;
        while progress.read.get() < progress.len && !progress.has_failed() && !progress.ended.get() {
            progress.changed.wait().await;
        }
    }

    /// Resolves when everything has been submitted to the destinations (true), or nothing more will be.
    pub async fn wait_submitted(&self) -> bool {
        while !self.progress.is_fully_submitted() && !self.progress.ended.get() {
            self.progress.changed.wait().await;
        }
        self.progress.is_written()
    }

    /// Resolves when none of its requests is in flight any more. Success: everything is written to all
    /// destinations (not durable before they are flushed); otherwise the reason of the failure.
    ///
    /// # Errors
    /// A read or write failed, or the job was cancelled.
    pub async fn wait_done(&self) -> Result<(), CopyError> {
        while !self.progress.ended.get() {
            self.progress.changed.wait().await;
        }
        match self.progress.take_failure() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }
}

/// A gate for a caller that submits several jobs and wants all of them read before any is written. The gate
/// opens when this is dropped. It never blocks progress: it does not hold while any job waits to be started.
pub struct WriteGate {
    hold: GateHold,
    engine: Weak<dyn Pump>,
}

/// For a [`Job`](super::Job): it is written only when the gate is open.
#[derive(Clone)]
pub struct GateHold(Rc<Cell<bool>>);

impl WriteGate {
    pub(super) fn new(engine: Weak<dyn Pump>) -> WriteGate {
        WriteGate { hold: GateHold(Rc::new(Cell::new(true))), engine }
    }

    /// Returns the hold for a job.
    pub fn hold(&self) -> GateHold {
        self.hold.clone()
    }
}

impl GateHold {
    pub(super) fn is_closed(&self) -> bool {
        self.0.get()
    }
}

impl Drop for WriteGate {
    fn drop(&mut self) {
        self.hold.0.set(false);
        if let Some(engine) = self.engine.upgrade() {
            engine.recheck_order();
        }
    }
}
