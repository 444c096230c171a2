//! Events that tasks wait for, and generations of plans: a task waits for all plans made before a moment without
//! delaying later ones.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Wakes the tasks that waited before [`notify`](Event::notify).
#[derive(Default)]
pub struct Event {
    round: Cell<u64>,
    /// Wakers by the number of the wait.
    waiters: RefCell<Vec<(u64, Waker)>>,
    next: Cell<u64>,
}

impl Event {
    /// Resolves at the next `notify` after this call.
    pub fn wait(&self) -> Wait<'_> {
        Wait { event: self, round: self.round.get(), number: None }
    }

    /// Wakes all waiting tasks.
    pub fn notify(&self) {
        self.round.set(self.round.get() + 1);
        for (_, waker) in self.waiters.take() {
            waker.wake();
        }
    }
}

/// See [`Event::wait`]. A wait that is dropped is forgotten.
pub struct Wait<'a> {
    event: &'a Event,
    round: u64,
    /// Number of the wait, once it is registered.
    number: Option<u64>,
}

impl Wait<'_> {
    fn is_over(&self) -> bool {
        self.event.round.get() != self.round
    }

    fn forget(&mut self) {
        let Some(number) = self.number.take().filter(|_| !self.is_over()) else { return };
        let mut waiters = self.event.waiters.borrow_mut();
        let gone = waiters.iter().position(|&(other, _)| other == number).map(|at| waiters.remove(at));
        // Dropping a waker may drop a task that waits here, too.
        drop(waiters);
        drop(gone);
    }
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_over() {
            return Poll::Ready(());
        }
        self.forget();
        let number = self.event.next.get();
        self.event.next.set(number + 1);
        self.event.waiters.borrow_mut().push((number, cx.waker().clone()));
        self.number = Some(number);
        Poll::Pending
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.forget();
    }
}

#[derive(Default)]
struct Generation {
    live: Cell<usize>,
    ended: Event,
}

/// The current generation and the earlier ones that still have plans under way.
#[derive(Default)]
pub struct Generations {
    current: RefCell<Rc<Generation>>,
    older: RefCell<Vec<Rc<Generation>>>,
    /// A task waits for the plans of the generation that was current.
    turned: Event,
}

/// A plan under way; dropping it ends the plan.
pub struct PlanGuard(Rc<Generation>);

impl Drop for PlanGuard {
    fn drop(&mut self) {
        self.0.live.set(self.0.live.get() - 1);
        if self.0.live.get() == 0 {
            self.0.ended.notify();
        }
    }
}

impl Generations {
    /// Begins a plan.
    pub fn enter(&self) -> PlanGuard {
        let current = self.current.borrow().clone();
        current.live.set(current.live.get() + 1);
        PlanGuard(current)
    }

    /// Resolves when a task waits for this plan.
    pub async fn turned(&self, plan: &PlanGuard) {
        while Rc::ptr_eq(&plan.0, &self.current.borrow()) {
            self.turned.wait().await;
        }
    }

    /// Waits until every plan begun before this call has ended.
    pub async fn barrier(&self) {
        let old = self.current.replace(Rc::default());
        self.turned.notify();
        let mut waiting = {
            let mut older = self.older.borrow_mut();
            older.push(old);
            older.retain(|g| g.live.get() > 0);
            older.clone()
        };
        while let Some(generation) = waiting.pop() {
            while generation.live.get() > 0 {
                generation.ended.wait().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[test]
    fn who_gives_up_waiting_is_forgotten() {
        let event = Event::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut stays = pin!(event.wait());
        assert!(stays.as_mut().poll(&mut cx).is_pending());
        for _ in 0..3 {
            let mut goes = pin!(event.wait());
            assert!(goes.as_mut().poll(&mut cx).is_pending() && goes.as_mut().poll(&mut cx).is_pending());
            assert_eq!(event.waiters.borrow().len(), 2, "polled twice, noted once");
        }
    }

    #[test]
    fn whoever_waited_before_is_woken() {
        let event = Event::default();
        let mut cx = Context::from_waker(Waker::noop());
        let (mut noted, mut quiet) = (pin!(event.wait()), pin!(event.wait()));
        assert!(noted.as_mut().poll(&mut cx).is_pending());
        event.notify();
        let mut later = pin!(event.wait());
        assert!(noted.as_mut().poll(&mut cx).is_ready() && quiet.as_mut().poll(&mut cx).is_ready());
        assert!(later.as_mut().poll(&mut cx).is_pending());
        assert_eq!(event.waiters.borrow().len(), 1);
    }
}
