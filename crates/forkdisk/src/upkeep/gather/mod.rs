//! Gathering: scattered pages of a volume are moved into one contiguous place, a virtual block at a time,
//! without unsharing anything.
//!
//! Nothing waits for it, and nothing is locked while pages are copied: they are *watched*. Writes in place
//! that were planned before are waited for, and one that is planned meanwhile makes its page stay where it
//! is. The move is published in one record for everything that refers to the pages; until that is durable,
//! and the next checkpoint has ended, the old pages stay unchanged (I6). A waiting checkpoint or snapshot
//! cuts a copy short.

mod plan;
mod policy;
mod row;

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use smallvec::smallvec;

use crate::catalog::Failure;
use crate::copier::{CopyError, CopySource, Job, JobGroup, JobHandle, Piece, Place};
use crate::device::{CachedDevice, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::MovedRun;
use crate::map::Stop;
use crate::planted::correct;
use crate::runtime::yield_now;
use crate::space::alloc;
use crate::sync::{LockMode, PlanGuard};
use crate::types::{BLOCK_PAGES, PAGE_SIZE, PageAddr, VirtualPage, VolumeId, table_span};

use super::Upkeep;
use plan::{GatherMode, Placed};
pub use policy::GatherScheduler;
use row::Rows;

/// Virtual blocks examined before other tasks may run.
const BLOCKS_PER_STEP: u64 = 256;
/// How often a block is retried whose pages were written meanwhile, or whose copy was cut short.
const MAX_TRIES: usize = 4;

/// Result of gathering a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GatherReport {
    /// Bytes that were moved.
    pub moved: u64,
    /// Blocks of 1 MiB of the volume of which something was moved.
    pub blocks: u64,
    /// Blocks that are still scattered, in all of the volume: moving their pages would undo sharing, they
    /// were written all the time, or there is no contiguous space.
    pub left: u64,
    /// It ended before the end of the volume: the file system under the pool had no space for the moves.
    pub host_full: bool,
    /// Fragmentation before and after, in percent; see
    /// [`VolumeInfo::fragmentation`](super::VolumeInfo::fragmentation).
    pub before: f64,
    /// See `before`.
    pub after: f64,
}

/// Result of one virtual block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// This many pages were moved.
    Moved(u64),
    /// There was nothing to do.
    Nothing,
    /// There is no space.
    NoSpace,
    /// The file system under the pool has no space.
    HostFull,
    /// Other tasks were in the way.
    Conflict,
}

impl<D: Device> Upkeep<D> {
    /// Gathers the scattered pages of a volume or snapshot, as far as that unshares nothing. Calls `progress`
    /// with the bytes examined and their total; ends when it returns false. Limited by the copier's
    /// throttles; reads, writes and verbs continue meanwhile. Refused while another call gathers the same
    /// volume.
    pub async fn gather(
        self: &Rc<Self>,
        name: &str,
        mut progress: impl FnMut(u64, u64) -> bool,
    ) -> Result<GatherReport> {
        self.store.check_writable()?;
        let before = self.store.find(name)?;
        // Two calls would each look for contiguous blocks, and move all of it.
        let Some(_asked) = self.gathering.request(before.id) else {
            let why = format!("{name:?} is being gathered already; wait until that has ended");
            return Err(Error::new(ErrorKind::Busy, why));
        };
        let mut report = GatherReport { before: before.fragmentation(), ..GatherReport::default() };
        wait_space_freed(self).await?;
        let (mut rows, mut gone_over, mut blocks) = (Rows::new(before.id), 0, BTreeSet::new());
        while let Some((at, way)) = rows.next(self).await? {
            // It may begin again, for contiguous blocks that there was no space for.
            gone_over = (at.0 * PAGE_SIZE as u64).min(before.size).max(gone_over);
            if !progress(gone_over, before.size) {
                break;
            }
            match gather_for(self, before.id, at, way).await? {
                Outcome::Moved(pages) => {
                    report.moved += pages * PAGE_SIZE as u64;
                    blocks.insert(at);
                }
                Outcome::HostFull => {
                    report.host_full = true;
                    break;
                }
                Outcome::Nothing | Outcome::NoSpace | Outcome::Conflict => {}
            }
        }
        report.blocks = blocks.len() as u64;
        self.store.clone().commit().await?;
        report.left = scattered_blocks(self, before.id).await?;
        let _ = progress(before.size, before.size);
        let meta = self.store.meta.borrow();
        if let Some(volume) = meta.directory.get(before.id) {
            report.after = self.store.info_of(&meta, &volume.record).fragmentation();
        }
        Ok(report)
    }
}

/// Waits until pending free space is freed, so that pages can go home. Fails where that can take forever.
async fn wait_space_freed<D: Device>(upkeep: &Rc<Upkeep<D>>) -> Result<()> {
    upkeep.store.unless_blocked(free_pending_space(upkeep)).await
}

async fn free_pending_space<D: Device>(upkeep: &Rc<Upkeep<D>>) -> Result<()> {
    while upkeep.store.reaping.get() {
        upkeep.store.check_writable()?;
        upkeep.store.reaped.wait().await;
    }
    match upkeep.store.has_pending_space() {
        true => upkeep.store.clone().checkpoint().await,
        false => Ok(()),
    }
}

