//! Something others wait for.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Wakes whoever waited before [`notify`](Event::notify).
#[derive(Default)]
pub struct Event {
    round: Cell<u64>,
    waiters: RefCell<Vec<Waker>>,
}

impl Event {
    /// Resolves at the next `notify` after this call.
    pub fn wait(&self) -> Wait<'_> {
        Wait { event: self, round: self.round.get() }
    }

    /// Wakes all who wait.
    pub fn notify(&self) {
        self.round.set(self.round.get() + 1);
        for waker in self.waiters.take() {
            waker.wake();
        }
    }
}

/// See [`Event::wait`].
pub struct Wait<'a> {
    event: &'a Event,
    round: u64,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.event.round.get() != self.round {
            return Poll::Ready(());
        }
        self.event.waiters.borrow_mut().push(cx.waker().clone());
        Poll::Pending
    }
}
