//! Locks on ranges of a volume's pages, granted in the order of the requests.
//!
//! Writes in place share a range. What reads before it writes or changes the map (a fault, a hole) holds it
//! exclusively.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use super::Event;

/// How a range is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Shared with other holders in this mode.
    Shared,
    /// Excludes all other holders.
    Exclusive,
}

struct LockRequest {
    id: u64,
    range: Range<u64>,
    hold: LockMode,
    granted: bool,
}

impl LockRequest {
    fn conflicts(&self, other: &LockRequest) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.hold == LockMode::Exclusive || other.hold == LockMode::Exclusive)
    }
}

/// Identifiers ascend along the queue.
#[derive(Default)]
struct LockQueue {
    next: u64,
    queue: VecDeque<LockRequest>,
    /// Number of exclusive requests, and below it of those not granted yet.
    alone: usize,
    waiting: usize,
}

impl LockQueue {
    /// Adds a request that is not granted yet.
    fn add(&mut self, range: Range<u64>, hold: LockMode) -> u64 {
        self.next += 1;
        self.alone += usize::from(hold == LockMode::Exclusive);
        self.waiting += 1;
        self.queue.push_back(LockRequest { id: self.next, range, hold, granted: false });
        self.next
    }

    fn place(&self, id: u64) -> usize {
        self.queue.binary_search_by_key(&id, |c| c.id).expect("a claim lives as long as its guard")
    }

    /// Whether none of the first `n` requests conflicts with `claim`.
    fn is_free(&self, claim: &LockRequest, n: usize) -> bool {
        let all_share = self.alone == 0;
        all_share || !self.queue.iter().take(n).any(|c| c.conflicts(claim))
    }

    fn try_grant(&mut self, id: u64) -> bool {
        let at = self.place(id);
        if !self.is_free(&self.queue[at], at) {
            return false;
        }
        let claim = &mut self.queue[at];
        self.waiting -= usize::from(!claim.granted);
        claim.granted = true;
        true
    }

    /// Removes a request; returns whether any request still waits.
    fn remove(&mut self, id: u64) -> bool {
        let at = self.place(id);
        let claim = self.queue.remove(at).expect("found there");
        self.alone -= usize::from(claim.hold == LockMode::Exclusive);
        self.waiting -= usize::from(!claim.granted);
        self.waiting > 0
    }
}

/// All requests on one volume, oldest first.
#[derive(Default)]
pub struct RangeLocks {
    claims: RefCell<LockQueue>,
    changed: Event,
}

/// A range held until this is dropped.
pub struct RangeGuard {
    locks: Rc<RangeLocks>,
    id: u64,
}

impl RangeLocks {
    /// Locks `range`; waits for every earlier request that conflicts with it.
    pub async fn lock(self: &Rc<Self>, range: Range<u64>, hold: LockMode) -> RangeGuard {
        let id = self.claims.borrow_mut().add(range, hold);
        let guard = RangeGuard { locks: self.clone(), id };
        while !self.claims.borrow_mut().try_grant(id) {
            self.changed.wait().await;
        }
        guard
    }

    /// Whether a request waits for a part of `range`.
    pub fn is_awaited(&self, range: &Range<u64>) -> bool {
        let claims = self.claims.borrow();
        let waits = |c: &LockRequest| !c.granted && c.range.start < range.end && range.start < c.range.end;
        claims.waiting > 0 && claims.queue.iter().any(waits)
    }

    /// Locks `range` if no request conflicts with it; never waits.
    pub fn try_lock(self: &Rc<Self>, range: Range<u64>, hold: LockMode) -> Option<RangeGuard> {
        let mut claims = self.claims.borrow_mut();
        let id = claims.add(range, hold);
        if claims.try_grant(id) {
            return Some(RangeGuard { locks: self.clone(), id });
        }
        claims.remove(id);
        None
    }
}

