//! ENOSPC of the host file system: the pool may have free space for which the host has none.
//!
//! Data writes fail, as in a full pool. Metadata waits: a checkpoint writes to places that nothing refers to,
//! so it can be retried until there is space; the journal is allocated in advance. If the pool itself fills
//! the host, waiting alone would never end, since freed space is discarded by the checkpoint that waits. So
//! it is discarded *early*: data pages that nothing refers to, according to durable records, are discarded
//! before the checkpoint ends. Recovery starts from the old checkpoint and replays the journal; it reads
//! tables, but no data except what is covered by checksums (`journal::data_checksums`), so a seal comes
//! first. The pages are reused only after the checkpoint, as always.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::catalog::Failure;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::planted::correct;
use crate::runtime::{LocalFuture, yield_now};
use crate::space::{Runs, delta, view_counts};
use crate::store::retained;
use crate::sync::Event;
use crate::types::Block;

use super::{DiscardPolicy, Store, WhenFull};

/// Pause before metadata is written again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Pages discarded early before the write of metadata is retried.
const EARLY_FREE_PAGES: u64 = 16 << 10;

/// State of the host file system.
#[derive(Default)]
pub struct HostEnospc {
    /// The running checkpoint waits for space on the host.
    blocked: Cell<bool>,
    became_blocked: Event,
    /// A commit waits for a checkpoint.
    journal_is_full: Cell<bool>,
    /// There may be space, or something that can be discarded.
    retry: Event,
    /// The waiting checkpoint has retried.
    retried: Event,
}

/// A write for which the host has no space.
pub struct HostShortage {
    /// Freed space existed before it, and no retry was made since.
    may_end: bool,
    /// Timer after which it fails.
    patience: Option<LocalFuture<()>>,
    reported: bool,
}

impl HostShortage {
    /// `may_end`: freed space has not been returned yet.
    pub fn new(may_end: bool) -> HostShortage {
        HostShortage { may_end, patience: None, reported: false }
    }

    /// Whether its wait begins now, if it `waits` at all.
    pub fn begins(&mut self, waits: bool) -> bool {
        waits && !std::mem::replace(&mut self.reported, true)
    }
}

impl HostEnospc {
    /// The waiting checkpoint ended, or none waited.
    pub fn unblock(&self) {
        self.blocked.set(false);
        self.retried.notify();
    }

    /// Lets a waiting checkpoint retry at once.
    pub fn retry_now(&self) {
        self.retry.notify();
    }

    /// Runs a checkpoint for a full journal.
    pub async fn while_journal_is_full<T>(&self, checkpoint: impl Future<Output = T>) -> T {
        self.journal_is_full.set(true);
        self.became_blocked.notify();
        let outcome = checkpoint.await;
        self.journal_is_full.set(false);
        outcome
    }
}

/// The outcome of `work`, or `None` as soon as `other` ends first.
async fn unless<T>(work: &mut Pin<&mut impl Future<Output = T>>, other: impl Future<Output = ()>) -> Option<T> {
    let mut other = pin!(other);
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
        Poll::Pending => other.as_mut().poll(cx).map(|()| None),
    })
    .await
}

impl<D: Device> Store<D> {
    /// Whether requests wait for space.
    pub fn waits_for_space(&self) -> bool {
        matches!(self.options.when_full, WhenFull::Wait(_))
    }

    /// Whether a checkpoint waits for space on the host.
    pub fn is_blocked(&self) -> bool {
        self.host_enospc.blocked.get()
    }

    /// Refuses while a checkpoint waits for space on the host.
    pub fn check_not_blocked(&self) -> Result<()> {
        if !self.is_blocked() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NoSpace, "the file system under the pool is full: give it room"))
    }

    /// The outcome of `work`, unless a checkpoint waits for space and still does after a retry. `work` must
    /// only wait; it may be dropped at any point.
    pub async fn unless_blocked<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        retry_checkpoint(self).await;
        let mut work = pin!(work);
        loop {
            self.check_not_blocked()?;
            if let Some(outcome) = unless(&mut work, self.host_enospc.became_blocked.wait()).await {
                return outcome;
            }
        }
    }

    /// Like [`unless_blocked`](Self::unless_blocked) if requests do not wait for space.
    pub async fn unless_full<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        if self.waits_for_space() { work.await } else { self.unless_blocked(work).await }
    }

    /// Commit for a client. Returns ENOSPC instead of waiting when the checkpoint it needs is blocked by a
    /// full host file system and requests do not wait for space. The commit itself goes on.
    pub async fn commit_for_client(self: &Rc<Self>) -> Result<()> {
        let commit = self.clone().commit();
        if self.waits_for_space() {
            return commit.await;
        }
        let mut commit = pin!(commit);
        loop {
            if self.host_enospc.journal_is_full.get() {
                retry_checkpoint(self).await;
                self.check_not_blocked()?;
            }
            if let Some(outcome) = unless(&mut commit, self.host_enospc.became_blocked.wait()).await {
                return outcome;
            }
        }
    }

    /// For a write without space on the host: gets freed space back and waits if the pool waits for space.
    /// Returns whether to retry.
    pub async fn wait_for_host_space(self: &Rc<Self>, shortage: &mut HostShortage) -> Result<bool> {
        if self.closing.get() {
            return Ok(false);
        }
        if let WhenFull::Wait(time) = self.options.when_full {
            let patience = shortage.patience.get_or_insert_with(|| self.runtime.sleep(time));
            let mut room = pin!(async {
                self.clone().patient_checkpoint().await?;
                if retained::give_back(self, false).await {
                    return Ok(true);
                }
                // Metadata may need less space than data.
                self.runtime.sleep(RETRY_AFTER).await;
                Ok(true)
            });
            return unless(&mut room, patience).await.unwrap_or(Ok(false));
        }
        if !std::mem::take(&mut shortage.may_end) {
            return Ok(false);
        }
        while self.reaping.get() {
            self.check_writable()?;
            self.reaped.wait().await;
        }
        Ok(self.unless_blocked(self.clone().patient_checkpoint()).await.is_ok())
    }
}

