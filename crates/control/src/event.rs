//! Something that happens once, on one thread; any number of tasks can wait for it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Something that happens once.
#[derive(Default)]
pub struct Event {
    happened: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Event {
    /// It happens now; whoever waits goes on.
    pub fn raise(&self) {
        self.happened.set(true);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Whether it has happened.
    pub fn has_happened(&self) -> bool {
        self.happened.get()
    }

    /// Resolves when it happens, or has happened already.
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

    /// What `work` resolves with, or `None` when the event happens before; `work` is dropped then.
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
