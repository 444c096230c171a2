//! One-time events on one thread; any number of tasks can wait for each.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// An event that is raised at most once.
#[derive(Default)]
#[non_exhaustive]
pub struct Event {
    happened: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Event {
    /// Raises the event; all waiting tasks resume.
    pub fn raise(&self) {
        self.happened.set(true);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Returns whether the event was raised.
    pub fn has_happened(&self) -> bool {
        self.happened.get()
    }

    /// Waits until the event is raised; returns at once if it was raised before.
    pub async fn wait(&self) {
        poll_fn(|cx| {
            if self.happened.get() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Runs `work` until it ends or the event is raised; in the latter case drops `work` and returns `None`.
    pub async fn unless<F: Future>(&self, work: F) -> Option<F::Output> {
        let mut work = std::pin::pin!(work);
        let mut wait = std::pin::pin!(self.wait());
        poll_fn(|cx| match wait.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => work.as_mut().poll(cx).map(Some),
        })
        .await
    }
}
