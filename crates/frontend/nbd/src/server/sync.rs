//! Waiting within one thread.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Lets one task wait for a change.
#[derive(Default)]
pub(crate) struct WakeCell {
    waker: Cell<Option<Waker>>,
}

impl WakeCell {
    /// Wakes the waiting task.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Waits until `look` returns `Some`; calls it again after every wake.
    pub(crate) async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|cx| match look() {
            Some(value) => Poll::Ready(value),
            None => {
                self.register(cx);
                Poll::Pending
            }
        })
        .await
    }

    fn register(&self, cx: &Context<'_>) {
        match self.waker.take() {
            Some(old) if old.will_wake(cx.waker()) => self.waker.set(Some(old)),
            _ => self.waker.set(Some(cx.waker().clone())),
        }
    }
}

/// A one-time event; any number of tasks can wait for it.
#[derive(Default)]
pub(super) struct Event {
    happened: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Event {
    pub(super) fn raise(&self) {
        self.happened.set(true);
        let waiting = self.waiting.take();
        waiting.into_iter().for_each(Waker::wake);
    }

    pub(super) fn has_happened(&self) -> bool {
        self.happened.get()
    }

    pub(super) async fn wait(&self) {
        poll_fn(|cx| {
            if self.happened.get() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|w| w.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

/// Runs `work` until it ends or `event` is raised; in the latter case drops `work` and returns `None`.
pub(super) async fn unless<F: Future>(event: &Event, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    let mut stop = pin!(event.wait());
    poll_fn(|cx| {
        if stop.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        work.as_mut().poll(cx).map(Some)
    })
    .await
}
