//! Waiting within one thread.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
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
