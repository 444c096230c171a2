//! A write admitted by the write queue: it is planned until nothing is missing, merged with the writes queued
//! directly behind it, and waits for space if there is none. Then its data is written; nothing of that is visible
//! before it is published, except in place.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;

use smallvec::smallvec;

use crate::catalog::{Failure, directory};
#[cfg(feature = "planted")]
use crate::device::CachedDevice;
use crate::device::{Buf, Device, IoResult, Segment, Segments, add_segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, Record};
use crate::planted::correct;
use crate::runtime::LocalFuture;
use crate::space::alloc;
use crate::store::{EditError, Retry, Store, WhenFull, checkpoint, events, no_space_error, write_early};
use crate::sync::{LockMode, MergedWrite, PlanGuard, QueuedWrite, RangeGuard, RangeLocks};
use crate::types::{BLOCK_PAGES, PAGE_BYTES, PAGE_SIZE, VolumeId};

use super::Volume;
use super::fault::{Fault, Partial, WritePlan};
use super::write::WriteRequest;

/// Largest write that is merged with others, in bytes: copying it must cost less than the request it saves.
const MAX_MERGED_BYTES: usize = 64 << 10;

/// Whether a write can be merged: it is small and covers whole pages.
pub(super) fn is_mergeable(buf: &Buf, pages: &Range<u64>) -> bool {
    buf.len() <= MAX_MERGED_BYTES && buf.len() as u64 == (pages.end - pages.start) * PAGE_SIZE as u64
}

/// A write under way.
pub(super) struct PendingWrite {
    pub offset: u64,
    /// More writes follow before this one is acknowledged.
    pub more: bool,
    len: usize,
    unit: usize,
    /// Pages of a chunk, if chunks are copied as a whole on a break; `None`: they are not.
    copying: Option<u64>,
    /// Pages locked for it.
    held: Range<u64>,
    /// Nothing is merged with it.
    exclusive: bool,
    pub plan: WritePlan,
    /// Writes that continue at the end of this one and are done with it.
    pub merged: Vec<MergedWrite<Buf>>,
    locks: Vec<RangeGuard>,
}

impl PendingWrite {
    pub fn new(write: &WriteRequest, len: usize, unit: usize, copying: Option<u64>, held: Range<u64>) -> PendingWrite {
        let WriteRequest { offset, more, .. } = *write;
        let plan = WritePlan::new(offset, len as u64, unit, copying);
        PendingWrite {
            offset,
            more,
            len,
            unit,
            copying,
            held,
            exclusive: false,
            plan,
            merged: Vec::new(),
            locks: Vec::new(),
        }
    }

    /// Drops the plan and the merged writes.
    fn restart(&mut self) {
        self.plan = WritePlan::new(self.offset, self.len as u64, self.unit, self.copying);
        self.merged.clear();
        self.locks.clear();
    }

    /// No space: stops copying whole chunks and locks only the pages that are written.
    fn give_up_copying(&mut self) {
        if self.copying.take().is_some() {
            let page = PAGE_SIZE as u64;
            self.held = self.offset / page..(self.offset + self.len as u64).div_ceil(page);
        }
    }