/// Returns the first virtual block from `at` on whose pages are not contiguous.
async fn next_scattered<D: Device>(
    upkeep: &Upkeep<D>,
    id: VolumeId,
    mut at: VirtualPage,
) -> Result<Option<VirtualPage>> {
    loop {
        let (next, found) = upkeep
            .store
            .retry_no_alloc(|meta| {
                let (mut editor, record) = plan::living(meta, id)?;
                let (next, found) = editor.next_scattered(record, at, BLOCKS_PER_STEP).map_err(Stop::from)?;
                Ok((next, found || next.0 >= table_span(record.level)))
            })
            .await?;
        let end = {
            let meta = upkeep.store.meta.borrow();
            meta.directory.get(id).map_or(0, |v| table_span(v.record.level))
        };
        match found {
            true => return Ok((next.0 < end).then_some(next)),
            false => at = next,
        }
        yield_now().await;
    }
}

/// Returns how many virtual blocks have pages that are not contiguous; none of a deleted volume.
async fn scattered_blocks<D: Device>(upkeep: &Upkeep<D>, id: VolumeId) -> Result<u64> {
    let (mut at, mut count) = (VirtualPage(0), 0);
    while upkeep.store.meta.borrow().directory.get(id).is_some()
        && let Some(next) = next_scattered(upkeep, id, at).await?
    {
        (at, count) = (VirtualPage(next.0 + BLOCK_PAGES), count + 1);
    }
    Ok(count)
}

/// Gathers one virtual block, and retries on conflicts.
async fn gather_for<D: Device>(
    upkeep: &Rc<Upkeep<D>>,
    id: VolumeId,
    at: VirtualPage,
    way: GatherMode,
) -> Result<Outcome> {
    let mut outcome = Outcome::Conflict;
    let mut emptied = false;
    for _ in 0..MAX_TRIES {
        upkeep.store.check_writable()?;
        upkeep.store.check_not_blocked()?;
        if upkeep.store.closing.get() {
            return Err(Error::new(ErrorKind::Failed, "the pool is being closed"));
        }
        outcome = gather_block(upkeep, id, at, way).await?;
        match outcome {
            // Pages moved before, and places allocated in vain, are in the way until the next checkpoint.
            Outcome::Conflict | Outcome::NoSpace | Outcome::HostFull
                if !emptied && upkeep.store.has_pending_space() =>
            {
                emptied = true;
                upkeep.store.unless_blocked(upkeep.store.clone().checkpoint()).await?;
            }
            Outcome::Conflict => yield_now().await,
            _ => break,
        }
    }
    upkeep.store.commit_soon();
    upkeep.store.checkpoint_soon();
    Ok(outcome)
}

/// Gathers the part of one virtual block that is worth it.
async fn gather_block<D: Device>(
    upkeep: &Rc<Upkeep<D>>,
    id: VolumeId,
    at: VirtualPage,
    way: GatherMode,
) -> Result<Outcome> {
    // One at a time: a waiting task cuts copies short.
    let _alone = upkeep.gathering.lock.lock(0..1, LockMode::Exclusive).await;
    upkeep.store.wait_below_dirty_limit().await?;
    let Some(plan) = upkeep.store.retry_pinned(|meta| plan::plan_moves(meta, id, at, way)).await? else {
        return Ok(Outcome::Nothing);
    };
    upkeep.store.meta.borrow_mut().watched.watch(plan.pages());
    let outcome = gather_watched(upkeep, id, at, way).await;
    upkeep.store.meta.borrow_mut().watched.forget();
    outcome
}

async fn gather_watched<D: Device>(
    upkeep: &Rc<Upkeep<D>>,
    id: VolumeId,
    at: VirtualPage,
    way: GatherMode,
) -> Result<Outcome> {
    // Writes in place that were planned before the pages were watched.
    correct!(upkeep.store.generations.barrier().await, Bug::GatherOvertakesWriters => ());
    let plan = upkeep.store.generations.enter();
    let placed = upkeep
        .store
        .retry_pinned(|meta| {
            let Some(plan) = plan::plan_moves(meta, id, at, way)? else { return Ok(None) };
            if !plan.pages().all(|page| meta.watched.is_watched(page)) {
                return Ok(None);
            }
            Ok(Some(plan::place_gathered(meta, plan).map_err(|miss| Failure::Stop(miss.into()))?))
        })
        .await?;
    let moved = match placed {
        None => return Ok(Outcome::Conflict),
        Some(Placed::NoRoom) => return Ok(Outcome::NoSpace),
        Some(Placed::Moves(moved)) => moved,
    };
    let plan = correct!(Some(plan), Bug::GatherOutlivesCheckpoint => crate::planted::released(plan));
    let outcome = match copy_gathered(upkeep, id, &moved, plan.as_ref()).await {
        Ok(true) => publish_gathered(upkeep, id, at, &moved).await,
        Ok(false) => Ok(Outcome::Conflict),
        Err(error) => Err(error),
    };
    if !matches!(outcome, Ok(Outcome::Moved(_))) {
        alloc::write_off(&mut upkeep.store.meta.borrow_mut().space, moved.iter().map(|run| u64::from(run.len)).sum());
    }
    match outcome {
        Err(e) if e.is_full_host() => Ok(Outcome::HostFull),
        other => other,
    }
}

