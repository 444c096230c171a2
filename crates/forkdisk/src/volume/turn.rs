//! A write whose turn has come: planned until nothing is missing, with what waits directly behind it,
//! and what it does while there is no space.

use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;

use crate::device::{Buf, Device};
use crate::error::{ErrorKind, Result};
use crate::planted::{Bug, planted};
use crate::pool::{Ended, WhenFull, no_space};
use crate::runtime::LocalFuture;
use crate::sync::{Hold, PlanGuard, RangeGuard, RangeLocks, Taken, Turn};
use crate::types::{BLOCK_PAGES, PAGE_SIZE};

use super::Volume;
use super::fault::WritePlan;

/// Largest write that is taken along by another, or takes others along, in bytes: what is copied must
/// cost less than the request it saves.
const SMALL: usize = 64 << 10;

/// Whether a write is one that is taken along: small, and whole pages.
pub(super) fn fits(buf: &Buf, pages: &Range<u64>) -> bool {
    buf.len() <= SMALL && buf.len() as u64 == (pages.end - pages.start) * PAGE_SIZE as u64
}

/// A write under way.
pub(super) struct Work {
    pub offset: u64,
    len: usize,
    unit: usize,
    /// Pages of the chunks that are copied as wholes when they are broken; `None`: none are.
    copying: Option<u64>,
    /// Pages that are held for it.
    held: Range<u64>,
    /// Whether nobody is taken along.
    alone: bool,
    pub plan: WritePlan,
    /// Writes that go on where this one ends, and are done together with it.
    pub along: Vec<Taken<Buf>>,
    locks: Vec<RangeGuard>,
}

impl Work {
    pub fn new(offset: u64, len: usize, unit: usize, copying: Option<u64>, held: Range<u64>) -> Work {
        let plan = WritePlan::new(offset, len as u64, unit, copying);
        Work { offset, len, unit, copying, held, alone: false, plan, along: Vec::new(), locks: Vec::new() }
    }

    /// Forgets the plan and whoever was taken along.
    fn restart(&mut self) {
        let alone = self.alone;
        *self = Work::new(self.offset, self.len, self.unit, self.copying, self.held.clone());
        self.alone = alone;
    }

    /// There is no space: no chunk is copied any more, and only what is written need be held.
    fn give_up_copying(&mut self) {
        if self.copying.take().is_some() {
            let page = PAGE_SIZE as u64;
            self.held = self.offset / page..(self.offset + self.len as u64).div_ceil(page);
        }
    }

    /// Takes along who waits directly behind, within the block.
    fn take_along(&mut self, turn: &Turn<Buf>, locks: &Rc<RangeLocks>) {
        let page = PAGE_SIZE as u64;
        if self.alone || self.len > SMALL || !(self.offset + self.len as u64).is_multiple_of(page) {
            return;
        }
        let (end, had) = (self.plan.end(), self.along.len());
        let mut limit = end.next_multiple_of(BLOCK_PAGES);
        if self.copying.is_some() {
            // Of a further chunk more would have to be held than those who come along write.
            limit = limit.min(self.held.end);
        }
        let until = turn.take_along(&mut self.along, end, limit, fits);
        if until == end {
            return;
        }
        if until > self.held.end {
            let Some(lock) = locks.try_lock(end..until, Hold::Alone) else {
                self.along.truncate(had);
                return;
            };
            self.locks.push(lock);
        }
        self.plan.extend(until);
    }

    /// Tells those who were taken along how it went.
    pub fn deliver(self, result: &Result<()>) {
        drop(self.locks);
        self.along.into_iter().for_each(|taken| taken.deliver(result.clone()));
    }
}

/// How long a write has been without space.
#[derive(Default)]
struct Shortage {
    /// Checkpoints made for it since free space last changed.
    emptied: u32,
    free: u64,
    /// Ends when it is to fail.
    patience: Option<LocalFuture<()>>,
    /// Its time is over, but there was room for it then.
    is_over: bool,
    /// It was told that it waits.
    is_told: bool,
}