    /// Merges the writes queued directly behind it, within the block.
    fn merge_followers(&mut self, queued: &QueuedWrite<Buf>, locks: &Rc<RangeLocks>) {
        let page = PAGE_SIZE as u64;
        if self.exclusive || self.len > MAX_MERGED_BYTES || !(self.offset + self.len as u64).is_multiple_of(page) {
            return;
        }
        let (end, had) = (self.plan.end(), self.merged.len());
        let mut limit = end.next_multiple_of(BLOCK_PAGES);
        if self.copying.is_some() {
            // A further chunk would lock more pages than the merged writes cover.
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

    /// Completes the merged writes with the same result.
    pub fn complete_merged(self, result: &Result<()>) {
        drop(self.locks);
        self.merged.into_iter().for_each(|taken| taken.complete(result.clone()));
    }
}

/// How long a write has been without space.
#[derive(Default)]
struct Shortage {
    /// Checkpoints made for it since the free space last changed.
    checkpoints: u32,
    free: u64,
    /// Timer after which it fails.
    patience: Option<LocalFuture<()>>,
    /// The timer expired, but the write fitted at that moment.
    timed_out: bool,
    /// Its wait was reported as an event.
    reported: bool,
}

impl<D: Device> Volume<D> {
    /// Pages of a chunk, if chunks are copied on a break, and the pages that a write to `range` then has to
    /// lock.
    pub(super) fn break_range(&self, range: Range<u64>) -> (Option<u64>, Range<u64>) {
        let meta = self.store.meta.borrow();
        let record = self.record(&meta);
        let chunk = record.chunk / PAGE_BYTES;
        match record.break_policy {
            BreakPolicy::Copy => (Some(chunk), range.start / chunk * chunk..range.end.next_multiple_of(chunk)),
            BreakPolicy::Split => (None, range),
        }
    }

    /// Completes the plan and waits for space if necessary. Holds neither plan nor `lock` during that wait:
    /// an earlier write may need more pages than it writes, and waits for those.
    pub(super) async fn plan(
        &self,
        queued: &QueuedWrite<Buf>,
        work: &mut PendingWrite,
        lock: &mut Option<RangeGuard>,
    ) -> Result<PlanGuard> {
        let mut shortage = Shortage::default();
        let (mut sealed, mut bound) = (false, BoundShortage::default());
        loop {
            self.store.wait_below_dirty_limit().await?;
            let guard = self.store.generations.enter();
            let planned = {
                let mut retry = Retry::new(&self.store);
                loop {
                    work.merge_followers(queued, &self.live.locks);
                    let volume = (self.id, &*self.live);
                    let planned = work.plan.advance(&mut self.store.meta.borrow_mut(), volume, queued.is_first());
                    let Err(failure) = planned else { break Ok(()) };
                    if bound.waits(&self.store, &failure) {
                        break Err(EditError::NoSpace);
                    }
                    if let Err(error) = retry.missed(failure).await {
                        break Err(error);
                    }
                }
            };
            match correct!(planned, Bug::FullLeavesHalf => publish_half(self, planned, work).await?) {
                Ok(()) => return Ok(guard),
                // The quota may have room for this write without the merged ones.
                Err(EditError::Error(e)) if e.kind() == ErrorKind::NoSpace && !work.merged.is_empty() => {
                    work.exclusive = true;
                    self.restart(work);
                    continue;
                }
                Err(EditError::Error(e)) => {
                    self.return_pages(work);
                    return Err(e);
                }
                Err(EditError::NoSpace) => {}
            }
            drop(guard);
            if std::mem::take(&mut bound.is_waiting) {
                self.restart(work);
                bound.wait(&self.store).await;
                continue;
            }
            // Pages that recovery may verify are relocated, unless space is short: a sealed commit allows to
            // overwrite them.
            if !std::mem::replace(&mut sealed, true) && self.store.meta.borrow().journal.checksums.holds_pages() {
                self.restart(work);
                self.store.commit_sealed().await?;
                continue;
            }
            work.give_up_copying();
            self.restart(work);
            let locked = lock.take().is_some();
            queued.yield_for_space();
            let room = self.wait_for_free_space(queued, work, &mut shortage).await;
            events::report_if_full(&self.store, self.id, room)?;
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

    /// Returns the pages that the plan was given.
    fn return_pages(&self, work: &PendingWrite) {
        let mut meta = self.store.meta.borrow_mut();
        work.plan.faults.iter().for_each(|fault| alloc::return_pages(&mut meta.space, fault.to, fault.len));
    }

    /// Waits until there may be space: for the earlier writes without space, for a checkpoint that returns
    /// freed space, or for space freed by others.
    async fn wait_for_free_space(
        &self,
        queued: &QueuedWrite<Buf>,
        work: &PendingWrite,
        shortage: &mut Shortage,
    ) -> Result<()> {
        self.store.check_writable()?;
        if shortage.patience.is_none()
            && !shortage.timed_out
            && let WhenFull::Wait(time) = self.store.options.when_full
        {
            shortage.patience = Some(self.store.runtime.sleep(time));
        }
        if !queued.is_first() {
            let waited = shortage.until_first(queued).await;
            if waited.is_err() && !shortage.timed_out && self.will_fit(work).await {
                // The first in line continues, or fails when its timer expires.
                (shortage.timed_out, shortage.patience) = (true, None);
                return shortage.until_first(queued).await;
            }
            return waited;
        }
        let free = self.store.meta.borrow().space.available();
        if free != shortage.free {
            (shortage.free, shortage.checkpoints) = (free, 0);
        }
        // A checkpoint returns freed space; one more returns the tables that it replaced.
        if shortage.checkpoints < 2 && self.store.has_pending_space() {
            shortage.checkpoints += 1;
            return self.store.clone().checkpoint().await;
        }
        self.store.full.set(true);
        let Some(patience) = &mut shortage.patience else { return Err(no_space_error()) };
        if !std::mem::replace(&mut shortage.reported, true) {
            events::report_waiting(&self.store, self.id);
        }
        if self.store.wait_for_space(patience).await { Ok(()) } else { Err(no_space_error()) }
    }
}

/// The wait of a write beyond the bound of its volume: what was deleted before may be charged to it until it is freed.
#[derive(Default)]
struct BoundShortage {
    /// The dead volumes at the first refusal.
    dead: Option<BTreeSet<VolumeId>>,
    is_waiting: bool,
}

impl BoundShortage {
    /// Whether the write has to wait after this failure.
    fn waits<D: Device>(&mut self, store: &Store<D>, failure: &Failure) -> bool {
        if matches!(failure, Failure::OverBound(_)) && store.reaping.get() {
            let now = directory::dead(&store.meta.borrow().directory);
            let dead = self.dead.get_or_insert_with(|| now.clone());
            self.is_waiting = !dead.is_disjoint(&now);
        }
        self.is_waiting
    }

    /// Waits until another dead volume is gone.
    async fn wait<D: Device>(&self, store: &Store<D>) {
        if store.reaping.get() {
            store.reaped.wait().await;
        }
    }
}

/// Maps what a plan that found no space has allocated; returns how planning ended.
#[cfg(feature = "planted")]
async fn publish_half<D: Device>(
    volume: &Volume<D>,
    planned: std::result::Result<(), EditError>,
    work: &PendingWrite,
) -> Result<std::result::Result<(), EditError>> {
    if let Err(EditError::NoSpace) = planned {
        volume.publish(&work.plan).await?;
    }
    Ok(planned)
}

impl<D: Device> Volume<D> {
    /// Whether the write fits now, or after the running checkpoint.
    async fn will_fit(&self, work: &PendingWrite) -> bool {
        let has_room = || work.plan.fits(&self.store.meta.borrow(), self.id);
        if !has_room() {
            checkpoint::wait_checkpoint_end(&self.store).await;
        }
        has_room()
    }
}

impl Shortage {
    /// Waits until no earlier write lacks space.
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

impl<D: Device> Volume<D> {
    /// Submits the data in ascending order, with the completed `pages`, leaves the write queue, and waits for
    /// the end.
    pub(super) async fn submit_planned(
        &self,
        queued: QueuedWrite<Buf>,
        work: &mut PendingWrite,
        pages: Vec<Buf>,
        buf: Buf,
    ) -> (Result<()>, Buf) {
        let counters = &self.store.counters;
        // The end of a merged request is that of the latest write.
        let more = if work.merged.is_empty() { work.more } else { self.live.more.get() };
        let (result, buf) = match self.assembled(work, &pages, &buf) {
            Some((whole, segments)) => {
                counters.data_writes.add(&segments);
                work.plan.checksum_data(&self.store.meta.borrow().journal, &whole, &segments);
                let write = self.submit(&work.plan, whole, segments, more);
                self.record_early(&work.plan);
                queued.submitted(&work.merged);
                (write.await.0, buf)
            }
            None => {
                let segments = work.plan.segments.clone();
                counters.data_writes.add(&segments);
                work.plan.checksum_data(&self.store.meta.borrow().journal, &buf, &segments);
                let write = self.submit(&work.plan, buf, segments, more);
                self.record_early(&work.plan);
                queued.submitted(&work.merged);
                write.await
            }
        };
        (self.device_error(work.offset, result), buf)
    }

    /// Writes the record of a planned write early, if it has one only.
    fn record_early(&self, plan: &WritePlan) {
        if let [Fault { at, len, to, sum: Some(sum), .. }] = &plan.faults[..] {
            let record = Record::Map { volume: self.id, at: *at, len: *len as u32, to: *to };
            write_early(&self.store, &record, *sum);
        }
    }

    /// Submits a planned data write with the hint whether more writes follow.
    fn submit(
        &self,
        _plan: &WritePlan,
        buf: Buf,
        segments: Segments,
        more: bool,
    ) -> impl Future<Output = IoResult> + 'static {
        let device = correct!(
            &self.store.device,
            Bug::SharedCacheKeepsOverwritten => unseen_if(&self.store.device, _plan.faults.is_empty()),
            Bug::SharedCacheKeepsReused => unseen_if(&self.store.device, !_plan.faults.is_empty())
        );
        device.cork(more);
        let write = device.write(buf, segments, false);
        // Writes of the engine itself are awaited: no further write follows.
        device.cork(false);
        write
    }

    /// Copies all data to one buffer, with its segments, if it cannot be written from `buf`: because pages
    /// were completed, writes were merged, or whole pages are not aligned in it.
    fn assembled(&self, work: &PendingWrite, pages: &[Buf], buf: &Buf) -> Option<(Buf, Segments)> {
        let WritePlan { segments, partials, .. } = &work.plan;
        let odd = segments.first().is_some_and(|s| !s.at.is_multiple_of(self.store.device.block_size()));
        if partials.is_empty() && work.merged.is_empty() && !odd {
            return None;
        }
        Some(self.assemble(work, pages, buf, &work.merged))
    }

    /// Lays the planned part of `own`, the data of the writes `along` behind it and the completed `pages`
    /// into a new buffer that starts at the first page; its segments are in ascending order.
    pub(super) fn assemble(
        &self,
        work: &PendingWrite,
        pages: &[Buf],
        own: &[u8],
        along: &[MergedWrite<Buf>],
    ) -> (Buf, Segments) {
        let WritePlan { segments, partials, .. } = &work.plan;
        let lead = (work.offset % PAGE_SIZE as u64) as usize;
        let len = (work.plan.end() - work.offset / PAGE_SIZE as u64) as usize * PAGE_SIZE;
        let mut whole = self.store.device.buffer(len);
        let mut at = lead + own.len();
        whole[lead..at].copy_from_slice(own);
        for taken in along {
            at += taken.with_payload(|more| {
                correct!(whole[at..at + more.len()].copy_from_slice(more), Bug::TakenAlongForgotten => ());
                more.len()
            });
        }
        let mut pieces: Vec<Segment> = segments.iter().map(|s| Segment { at: s.at + lead, ..*s }).collect();
        for (partial, page) in partials.iter().zip(pages) {
            let at = (lead + partial.at) / PAGE_SIZE * PAGE_SIZE;
            whole[at..at + PAGE_SIZE].copy_from_slice(page);
            pieces.push(Segment { offset: partial.to.offset(), at, len: PAGE_SIZE });
        }
        pieces.sort_unstable_by_key(|s| s.at);
        let mut segments = Segments::new();
        pieces.iter().for_each(|s| add_segment(&mut segments, s.offset, s.at, s.len));
        (whole, segments)
    }

    /// Reads and completes the pages of which only a part is written.
    pub(super) async fn compose(&self, work: &PendingWrite, data: &[u8]) -> Result<Vec<Buf>> {
        let mut pages = Vec::with_capacity(work.plan.partials.len());
        for partial in &work.plan.partials {
            pages.push(self.complete(partial, data).await?);
        }
        Ok(pages)
    }

    async fn complete(&self, partial: &Partial, data: &[u8]) -> Result<Buf> {
        let mut page = self.store.device.buffer(PAGE_SIZE);
        match partial.from {
            Some(from) => {
                let segment = Segment { offset: from.offset(), at: 0, len: PAGE_SIZE };
                self.store.counters.data_reads.add_one(PAGE_SIZE as u64);
                let (result, read) = self.store.device.read(page, smallvec![segment]).await;
                result.map_err(|e| Error::io(format!("reading {} to complete a page", self.shown_name()), e))?;
                page = read;
            }
            // The new page has old contents of another owner: write all of it, zeroes included.
            None => correct!(
                page.fill(0),
                Bug::ZeroFillSkipped => page = read_old(self, partial, page).await
            ),
        }
        page[partial.within..partial.within + partial.len].copy_from_slice(&data[partial.at..partial.at + partial.len]);
        Ok(page)
    }
}

/// The device with its shared cache, or without it.
#[cfg(feature = "planted")]
fn unseen_if<D: Device>(device: &Rc<CachedDevice<D>>, unseen: bool) -> &Rc<CachedDevice<D>> {
    if unseen { device.unseen() } else { device }
}

/// Reads the old contents of the new page of `partial`.
#[cfg(feature = "planted")]
async fn read_old<D: Device>(volume: &Volume<D>, partial: &Partial, page: Buf) -> Buf {
    let segment = Segment { offset: partial.to.offset(), at: 0, len: PAGE_SIZE };
    volume.store.device.read(page, smallvec![segment]).await.1
}
