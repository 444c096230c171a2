//! A write whose turn has come: planned until nothing is missing, with what waits directly behind it,
//! and what it does while there is no space.

use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;

use crate::device::{Buf, Device};
use crate::error::{ErrorKind, Result};
use crate::planted::{Bug, planted};
use crate::pool::{EditError, WhenFull, no_space_error};
use crate::runtime::LocalFuture;
use crate::sync::{LockMode, MergedWrite, PlanGuard, QueuedWrite, RangeGuard, RangeLocks};
use crate::types::{BLOCK_PAGES, PAGE_SIZE};

use super::Volume;
use super::fault::WritePlan;

/// Largest write that is taken along by another, or takes others along, in bytes: what is copied must
/// cost less than the request it saves.
const MAX_MERGED_BYTES: usize = 64 << 10;

/// Whether a write is one that is taken along: small, and whole pages.
pub(super) fn is_mergeable(buf: &Buf, pages: &Range<u64>) -> bool {
    buf.len() <= MAX_MERGED_BYTES && buf.len() as u64 == (pages.end - pages.start) * PAGE_SIZE as u64
}

/// A write under way.
pub(super) struct PendingWrite {
    pub offset: u64,
    len: usize,
    unit: usize,
    /// Pages of the chunks that are copied as wholes when they are broken; `None`: none are.
    copying: Option<u64>,
    /// Pages that are held for it.
    held: Range<u64>,
    /// Whether nobody is taken along.
    exclusive: bool,
    pub plan: WritePlan,
    /// Writes that go on where this one ends, and are done together with it.
    pub merged: Vec<MergedWrite<Buf>>,
    locks: Vec<RangeGuard>,
}

impl PendingWrite {
    pub fn new(offset: u64, len: usize, unit: usize, copying: Option<u64>, held: Range<u64>) -> PendingWrite {
        let plan = WritePlan::new(offset, len as u64, unit, copying);
        PendingWrite { offset, len, unit, copying, held, exclusive: false, plan, merged: Vec::new(), locks: Vec::new() }
    }

    /// Forgets the plan and whoever was taken along.
    fn restart(&mut self) {
        let alone = self.exclusive;
        *self = PendingWrite::new(self.offset, self.len, self.unit, self.copying, self.held.clone());
        self.exclusive = alone;
    }

    /// There is no space: no chunk is copied any more, and only what is written need be held.
    fn give_up_copying(&mut self) {
        if self.copying.take().is_some() {
            let page = PAGE_SIZE as u64;
            self.held = self.offset / page..(self.offset + self.len as u64).div_ceil(page);
        }
    }

    /// Takes along who waits directly behind, within the block.
    fn merge_followers(&mut self, queued: &QueuedWrite<Buf>, locks: &Rc<RangeLocks>) {
        let page = PAGE_SIZE as u64;
        if self.exclusive || self.len > MAX_MERGED_BYTES || !(self.offset + self.len as u64).is_multiple_of(page) {
            return;
        }
        let (end, had) = (self.plan.end(), self.merged.len());
        let mut limit = end.next_multiple_of(BLOCK_PAGES);
        if self.copying.is_some() {
            // Of a further chunk more would have to be held than those who come along write.
            limit = limit.min(self.held.end);
        }
        let until = queued.merge_followers(&mut self.merged, end, limit, is_mergeable);
        if until == end {
            return;
        }
        if until > self.held.end {
            let Some(lock) = locks.try_lock(end..until, LockMode::Exclusive) else {
                self.merged.truncate(had);
                return;
            };
            self.locks.push(lock);
        }
        self.plan.extend(until);
    }

    /// Tells those who were taken along how it went.
    pub fn complete_merged(self, result: &Result<()>) {
        drop(self.locks);
        self.merged.into_iter().for_each(|taken| taken.complete(result.clone()));
    }
}

/// How long a write has been without space.
#[derive(Default)]
struct Shortage {
    /// Checkpoints made for it since free space last changed.
    checkpoints: u32,
    free: u64,
    /// Ends when it is to fail.
    patience: Option<LocalFuture<()>>,
    /// Its time is over, but there was room for it then.
    timed_out: bool,
    /// It was told that it waits.
    reported: bool,
}

