//! Copying out what is about to be overwritten: copy durable in the pool → record durable.
//!
//! The pool's copier moves the bytes in the order of their offsets, with its buffers, within its throttles
//! and those of the origin. One commit serves all copies that run at a time. A sequential writer copies many
//! chunks at once, all of them read before any is written where the buffers suffice (see
//! `copier::WriteGate`). The records carry checksums of the copies (see `journal::data_checksums`), so that
//! one flush makes copies and records durable.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use crate::catalog::{Catalog, Failure, exceptions};
use crate::copier::{
    Client, CopyError, CopySource, Job, JobGroup, JobHandle, MAX_DESTINATIONS, Piece, Place, WriteGate,
};
use crate::device::{CachedDevice, Device};
use crate::error::{Error, Result};
use crate::format::{DataChecksum, Record};
use crate::planted::correct;
use crate::space::{Need, alloc};
use crate::store::{EditError, Retry, Store, commit, copy_client, deleted_error, retained};
use crate::sync::{LockMode, PlanGuard, RangeGuard};
use crate::types::{PAGE_BYTES, PageAddr, VirtualPage};

use super::Origin;
use super::plan::{CopyPlan, PageCopy, SpaceWait};
use super::running_copies::RunningCopy;

/// Copies for queued writes reach at most this multiple of copy-ahead.
const FOLLOWERS_PART: u64 = 2;
/// Time for which a write waits for followers of its stream, if the stream had some before.
const FOLLOWER_WAIT: Duration = Duration::from_micros(300);

/// Submitted copies; they are written when their gate opens.
struct StartedCopies {
    plan: CopyPlan,
    tickets: Vec<(VirtualPage, JobHandle)>,
    _guard: PlanGuard,
}

impl StartedCopies {
    /// Waits until everything was read or failed.
    async fn read(&self) {
        for (_, ticket) in &self.tickets {
            ticket.wait_read().await;
        }
    }
}

/// The parts of `range` before and behind `other`; both are whole chunks.
fn without(range: Range<u64>, other: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let parts = [range.start..range.end.min(other.start), range.start.max(other.end)..range.end];
    parts.into_iter().filter(|part| !part.is_empty())
}

impl<D: Device> Origin<D> {
    /// Copies out what the range holds for all snapshots that need it, and more ahead of a sequential writer.
    /// Without `patience` it does not wait for space.
    pub(super) async fn copy_out(
        &self,
        store: &Rc<Store<D>>,
        offset: u64,
        end: u64,
        mut patience: Option<&mut SpaceWait>,
    ) -> std::result::Result<(), EditError> {
        let mut limit = store.meta.borrow().protects(self.id).map_or(0, |(p, _)| p.copy_ahead);
        loop {
            let lookahead = self.streams.borrow_mut().lookahead(offset, end, limit);
            // Later writes of the stream queue behind this lock; this one queues behind earlier ones, which
            // may have copied its chunks already.
            let reach = lookahead.group_end.next_multiple_of(self.chunk).min(self.size);
            let others_come = lookahead.group_end > end;
            let from = self.streams.borrow().announced_start(offset, limit);
            let turn = self.copy_locks.lock(self.chunks(from, reach), LockMode::Exclusive).await;
            if self.first_missing_exception(store, offset, end).await?.is_none() {
                return Ok(());
            }
            if lookahead.alone {
                store.runtime.sleep(FOLLOWER_WAIT).await;
            }
            // Queued writes before it are included: they may wait for another lock.
            let from = self.streams.borrow().announced_start(offset, limit).max(from);
            let from = self.first_missing_exception(store, from, end).await?.unwrap_or(offset);
            let lookahead = self.streams.borrow_mut().lookahead(offset, end, reach.saturating_sub(end));
            if lookahead.alone {
                self.streams.borrow_mut().no_follower(end);
            }
            let lookahead = lookahead.end.next_multiple_of(self.chunk).min(reach);
            if others_come {
                // Writes of the stream that are under way end first: a disk that seeks between them and the
                // copies takes longer for both.
                let before = offset.saturating_sub(FOLLOWERS_PART * limit);
                drop(self.locks.lock(self.chunks(before, offset), LockMode::Exclusive).await);
            }
            let mut held = self.locks.lock(self.chunks(from, lookahead), LockMode::Exclusive).await;
            store.wait_below_dirty_limit().await?;
            if let Some(patience) = patience.as_deref_mut() {
                patience.note_attempt(store.meta.borrow().space.available());
            }
            let mut along = Vec::new();
            let under_way = self.run_small_copy(store, lookahead.saturating_sub(from));
            let copied =
                copy_with_followers(self, store, offset..end, (from, lookahead), limit, (&mut held, &mut along)).await;
            if let Some(copy) = under_way {
                copy.end_with_others(&*store.runtime, commit::last_duration(store)).await;
            }
            // Also after a failure: exceptions found by others are durable, or nothing is written on them.
            let committed = correct!(
                store.clone().commit().await,
                Bug::OriginBeforeRecord => Ok(()),
                Bug::VolatileBelievedDurable => match &store.options.volatile {
                    Some(_) => Ok(()),
                    None => store.clone().commit().await,
                }
            );
            committed.map_err(EditError::Error)?;
            match copied {
                Ok(()) => return Ok(()),
                Err(EditError::Error(e)) if e.is_full_host() => {
                    drop((held, along, turn));
                    if !retained::give_back(store, false).await {
                        return Err(EditError::Error(e));
                    }
                }
                Err(EditError::Error(e)) => return Err(EditError::Error(e)),
                // Copy-ahead is not worth waiting for.
                Err(EditError::NoSpace) if limit > 0 => limit = 0,
                Err(EditError::NoSpace) => {
                    drop((held, along, turn));
                    let Some(patience) = patience.as_deref_mut() else { return Err(EditError::NoSpace) };
                    self.wait_for_space(store, patience).await?;
                }
            }
        }
    }

