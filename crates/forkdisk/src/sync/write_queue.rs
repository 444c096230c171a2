//! The order in which one volume's writes reach the device: the order in which they were accepted.
//!
//! A write enters the queue when it is accepted and leaves it when its requests have been submitted. Until
//! then every later write to the same or a neighbouring block waits, whatever the earlier one waits for: a
//! table, a count page, a checkpoint, the rest of its page, a lock. Writes elsewhere never wait here.
//!
//! Space is the one thing that is not waited for in order. A write that finds none *yields*. Neighbours that
//! need no space may pass it; those that need space stay behind it, and so does every write that overlaps it.
//!
//! A waiting write leaves a payload. An earlier writer may merge it and do the work of both in one request.
//!
//! Requests that replace contents without data (holes, shared ranges, rollbacks) enter the queue only if it has
//! writes that they overlap.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Poll, Waker};

use crate::error::Result;
use crate::planted::correct;
use crate::types::BLOCK_PAGES;

/// What the queued writes before a write allow it to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// An earlier neighbour comes first.
    Blocked,
    /// A write that yielded comes first: it overlaps the same pages.
    Overlaps,
    /// Neighbours have yielded: only a write that needs no space may go.
    NoSpaceNeeded,
    /// No write is before it.
    Free,
}

/// The payload of a waiting write, and its outcome.
struct Waiter<P> {
    payload: RefCell<Option<P>>,
    outcome: RefCell<Option<Result<()>>>,
    waker: RefCell<Option<Waker>>,
}

impl<P> Waiter<P> {
    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

struct Queued<P> {
    id: u64,
    pages: Range<u64>,
    aside: bool,
    wait: Option<Rc<Waiter<P>>>,
}

impl<P> Queued<P> {
    /// Whether the blocks of both are the same or adjacent.
    fn is_near(&self, pages: &Range<u64>) -> bool {
        let blocks = |pages: &Range<u64>| pages.start / BLOCK_PAGES..(pages.end - 1) / BLOCK_PAGES + 1;
        let (a, b) = (blocks(&self.pages), blocks(pages));
        correct!(a.start <= b.end && b.start <= a.end, Bug::NeighbourOvertakes => false)
    }

    fn overlaps(&self, pages: &Range<u64>) -> bool {
        self.pages.start < pages.end && pages.start < self.pages.end
    }
}

/// Identifiers ascend along the queue.
struct Entries<P> {
    next: u64,
    claims: VecDeque<Queued<P>>,
    /// Number of entries that wait.
    waiting: usize,
}

impl<P> Entries<P> {
    fn place(&self, id: u64) -> Option<usize> {
        self.claims.binary_search_by_key(&id, |c| c.id).ok()
    }

    /// Returns the admission of `pages` behind the first `n` entries.
    fn admission(&self, pages: &Range<u64>, n: usize) -> Admission {
        let mut standing = Admission::Free;
        for other in self.claims.iter().take(n).filter(|c| c.is_near(pages)) {
            match (other.aside, other.overlaps(pages)) {
                (false, _) => return Admission::Blocked,
                (true, true) => standing = Admission::Overlaps,
                (true, false) if standing == Admission::Free => standing = Admission::NoSpaceNeeded,
                (true, false) => {}
            }
        }
        standing
    }

    fn admission_of(&self, id: u64) -> Admission {
        let at = self.place(id).expect("a claim lives as long as its turn");
        self.admission(&self.claims[at].pages, at)
    }

    fn remove(&mut self, id: u64) {
        if let Some(claim) = self.place(id).and_then(|at| self.claims.remove(at)) {
            self.waiting -= usize::from(claim.wait.is_some());
        }
    }

