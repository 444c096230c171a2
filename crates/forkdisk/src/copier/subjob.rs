//! One buffer of a copy: read, wait for admission, write. What the device can clone is neither read nor
//! written (see `offload`).

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::device::{Buf, Device, IoResult, Segment, Segments};
use crate::planted::correct;

use super::client::Moved;
use super::engine::Engine;
use super::job::{CopyError, CopySource, Place};
use super::queue::Part;

/// A request that has been submitted.
type Request = Pin<Box<dyn Future<Output = IoResult>>>;
/// A set of requests, of which the first has been submitted.
pub type StartedTransfer<D> = (Vec<SegmentGroup<D>>, Request);

/// See the module. All parts belong to one client and are contiguous at every destination.
pub struct SubJob<D> {
    pub parts: SmallVec<[Part<D>; 1]>,
    pub done: Moved,
    /// Reads and writes that succeeded.
    pub requests: [u64; 2],
    buf: Option<Buf>,
    len: usize,
    /// The device clones what it can; only provided bytes are written.
    pub(super) offloads: bool,
    /// Ranges of the buffer that are filled from the source.
    pub(super) fill: Vec<Range<usize>>,
    /// Ranges that hold the data of the source, including those that are still being read.
    pub(super) filled: Vec<Range<usize>>,
}

/// Segments of one request, all on one device.
pub struct SegmentGroup<D> {
    device: Rc<D>,
    segments: Segments,
}

impl<D> SegmentGroup<D> {
    fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.len as u64).sum()
    }
}

impl<D> SubJob<D> {
    pub fn new(buf: Buf, parts: SmallVec<[Part<D>; 1]>) -> SubJob<D> {
        let (fill, filled) = Default::default();
        let (done, requests) = Default::default();
        SubJob { parts, done, requests, len: buf.len(), buf: Some(buf), offloads: false, fill, filled }
    }

    pub fn buf_len(&self) -> usize {
        self.len
    }

    /// Takes the buffer, when nothing is in flight.
    pub fn take_buf(&mut self) -> Buf {
        self.buf.take().expect("a request gives its buffer back")
    }

    /// Yields each part with its place in the buffer.
    pub(super) fn placed(&self) -> impl Iterator<Item = (usize, &Part<D>)> {
        self.parts.iter().scan(0, |at, part| {
            let start = *at;
            *at += part.len as usize;
            Some((start, part))
        })
    }

    pub(super) fn all_failed(&self) -> bool {
        self.parts.iter().all(|part| part.job.progress.has_failed())
    }
}

impl<D: Device> SubJob<D> {
    /// Zeroes the holes and submits the first read of what is missing, if anything is.
    pub fn start_reading(&mut self) -> Option<StartedTransfer<D>> {
        let whole = 0..self.len;
        self.fill = if self.offloads { self.missing() } else { vec![whole] };
        let mut zeroes = Vec::new();
        let all: Vec<usize> = (0..self.parts.len()).collect();
        self.each_source(&all, |from, place| {
            if matches!(from, CopySource::Zeroes) {
                zeroes.push(place);
            }
        });
        let buf = self.buf.as_mut().expect("at rest");
        zeroes.into_iter().for_each(|range| buf[range].fill(0));
        self.filled.extend(self.fill.iter().cloned());
        let groups = self.reads(&self.alive());
        let (device, segments) = groups.first().map(|g| (g.device.clone(), g.segments.clone()))?;
        let request = Box::pin(device.read(self.take_buf(), segments));
        Some((groups, request))
    }

    /// Reads, waits for admission, writes. Failures are noted in the jobs they belong to.
    pub async fn run(&mut self, engine: &Rc<Engine<D>>, reading: Option<StartedTransfer<D>>) {
        if let Some(reading) = reading {
            self.finish(reading, false).await;
        }
        self.parts.iter().for_each(|part| part.job.progress.note_read(part.len));
        if !self.all_failed() {
            self.await_turn(engine).await;
        }
        if self.offloads {
            correct!(self.offload().await, Bug::CloneOverGiven => ());
        }
        let writing = if self.all_failed() { None } else { self.start_writing() };
        engine.turned.notify();
        correct!(self.finish_writing(writing).await, Bug::CloneOverGiven => finish_late(self, writing).await);
    }

