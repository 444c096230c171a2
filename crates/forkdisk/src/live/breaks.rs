//! Running copies of an open volume, which later writes may join.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use crate::copier::JobHandle;
use crate::device::Buf;
use crate::error::Error;
use crate::sync::{Event, QueuedWrite};

use super::Live;

/// A part of a volume that is being copied to a new place.
pub struct CopyPart {
    /// Range in the volume, in bytes.
    pub range: Range<u64>,
    /// The copy.
    pub ticket: JobHandle,
}

/// All copies that one write started.
pub struct InflightBreak {
    /// Its parts.
    pub parts: Vec<CopyPart>,
    /// Numbers in the write queue of the write that started them and of those that joined.
    pub queued_ids: RefCell<Vec<u64>>,
    /// Bytes of the volume before this offset are taken: a joining write begins behind it.
    pub joined: Cell<u64>,
    outcome: RefCell<Option<Result<(), Error>>>,
    ended: Event,
}

impl InflightBreak {
    /// The parts that together contain `range`, if they do.
    pub fn parts_of(&self, range: &Range<u64>) -> Option<Vec<&CopyPart>> {
        let overlap = |p: &&CopyPart| p.range.start < range.end && range.start < p.range.end;
        let parts: Vec<&CopyPart> = self.parts.iter().filter(overlap).collect();
        let held: u64 = parts.iter().map(|p| p.range.end.min(range.end) - p.range.start.max(range.start)).sum();
        (held == range.end - range.start).then_some(parts)
    }

    /// Waits for the end.
    pub async fn outcome(&self) -> Result<(), Error> {
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
