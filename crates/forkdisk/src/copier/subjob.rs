//! One buffer's worth of copying: read, wait for one's turn, write.

use std::io;
use std::pin::Pin;
use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::device::{Buf, Device, IoResult, Segment, Segments};
use crate::planted::{Bug, planted};

use super::engine::Engine;
use super::job::{CopyError, Place, Source};
use super::queue::Part;

/// A request that has been submitted.
type Request = Pin<Box<dyn Future<Output = IoResult>>>;
/// All that belongs together, of which the first request has been submitted.
pub type Begun<D> = (Vec<Group<D>>, Request);

/// What a sub-job has moved, in bytes.
#[derive(Clone, Copy, Default)]
pub struct Moved {
    pub read: u64,
    pub written: u64,
    pub offloaded: u64,
}

/// See the module. All parts belong to one client and follow each other at every destination.
pub struct SubJob<D> {
    pub parts: SmallVec<[Part<D>; 1]>,
    pub done: Moved,
    buf: Option<Buf>,
    len: usize,
}

/// Segments of one request, all on one device.
pub struct Group<D> {
    device: Rc<D>,
    segments: Segments,
}

impl<D: Device> Group<D> {
    fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.len as u64).sum()
    }
}

impl<D> SubJob<D> {
    pub fn new(buf: Buf, parts: SmallVec<[Part<D>; 1]>) -> SubJob<D> {
        SubJob { parts, done: Moved::default(), len: buf.len(), buf: Some(buf) }
    }

    pub fn buf_len(&self) -> usize {
        self.len
    }

    /// The buffer, when nothing is in flight.
    pub fn take_buf(&mut self) -> Buf {
        self.buf.take().expect("a request gives its buffer back")
    }

    /// Each part with its place in the buffer.
    fn placed(&self) -> impl Iterator<Item = (usize, &Part<D>)> {
        self.parts.iter().scan(0, |at, part| {
            let start = *at;
            *at += part.len as usize;
            Some((start, part))
        })
    }

    fn all_failed(&self) -> bool {
        self.parts.iter().all(|part| part.job.progress.has_failed())
    }
}

impl<D: Device> SubJob<D> {
    /// Fills in what comes from nowhere and submits the first read.
    pub fn start_reading(&mut self) -> Option<Begun<D>> {
        let mut zeroes = Vec::new();
        for (start, part) in self.placed() {
            let mut at = start;
            for piece in part.job.pieces(part.at, part.len) {
                if matches!(piece.from, Source::Zeroes) {
                    zeroes.push(at..at + piece.len as usize);
                }
                at += piece.len as usize;
            }
        }
        let buf = self.buf.as_mut().expect("at rest");
        zeroes.into_iter().for_each(|range| buf[range].fill(0));
        let groups = self.reads(&self.alive());
        let (device, segments) = groups.first().map(|g| (g.device.clone(), g.segments.clone()))?;
        let request = Box::pin(device.read(self.take_buf(), segments));
        Some((groups, request))
    }

    /// Reads, waits for its turn, writes. Failures end up with the jobs they belong to.
    pub async fn run(&mut self, engine: &Rc<Engine<D>>, reading: Option<Begun<D>>) {
        if let Some(reading) = reading {
            self.done.read += self.finish(reading, false).await;
        }
        if !self.all_failed() {
            self.await_turn(engine).await;
        }
        let writing = (!self.all_failed()).then(|| self.start_writing());
        engine.turned.notify();
        if let Some(writing) = writing {
            self.done.written += self.finish(writing, true).await;
        }
    }

