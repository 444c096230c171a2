//! The order in which one volume's writes reach the device: the order in which they were accepted.
//!
//! A write takes a *turn* when it is accepted and gives it up when its requests have been submitted.
//! Until then every later write to the same or a neighbouring block waits, whatever the earlier one
//! waits for: a table, a count page, a checkpoint, the rest of its page, a lock. Writes elsewhere
//! never wait here.
//!
//! One thing is not waited for in order: space. A write that finds none *steps aside*. Neighbours that
//! need no space may pass it, those that do stay behind it, and so does whatever overlaps it.
//!
//! Who waits leaves a parcel. An earlier writer that goes first may take it along and do the work of
//! both in one request.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Poll, Waker};

use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::types::BLOCK_PAGES;

/// What a turn may do by the turns before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// An earlier neighbour comes first.
    Blocked,
    /// One that stepped aside comes first: it has some of the same pages.
    Overlapped,
    /// Neighbours have stepped aside: what needs no space may go.
    Thrifty,
    /// Nobody is before it.
    Free,
}

/// What somebody who waits for a turn has left, and what became of it.
struct Wait<P> {
    parcel: RefCell<Option<P>>,
    outcome: RefCell<Option<Result<()>>>,
    waker: RefCell<Option<Waker>>,
}

impl<P> Wait<P> {
    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

struct Claim<P> {
    id: u64,
    pages: Range<u64>,
    aside: bool,
    wait: Option<Rc<Wait<P>>>,
}

impl<P> Claim<P> {
    /// Whether the blocks of both are the same or next to each other.
    fn is_near(&self, pages: &Range<u64>) -> bool {
        let blocks = |pages: &Range<u64>| pages.start / BLOCK_PAGES..(pages.end - 1) / BLOCK_PAGES + 1;
        let (a, b) = (blocks(&self.pages), blocks(pages));
        a.start <= b.end && b.start <= a.end && !planted(Bug::NeighbourOvertakes)
    }

    fn overlaps(&self, pages: &Range<u64>) -> bool {
        self.pages.start < pages.end && pages.start < self.pages.end
    }
}

/// Numbers rise along the queue.
struct Queue<P> {
    next: u64,
    claims: VecDeque<Claim<P>>,
    /// How many of them wait.
    waiting: usize,
}

impl<P> Queue<P> {
    fn place(&self, id: u64) -> Option<usize> {
        self.claims.binary_search_by_key(&id, |c| c.id).ok()
    }

    /// The standing of `pages` behind the first `n` claims.
    fn standing(&self, pages: &Range<u64>, n: usize) -> Standing {
        let mut standing = Standing::Free;
        for other in self.claims.iter().take(n).filter(|c| c.is_near(pages)) {
            match (other.aside, other.overlaps(pages)) {
                (false, _) => return Standing::Blocked,
                (true, true) => standing = Standing::Overlapped,
                (true, false) if standing == Standing::Free => standing = Standing::Thrifty,
                (true, false) => {}
            }
        }
        standing
    }

    fn standing_of(&self, id: u64) -> Standing {
        let at = self.place(id).expect("a claim lives as long as its turn");
        self.standing(&self.claims[at].pages, at)
    }

    fn remove(&mut self, id: u64) {
        if let Some(claim) = self.place(id).and_then(|at| self.claims.remove(at)) {
            self.waiting -= usize::from(claim.wait.is_some());
        }
    }

    /// Wakes those who wait and are not blocked.
    fn wake(&self) {
        if self.waiting == 0 {
            return;
        }
        for (at, claim) in self.claims.iter().enumerate() {
            if let Some(wait) = &claim.wait
                && self.standing(&claim.pages, at) != Standing::Blocked
            {
                wait.wake();
            }
        }
    }
}

/// The turns of one volume, oldest first. `P` is what those who wait leave for others.
pub struct Turns<P> {
    queue: RefCell<Queue<P>>,
}

impl<P> Default for Turns<P> {
    fn default() -> Self {
        Turns { queue: RefCell::new(Queue { next: 0, claims: VecDeque::new(), waiting: 0 }) }
    }
}

/// A turn taken; dropping it gives it up.
pub struct Turn<P> {
    turns: Rc<Turns<P>>,
    id: u64,
}

/// How waiting for a turn has ended.
pub enum Came<P> {
    /// Nobody was before it; here is the parcel.
    AtOnce(P),
    /// It has come; here is the parcel.
    Now(P),
    /// Somebody else has done the work.
    Done(Result<()>, P),
}

/// A parcel taken along by another. Its owner waits until [`deliver`](Taken::deliver).
pub struct Taken<P> {
    id: u64,
    wait: Rc<Wait<P>>,
}

impl<P> Taken<P> {
    /// What `f` makes of the parcel.
    pub fn look<T>(&self, f: impl FnOnce(&P) -> T) -> T {
        f(self.wait.parcel.borrow().as_ref().expect("its owner takes it back when it has been delivered"))
    }

