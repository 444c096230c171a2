//! Running copies of one volume, and writes that join them: a write to a chunk that is being copied is merged
//! into the copy instead of waiting and writing a second time. That is possible until the affected part was
//! submitted, and while no earlier write waits for it.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use crate::copier::{JobHandle, ProvidedBytes};
use crate::device::{Buf, Device};
use crate::error::Error;
use crate::planted::{Bug, planted};
use crate::sync::{Event, QueuedWrite};

use super::Volume;
use super::live::Live;

/// A part of a volume that is being copied to a new place.
pub struct CopyPart {
    /// Range in the volume, in bytes.
    pub range: Range<u64>,
    pub ticket: JobHandle,
}

/// All copies that one write started.
pub struct InflightBreak {
    pub parts: Vec<CopyPart>,
    /// Numbers in the write queue of the write that started them and of those that joined.
    queued_ids: RefCell<Vec<u64>>,
    /// Bytes of the volume before this offset are taken: a joining write begins behind it.
    joined: Cell<u64>,
    outcome: RefCell<Option<Result<(), Error>>>,
    ended: Event,
}

impl InflightBreak {
    /// The parts that together contain `range`, if they do.
    fn parts_of(&self, range: &Range<u64>) -> Option<Vec<&CopyPart>> {
        let overlap = |p: &&CopyPart| p.range.start < range.end && range.start < p.range.end;
        let parts: Vec<&CopyPart> = self.parts.iter().filter(overlap).collect();
        let held: u64 = parts.iter().map(|p| p.range.end.min(range.end) - p.range.start.max(range.start)).sum();
        (held == range.end - range.start).then_some(parts)
    }

    async fn outcome(&self) -> Result<(), Error> {
        loop {
            if let Some(outcome) = &*self.outcome.borrow() {
                return outcome.clone();
            }
            self.ended.wait().await;
        }
    }
}

impl Live {
    /// Registers copies that writes may join from byte `from` of the volume on.
    pub fn begin_break(&self, parts: Vec<CopyPart>, queued: &QueuedWrite<Buf>, from: u64) -> Rc<InflightBreak> {
        let (outcome, ended) = Default::default();
        let new = Rc::new(InflightBreak {
            parts,
            queued_ids: RefCell::new(vec![queued.id()]),
            joined: Cell::new(from),
            outcome,
            ended,
        });
        self.breaks.borrow_mut().push(new.clone());
        new
    }

    /// Ends the copies: they were mapped, or failed.
    pub fn end_break(&self, ended: &Rc<InflightBreak>, outcome: Result<(), Error>) {
        self.breaks.borrow_mut().retain(|b| !Rc::ptr_eq(b, ended));
        *ended.outcome.borrow_mut() = Some(outcome);
        ended.ended.notify();
    }
}

impl<D: Device> Volume<D> {
    /// Merges `buf` into a running copy if one accepts it. `Err` returns the buffer and its place in the
    /// write queue: it has to be written normally, also after a copy that failed.
    pub(super) async fn join_copy(
        &self,
        offset: u64,
        buf: Buf,
        pages: &Range<u64>,
    ) -> Result<Buf, (Buf, QueuedWrite<Buf>)> {
        let range = offset..offset + buf.len() as u64;
        let found = self.joinable_copy(&range, pages);
        let queued = self.live.write_queue.enter(pages.clone());
        let Some(joined) = found else { return Err((buf, queued)) };
        joined.queued_ids.borrow_mut().push(queued.id());
        joined.joined.set(range.end);
        let bytes = Rc::new(buf);
        let parts = joined.parts_of(&range).expect("found with it");
        for part in &parts {
            let (from, to) = (part.range.start.max(range.start), part.range.end.min(range.end));
            let place = (from - offset) as usize..(to - offset) as usize;
            if !planted(Bug::JoinedWriteLost) {
                part.ticket.give(ProvidedBytes { at: from - part.range.start, range: place, bytes: bytes.clone() });
            }
        }
        let mut submitted = true;
        for part in &parts {
            submitted &= part.ticket.wait_submitted().await;
        }
        // Keeps its place in the queue in case it has to be written normally.
        let queued = (!submitted).then_some(queued);
        let outcome = joined.outcome().await;
        let buf = Rc::try_unwrap(bytes).unwrap_or_else(|shared| Buf::copy_of(&shared));
        match outcome {
            Ok(()) => Ok(buf),
            Err(_) => Err((buf, queued.unwrap_or_else(|| self.live.write_queue.enter(pages.clone())))),
        }
    }

    fn joinable_copy(&self, range: &Range<u64>, pages: &Range<u64>) -> Option<Rc<InflightBreak>> {
        let running = self.live.breaks.borrow();
        if running.is_empty() {
            return None;
        }
        if self.live.locks.is_awaited(pages) {
            return None;
        }
        let takes = |part: &&CopyPart| {
            planted(Bug::JoinedWriteTooLate) || part.ticket.takes(range.start.max(part.range.start) - part.range.start)
        };
        let joins = |b: &&Rc<InflightBreak>| {
            let in_order =
                b.joined.get() <= range.start && self.live.write_queue.is_behind_only(pages, &b.queued_ids.borrow());
            in_order && b.parts_of(range).is_some_and(|parts| parts.iter().all(takes))
        };
        running.iter().find(joins).cloned()
    }
}
