//! Locks on ranges of a volume's pages, granted in the order in which they were asked for.
//!
//! Writes in place share a range with one another. Whatever reads before it writes, or changes
//! the map (a fault, a hole), has it alone.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use super::Event;

/// How a range is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Together with others who share it.
    Shared,
    /// Alone.
    Alone,
}

struct Claim {
    id: u64,
    range: Range<u64>,
    hold: Hold,
    granted: bool,
}

impl Claim {
    fn conflicts(&self, other: &Claim) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.hold == Hold::Alone || other.hold == Hold::Alone)
    }
}

#[derive(Default)]
struct Claims {
    next: u64,
    queue: VecDeque<Claim>,
}

/// All claims on one volume, oldest first.
#[derive(Default)]
pub struct RangeLocks {
    claims: RefCell<Claims>,
    changed: Event,
}

/// A range held until this is dropped.
pub struct RangeGuard {
    locks: Rc<RangeLocks>,
    id: u64,
}

impl RangeLocks {
    /// Holds `range`; waits for every earlier claim that conflicts with it.
    pub async fn lock(self: &Rc<Self>, range: Range<u64>, hold: Hold) -> RangeGuard {
        let id = {
            let mut claims = self.claims.borrow_mut();
            claims.next += 1;
            let id = claims.next;
            claims.queue.push_back(Claim { id, range, hold, granted: false });
            id
        };
        let guard = RangeGuard { locks: self.clone(), id };
        while !self.try_grant(id) {
            self.changed.wait().await;
        }
        guard
    }

    fn try_grant(&self, id: u64) -> bool {
        let mut claims = self.claims.borrow_mut();
        let at = claims.queue.iter().position(|c| c.id == id).expect("a claim lives as long as its guard");
        let free = !claims.queue.iter().take(at).any(|c| c.conflicts(&claims.queue[at]));
        claims.queue[at].granted = free;
        free
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut claims = self.locks.claims.borrow_mut();
        claims.queue.retain(|c| c.id != self.id);
        let waiting = claims.queue.iter().any(|c| !c.granted);
        drop(claims);
        if waiting {
            self.locks.changed.notify();
        }
    }
}