    /// Tells its owner how it went.
    pub fn deliver(self, outcome: Result<()>) {
        *self.wait.outcome.borrow_mut() = Some(outcome);
        self.wait.wake();
    }
}

impl<P> Turns<P> {
    /// Whether a write of `pages` that needs no space may go before anybody who waits now.
    pub fn lets_pass(&self, pages: &Range<u64>) -> bool {
        let queue = self.queue.borrow();
        queue.claims.is_empty()
            || matches!(queue.standing(pages, queue.claims.len()), Standing::Free | Standing::Thrifty)
    }

    /// Whether nobody but these turns is before a write of `pages`.
    pub fn has_only(&self, pages: &Range<u64>, turns: &[u64]) -> bool {
        self.queue.borrow().claims.iter().all(|c| turns.contains(&c.id) || !c.is_near(pages))
    }

    /// Takes a turn behind all others.
    pub fn enter(self: &Rc<Self>, pages: Range<u64>) -> Turn<P> {
        let mut queue = self.queue.borrow_mut();
        queue.next += 1;
        let id = queue.next;
        queue.claims.push_back(Claim { id, pages, aside: false, wait: None });
        Turn { turns: self.clone(), id }
    }
}

impl<P> Turn<P> {
    /// Its number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits until no earlier neighbour is before it, or only such as stepped aside; the parcel lies
    /// open to them meanwhile.
    pub async fn come(&self, parcel: P) -> Came<P> {
        match self.standing() {
            Standing::Free => return Came::AtOnce(parcel),
            Standing::Thrifty => return Came::Now(parcel),
            _ => {}
        }
        let wait = self.wait_with(Some(parcel));
        let mut outcome = None;
        poll_fn(|cx| {
            outcome = wait.outcome.take();
            if outcome.is_some() || self.has_come() {
                return Poll::Ready(());
            }
            *wait.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        self.stop_waiting();
        let parcel = wait.parcel.take().expect("left above, and nobody takes it out");
        match outcome {
            Some(result) => Came::Done(result, parcel),
            None => Came::Now(parcel),
        }
    }

    /// Whether the turn has come. One that overlaps somebody who stepped aside does so, too.
    fn has_come(&self) -> bool {
        let mut queue = self.turns.queue.borrow_mut();
        // Not there: somebody took the parcel along and has submitted it.
        let Some(at) = queue.place(self.id) else { return false };
        let standing = queue.standing(&queue.claims[at].pages, at);
        let aside = standing == Standing::Overlapped;
        if std::mem::replace(&mut queue.claims[at].aside, aside) != aside {
            queue.wake();
        }
        matches!(standing, Standing::Free | Standing::Thrifty)
    }

    /// There is no space for it: those who need none may pass, until [`step_back`](Self::step_back).
    pub fn step_aside(&self) {
        self.set_aside(true);
    }

    /// It is in everybody's way again.
    pub fn step_back(&self) {
        self.set_aside(false);
    }

    /// Whether nobody is before it, not even somebody who stepped aside.
    pub fn is_first(&self) -> bool {
        self.standing() == Standing::Free
    }

    /// Wakes the calling task when somebody before it has gone.
    pub fn watch(&self, waker: &Waker) {
        *self.wait_with(None).waker.borrow_mut() = Some(waker.clone());
    }

    /// Ends [`watch`](Self::watch).
    pub fn stop_waiting(&self) {
        let mut queue = self.turns.queue.borrow_mut();
        if let Some(at) = queue.place(self.id) {
            let waited = queue.claims[at].wait.take().is_some();
            queue.waiting -= usize::from(waited);
        }
    }

    /// Takes along the parcels of those who wait and go on where pages end at `end`, one behind the other,
    /// up to page `limit` at most, if they `fit`; returns where they end. Stops at the first neighbour for
    /// whom that is not so: nobody is overtaken. `taken` are those who come along already.
    ///
    /// `limit` must be in the last block of this turn's pages: whoever is near to one taken along is
    /// near to this turn then.
    pub fn take_along(
        &self,
        taken: &mut Vec<Taken<P>>,
        mut end: u64,
        limit: u64,
        fit: impl Fn(&P, &Range<u64>) -> bool,
    ) -> u64 {
        let queue = self.turns.queue.borrow();
        if queue.waiting <= taken.len() {
            return end;
        }
        let me = queue.place(self.id).expect("a claim lives as long as its turn");
        let near = |claim: &&Claim<P>| claim.is_near(&queue.claims[me].pages);
        for claim in queue.claims.iter().skip(me + 1).filter(near) {
            if taken.iter().any(|t| t.id == claim.id) {
                continue;
            }
            let Some(wait) = &claim.wait else { break };
            let follows = claim.pages.start == end && claim.pages.end <= limit && !claim.aside;
            if !follows || !wait.parcel.borrow().as_ref().is_some_and(|parcel| fit(parcel, &claim.pages)) {
                break;
            }
            end = claim.pages.end;
            taken.push(Taken { id: claim.id, wait: wait.clone() });
        }
        end
    }

    /// Its requests have been submitted, and those of the ones taken along with them.
    pub fn submitted(self, taken: &[Taken<P>]) {
        let mut queue = self.turns.queue.borrow_mut();
        taken.iter().for_each(|t| queue.remove(t.id));
    }

    fn standing(&self) -> Standing {
        self.turns.queue.borrow().standing_of(self.id)
    }

    fn set_aside(&self, aside: bool) {
        let mut queue = self.turns.queue.borrow_mut();
        let at = queue.place(self.id).expect("a claim lives as long as its turn");
        queue.claims[at].aside = aside;
        if aside {
            queue.wake();
        }
    }

    fn wait_with(&self, parcel: Option<P>) -> Rc<Wait<P>> {
        let mut queue = self.turns.queue.borrow_mut();
        let at = queue.place(self.id).expect("a claim lives as long as its turn");
        if let Some(wait) = &queue.claims[at].wait {
            return wait.clone();
        }
        let parcel = RefCell::new(parcel);
        let wait = Rc::new(Wait { parcel, outcome: RefCell::default(), waker: RefCell::default() });
        queue.claims[at].wait = Some(wait.clone());
        queue.waiting += 1;
        wait
    }
}

impl<P> Drop for Turn<P> {
    fn drop(&mut self) {
        let mut queue = self.turns.queue.borrow_mut();
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

    fn turns() -> Rc<Turns<u32>> {
        Rc::default()
    }

    #[test]
    fn only_neighbours_wait() {
        let turns = turns();
        let first = turns.enter(0..1);
        let (same, next, far) = (turns.enter(9..10), turns.enter(256..257), turns.enter(1000..1001));
        let (mut same, mut next, mut far) = (pin!(same.come(1)), pin!(next.come(2)), pin!(far.come(3)));
        assert!(poll(same.as_mut()).is_none() && poll(next.as_mut()).is_none());
        assert!(matches!(poll(far.as_mut()), Some(Came::AtOnce(3))), "three blocks away");
        assert!(!turns.lets_pass(&(300..301)) && turns.lets_pass(&(2000..2001)));
        first.submitted(&[]);
        assert!(matches!(poll(same.as_mut()), Some(Came::Now(1))));
        assert!(poll(next.as_mut()).is_none(), "the one before it is still there");
    }

    #[test]
    fn who_stepped_aside_is_passed_but_not_by_what_overlaps_it() {
        let turns = turns();
        let first = turns.enter(0..4);
        first.step_aside();
        let (beside, over) = (turns.enter(4..5), turns.enter(3..4));
        assert!(matches!(poll(pin!(beside.come(1)).as_mut()), Some(Came::Now(1))));
        assert!(!beside.is_first(), "it has to do without space");
        beside.submitted(&[]);
        let mut waiting = pin!(over.come(2));
        assert!(poll(waiting.as_mut()).is_none());
        let last = turns.enter(5..6);
        assert!(matches!(poll(pin!(last.come(3)).as_mut()), Some(Came::Now(3))), "it has stepped aside as well");
        first.step_back();
        assert!(!turns.lets_pass(&(6..7)));
        drop(first);
        assert!(matches!(poll(waiting.as_mut()), Some(Came::Now(2))));
    }

    #[test]
    fn only_who_follows_directly_is_taken_along_and_nobody_is_overtaken() {
        let turns = turns();
        let first = turns.enter(0..1);
        let waiting: Vec<_> = [1..2, 2..4, 9..10, 4..5].into_iter().map(|pages| turns.enter(pages)).collect();
        let mut coming: Vec<_> = waiting.iter().zip(0..).map(|(turn, i)| Box::pin(turn.come(i))).collect();
        assert!(coming.iter_mut().all(|c| poll(c.as_mut()).is_none()));
        let mut taken = Vec::new();
        assert_eq!(first.take_along(&mut taken, 1, 256, |&parcel, _| parcel != 7), 4);
        assert_eq!(first.take_along(&mut taken, 4, 256, |_, _| true), 4, "9..10 comes before 4..5");
        assert_eq!(taken.iter().map(|t| t.look(|&parcel| parcel)).collect::<Vec<_>>(), [0, 1]);
        first.submitted(&taken);
        assert!(poll(coming[0].as_mut()).is_none(), "not before it is delivered");
        assert!(matches!(poll(coming[2].as_mut()), Some(Came::Now(2))));
        let error = Error::new(ErrorKind::Io, "lost");
        taken.into_iter().for_each(|t| t.deliver(Err(error.clone())));
        assert!(matches!(poll(coming[0].as_mut()), Some(Came::Done(Err(_), 0))));
        assert!(matches!(poll(coming[1].as_mut()), Some(Came::Done(Err(_), 1))));
        drop(coming);
        drop(waiting);
        assert!(turns.queue.borrow().claims.is_empty() && turns.queue.borrow().waiting == 0);
    }
}
