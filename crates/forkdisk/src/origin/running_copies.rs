//! Small copies that are under way: one that has ended waits for those beside it, so that one commit serves all.
//!
//! Writers at random places have their copies in flight side by side, and each write that needs one waits for a
//! commit. A commit takes as long as several copies, so a copy that ends waits until none is under way. By then all
//! such writers wait, and one commit serves them, as in dm-snapshot.
//!
//! Invariants: a copy waits for copies that begin later only for a few times the duration of a commit, and for others
//! until they end; it holds nothing that these need but the locks of its own chunks.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::runtime::Runtime;
use crate::sync::Event;

/// Longest copy that waits and is waited for: copying more takes longer than a flush.
const SMALL_BYTES: u64 = 1 << 20;
/// Durations of a commit for which later copies are waited for.
const PATIENCE_COUNT: u32 = 8;

/// The small copies of an origin.
#[derive(Default)]
pub struct RunningCopies {
    next: Cell<u64>,
    running: RefCell<BTreeSet<u64>>,
    /// The oldest one has ended.
    ended: Event,
}

impl RunningCopies {
    /// Begins a copy of `len` bytes; `None` if it is not small.
    pub fn begin(self: &Rc<RunningCopies>, len: u64) -> Option<RunningCopy> {
        (len <= SMALL_BYTES).then(|| {
            let number = self.next.replace(self.next.get() + 1);
            self.running.borrow_mut().insert(number);
            RunningCopy { all: self.clone(), number }
        })
    }
}

/// A copy under way; it ends when this is dropped.
pub struct RunningCopy {
    all: Rc<RunningCopies>,
    number: u64,
}

impl RunningCopy {
    /// Ends it, and waits for the copies under way. `commit`: duration of a commit.
    pub async fn end_with_others(self, runtime: &dyn Runtime, commit: Duration) {
        let (all, end) = (self.all.clone(), self.all.next.get());
        drop(self);
        let mut limit = pin!(runtime.sleep(commit * PATIENCE_COUNT));
        let mut is_late = commit.is_zero();
        while all.running.borrow().first().is_some_and(|&first| !is_late || first < end) {
            let mut changed = pin!(all.ended.wait());
            let woken = poll_fn(|cx| match !is_late && limit.as_mut().poll(cx).is_ready() {
                true => Poll::Ready(true),
                false => changed.as_mut().poll(cx).map(|()| is_late),
            });
            is_late = woken.await;
        }
    }
}

impl Drop for RunningCopy {
    fn drop(&mut self) {
        let mut running = self.all.running.borrow_mut();
        let was_first = running.first() == Some(&self.number);
        running.remove(&self.number);
        drop(running);
        if was_first {
            self.all.ended.notify();
        }
    }
}
