//! Group commit: one device flush and one journal write for all waiting flushes; and when a commit begins by itself.
//!
//! Order: data durable → journal records written → durable → acknowledged. If the records carry checksums of
//! the data (see `journal::data_checksums`), or if all data is durable already, one flush makes both durable: after a
//! crash in between recovery finds out what is missing. A commit covers what was published before it began; later
//! requests wait for the next one.
//!
//! A commit that begins by itself writes its records and leaves the last flush out. What it wrote counts as durable
//! after a flush that begins later: that of the next commit for a request, of the commit interval, or the one between
//! data and records of the next commit of any kind. Until then no group says that it was durable, nothing that depends
//! on it is written in place or discarded, and the commit interval goes on.
//!
//! While the last flush of a commit runs, the groups of the next one are written (see `overlap`).
//!
//! A commit that is early (see `early`) is one of these. It begins only if its records carry checksums of all their
//! data, so that no flush has to come before them.
//!
//! Nothing acknowledged waits longer than the *commit interval*: that time after the first change that is not
//! durable the pool is committed, with a flush. An idle pool does nothing. At most one task sleeps, and only while
//! something is not durable. It holds no reference to the pool meanwhile.
//!
//! Times of the last change of volumes, for mounts that show them as files.
//!
//! A write sets a mark in memory and nothing else. The time is taken when it is read or recorded. It is
//! recorded by a commit that writes records anyway, by the first commit after the commit interval, and by a
//! close: no flush costs an additional request. Each commit records at most one time for each volume. Without
//! a clock ([`OpenOptions::clock`](super::OpenOptions::clock)) no times are recorded.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::catalog::{Catalog, directory};
use crate::device::{Buf, Device, Segments};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Attributes, Record, VolumeState};
use crate::journal::{Outgoing, Written, appended_in_order};
use crate::live::LastChange;
use crate::planted::correct;
use crate::space::Need;
use crate::sync::Event;
use crate::types::{PAGE_SIZE, VolumeId};

use super::early::{Early, erase_early, take_other};
use super::overlap::{Overlap, write_overlapping};
use super::{EarlyGroups, Store, checkpoint_steps, host_enospc};

/// Also start one when pending records reach the end of a journal extent of at least this many bytes.
const MIN_EXTENT_BYTES: u64 = 1 << 20;
/// Contiguous groups are written by requests of at most this many bytes.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// The commit that runs, and the tasks that wait for it.
#[derive(Default)]
pub struct Commits {
    running: Cell<bool>,
    asked: Cell<u64>,
    /// The last one that a request waits for: it flushes.
    flush_asked: Cell<u64>,
    begun: Cell<u64>,
    /// The next commit ends with a seal.
    sealing: Cell<bool>,
    ended: Cell<u64>,
    /// How long the last one with a flush took.
    duration: Cell<Duration>,
    /// Value of `journal.recorded()` at the last flush, advanced by multiples of the interval at each
    /// background commit.
    background_mark: Cell<u64>,
    changed: Event,
    early: Early,
    /// The last commit that is not only an early one.
    not_early: Cell<u64>,
    /// Early ones since the last commit began.
    early_asked: Cell<u64>,
    overlap: Overlap,
}

impl Commits {
    pub fn is_running(&self) -> bool {
        self.running.get()
    }

    pub fn early(&self) -> &Early {
        &self.early
    }

    pub fn overlap(&self) -> &Overlap {
        &self.overlap
    }

    /// Returns the number of the last commit that a request waits for.
    pub fn flush_requested(&self) -> u64 {
        self.flush_asked.get()
    }

    /// Whether the next commit ends with a seal.
    pub fn is_sealing(&self) -> bool {
        self.sealing.get()
    }
}

impl<D: Device> Store<D> {
    /// Makes everything published and every acknowledged write durable.
    pub async fn commit(self: Rc<Self>) -> Result<()> {
        reset_background_mark(&self);
        next_commit(self).await
    }