/// Copies pages to their new place. False: it was cut short, or a request failed.
async fn copy_gathered<D: Device>(
    upkeep: &Upkeep<D>,
    id: VolumeId,
    moved: &[MovedRun],
    plan: Option<&PlanGuard>,
) -> Result<bool> {
    let client = {
        let meta = &mut *upkeep.store.meta.borrow_mut();
        let Some(volume) = meta.directory.get(id) else { return Ok(false) };
        upkeep.store.live.borrow_mut().activity_or_create(&volume.record).gather.clone()
    };
    let tickets: Vec<JobHandle> =
        jobs(upkeep, moved).into_iter().map(|job| upkeep.store.copier.submit(&client, job, Vec::new())).collect();
    let requests = moved.len() + tickets.len();
    upkeep.gathering.requests.set(upkeep.gathering.requests.get() + requests as u64);
    moved.iter().for_each(|run| upkeep.store.counters.data_reads.add_one(u64::from(run.len) * PAGE_SIZE as u64));
    tickets.iter().for_each(|ticket| upkeep.store.counters.data_writes.add_one(ticket.len()));
    let mut done = pin!(async {
        let mut failure = None;
        for ticket in &tickets {
            if let Err(error) = ticket.wait_done().await {
                failure = failure.or(Some(error));
            }
        }
        failure
    });
    let mut turned = pin!(async {
        match plan {
            Some(plan) => upkeep.store.generations.turned(plan).await,
            None => std::future::pending().await,
        }
    });
    let mut is_cut = false;
    let failure = poll_fn(|cx| {
        if !is_cut && turned.as_mut().poll(cx).is_ready() {
            is_cut = true;
            tickets.iter().for_each(JobHandle::cancel);
        }
        match done.as_mut().poll(cx) {
            Poll::Ready(failure) => Poll::Ready(failure),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
    match failure {
        None => Ok(true),
        Some(CopyError::Cancelled) => Ok(false),
        Some(CopyError::Read(e)) => Err(Error::io("reading scattered pages to gather them", e)),
        Some(CopyError::Write(e)) => Err(Error::io("writing pages that are gathered", e)),
    }
}

/// Returns one job for each contiguous destination.
fn jobs<D: Device>(upkeep: &Upkeep<D>, moved: &[MovedRun]) -> Vec<Job<CachedDevice<D>>> {
    let device = &upkeep.store.device;
    let place = |page: PageAddr| Place { device: device.clone(), offset: page.offset() };
    let target = |page: PageAddr| correct!(place(page), Bug::SharedCacheKeepsGathered => unseen(device, page));
    let group = JobGroup::default();
    let mut jobs: Vec<(u64, Job<CachedDevice<D>>)> = Vec::new();
    for run in moved {
        let len = u64::from(run.len) * PAGE_SIZE as u64;
        let piece = Piece { len, from: CopySource::Device(place(run.from)) };
        match jobs.last_mut() {
            Some((end, job)) if *end == run.to.0 => {
                job.source.push(piece);
                *end += u64::from(run.len);
            }
            _ => {
                let near = jobs.len() as u64..jobs.len() as u64 + 1;
                let (source, destinations) = (vec![piece], smallvec![target(run.to)]);
                let job = Job { source, destinations, near, group: group.clone(), checksums: Vec::new(), hold: None };
                jobs.push((run.to.0 + u64::from(run.len), job));
            }
        }
    }
    jobs.into_iter().map(|(_, job)| job).collect()
}

/// A place on the device that the shared cache does not see.
#[cfg(feature = "planted")]
fn unseen<D: Device>(device: &CachedDevice<D>, page: PageAddr) -> Place<CachedDevice<D>> {
    Place { device: device.unseen().clone(), offset: page.offset() }
}

async fn publish_gathered<D: Device>(
    upkeep: &Upkeep<D>,
    id: VolumeId,
    at: VirtualPage,
    moved: &[MovedRun],
) -> Result<Outcome> {
    upkeep.store.check_writable()?;
    let published = upkeep.store.retry_pinned(|meta| {
        let Some(record) = plan::gather_record(meta, id, at, moved)? else { return Ok(None) };
        let mut done = 0;
        meta.apply(&record, &mut done)?;
        meta.journal.append(&record);
        let crate::format::Record::Gather { moved, .. } = &record else { return Ok(None) };
        Ok(Some(moved.iter().map(|run| u64::from(run.len)).sum()))
    });
    match published.await {
        Ok(Some(pages)) => {
            upkeep.store.counters.gathered.add(pages * PAGE_SIZE as u64);
            Ok(Outcome::Moved(pages))
        }
        Ok(None) => Ok(Outcome::Conflict),
        Err(error) => Err(error),
    }
}