    /// Wakes the entries that wait and are not blocked.
    fn wake(&self) {
        if self.waiting == 0 {
            return;
        }
        for (at, claim) in self.claims.iter().enumerate() {
            if let Some(wait) = &claim.wait
                && self.admission(&claim.pages, at) != Admission::Blocked
            {
                wait.wake();
            }
        }
    }
}

/// The queue of one volume, oldest first. `P` is the payload that waiting writes leave.
pub struct WriteQueue<P> {
    queue: RefCell<Entries<P>>,
}

impl<P> Default for WriteQueue<P> {
    fn default() -> Self {
        WriteQueue { queue: RefCell::new(Entries { next: 0, claims: VecDeque::new(), waiting: 0 }) }
    }
}

/// An entry of the queue; dropping it removes it.
pub struct QueuedWrite<P> {
    writes: Rc<WriteQueue<P>>,
    id: u64,
}

/// How waiting in the queue has ended.
pub enum Admitted<P> {
    /// No write was before it; returns the payload.
    Immediately(P),
    /// Admitted after a wait; returns the payload.
    AfterWait(P),
    /// Another write has done the work.
    Merged(Result<()>, P),
}

/// A payload merged into another write. Its owner waits until [`complete`](Self::complete).
pub struct MergedWrite<P> {
    id: u64,
    wait: Rc<Waiter<P>>,
}

impl<P> MergedWrite<P> {
    /// Calls `f` with the payload and returns its result.
    pub fn with_payload<T>(&self, f: impl FnOnce(&P) -> T) -> T {
        f(self.wait.payload.borrow().as_ref().expect("its owner takes it back when it has been delivered"))
    }

    /// Reports the outcome to the owner.
    pub fn complete(self, outcome: Result<()>) {
        *self.wait.outcome.borrow_mut() = Some(outcome);
        self.wait.wake();
    }
}

impl<P> WriteQueue<P> {
    /// Whether a write of `pages` that needs no space may go before all that wait now.
    pub fn may_pass(&self, pages: &Range<u64>) -> bool {
        let queue = self.queue.borrow();
        queue.claims.is_empty()
            || matches!(queue.admission(pages, queue.claims.len()), Admission::Free | Admission::NoSpaceNeeded)
    }

    /// Whether only these entries are before a write of `pages`.
    pub fn is_behind_only(&self, pages: &Range<u64>, turns: &[u64]) -> bool {
        self.queue.borrow().claims.iter().all(|c| turns.contains(&c.id) || !c.is_near(pages))
    }

    /// Whether an entry overlaps `pages`.
    pub fn overlaps(&self, pages: &Range<u64>) -> bool {
        self.queue.borrow().claims.iter().any(|c| c.overlaps(pages))
    }