    /// The parts whose jobs have not failed.
    fn alive(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&i| !self.parts[i].job.progress.has_failed()).collect()
    }

    /// What is read for some of the parts, by device, in order.
    fn reads(&self, parts: &[usize]) -> Vec<Group<D>> {
        let mut groups: Vec<Group<D>> = Vec::new();
        for (_, (start, part)) in self.placed().enumerate().filter(|(i, _)| parts.contains(i)) {
            let mut at = start;
            for piece in part.job.pieces(part.at, part.len) {
                if let Source::Device(place) = piece.from {
                    push(&mut groups, &place, at, piece.len as usize);
                }
                at += piece.len as usize;
            }
        }
        groups
    }

    /// What is written for some of the parts, by device.
    fn writes(&self, parts: &[usize]) -> Vec<Group<D>> {
        let mut groups: Vec<Group<D>> = Vec::new();
        for d in 0..self.parts[0].job.destinations.len() {
            for (_, (start, part)) in self.placed().enumerate().filter(|(i, _)| parts.contains(i)) {
                push(&mut groups, &part.job.destinations[d].after(part.at), start, part.len as usize);
            }
        }
        groups
    }

    /// The rest of what has begun. If something failed, each part is tried by itself to see whose
    /// failure it is. Returns the bytes moved.
    async fn finish(&mut self, (groups, first): Begun<D>, write: bool) -> u64 {
        let (mut result, buf) = first.await;
        self.buf = Some(buf);
        for group in groups.iter().skip(1) {
            if result.is_ok() {
                result = self.transfer(group, write).await;
            }
        }
        let parts = self.alive();
        match result {
            Ok(()) => groups.iter().map(Group::bytes).sum(),
            Err(error) if self.parts.len() == 1 => {
                self.fail(0, error, write);
                0
            }
            Err(_) => {
                let mut moved = 0;
                for part in parts {
                    moved += self.alone(part, write).await;
                }
                moved
            }
        }
    }

    /// Reads or writes one part by itself.
    async fn alone(&mut self, part: usize, write: bool) -> u64 {
        let mut moved = 0;
        for group in if write { self.writes(&[part]) } else { self.reads(&[part]) } {
            match self.transfer(&group, write).await {
                Ok(()) => moved += group.bytes(),
                Err(error) => self.fail(part, error, write),
            }
        }
        moved
    }

    fn fail(&self, part: usize, error: io::Error, write: bool) {
        if !planted(Bug::CopierErrorSwallowed) {
            let error = if write { CopyError::Write(error) } else { CopyError::Read(error) };
            self.parts[part].job.progress.fail(error);
        }
    }

    /// Waits until everything near that was submitted before has been written.
    async fn await_turn(&self, engine: &Engine<D>) {
        let beside = |number: u64| self.parts.iter().any(|part| part.job.progress.number == number);
        let is_turn = || {
            let state = engine.state.borrow();
            self.parts.iter().all(|part| {
                let job = &part.job.progress;
                job.has_failed() || job.sealed.get() == part.at && state.is_turn_of(job, beside)
            })
        };
        while !is_turn() && !self.all_failed() {
            engine.turned.wait().await;
        }
    }

    /// Lays what was given over what was read and submits the first write.
    fn start_writing(&mut self) -> Begun<D> {
        let groups = self.writes(&self.alive());
        let mut buf = self.take_buf();
        for (start, part) in self.placed() {
            let job = &part.job.progress;
            job.overlay(part.at, &mut buf[start..start + part.len as usize]);
            job.seal(part.at + part.len);
        }
        let request = Box::pin(groups[0].device.write(buf, groups[0].segments.clone(), false));
        (groups, request)
    }

    async fn transfer(&mut self, group: &Group<D>, write: bool) -> io::Result<()> {
        let (buf, segments) = (self.take_buf(), group.segments.clone());
        let (result, buf) = match write {
            true => group.device.write(buf, segments, false).await,
            false => group.device.read(buf, segments).await,
        };
        self.buf = Some(buf);
        result
    }
}

/// Adds a piece: to the last one where it goes on, to its device's group, or to a new one.
fn push<D>(groups: &mut Vec<Group<D>>, place: &Place<D>, at: usize, len: usize) {
    let segment = Segment { offset: place.offset, at, len };
    let Some(group) = groups.iter_mut().find(|g| Rc::ptr_eq(&g.device, &place.device)) else {
        groups.push(Group { device: place.device.clone(), segments: smallvec![segment] });
        return;
    };
    match group.segments.last_mut() {
        Some(s) if s.offset + s.len as u64 == place.offset && s.at + s.len == at => s.len += len,
        _ => group.segments.push(segment),
    }
}
