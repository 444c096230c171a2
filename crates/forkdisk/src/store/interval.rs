//! Nothing acknowledged waits longer than the *commit interval*: that time after the first change that is not
//! durable the pool is committed, with a flush. An idle pool does nothing.
//!
//! At most one task sleeps, and only while something is not durable. It holds no reference to the pool
//! meanwhile.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::planted::correct;

use super::Store;

/// What was acknowledged and may not be durable.
#[derive(Default)]
pub struct Interval {
    /// There is something.
    is_dirty: Cell<bool>,
    /// Time of the first such change.
    since: Cell<Duration>,
    /// The task sleeps.
    sleeps: Cell<bool>,
}

impl Interval {
    /// A commit covers everything acknowledged so far.
    pub fn begin_commit(&self) {
        self.is_dirty.set(false);
    }
}

impl<D: Device> Store<D> {
    /// Records that something was acknowledged that is not durable.
    pub fn note_dirty(self: &Rc<Self>) {
        if !self.interval.is_dirty.replace(true) {
            begin_interval(self);
        }
    }
}

fn begin_interval<D: Device>(store: &Rc<Store<D>>) {
    if correct!(store.options.commit_interval.is_zero(), Bug::IntervalForgotten => true) {
        return;
    }
    store.interval.since.set(store.runtime.now());
    if store.interval.sleeps.replace(true) {
        return;
    }
    let (weak, runtime, length) = (Rc::downgrade(store), store.runtime.clone(), store.options.commit_interval);
    let mut left = length;
    store.runtime.spawn(Box::pin(async move {
        loop {
            runtime.sleep(left).await;
            let Some(store) = weak.upgrade() else { return };
            if !store.interval.is_dirty.get() || store.check_alive().is_err() {
                return store.interval.sleeps.set(false);
            }
            // Changes after an earlier commit have waited less.
            let age = runtime.now().saturating_sub(store.interval.since.get());
            left = length.saturating_sub(age);
            if left.is_zero() {
                left = length;
                if let Some(hooks) = store.hooks.get() {
                    hooks.flush_origins().await;
                }
                // An error has failed the pool; the next request returns it.
                let _ = store.clone().commit().await;
            }
        }
    }));
}
