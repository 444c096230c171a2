//! Nothing acknowledged waits longer than the *commit interval*: some time after the first change that is not durable
//! the pool is committed, with a flush, without anybody asking. A pool in which nothing changes does nothing.
//!
//! One task at most sleeps, and only while something is not durable. It holds no pool while it sleeps: a pool that is
//! dropped meanwhile is gone.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::planted::{Bug, planted};

use super::Inner;

/// What is acknowledged and may not be durable.
#[derive(Default)]
pub struct Interval {
    /// Something is.
    is_dirty: Cell<bool>,
    /// Since when.
    since: Cell<Duration>,
    /// The task sleeps.
    sleeps: Cell<bool>,
}

impl Interval {
    /// A commit covers all that was acknowledged so far.
    pub fn begin_commit(&self) {
        self.is_dirty.set(false);
    }
}

impl<D: Device> Inner<D> {
    /// Something was acknowledged that is not durable.
    pub fn note_dirty(self: &Rc<Self>) {
        if !self.interval.is_dirty.replace(true) {
            self.begin_interval();
        }
    }

    fn begin_interval(self: &Rc<Self>) {
        if self.options.commit_interval.is_zero() || planted(Bug::IntervalForgotten) {
            return;
        }
        self.interval.since.set(self.runtime.now());
        if self.interval.sleeps.replace(true) {
            return;
        }
        let (weak, runtime, length) = (Rc::downgrade(self), self.runtime.clone(), self.options.commit_interval);
        let mut left = length;
        self.runtime.spawn(Box::pin(async move {
            loop {
                runtime.sleep(left).await;
                let Some(inner) = weak.upgrade() else { return };
                if !inner.interval.is_dirty.get() || inner.check_alive().is_err() {
                    return inner.interval.sleeps.set(false);
                }
                // What came behind an earlier commit has waited less.
                let age = runtime.now().saturating_sub(inner.interval.since.get());
                left = length.saturating_sub(age);
                if left.is_zero() {
                    left = length;
                    inner.flush_origins().await;
                    // A failure has failed the pool, which says so to the next request.
                    let _ = inner.clone().commit().await;
                }
            }
        }));
    }
}