    /// Begins a copy that shares its commit with others. Under a throttle there is none: they would wait for theirs.
    pub(super) fn run_small_copy(&self, store: &Store<D>, len: u64) -> Option<RunningCopy> {
        let is_throttled = copy_client(store, self.id).is_none_or(|client| client.is_throttled())
            || !store.meta.borrow().copier.throttle.is_none();
        if is_throttled { None } else { self.running_copies.begin(len) }
    }
}

/// Copies from `from` to `lookahead`, and on to the end of the locked chunks for writes that queued
/// behind `range` meanwhile, so that one commit serves them, too. Copies the hot ranges along with it;
/// their chunks stay locked as long as `along` lives. Returns only the failure of the first copy: the
/// other writes meet theirs themselves.
async fn copy_with_followers<D: Device>(
    origin: &Origin<D>,
    store: &Rc<Store<D>>,
    range: Range<u64>,
    (from, lookahead): (u64, u64),
    limit: u64,
    (held, along): (&mut RangeGuard, &mut Vec<RangeGuard>),
) -> std::result::Result<(), EditError> {
    let (mut first, mut done, mut lookahead) = (None, from, lookahead);
    loop {
        // All of it is read before any of it is written.
        let gate = store.copier.gate();
        let hot_ranges = match first {
            None => begin_hot_ranges(origin, store, limit, from..lookahead, (&gate, &mut *along)).await,
            Some(_) => Vec::new(),
        };
        let mut begun = Vec::new();
        loop {
            lookahead = extend_to_followers(origin, range.clone(), (from, lookahead), limit, held);
            if lookahead <= done || begun.last().is_some_and(std::result::Result::is_err) {
                break;
            }
            let copy = begin_copy(origin, store, done, lookahead, &gate).await;
            if let Ok(copy) = &copy {
                copy.read().await;
            }
            begun.push(copy);
            done = lookahead;
        }
        drop(gate);
        for copy in hot_ranges {
            let _ = end_copy(origin, store, copy).await;
        }
        let mut failed = false;
        for copy in begun {
            let copied = match copy {
                Ok(copy) => end_copy(origin, store, copy).await.map_err(EditError::Error),
                Err(refused) => Err(refused),
            };
            failed |= copied.is_err();
            first.get_or_insert(copied);
        }
        lookahead = extend_to_followers(origin, range.clone(), (from, lookahead), limit, held);
        if failed || lookahead <= done {
            return first.unwrap_or(Ok(()));
        }
    }
}

/// End of the writes that queued behind `range`; extends the lock to there. If that is not possible,
/// `lookahead`.
fn extend_to_followers<D: Device>(
    origin: &Origin<D>,
    range: Range<u64>,
    (from, lookahead): (u64, u64),
    limit: u64,
    held: &mut RangeGuard,
) -> u64 {
    let asked = origin.streams.borrow_mut().followers_end(range.start, range.end, FOLLOWERS_PART * limit);
    let reach = asked.next_multiple_of(origin.chunk).min(origin.size);
    if reach > lookahead && held.widen(origin.chunks(from, reach)) { reach } else { lookahead }
}