    /// Whether [`wait_process_safe`](Self::wait_process_safe) would return at once.
    pub fn is_process_safe(&self) -> bool {
        self.meta.borrow().journal.is_process_safe()
    }

    /// Waits until every record published before this call survives a crash of the process. Returns at once
    /// unless the volatile log was full; then it waits for a commit. A change that is not durable is
    /// acknowledged only after this.
    pub async fn wait_process_safe(self: &Rc<Self>) -> Result<()> {
        if self.is_process_safe() {
            return Ok(());
        }
        self.check_writable()?;
        Box::pin(self.clone().commit()).await
    }

    /// Starts a background commit after every [`background_commit`](super::OpenOptions::background_commit) bytes of
    /// records, independent of other commits, so that flushes find about the same amount of work each time; when
    /// pending records would span two journal extents or fill the volatile log; and an early one (see `early`).
    pub fn commit_soon(self: &Rc<Self>) {
        let commits = &self.commits;
        if commits.running.get() {
            return;
        }
        let (recorded, pending, fills, is_early) = {
            let journal = &self.meta.borrow().journal;
            let fills = journal.fills_extent(MIN_EXTENT_BYTES) || journal.volatile_is_filling();
            let is_early = self.options.early_groups != EarlyGroups::Never
                && journal.checksums.covers_data()
                && commits.early.is_due(appended_in_order(journal));
            (journal.recorded(), journal.pending(), fills, is_early)
        };
        let bytes = self.options.background_commit.max(1);
        let marks = (recorded - commits.background_mark.get()) / bytes;
        commits.background_mark.set(commits.background_mark.get() + marks * bytes);
        let is_background = marks > 0 || fills;
        if (is_background || is_early) && pending > 0 {
            commits.asked.set(commits.asked.get() + 1);
            match is_background {
                true => commits.not_early.set(commits.asked.get()),
                false => commits.early_asked.set(commits.early_asked.get() + 1),
            }
            start_commits(self);
        }
    }

    /// Commits and seals: the device itself states that everything committed is durable, so recovery verifies
    /// no page that is written in place from now on.
    pub async fn commit_sealed(self: &Rc<Self>) -> Result<()> {
        self.commits.sealing.set(true);
        next_commit(self.clone()).await
    }
}

/// Begins a commit that removes the early group of a write that failed.
pub fn commit_failed_write<D: Device>(store: &Rc<Store<D>>) {
    let commits = &store.commits;
    if commits.early.is_any() && !store.options.read_only {
        commits.asked.set(commits.asked.get() + 1);
        commits.not_early.set(commits.asked.get());
        start_commits(store);
    }
}

/// Merges contiguous groups into requests of limited size. Recovery accepts each group as a whole or not at
/// all, whatever request it was written by.
pub(super) fn merge_groups(groups: Vec<Outgoing>) -> Vec<Outgoing> {
    let mut pieces: Vec<Outgoing> = Vec::with_capacity(groups.len());
    for group in groups {
        match pieces.last_mut() {
            Some(piece) if piece.bytes.len() + group.bytes.len() <= MAX_REQUEST_BYTES => {
                piece.bytes.extend(group.bytes)
            }
            _ => pieces.push(group),
        }
    }
    pieces
}

async fn next_commit<D: Device>(store: Rc<Store<D>>) -> Result<()> {
    store.check_alive()?;
    if store.options.read_only {
        return Ok(());
    }
    let commits = &store.commits;
    // The bug joins the commit that is already running. It still waits once, so callers cannot loop.
    let ticket = correct!(
        commits.asked.get() + 1,
        Bug::FlushJoinsRunningCommit => match commits.begun.get() > commits.ended.get() {
            true => commits.begun.get(),
            false => commits.asked.get() + 1,
        }
    );
    commits.asked.set(commits.asked.get().max(ticket));
    commits.flush_asked.set(commits.flush_asked.get().max(ticket));
    commits.early.flush_requested(appended_in_order(&store.meta.borrow().journal));
    start_commits(&store);
    write_overlapping(&store);
    while commits.ended.get() < ticket {
        store.check_alive()?;
        commits.changed.wait().await;
    }
    store.check_failed()
}