impl<D: Device> Volume<D> {
    /// Completes the plan, waiting for space if need be. Never holds a plan or the `lock` while it waits for
    /// that: who comes before it may need more pages than it writes, and it waits for them.
    pub(super) async fn plan(
        &self,
        queued: &QueuedWrite<Buf>,
        work: &mut PendingWrite,
        lock: &mut Option<RangeGuard>,
    ) -> Result<PlanGuard> {
        let mut shortage = Shortage::default();
        let mut sealed = false;
        loop {
            self.inner.wait_below_dirty_limit().await?;
            let guard = self.inner.generations.enter();
            let planned = self.inner.retry_on_miss(|meta| {
                work.merge_followers(queued, &self.live.locks);
                work.plan.advance(meta, self.id, queued.is_first())
            });
            match planned.await {
                Ok(()) => return Ok(guard),
                // A quota that has no room for all of them may have some for this one.
                Err(EditError::Error(e)) if e.kind() == ErrorKind::NoSpace && !work.merged.is_empty() => {
                    work.exclusive = true;
                    self.restart(work);
                    continue;
                }
                Err(EditError::Error(e)) => {
                    self.return_pages(work);
                    return Err(e);
                }
                Err(EditError::NoSpace) if planted(Bug::FullLeavesHalf) => self.publish(&work.plan).await?,
                Err(EditError::NoSpace) => {}
            }
            drop(guard);
            // Pages that recovery might ask for are written elsewhere, but not for want of space.
            if !std::mem::replace(&mut sealed, true) && self.inner.meta.borrow().journal.holds_pages() {
                self.restart(work);
                self.inner.commit_sealed().await?;
                continue;
            }
            work.give_up_copying();
            self.restart(work);
            let locked = lock.take().is_some();
            queued.yield_for_space();
            let room = self.wait_for_free_space(queued, work, &mut shortage).await;
            self.inner.report_if_full(self.id, room)?;
            if locked {
                *lock = Some(self.live.locks.lock(work.held.clone(), LockMode::Exclusive).await);
            }
            queued.rejoin();
        }
    }

    /// Plans from the beginning.
    fn restart(&self, work: &mut PendingWrite) {
        self.return_pages(work);
        work.restart();
    }

    /// What the plan was handed is to be had by others.
    fn return_pages(&self, work: &PendingWrite) {
        let mut meta = self.inner.meta.borrow_mut();
        work.plan.faults.iter().for_each(|fault| meta.space.return_pages(fault.to, fault.len));
    }

    /// Waits until there may be space for it: for its turn among those who need some, for a checkpoint
    /// that brings back what was given up, for others to free some.
    async fn wait_for_free_space(
        &self,
        queued: &QueuedWrite<Buf>,
        work: &PendingWrite,
        shortage: &mut Shortage,
    ) -> Result<()> {
        self.inner.check_writable()?;
        if shortage.patience.is_none()
            && !shortage.timed_out
            && let WhenFull::Wait(time) = self.inner.options.when_full
        {
            shortage.patience = Some(self.inner.runtime.sleep(time));
        }
        if !queued.is_first() {
            let waited = shortage.until_first(queued).await;
            if waited.is_err() && !shortage.timed_out && self.will_fit(work).await {
                // The first goes on, or gives up in its time.
                (shortage.timed_out, shortage.patience) = (true, None);
                return shortage.until_first(queued).await;
            }
            return waited;
        }
        let free = self.inner.meta.borrow().space.available();
        if free != shortage.free {
            (shortage.free, shortage.checkpoints) = (free, 0);
        }
        // What was given up comes back with a checkpoint; tables it replaces with one more.
        if shortage.checkpoints < 2 && self.inner.has_pending_space() {
            shortage.checkpoints += 1;
            return self.inner.clone().checkpoint().await;
        }
        self.inner.full.set(true);
        let Some(patience) = &mut shortage.patience else { return Err(no_space_error()) };
        if !std::mem::replace(&mut shortage.reported, true) {
            self.inner.report_waiting(self.id);
        }
        if self.inner.wait_for_space(patience).await { Ok(()) } else { Err(no_space_error()) }
    }
}

impl<D: Device> Volume<D> {
    /// Whether there is room for it now, or once the checkpoint that runs has ended.
    async fn will_fit(&self, work: &PendingWrite) -> bool {
        let has_room = || work.plan.fits(&self.inner.meta.borrow());
        if !has_room() {
            self.inner.wait_checkpoint_end().await;
        }
        has_room()
    }
}

impl Shortage {
    /// Waits for those who were without space before it.
    async fn until_first(&mut self, queued: &QueuedWrite<Buf>) -> Result<()> {
        let outcome = poll_fn(|cx| {
            queued.watch(cx.waker());
            if queued.is_first() {
                return Poll::Ready(Ok(()));
            }
            match self.patience.as_mut().map(|patience| patience.as_mut().poll(cx)) {
                Some(Poll::Ready(())) => Poll::Ready(Err(no_space_error())),
                _ => Poll::Pending,
            }
        })
        .await;
        queued.stop_waiting();
        outcome
    }
}