/// With the first copy for a new snapshot: starts copies of the hot ranges, except for `apart`. Failures
/// are left to the writes that meet them. The chunks stay locked as long as `along` lives.
async fn begin_hot_ranges<D: Device>(
    origin: &Origin<D>,
    store: &Rc<Store<D>>,
    limit: u64,
    apart: Range<u64>,
    (gate, along): (&WriteGate, &mut Vec<RangeGuard>),
) -> Vec<StartedCopies> {
    if limit == 0 {
        return Vec::new();
    }
    let apart = apart.start / origin.chunk * origin.chunk..apart.end;
    let views = exceptions::copy_out_views(&store.meta.borrow(), origin.id);
    let due = origin.hot_ranges.borrow_mut().due(&views, origin.chunk, origin.size);
    let mut begun = Vec::new();
    if !has_ample_space(store, due.iter().chain([&apart]), views.len() as u64) {
        return begun;
    }
    for Range { start, end } in due.into_iter().flat_map(|range| without(range, &apart)) {
        let lacks_a_copy = matches!(origin.first_missing_exception(store, start, end).await, Ok(Some(_)));
        if lacks_a_copy && let Some(guard) = origin.locks.try_lock(origin.chunks(start, end), LockMode::Exclusive) {
            along.push(guard);
            begun.extend(begin_copy(origin, store, start, end, gate).await.ok());
        }
    }
    for copy in &begun {
        copy.read().await;
    }
    begun
}

/// Whether twice the space that all these copies need is free: copy-ahead must not take space that writes
/// need.
fn has_ample_space<'a, D: Device>(store: &Store<D>, ranges: impl Iterator<Item = &'a Range<u64>>, views: u64) -> bool {
    let pages: u64 = ranges.map(|range| (range.end - range.start).div_ceil(PAGE_BYTES)).sum();
    store.meta.borrow().reserve(Need::CopyAhead { pages, views }).is_ok()
}

/// Starts the missing copies of a range; its chunks are locked exclusively.
async fn begin_copy<D: Device>(
    origin: &Origin<D>,
    store: &Rc<Store<D>>,
    offset: u64,
    end: u64,
    gate: &WriteGate,
) -> std::result::Result<StartedCopies, EditError> {
    let chunk_pages = origin.chunk / PAGE_BYTES;
    let start = VirtualPage(offset / origin.chunk * chunk_pages);
    let end = VirtualPage(end.div_ceil(origin.chunk) * chunk_pages).min(VirtualPage(origin.size.div_ceil(PAGE_BYTES)));
    let guard = store.generations.enter();
    let mut plan = CopyPlan::new(exceptions::copy_out_views(&store.meta.borrow(), origin.id), start, end);
    let mut retry = Retry::new(store);
    loop {
        let Err(failure) = plan.admit(&mut store.meta.borrow_mut(), origin.id, chunk_pages) else { break };
        retry.missed(failure).await?;
    }
    drop(retry);
    let planned = {
        let mut retry = Retry::new(store);
        loop {
            let advanced = plan.advance(&mut store.meta.borrow_mut(), origin.id, chunk_pages);
            let Err(failure) = advanced else { break Ok(()) };
            if let Err(error) = retry.missed(failure).await {
                break Err(error);
            }
        }
    };
    if let Err(ended) = planned {
        let mut meta = store.meta.borrow_mut();
        plan.copies.iter().for_each(|copy| alloc::return_pages(&mut meta.space, copy.to, copy.len));
        return Err(ended);
    }
    plan.check();
    let Some(client) = copy_client(store, origin.id) else {
        alloc::write_off(&mut store.meta.borrow_mut().space, plan.pages());
        return Err(EditError::Error(deleted_error()));
    };
    let tickets = correct!(
        submit(origin, store, &client, &plan, gate),
        Bug::RecordBeforeCopy => submit_recorded(origin, store, &client, &plan, gate).await?
    );
    Ok(StartedCopies { plan, tickets, _guard: guard })
}

/// Waits for the copies and publishes them. Nothing is durable yet.
async fn end_copy<D: Device>(origin: &Origin<D>, store: &Rc<Store<D>>, begun: StartedCopies) -> Result<()> {
    let mut outcome = Ok(());
    for (at, ticket) in &begun.tickets {
        let failed = match ticket.wait_done().await {
            Err(CopyError::Read(e)) => correct!(
                Error::io(format!("reading the origin at {}", at.0 * PAGE_BYTES), e),
                Bug::OriginCopyErrorSwallowed => continue
            ),
            Err(CopyError::Write(e)) => Error::io("writing the pool to keep a chunk", e),
            // Cancelled because another job of the group failed, which reports why.
            Ok(()) | Err(_) => continue,
        };
        outcome = outcome.and(Err(failed));
    }
    if outcome.is_ok() {
        outcome = correct!(publish(origin, store, &begun.plan).await, Bug::RecordBeforeCopy => Ok(()));
    }
    if outcome.is_err() {
        alloc::write_off(&mut store.meta.borrow_mut().space, begun.plan.pages());
    }
    outcome
}