    /// Enters the queue behind all other writes.
    pub fn enter(self: &Rc<Self>, pages: Range<u64>) -> QueuedWrite<P> {
        let mut queue = self.queue.borrow_mut();
        queue.next += 1;
        let id = queue.next;
        queue.claims.push_back(Queued { id, pages, aside: false, wait: None });
        QueuedWrite { writes: self.clone(), id }
    }
}

impl<P> QueuedWrite<P> {
    /// Returns the identifier of the entry.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits until no earlier neighbour is before it, or only such as yielded; meanwhile earlier writes may
    /// merge the payload.
    pub async fn admitted(&self, payload: P) -> Admitted<P> {
        match self.standing() {
            Admission::Free => return Admitted::Immediately(payload),
            Admission::NoSpaceNeeded => return Admitted::AfterWait(payload),
            _ => {}
        }
        let wait = self.waiter_with(Some(payload));
        let mut outcome = None;
        poll_fn(|cx| {
            outcome = wait.outcome.take();
            if outcome.is_some() || self.is_admitted() {
                return Poll::Ready(());
            }
            *wait.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        self.stop_waiting();
        let payload = wait.payload.take().expect("left above, and nobody takes it out");
        match outcome {
            Some(result) => Admitted::Merged(result, payload),
            None => Admitted::AfterWait(payload),
        }
    }

    /// Like [`admitted`](Self::admitted) for a request that needs no space and has no data to merge.
    pub async fn admitted_alone(&self) {
        poll_fn(|cx| {
            if self.is_admitted() {
                return Poll::Ready(());
            }
            self.watch(cx.waker());
            Poll::Pending
        })
        .await;
        self.stop_waiting();
    }

    /// Whether the entry is admitted. One that overlaps a write that yielded yields, too.
    fn is_admitted(&self) -> bool {
        let mut queue = self.writes.queue.borrow_mut();
        // Not there: another write merged the payload and has submitted it.
        let Some(at) = queue.place(self.id) else { return false };
        let standing = queue.admission(&queue.claims[at].pages, at);
        let aside = standing == Admission::Overlaps;
        if std::mem::replace(&mut queue.claims[at].aside, aside) != aside {
            queue.wake();
        }
        matches!(standing, Admission::Free | Admission::NoSpaceNeeded)
    }

    /// Yields, because there is no space: writes that need none may pass, until [`rejoin`](Self::rejoin).
    pub fn yield_for_space(&self) {
        self.set_yielding(true);
    }

    /// Ends [`yield_for_space`](Self::yield_for_space): the entry blocks others again.
    pub fn rejoin(&self) {
        self.set_yielding(false);
    }

    /// Whether no write is before it, not even one that yielded.
    pub fn is_first(&self) -> bool {
        self.standing() == Admission::Free
    }

    /// Wakes the calling task when an entry before it has left.
    pub fn watch(&self, waker: &Waker) {
        *self.waiter_with(None).waker.borrow_mut() = Some(waker.clone());
    }

    /// Ends [`watch`](Self::watch).
    pub fn stop_waiting(&self) {
        let mut queue = self.writes.queue.borrow_mut();
        if let Some(at) = queue.place(self.id) {
            let waited = queue.claims[at].wait.take().is_some();
            queue.waiting -= usize::from(waited);
        }
    }

    /// Merges the payloads of waiting writes that continue where pages end at `end`, contiguously, up to page
    /// `limit` at most, if they `fit`; returns where they end. Stops at the first neighbour for which that
    /// does not hold, so no write is overtaken. `taken` are the writes merged already.
    ///
    /// `limit` must be in the last block of this entry's pages: then every write near a merged one is near
    /// this one.
    pub fn merge_followers(
        &self,
        taken: &mut Vec<MergedWrite<P>>,
        mut end: u64,
        limit: u64,
        fit: impl Fn(&P, &Range<u64>) -> bool,
    ) -> u64 {
        let queue = self.writes.queue.borrow();
        if queue.waiting <= taken.len() {
            return end;
        }
        let me = queue.place(self.id).expect("a claim lives as long as its turn");
        let near = |claim: &&Queued<P>| claim.is_near(&queue.claims[me].pages);
        for claim in queue.claims.iter().skip(me + 1).filter(near) {
            if taken.iter().any(|t| t.id == claim.id) {
                continue;
            }
            let Some(wait) = &claim.wait else { break };
            let follows = claim.pages.start == end && claim.pages.end <= limit && !claim.aside;
            if !follows || !wait.payload.borrow().as_ref().is_some_and(|payload| fit(payload, &claim.pages)) {
                break;
            }
            end = claim.pages.end;
            taken.push(MergedWrite { id: claim.id, wait: wait.clone() });
        }
        end
    }

    /// Its requests and those of the writes merged into it have been submitted.
    pub fn submitted(self, taken: &[MergedWrite<P>]) {
        let mut queue = self.writes.queue.borrow_mut();
        taken.iter().for_each(|t| queue.remove(t.id));
    }

    fn standing(&self) -> Admission {
        self.writes.queue.borrow().admission_of(self.id)
    }

    fn set_yielding(&self, aside: bool) {
        let mut queue = self.writes.queue.borrow_mut();
        let at = queue.place(self.id).expect("a claim lives as long as its turn");
        queue.claims[at].aside = aside;
        if aside {
            queue.wake();
        }
    }

    fn waiter_with(&self, payload: Option<P>) -> Rc<Waiter<P>> {
        let mut queue = self.writes.queue.borrow_mut();
        let at = queue.place(self.id).expect("a claim lives as long as its turn");
        if let Some(wait) = &queue.claims[at].wait {
            return wait.clone();
        }
        let payload = RefCell::new(payload);
        let wait = Rc::new(Waiter { payload, outcome: RefCell::default(), waker: RefCell::default() });
        queue.claims[at].wait = Some(wait.clone());
        queue.waiting += 1;
        wait
    }
}

impl<P> Drop for QueuedWrite<P> {
    fn drop(&mut self) {
        let mut queue = self.writes.queue.borrow_mut();
        queue.remove(self.id);
        queue.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::Context;

    use super::*;
    use crate::error::{Error, ErrorKind};

    fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    fn write_queue() -> Rc<WriteQueue<u32>> {
        Rc::default()
    }

    #[test]
    fn only_neighbours_wait() {
        let queue = write_queue();
        let first = queue.enter(0..1);
        let (same, next, far) = (queue.enter(9..10), queue.enter(256..257), queue.enter(1000..1001));
        let (mut same, mut next, mut far) = (pin!(same.admitted(1)), pin!(next.admitted(2)), pin!(far.admitted(3)));
        assert!(poll(same.as_mut()).is_none() && poll(next.as_mut()).is_none());
        assert!(matches!(poll(far.as_mut()), Some(Admitted::Immediately(3))), "three blocks away");
        assert!(!queue.may_pass(&(300..301)) && queue.may_pass(&(2000..2001)));
        first.submitted(&[]);
        assert!(matches!(poll(same.as_mut()), Some(Admitted::AfterWait(1))));
        assert!(poll(next.as_mut()).is_none(), "the one before it is still there");
    }

    #[test]
    fn who_stepped_aside_is_passed_but_not_by_what_overlaps_it() {
        let queue = write_queue();
        let first = queue.enter(0..4);
        first.yield_for_space();
        let (beside, over) = (queue.enter(4..5), queue.enter(3..4));
        assert!(matches!(poll(pin!(beside.admitted(1)).as_mut()), Some(Admitted::AfterWait(1))));
        assert!(!beside.is_first(), "it has to do without space");
        beside.submitted(&[]);
        let mut waiting = pin!(over.admitted(2));
        assert!(poll(waiting.as_mut()).is_none());
        let last = queue.enter(5..6);
        assert!(
            matches!(poll(pin!(last.admitted(3)).as_mut()), Some(Admitted::AfterWait(3))),
            "it has stepped aside as well"
        );
        first.rejoin();
        assert!(!queue.may_pass(&(6..7)));
        drop(first);
        assert!(matches!(poll(waiting.as_mut()), Some(Admitted::AfterWait(2))));
    }

    #[test]
    fn only_who_follows_directly_is_taken_along_and_nobody_is_overtaken() {
        let queue = write_queue();
        let first = queue.enter(0..1);
        let waiting: Vec<_> = [1..2, 2..4, 9..10, 4..5].into_iter().map(|pages| queue.enter(pages)).collect();
        let mut waits: Vec<_> = waiting.iter().zip(0..).map(|(queued, i)| Box::pin(queued.admitted(i))).collect();
        assert!(waits.iter_mut().all(|c| poll(c.as_mut()).is_none()));
        let mut taken = Vec::new();
        assert_eq!(first.merge_followers(&mut taken, 1, 256, |&payload, _| payload != 7), 4);
        assert_eq!(first.merge_followers(&mut taken, 4, 256, |_, _| true), 4, "9..10 comes before 4..5");
        assert_eq!(taken.iter().map(|t| t.with_payload(|&payload| payload)).collect::<Vec<_>>(), [0, 1]);
        first.submitted(&taken);
        assert!(poll(waits[0].as_mut()).is_none(), "not before it is delivered");
        assert!(matches!(poll(waits[2].as_mut()), Some(Admitted::AfterWait(2))));
        let error = Error::new(ErrorKind::Io, "lost");
        taken.into_iter().for_each(|t| t.complete(Err(error.clone())));
        assert!(matches!(poll(waits[0].as_mut()), Some(Admitted::Merged(Err(_), 0))));
        assert!(matches!(poll(waits[1].as_mut()), Some(Admitted::Merged(Err(_), 1))));
        drop(waits);
        drop(waiting);
        assert!(queue.queue.borrow().claims.is_empty() && queue.queue.borrow().waiting == 0);
    }
}