impl<D: Device> Volume<D> {
    /// Completes the plan, waiting for space if need be. Never holds a plan or the `lock` while it waits for
    /// that: who comes before it may need more pages than it writes, and it waits for them.
    pub(super) async fn plan(
        &self,
        turn: &Turn<Buf>,
        work: &mut Work,
        lock: &mut Option<RangeGuard>,
    ) -> Result<PlanGuard> {
        let mut shortage = Shortage::default();
        let mut unbound = false;
        loop {
            self.inner.admit().await?;
            let guard = self.inner.generations.enter();
            let planned = self.inner.edit(|meta| {
                work.take_along(turn, &self.locks);
                work.plan.advance(meta, self.id, turn.is_first())
            });
            match planned.await {
                Ok(()) => return Ok(guard),
                // A quota that has no room for all of them may have some for this one.
                Err(Ended::Error(e)) if e.kind() == ErrorKind::NoSpace && !work.along.is_empty() => {
                    work.alone = true;
                    self.restart(work);
                    continue;
                }
                Err(Ended::Error(e)) => {
                    self.untake(work);
                    return Err(e);
                }
                Err(Ended::NoSpace) if planted(Bug::FullLeavesHalf) => self.publish(&work.plan).await?,
                Err(Ended::NoSpace) => {}
            }
            drop(guard);
            // Pages that recovery might ask for are written elsewhere, but not for want of space.
            if !std::mem::replace(&mut unbound, true) && self.inner.meta.borrow().journal.vouches() {
                self.restart(work);
                self.inner.unbind().await?;
                continue;
            }
            work.give_up_copying();
            self.restart(work);
            let locked = lock.take().is_some();
            turn.step_aside();
            let room = self.make_room(turn, work, &mut shortage).await;
            self.inner.tell_if_full(self.id, room)?;
            if locked {
                *lock = Some(self.locks.lock(work.held.clone(), Hold::Alone).await);
            }
            turn.step_back();
        }
    }

    /// Plans from the beginning.
    fn restart(&self, work: &mut Work) {
        self.untake(work);
        work.restart();
    }

    /// What the plan was handed is to be had by others.
    fn untake(&self, work: &Work) {
        let mut meta = self.inner.meta.borrow_mut();
        work.plan.faults.iter().for_each(|fault| meta.space.untake(fault.to, fault.len));
    }

    /// Waits until there may be space for it: for its turn among those who need some, for a checkpoint
    /// that brings back what was given up, for others to free some.
    async fn make_room(&self, turn: &Turn<Buf>, work: &Work, shortage: &mut Shortage) -> Result<()> {
        self.inner.check_writable()?;
        if shortage.patience.is_none()
            && !shortage.is_over
            && let WhenFull::Wait(time) = self.inner.options.when_full
        {
            shortage.patience = Some(self.inner.runtime.sleep(time));
        }
        if !turn.is_first() {
            let waited = shortage.until_first(turn).await;
            if waited.is_err() && !shortage.is_over && self.comes_to_room(work).await {
                // The first goes on, or gives up in its time.
                (shortage.is_over, shortage.patience) = (true, None);
                return shortage.until_first(turn).await;
            }
            return waited;
        }
        let free = self.inner.meta.borrow().space.available();
        if free != shortage.free {
            (shortage.free, shortage.emptied) = (free, 0);
        }
        // What was given up comes back with a checkpoint; tables it replaces with one more.
        if shortage.emptied < 2 && self.inner.has_pending_space() {
            shortage.emptied += 1;
            return self.inner.clone().checkpoint().await;
        }
        self.inner.full.set(true);
        let Some(patience) = &mut shortage.patience else { return Err(no_space()) };
        if !std::mem::replace(&mut shortage.is_told, true) {
            self.inner.tell_waiting(self.id);
        }
        if self.inner.wait_for_space(patience).await { Ok(()) } else { Err(no_space()) }
    }
}

impl<D: Device> Volume<D> {
    /// Whether there is room for it now, or once the checkpoint that runs has ended.
    async fn comes_to_room(&self, work: &Work) -> bool {
        let has_room = || work.plan.has_room(&self.inner.meta.borrow());
        if !has_room() {
            self.inner.checkpoint_ends().await;
        }
        has_room()
    }
}

impl Shortage {
    /// Waits for those who were without space before it.
    async fn until_first(&mut self, turn: &Turn<Buf>) -> Result<()> {
        let outcome = poll_fn(|cx| {
            turn.watch(cx.waker());
            if turn.is_first() {
                return Poll::Ready(Ok(()));
            }
            match self.patience.as_mut().map(|patience| patience.as_mut().poll(cx)) {
                Some(Poll::Ready(())) => Poll::Ready(Err(no_space())),
                _ => Poll::Pending,
            }
        })
        .await;
        turn.stop_waiting();
        outcome
    }
}