fn start_commits<D: Device>(store: &Rc<Store<D>>) {
    if store.commits.running.replace(true) {
        return;
    }
    let runtime = store.runtime.clone();
    // The layers above last as long as the task: it flushes their origins.
    let (store, above) = (store.clone(), store.hooks.get());
    runtime.spawn(Box::pin(async move {
        let _above = above;
        let commits = &store.commits;
        while commits.ended.get() < commits.asked.get() {
            commits.begun.set(commits.asked.get());
            let covered = commits.begun.get();
            let asked = correct!(
                commits.flush_asked.get() > commits.ended.get(),
                Bug::UnflushedAnswersFlush => commits.flush_asked.get() > commits.ended.get() && !is_all_written(&store)
            );
            let flushes = asked || commits.sealing.get();
            if correct!(flushes, Bug::UnflushedEndsInterval => true) {
                store.interval.begin_commit();
            }
            let requests = covered - commits.ended.get() - commits.early_asked.take();
            if requests > 0 {
                store.counters.commit_group.observe(requests);
            }
            let begun_at = store.runtime.now();
            let is_early = !flushes && commits.not_early.get() <= commits.ended.get();
            if let Err(error) = commit_once(&store, flushes, is_early).await {
                correct!(store.fail(&error), Bug::FailedFlushForgotten => error);
            }
            if flushes {
                commits.duration.set(store.runtime.now().saturating_sub(begun_at));
            }
            commits.ended.set(covered);
            commits.changed.notify();
        }
        commits.running.set(false);
    }));
}

/// Whether all records are in groups, of which the last is not known to be durable.
#[cfg(feature = "planted")]
fn is_all_written<D: Device>(store: &Store<D>) -> bool {
    let journal = &store.meta.borrow().journal;
    journal.pending() == 0 && journal.written.next > journal.durable_seq()
}

async fn commit_once<D: Device>(store: &Rc<Store<D>>, flushes: bool, is_early: bool) -> Result<()> {
    store.check_failed()?;
    if !store.active.get() {
        checkpoint_steps::activate(store).await?;
    }
    if !is_early {
        record_times_along(store);
    }
    correct!(store.commits.early.settled().await, Bug::EarlyGroupNotAwaited => ());
    correct!(store.commits.overlap.settled().await, Bug::OverlappingGroupNotAwaited => ());
    store.check_failed()?;
    // No await between the last check and taking the records.
    loop {
        if !store.meta.borrow().journal.fits() {
            store.host_enospc.while_journal_is_full(store.clone().patient_checkpoint()).await?;
        } else if store.unflushed_snapshots.get() && store.hooks.has_unflushed_snapshots() {
            store.hooks.flush_snapshotted_origins().await?;
        } else if let Some(early) = take_other(store) {
            erase_early(store, &early).await;
        } else {
            store.unflushed_snapshots.set(false);
            break;
        }
    }
    // Records taken now describe data that was completely written before they were published.
    let taken = {
        let mut meta = store.meta.borrow_mut();
        meta.dirty_state(store.options.dirty);
        if is_early && !meta.journal.checksums.covers_data() {
            // The records that came since need their data to be durable first.
            return Ok(());
        }
        store.commits.overlap.records_taken(store.commits.flush_requested());
        meta.journal.take()
    };
    let (has_records, next) = (!taken.groups.is_empty(), taken.next);
    let early = store.commits.early.take();
    if has_records {
        let is_flushed = store.device.is_flushed();
        if is_flushed {
            let written = store.meta.borrow().journal.written;
            note_flushed(store, written);
        }
        let is_ready = taken.covers_data || is_flushed;
        if !correct!(is_ready, Bug::UnaskedGroupBeforeData => is_ready || !flushes) {
            flush_written(store).await?;
        }
        for groups in merge_groups(taken.groups) {
            let is_written = early.as_ref().is_some_and(
                |early| correct!(early.is(&groups), Bug::EarlyGroupTakenUnseen => early.position() == groups.position),
            );
            if !is_written {
                write_groups(store, groups).await?;
            }
        }
        store.meta.borrow_mut().journal.written = Written { next, claims_durable: taken.claims_durable };
    }
    // Recovery is to verify a bounded amount of data.
    let flushes = flushes || has_records && !store.meta.borrow().journal.checksums.may_wait();
    if flushes {
        store.commits.overlap.set_flushing(true);
        write_overlapping(store);
        let flushed = flush_written(store).await;
        store.commits.overlap.set_flushing(false);
        flushed?;
    }
    store.meta.borrow_mut().journal.committed(next);
    if store.meta.borrow().directory.gathering().next().is_some() {
        store.hooks.gather_soon();
    }
    if flushes && store.commits.sealing.take() { seal(store).await } else { Ok(()) }
}

