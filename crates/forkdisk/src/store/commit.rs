//! Group commit: one device flush and one journal write for all waiting flushes.
//!
//! Order: data durable → journal records written → durable → acknowledged. If the records carry checksums of
//! the data (see `journal::data_checksums`), one flush makes both durable: after a crash in between recovery
//! finds out what is missing. A commit covers what was published before it began; later requests wait for the
//! next one.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::{Buf, Device, Segments};
use crate::error::{Error, ErrorKind, Result};
use crate::journal::Outgoing;
use crate::planted::correct;
use crate::store::{checkpoint, host_enospc, times};
use crate::sync::Event;
use crate::types::PAGE_SIZE;

use super::Store;

/// Start a background commit after this many bytes of new records, so that the next flush has little left to
/// write.
const BACKGROUND_COMMIT_BYTES: u64 = 256 << 10;
/// Also start one when pending records reach the end of a journal extent of at least this many bytes.
const MIN_EXTENT_BYTES: u64 = 1 << 20;
/// Contiguous groups are written by requests of at most this many bytes.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// The commit that runs, and the tasks that wait for it.
#[derive(Default)]
pub struct Commits {
    running: Cell<bool>,
    asked: Cell<u64>,
    begun: Cell<u64>,
    /// The next commit ends with a seal.
    sealing: Cell<bool>,
    ended: Cell<u64>,
    /// Value of `journal.recorded()` at the last flush, advanced by multiples of the interval at each
    /// background commit.
    background_mark: Cell<u64>,
    changed: Event,
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

    /// Starts a background commit after every `BACKGROUND_COMMIT_BYTES` of records, independent of other
    /// commits, so that flushes find about the same amount of work each time; and when pending records would
    /// span two journal extents or fill the volatile log.
    pub fn commit_soon(self: &Rc<Self>) {
        let commits = &self.commits;
        if commits.running.get() {
            return;
        }
        let (recorded, pending, fills) = {
            let journal = &self.meta.borrow().journal;
            let fills = journal.fills_extent(MIN_EXTENT_BYTES) || journal.volatile_is_filling();
            (journal.recorded(), journal.pending(), fills)
        };
        let marks = (recorded - commits.background_mark.get()) / BACKGROUND_COMMIT_BYTES;
        commits.background_mark.set(commits.background_mark.get() + marks * BACKGROUND_COMMIT_BYTES);
        if (marks > 0 || fills) && pending > 0 {
            commits.asked.set(commits.asked.get() + 1);
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

/// Merges contiguous groups into requests of limited size. Recovery accepts each group as a whole or not at
/// all, whatever request it was written by.
fn merge_groups(groups: Vec<Outgoing>) -> Vec<Outgoing> {
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
    start_commits(&store);
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
            store.interval.begin_commit();
            let covered = commits.begun.get();
            store.counters.commit_group.observe(covered - commits.ended.get());
            if let Err(error) = commit_once(&store).await {
                correct!(store.fail(&error), Bug::FailedFlushForgotten => error);
            }
            commits.ended.set(covered);
            commits.changed.notify();
        }
        commits.running.set(false);
    }));
}

async fn commit_once<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    store.check_failed()?;
    checkpoint::activate(store).await?;
    times::record_times_along(store);
    // No await between the last check and taking the records.
    loop {
        if !store.meta.borrow().journal.fits() {
            store.host_enospc.while_journal_is_full(store.clone().patient_checkpoint()).await?;
        } else if store.unflushed_snapshots.get() && store.hooks.has_unflushed_snapshots() {
            store.hooks.flush_snapshotted_origins().await?;
        } else {
            store.unflushed_snapshots.set(false);
            break;
        }
    }
    // Records taken now describe data that was completely written before they were published.
    let taken = {
        let mut meta = store.meta.borrow_mut();
        meta.dirty_state(store.options.dirty);
        meta.journal.take()
    };
    if taken.groups.is_empty() {
        store.flush_device().await?;
    } else {
        if correct!(!taken.covers_data, Bug::DataFlushSkipped => false) {
            store.flush_device().await?;
        }
        for groups in merge_groups(taken.groups) {
            write_groups(store, groups).await?;
        }
        correct!(store.flush_device().await?, Bug::JournalFlushSkipped => ());
        let journal = &mut store.meta.borrow_mut().journal;
        journal.set_durable(taken.next);
        journal.durable_recorded(correct!(taken.claims_durable, Bug::ConfirmedTooEarly => taken.next));
    }
    store.meta.borrow_mut().journal.committed(taken.next);
    if store.meta.borrow().directory.gathering().next().is_some() {
        store.hooks.gather_soon();
    }
    if store.commits.sealing.take() { seal(store).await } else { Ok(()) }
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

async fn write_groups<D: Device>(store: &Store<D>, groups: Outgoing) -> Result<()> {
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

/// Counts the interval of background commits from here.
pub fn reset_background_mark<D: Device>(store: &Store<D>) {
    store.commits.background_mark.set(store.meta.borrow().journal.recorded());
}