impl RangeGuard {
    /// Extends the lock to all of `range`, which has the same start, unless an earlier request or the holder
    /// of a part of it conflicts. Requests that wait for a part of it continue to wait.
    pub fn widen(&mut self, range: Range<u64>) -> bool {
        let mut claims = self.locks.claims.borrow_mut();
        let at = claims.place(self.id);
        let wide = LockRequest { id: self.id, range, hold: claims.queue[at].hold, granted: true };
        debug_assert!(wide.range.start == claims.queue[at].range.start && claims.queue[at].range.end <= wide.range.end);
        let in_the_way = |(i, c): (usize, &LockRequest)| i != at && (i < at || c.granted) && c.conflicts(&wide);
        if claims.queue.iter().enumerate().any(in_the_way) {
            return false;
        }
        claims.queue[at] = wide;
        true
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let somebody_waits = self.locks.claims.borrow_mut().remove(self.id);
        if somebody_waits {
            self.locks.changed.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn those_who_share_do_not_wait_for_one_another() {
        let locks = Rc::new(RangeLocks::default());
        let a = locks.try_lock(0..4, LockMode::Shared).expect("the first");
        let b = locks.try_lock(2..6, LockMode::Shared).expect("shared as well");
        assert!(locks.try_lock(3..4, LockMode::Exclusive).is_none());
        let c = locks.try_lock(6..8, LockMode::Exclusive).expect("it overlaps nothing");
        assert!(locks.try_lock(7..9, LockMode::Shared).is_none());
        drop((a, b, c));
        assert!(locks.try_lock(0..9, LockMode::Exclusive).is_some());
    }

    #[test]
    fn a_claim_waits_for_all_earlier_ones_in_its_way() {
        let locks = Rc::new(RangeLocks::default());
        let first = locks.try_lock(0..4, LockMode::Shared).expect("the first");
        let mut alone = pin!(locks.lock(0..2, LockMode::Exclusive));
        assert!(poll(alone.as_mut()).is_none());
        assert!(locks.is_awaited(&(1..9)) && !locks.is_awaited(&(2..9)), "what is held is not awaited");
        assert!(locks.try_lock(1..2, LockMode::Shared).is_none(), "behind the one that waits to be alone");
        let mut later = pin!(locks.lock(1..2, LockMode::Shared));
        assert!(poll(later.as_mut()).is_none());
        drop(first);
        let held = poll(alone.as_mut()).expect("its turn");
        assert!(poll(later.as_mut()).is_none());
        drop(held);
        assert!(poll(later.as_mut()).is_some());
    }

    #[test]
    fn who_widens_goes_before_those_who_wait_and_not_before_others() {
        let locks = Rc::new(RangeLocks::default());
        let mut early = pin!(locks.lock(9..10, LockMode::Exclusive));
        let tenth = locks.try_lock(9..10, LockMode::Shared).expect("nobody has asked yet");
        assert!(poll(early.as_mut()).is_none());
        let mut first = locks.try_lock(0..4, LockMode::Exclusive).expect("nobody else");
        let mut waits = pin!(locks.lock(3..6, LockMode::Shared));
        assert!(poll(waits.as_mut()).is_none());
        let seventh = locks.try_lock(7..8, LockMode::Shared).expect("nobody else");
        assert!(first.widen(0..6), "behind it in the queue");
        assert!(!first.widen(0..8), "held");
        drop((seventh, tenth));
        assert!(!first.widen(0..10), "before it in the queue");
        assert!(first.widen(0..9));
        assert!(locks.try_lock(8..9, LockMode::Shared).is_none());
        assert!(poll(waits.as_mut()).is_none());
        drop(first);
        assert!(poll(waits.as_mut()).is_some() && poll(early.as_mut()).is_some());
    }

    #[test]
    fn a_claim_given_up_is_in_nobodys_way() {
        let locks = Rc::new(RangeLocks::default());
        let first = locks.try_lock(0..4, LockMode::Shared).expect("the first");
        let mut alone = Box::pin(locks.lock(0..2, LockMode::Exclusive));
        assert!(poll(alone.as_mut()).is_none());
        drop(alone);
        assert!(locks.try_lock(0..1, LockMode::Shared).is_some());
        drop(first);
        let claims = locks.claims.borrow();
        assert_eq!((claims.queue.len(), claims.alone, claims.waiting), (0, 0, 0));
    }
}