/// Flushes the device: what was written to the journal before is durable then, and the data that it covers.
async fn flush_written<D: Device>(store: &Store<D>) -> Result<()> {
    let written = store.meta.borrow().journal.written;
    store.flush_device().await?;
    note_flushed(store, written);
    Ok(())
}

/// Notes that the groups up to `written`, and what they say is durable, are durable on the device.
fn note_flushed<D: Device>(store: &Store<D>, written: Written) {
    let journal = &mut store.meta.borrow_mut().journal;
    journal.set_durable(written.next);
    journal.durable_recorded(correct!(written.claims_durable, Bug::ConfirmedTooEarly => written.next));
}

pub(super) async fn seal<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    while !store.meta.borrow().journal.seal_fits() {
        store.host_enospc.while_journal_is_full(store.clone().patient_checkpoint()).await?;
    }
    let (group, next) = {
        let journal = &mut store.meta.borrow_mut().journal;
        (journal.seal(), journal.durable_seq())
    };
    write_groups(store, group).await?;
    store.flush_device().await?;
    store.meta.borrow_mut().journal.durable_recorded(next);
    Ok(())
}

pub(super) async fn write_groups<D: Device>(store: &Rc<Store<D>>, groups: Outgoing) -> Result<()> {
    let segments: Segments = store.meta.borrow().journal.segments(groups.position, groups.bytes.len()).into();
    let is_page = |bytes: u64| bytes.is_multiple_of(PAGE_SIZE as u64);
    assert!(is_page(groups.position) && is_page(groups.bytes.len() as u64), "a group takes whole pages");
    assert_eq!(segments.iter().map(|s| s.len).sum::<usize>(), groups.bytes.len(), "a group is written as a whole");
    let mut buf: Buf = store.device.buffer(groups.bytes.len());
    buf.copy_from_slice(&groups.bytes);
    let mut waited = false;
    loop {
        store.counters.journal_writes.add(&segments);
        let (result, again) = store.device.write(buf, segments.clone(), false).await;
        match result.map_err(|e| Error::io("writing the journal", e)) {
            Err(e) if e.kind() == ErrorKind::NoSpace => host_enospc::retry_journal_until_space(store, e).await?,
            outcome => {
                if waited {
                    store.host_enospc.unblock();
                }
                return outcome;
            }
        }
        (buf, waited) = (again, true);
    }
}

/// Returns how long the last commit with a flush took.
pub fn last_duration<D: Device>(store: &Store<D>) -> Duration {
    store.commits.duration.get()
}

/// Counts the interval of background commits from here.
pub fn reset_background_mark<D: Device>(store: &Store<D>) {
    store.commits.background_mark.set(store.meta.borrow().journal.recorded());
}

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

impl<D: Device> Store<D> {
    /// Makes everything durable that the device acknowledged before this call. A failure fails the pool. Must not be
    /// dropped before it ends.
    pub async fn flush_device(&self) -> Result<()> {
        let request = self.flushes.request();
        while !self.flushes.is_done(request) {
            self.check_failed()?;
            let Some(running) = self.flushes.begin() else {
                self.flushes.wait().await;
                continue;
            };
            let flushed = flush_now(self).await;
            running.end();
            flushed?;
        }
        self.check_failed()
    }

