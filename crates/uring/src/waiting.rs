//! Waiting of tasks of one thread for one another.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Lets one task wait for a change.
#[derive(Default)]
pub struct WakeCell {
    waker: Cell<Option<Waker>>,
}

impl WakeCell {
    /// Wakes the waiting task.
    pub fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Registers the task of `cx` for the next wake.
    pub fn register(&self, cx: &Context<'_>) {
        match self.waker.take() {
            Some(old) if old.will_wake(cx.waker()) => self.waker.set(Some(old)),
            _ => self.waker.set(Some(cx.waker().clone())),
        }
    }

    /// Waits until `look` returns `Some`; calls it again after every wake.
    pub async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|cx| match look() {
            Some(value) => Poll::Ready(value),
            None => {
                self.register(cx);
                Poll::Pending
            }
        })
        .await
    }
}

/// A condition that several tasks wait for. It is checked again after every change.
#[derive(Default)]
pub struct Changes {
    waiting: RefCell<Vec<Waker>>,
}

impl Changes {
    /// Lets all waiting tasks check again.
    pub fn wake(&self) {
        let waiting = self.waiting.take();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Registers the task of `cx` for the next change.
    pub fn register(&self, cx: &Context<'_>) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
    }

    /// Waits until `look` returns true.
    pub async fn until(&self, look: impl Fn() -> bool) {
        poll_fn(|cx| {
            if look() {
                return Poll::Ready(());
            }
            self.register(cx);
            Poll::Pending
        })
        .await;
    }
}

/// An event that is raised at most once; any number of tasks can wait for it.
#[derive(Default)]
pub struct Event {
    happened: Cell<bool>,
    changes: Changes,
}

impl Event {
    /// Raises the event; all waiting tasks resume.
    pub fn raise(&self) {
        self.happened.set(true);
        self.changes.wake();
    }

    /// Returns whether the event was raised.
    pub fn has_happened(&self) -> bool {
        self.happened.get()
    }

    /// Waits until the event is raised; returns at once if it was raised before.
    pub async fn wait(&self) {
        self.changes.until(|| self.happened.get()).await;
    }

    /// Runs `work` until it ends or the event is raised; in the latter case drops `work` and returns `None`.
    pub async fn unless<F: Future>(&self, work: F) -> Option<F::Output> {
        let (mut work, mut raised) = (pin!(work), pin!(self.wait()));
        poll_fn(|cx| match raised.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => work.as_mut().poll(cx).map(Some),
        })
        .await
    }
}