/// Lets a waiting checkpoint retry and waits for the outcome.
async fn retry_checkpoint<D: Device>(store: &Store<D>) {
    if store.is_blocked() {
        let tried = store.host_enospc.retried.wait();
        store.host_enospc.retry_now();
        tried.await;
    }
}

/// Metadata found no space (`error`): discards what can be, or waits a little. Refuses when the pool
/// closes.
pub async fn retry_until_space<D: Device>(store: &Rc<Store<D>>, error: Error) -> Result<()> {
    store.check_failed()?;
    if retained::give_back(store, false).await {
        return Ok(());
    }
    store.full.set(true);
    if discard_early(store).await? {
        return Ok(());
    }
    if store.closing.get() {
        return Err(error);
    }
    store.host_enospc.blocked.set(true);
    store.host_enospc.became_blocked.notify();
    store.host_enospc.retried.notify();
    let mut pause = pin!(store.runtime.sleep(RETRY_AFTER));
    unless(&mut pause, store.host_enospc.retry.wait()).await;
    store.check_failed()
}

/// The journal found no space (`error`), although most file systems allocate it in advance. Nothing is
/// acknowledged before all of it is written to the same place, so the write can be retried.
pub async fn retry_journal_until_space<D: Device>(store: &Rc<Store<D>>, error: Error) -> Result<()> {
    store.check_failed()?;
    if retained::give_back(store, false).await {
        return Ok(());
    }
    if store.closing.get() {
        return Err(error);
    }
    store.full.set(true);
    store.host_enospc.blocked.set(true);
    store.host_enospc.journal_is_full.set(true);
    store.host_enospc.became_blocked.notify();
    store.host_enospc.retried.notify();
    let mut pause = pin!(store.runtime.sleep(RETRY_AFTER));
    unless(&mut pause, store.host_enospc.retry.wait()).await;
    store.host_enospc.journal_is_full.set(false);
    store.check_failed()
}

/// Discards freed data that stays free whatever happens. Returns whether there was any.
async fn discard_early<D: Device>(store: &Rc<Store<D>>) -> Result<bool> {
    // The walk of a view needs no checkpoint to end.
    if store.options.discard == DiscardPolicy::Never || view_counts::view(&store.meta.borrow().space).is_some() {
        return Ok(false);
    }
    let dead = pending_free_data(store).await?;
    if dead.is_empty() {
        return Ok(false);
    }
    // A commit may have to wait for the checkpoint that waits here.
    let mut sealed = pin!(store.commit_sealed());
    let is_open = correct!(
        unless(&mut sealed, store.runtime.sleep(RETRY_AFTER)).await.is_none_or(|outcome| outcome.is_err()),
        Bug::DeadDiscardedBeforeDurable => false
    );
    if is_open {
        return Ok(false);
    }
    // Readers may be under way, and a write may still publish a page it was given.
    store.generations.barrier().await;
    let dead = store
        .retry_no_alloc(|meta| {
            let mut dead = delta::still_pending(&mut meta.space, &dead).map_err(|miss| Failure::Stop(miss.into()))?;
            let journal = &mut meta.journal;
            let durable = correct!(journal.durable_seq(), Bug::DeadDiscardedBeforeDurable => u64::MAX);
            dead.retain(|&(first, pages)| {
                meta.space.lost_until(first.block()) <= durable && journal.checksums.may_overwrite(first, pages)
            });
            delta::mark_discarded(&mut meta.space, &dead);
            Ok(dead)
        })
        .await?;
    retained::discard_freed(store, &dead).await;
    Ok(!dead.is_empty())
}

/// Data that nothing refers to any more, up to a limit.
async fn pending_free_data<D: Device>(store: &Store<D>) -> Result<Runs> {
    let (mut dead, mut pages, mut from) = (Runs::new(), 0, Some(Block(0)));
    while let Some(block) = from.filter(|_| pages < EARLY_FREE_PAGES) {
        let (more, next) = store
            .retry_no_alloc(|meta| {
                delta::pending_free_runs(&mut meta.space, block).map_err(|miss| Failure::Stop(miss.into()))
            })
            .await?;
        pages += more.iter().map(|&(_, pages)| pages).sum::<u64>();
        dead.extend(more);
        from = next;
        yield_now().await;
    }
    Ok(dead)
}