    /// Refuses after a failure of the pool.
    pub fn check_failed(&self) -> Result<()> {
        self.failed.borrow().as_ref().map_or(Ok(()), |e| Err(e.clone()))
    }
}

async fn flush_now<D: Device>(store: &Store<D>) -> Result<()> {
    store.counters.flushes.add(1);
    let outcome = store.device.flush().await.map_err(|e| Error::io("flushing the pool's device", e));
    if let Some(error) = correct!(outcome.as_ref().err(), Bug::FailedFlushForgotten => None) {
        store.fail(error);
        // The state of the data that records map is unknown from here on.
        super::end_volatile(store);
    }
    outcome
}

/// Volumes with a last change that is not recorded.
#[derive(Default)]
pub struct Times {
    volumes: RefCell<Vec<VolumeId>>,
    /// Time of the first mark, by the clock of the runtime.
    since: Cell<Duration>,
}

/// Marks a change of contents or length.
pub fn mark_changed<D: Device>(store: &Store<D>, id: VolumeId, last: &Cell<LastChange>) {
    if store.options.clock.is_none() || last.replace(LastChange::Marked) != LastChange::Recorded {
        return;
    }
    let mut volumes = store.times.volumes.borrow_mut();
    if volumes.is_empty() {
        store.times.since.set(store.runtime.now());
    }
    volumes.push(id);
}

/// Takes the time of a marked volume, for a reader of its record.
pub fn take_time<D: Device>(store: &Store<D>, meta: &mut Catalog, id: VolumeId) {
    let (Some(clock), Some(volume)) = (store.options.clock, meta.directory.get_mut(id)) else { return };
    let live = store.live.borrow();
    let Some(live) = live.get(id) else { return };
    let is_shown = !matches!(volume.record.state, VolumeState::Dead | VolumeState::Folder);
    if live.last_change.get() == LastChange::Marked && is_shown {
        live.last_change.set(LastChange::Taken);
        let now = clock();
        let known = volume.record.attributes.unwrap_or_else(|| Attributes::of_no_owner(volume.record.created));
        volume.record.attributes = Some(Attributes { modified: now, changed: now, ..known });
    }
}

/// Records the time of a marked volume.
pub fn record_time<D: Device>(store: &Store<D>, meta: &mut Catalog, id: VolumeId) {
    take_time(store, meta, id);
    if store.live.borrow().get(id).is_none_or(|live| live.last_change.get() != LastChange::Taken) {
        return;
    }
    // On a full pool it waits until a checkpoint has written other pages.
    if directory::unchanged_page_of(&meta.directory, id).is_some() && meta.reserve(Need::Step).is_err() {
        let mut volumes = store.times.volumes.borrow_mut();
        if !volumes.contains(&id) {
            volumes.push(id);
        }
        return;
    }
    let attributes = meta.directory.change(id).expect("its time was taken").record.attributes;
    store.live.borrow_mut().set_change_recorded(id);
    // Unordered: a commit with checksums of its data stays one.
    meta.journal.append_unordered(&Record::SetAttributes { id, attributes });
}

/// Records all times.
pub fn record_times<D: Device>(store: &Store<D>) {
    let volumes = store.times.volumes.take();
    let mut meta = store.meta.borrow_mut();
    volumes.into_iter().for_each(|id| record_time(store, &mut meta, id));
}

/// At the beginning of a commit: records the times if it writes records anyway, unless these are in an early group, or
/// if the times have waited long; otherwise leaves them to a later commit.
pub fn record_times_along<D: Device>(store: &Rc<Store<D>>) {
    if store.times.volumes.borrow().is_empty() {
        return;
    }
    let interval = store.options.commit_interval;
    let waited = store.runtime.now().saturating_sub(store.times.since.get());
    let is_along = store.meta.borrow().journal.pending() > 0 && !store.commits.early.is_any();
    if is_along || !interval.is_zero() && waited >= interval {
        return record_times(store);
    }
    store.note_dirty();
}
