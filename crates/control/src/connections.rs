//! The control connections that hold leases of volumes, and the wait for changes of lifetimes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use forkdisk::Lease;

/// The control connections that exist, and the wait of the task that deletes.
#[derive(Default)]
pub struct Connections {
    numbers: RefCell<BTreeSet<u64>>,
    rung: Cell<bool>,
    waiting: Cell<Option<Waker>>,
}

impl Connections {
    /// A connection begins.
    pub fn begin(&self, number: u64) {
        self.numbers.borrow_mut().insert(number);
    }

    /// A connection has ended.
    pub fn end(&self, number: u64) {
        self.numbers.borrow_mut().remove(&number);
        self.ring();
    }

    /// Lifetimes may have changed.
    pub fn ring(&self) {
        self.rung.set(true);
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    /// Waits until lifetimes may have changed since the last wait.
    pub async fn changed(&self) {
        poll_fn(|cx| {
            if self.rung.take() {
                return Poll::Ready(());
            }
            self.waiting.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await
    }

    /// Whether a lease has ended; `ended` are those of processes that have.
    pub fn has_ended(&self, lease: &Lease, ended: &BTreeSet<Lease>) -> bool {
        match lease {
            Lease::Connection(number) => !self.numbers.borrow().contains(number),
            process => ended.contains(process),
        }
    }
}