/// Publishes the copies and commits their record, then submits them.
#[cfg(feature = "planted")]
async fn submit_recorded<D: Device>(
    origin: &Origin<D>,
    store: &Rc<Store<D>>,
    client: &Rc<Client>,
    plan: &CopyPlan,
    gate: &WriteGate,
) -> std::result::Result<Vec<(VirtualPage, JobHandle)>, EditError> {
    publish(origin, store, plan).await.map_err(EditError::Error)?;
    store.clone().commit().await.map_err(EditError::Error)?;
    Ok(submit(origin, store, client, plan, gate))
}

/// Submits the copies. Pages that several snapshots need are read once.
fn submit<D: Device>(
    origin: &Origin<D>,
    store: &Store<D>,
    client: &Rc<Client>,
    plan: &CopyPlan,
    gate: &WriteGate,
) -> Vec<(VirtualPage, JobHandle)> {
    let (mut left, mut tickets, group): (Vec<&PageCopy>, _, _) =
        (plan.copies.iter().collect(), Vec::new(), JobGroup::default());
    while let Some(&first) = left.first() {
        let mut alike = Vec::new();
        left.retain(|copy| {
            let same = (copy.at, copy.len) == (first.at, first.len) && alike.len() < MAX_DESTINATIONS;
            if same {
                alike.push(*copy);
            }
            !same
        });
        let job = job(origin, store, &alike, &group, gate);
        tickets.push((first.at, store.copier.submit(client, job, Vec::new())));
    }
    tickets
}

/// One read of the origin, written to the places of all these copies.
fn job<D: Device>(
    origin: &Origin<D>,
    store: &Store<D>,
    copies: &[&PageCopy],
    group: &JobGroup,
    gate: &WriteGate,
) -> Job<CachedDevice<D>> {
    let (at, len) = (copies[0].at, copies[0].len);
    let real = ((at.0 + len) * PAGE_BYTES).min(origin.size) - at.0 * PAGE_BYTES;
    let place = Place { device: origin.device.clone(), offset: at.0 * PAGE_BYTES };
    let mut source = vec![Piece { len: real, from: CopySource::Device(place) }];
    if real < len * PAGE_BYTES {
        source.push(Piece { len: len * PAGE_BYTES - real, from: CopySource::Zeroes });
    }
    let places = |copy: &&PageCopy| Place { device: store.device.clone(), offset: copy.to.offset() };
    Job {
        source,
        destinations: copies.iter().map(places).collect(),
        near: at.0..at.0 + len,
        group: group.clone(),
        checksums: copies.iter().map(|copy| (copy.to, copy.checksums.clone())).collect(),
        hold: Some(gate.hold()),
    }
}

/// Publishes the exceptions. Snapshots deleted meanwhile need none.
async fn publish<D: Device>(origin: &Origin<D>, store: &Store<D>, plan: &CopyPlan) -> Result<()> {
    for copy in &plan.copies {
        let checksums = copy.checksums.take();
        let known = checksums.iter().map(|w| u64::from(w.pages)).sum::<u64>() == copy.len;
        let mut covered = known.then_some(&checksums[..]);
        let mut done = 0;
        while done < copy.len {
            let mut retry = Retry::new(store);
            let step = loop {
                let failure = match publish_step(origin, &mut store.meta.borrow_mut(), copy, done, covered) {
                    Ok(step) => break step,
                    Err(failure) => failure,
                };
                retry.missed(failure).await?;
            };
            let Some(len) = step else { break };
            // The checksums of all go with the first record.
            covered = covered.map(|_| &[][..]);
            done += len;
        }
    }
    Ok(())
}

/// Publishes the exceptions of a copy within one chunk, from page `done` of it on; returns their number, or `None` if
/// the snapshot was deleted.
fn publish_step<D: Device>(
    origin: &Origin<D>,
    meta: &mut Catalog,
    copy: &PageCopy,
    done: u64,
    covered: Option<&[DataChecksum]>,
) -> std::result::Result<Option<u64>, Failure> {
    let chain = meta.directory.chain(origin.id);
    let lives = chain.is_some_and(|c| c.chained.contains(&copy.sequence) || c.independent.contains(&copy.sequence));
    if !lives {
        return Ok(None);
    }
    let chunk_pages = origin.chunk / PAGE_BYTES;
    let at = VirtualPage(copy.at.0 + done);
    let len = (copy.len - done).min(chunk_pages - at.0 % chunk_pages);
    let to = PageAddr(copy.to.0 + done);
    exceptions::add_exceptions(meta, origin.id, copy.sequence, at, len, to)?;
    let (origin, sequence) = (origin.id, copy.sequence);
    meta.journal.append_copied(&Record::CopyOut { origin, sequence, at, len: len as u32, to }, covered);
    Ok(Some(len))
}