    async fn finish_writing(&mut self, writing: Option<StartedTransfer<D>>) {
        if let Some(writing) = writing {
            self.finish(writing, true).await;
        }
    }

    /// Returns the parts whose jobs have not failed.
    pub(super) fn alive(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&i| !self.parts[i].job.progress.has_failed()).collect()
    }

    /// Calls `see` for each piece to be filled of some of the parts, with its source and its place in the
    /// buffer.
    fn each_source(&self, parts: &[usize], mut see: impl FnMut(CopySource<D>, Range<usize>)) {
        for (_, (start, part)) in self.placed().enumerate().filter(|(i, _)| parts.contains(i)) {
            let end = start + part.len as usize;
            for range in &self.fill {
                let (from, to) = (range.start.max(start), range.end.min(end));
                if from >= to {
                    continue;
                }
                let mut at = from;
                for piece in part.job.pieces(part.at + (from - start) as u64, (to - from) as u64) {
                    let place = at..at + piece.len as usize;
                    at = place.end;
                    see(piece.from, place);
                }
            }
        }
    }

    /// Returns what is read for some of the parts, by device, in order.
    fn reads(&self, parts: &[usize]) -> Vec<SegmentGroup<D>> {
        let mut groups: Vec<SegmentGroup<D>> = Vec::new();
        self.each_source(parts, |from, place| {
            if let CopySource::Device(source) = from {
                push(&mut groups, &source, place.start, place.len());
            }
        });
        groups
    }

    /// Returns what is written for some of the parts, by device.
    fn writes(&self, parts: &[usize]) -> Vec<SegmentGroup<D>> {
        let mut groups: Vec<SegmentGroup<D>> = Vec::new();
        for d in 0..self.parts[0].job.destinations.len() {
            for (i, (start, part)) in self.placed().enumerate().filter(|(i, _)| parts.contains(i)) {
                let whole = start..start + part.len as usize;
                for range in if self.offloads { self.written(i) } else { vec![whole] } {
                    let place = part.job.destinations[d].after(part.at + (range.start - start) as u64);
                    push(&mut groups, &place, range.start, range.len());
                }
            }
        }
        groups
    }

    /// Completes what has begun. If a request failed, tries each part separately to find out which one
    /// failed.
    pub(super) async fn finish(&mut self, (groups, first): StartedTransfer<D>, write: bool) {
        let parts = self.alive();
        let (mut result, buf) = first.await;
        self.buf = Some(buf);
        for group in groups.iter().skip(1) {
            if result.is_ok() {
                result = self.transfer(group, write).await;
            }
        }
        match result {
            Ok(()) if self.parts.len() == 1 => {
                self.note_requests(&groups, write);
                self.note_transfer(0, &groups, write);
            }
            Ok(()) => {
                self.note_requests(&groups, write);
                for part in parts {
                    let groups = if write { self.writes(&[part]) } else { self.reads(&[part]) };
                    self.note_transfer(part, &groups, write);
                }
            }
            Err(error) if self.parts.len() == 1 => self.fail(0, error, write),
            Err(_) => {
                for part in self.alive() {
                    self.transfer_part(part, write).await;
                }
            }
        }
    }

    /// Reads or writes one part separately.
    async fn transfer_part(&mut self, part: usize, write: bool) {
        for group in if write { self.writes(&[part]) } else { self.reads(&[part]) } {
            match self.transfer(&group, write).await {
                Ok(()) => {
                    self.note_requests(std::slice::from_ref(&group), write);
                    self.note_transfer(part, &[group], write);
                }
                Err(error) => self.fail(part, error, write),
            }
        }
    }

    fn note_requests(&mut self, groups: &[SegmentGroup<D>], write: bool) {
        self.requests[usize::from(write)] += groups.iter().map(|group| group.segments.len() as u64).sum::<u64>();
    }

    fn note_transfer(&mut self, part: usize, groups: &[SegmentGroup<D>], write: bool) {
        let bytes: u64 = groups.iter().map(SegmentGroup::bytes).sum();
        self.note(part, |moved| *if write { &mut moved.written } else { &mut moved.read } += bytes);
    }

    /// Counts for a part's job, and for the sub-job.
    pub(super) fn note(&mut self, part: usize, count: impl Fn(&mut Moved)) {
        let of_job = &self.parts[part].job.progress.moved;
        let mut moved = of_job.get();
        count(&mut moved);
        of_job.set(moved);
        count(&mut self.done);
    }

    pub(super) fn fail(&self, part: usize, error: io::Error, write: bool) {
        let error = if write { CopyError::Write(error) } else { CopyError::Read(error) };
        correct!(self.parts[part].job.progress.fail(error), Bug::CopierErrorSwallowed => ());
    }

    /// Waits until everything near that was submitted before has been written, and no gate holds it.
    async fn await_turn(&self, engine: &Engine<D>) {
        let beside = |number: u64| self.parts.iter().any(|part| part.job.progress.number == number);
        let is_turn = || {
            let state = engine.state.borrow();
            self.parts.iter().all(|part| {
                let job = &part.job.progress;
                job.has_failed()
                    || job.submitted.get() == part.at && state.is_turn_of(job, beside) && !state.is_held(job)
            })
        };
        while !is_turn() && !self.all_failed() {
            engine.turned.wait().await;
        }
    }

    /// Overlays what was read with the provided bytes and submits the first write, if there is one.
    fn start_writing(&mut self) -> Option<StartedTransfer<D>> {
        let groups = self.writes(&self.alive());
        let mut buf = self.take_buf();
        for (start, part) in self.placed() {
            let job = &part.job.progress;
            let bytes = &mut buf[start..start + part.len as usize];
            job.overlay(part.at, bytes);
            if !self.offloads && !job.has_failed() {
                job.note_checksums(part.at, bytes);
            }
            job.note_submitted(part.at + part.len);
        }
        let Some(first) = groups.first() else {
            self.buf = Some(buf);
            return None;
        };
        let request = Box::pin(first.device.write(buf, first.segments.clone(), false));
        Some((groups, request))
    }

    async fn transfer(&mut self, group: &SegmentGroup<D>, write: bool) -> io::Result<()> {
        let (buf, segments) = (self.take_buf(), group.segments.clone());
        let (result, buf) = match write {
            true => group.device.write(buf, segments, false).await,
            false => group.device.read(buf, segments).await,
        };
        self.buf = Some(buf);
        result
    }
}

/// Completes the writes, then clones.
#[cfg(feature = "planted")]
async fn finish_late<D: Device>(subjob: &mut SubJob<D>, writing: Option<StartedTransfer<D>>) {
    subjob.finish_writing(writing).await;
    if subjob.offloads {
        subjob.offload().await;
    }
}

/// Adds a piece: to the last segment if it continues it, to its device's group, or to a new one.
fn push<D>(groups: &mut Vec<SegmentGroup<D>>, place: &Place<D>, at: usize, len: usize) {
    let segment = Segment { offset: place.offset, at, len };
    let Some(group) = groups.iter_mut().find(|g| Rc::ptr_eq(&g.device, &place.device)) else {
        groups.push(SegmentGroup { device: place.device.clone(), segments: smallvec![segment] });
        return;
    };
    match group.segments.last_mut() {
        Some(s) if s.offset + s.len as u64 == place.offset && s.at + s.len == at => s.len += len,
        _ => group.segments.push(segment),
    }
}
