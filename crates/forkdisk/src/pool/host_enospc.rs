//! A full file system under the pool. The pool may have free space then that the host has none for.
//!
//! Data that finds no room is refused, as in a full pool. Metadata waits: a checkpoint goes to places that nothing
//! refers to, so it tries again until there is room; the journal has its storage set aside. Waiting alone would be for
//! ever where it is the pool that fills the host, because what is given up comes back with the checkpoint that waits.
//! So it is given back *early*: pages of data that nothing refers to any more, if the journal says so durably, are
//! discarded before a checkpoint says so. Recovery begins with the old checkpoint and goes by the journal; on its way
//! it reads tables, but no data. It does read what a commit vouches for (`journal::checksum`), so the device must have
//! said before that those are durable. The pages are handed out again only when the checkpoint has ended, as always.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::planted::{Bug, planted};
use crate::runtime::LocalFuture;
use crate::space::Runs;
use crate::sync::Event;
use crate::types::Block;

use super::{Failure, Inner, WhenFull, yield_now};

/// Pause before metadata is written again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Pages given back early before the metadata is tried again.
const EARLY_FREE_PAGES: u64 = 16 << 10;

/// What is known of the file system under the pool.
#[derive(Default)]
pub struct HostEnospc {
    /// The checkpoint that runs waits for it to have room.
    blocked: Cell<bool>,
    is_stuck: Event,
    /// A commit waits for a checkpoint.
    journal_is_full: Cell<bool>,
    /// There may be room, or something that can be given back.
    retry: Event,
    /// The checkpoint that waits has tried again.
    retried: Event,
}

/// A write that the host has no room for.
pub struct HostShortage {
    /// Something had been given up before it, and it was not tried again since.
    may_end: bool,
    /// Ends when it is to fail.
    patience: Option<LocalFuture<()>>,
    is_told: bool,
}

impl HostShortage {
    /// `may_end`: something has been given up and not come back.
    pub fn new(may_end: bool) -> HostShortage {
        HostShortage { may_end, patience: None, is_told: false }
    }

    /// Whether it begins to wait now, if it `waits` at all.
    pub fn begins(&mut self, waits: bool) -> bool {
        waits && !std::mem::replace(&mut self.is_told, true)
    }
}

impl HostEnospc {
    /// The checkpoint that had to wait has ended, or none had to.
    pub fn unblock(&self) {
        self.blocked.set(false);
        self.retried.notify();
    }

    /// The checkpoint that waits, if one does, tries again at once.
    pub fn retry_now(&self) {
        self.retry.notify();
    }

    /// Runs a checkpoint for a journal that has no room.
    pub async fn while_journal_is_full<T>(&self, checkpoint: impl Future<Output = T>) -> T {
        self.journal_is_full.set(true);
        self.is_stuck.notify();
        let outcome = checkpoint.await;
        self.journal_is_full.set(false);
        outcome
    }
}

/// What comes first: the outcome of `work`, or `None` as soon as `other` ends.
async fn unless<T>(work: &mut Pin<&mut impl Future<Output = T>>, other: impl Future<Output = ()>) -> Option<T> {
    let mut other = pin!(other);
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
        Poll::Pending => other.as_mut().poll(cx).map(|()| None),
    })
    .await
}

impl<D: Device> Inner<D> {
    /// Whether whoever finds no space waits for some.
    pub fn waits_for_space(&self) -> bool {
        matches!(self.options.when_full, WhenFull::Wait(_))
    }

    /// Whether a checkpoint waits for room.
    pub fn is_blocked(&self) -> bool {
        self.host.blocked.get()
    }

    /// Refuses while a checkpoint waits for room.
    pub fn check_not_blocked(&self) -> Result<()> {
        if !self.is_blocked() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NoSpace, "the file system under the pool is full: give it room"))
    }

    /// What `work` brings, unless a checkpoint has to wait for room, and still has to when it has tried again.
    /// `work` only waits; it may be given up at any point.
    pub async fn unless_blocked<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.retry_checkpoint().await;
        let mut work = pin!(work);
        loop {
            self.check_not_blocked()?;
            if let Some(outcome) = unless(&mut work, self.host.is_stuck.wait()).await {
                return outcome;
            }
        }
    }

    /// Has a checkpoint that waits try again.
    async fn retry_checkpoint(&self) {
        if self.is_blocked() {
            let tried = self.host.retried.wait();
            self.host.retry_now();
            tried.await;
        }
    }

    /// As [`unless_blocked`](Self::unless_blocked) where nobody wants to wait for space.
    pub async fn unless_full<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        if self.waits_for_space() { work.await } else { self.unless_blocked(work).await }
    }

    /// A commit that somebody outside asked for: it is not waited for where it takes a checkpoint that has to wait,
    /// and nobody wants to wait for space. It goes on all the same.
    pub async fn commit_for_client(self: &Rc<Self>) -> Result<()> {
        let commit = self.clone().commit();
        if self.waits_for_space() {
            return commit.await;
        }
        let mut commit = pin!(commit);
        loop {
            if self.host.journal_is_full.get() {
                self.retry_checkpoint().await;
                self.check_not_blocked()?;
            }
            if let Some(outcome) = unless(&mut commit, self.host.is_stuck.wait()).await {
                return outcome;
            }
        }
    }

    /// Metadata found no room, which `error` says: gives back what can be, or waits a little. Refuses where nobody waits
    /// any more.
    pub async fn retry_until_space(self: &Rc<Self>, error: Error) -> Result<()> {
        self.check_failed()?;
        self.full.set(true);
        if self.discard_early().await? {
            return Ok(());
        }
        if self.closing.get() {
            return Err(error);
        }
        self.host.blocked.set(true);
        self.host.is_stuck.notify();
        self.host.retried.notify();
        let mut pause = pin!(self.runtime.sleep(RETRY_AFTER));
        unless(&mut pause, self.host.retry.wait()).await;
        self.check_failed()
    }

    /// The journal found no room, which `error` says; on most file systems its storage is set aside. Nothing of it is
    /// acknowledged before it is written as a whole, to the same place, so it can be tried again.
    pub async fn retry_journal_until_space(&self, error: Error) -> Result<()> {
        self.check_failed()?;
        if self.closing.get() {
            return Err(error);
        }
        self.full.set(true);
        self.host.blocked.set(true);
        self.host.journal_is_full.set(true);
        self.host.is_stuck.notify();
        self.host.retried.notify();
        let mut pause = pin!(self.runtime.sleep(RETRY_AFTER));
        unless(&mut pause, self.host.retry.wait()).await;
        self.host.journal_is_full.set(false);
        self.check_failed()
    }

    /// Has what was given up come back for a write that the host had no room for, and waits for room where it is
    /// waited for; whether another try is worth it.
    pub async fn wait_for_host_space(self: &Rc<Self>, shortage: &mut HostShortage) -> Result<bool> {
        if self.closing.get() {
            return Ok(false);
        }
        if let WhenFull::Wait(time) = self.options.when_full {
            let patience = shortage.patience.get_or_insert_with(|| self.runtime.sleep(time));
            let mut room = pin!(async {
                self.clone().patient_checkpoint().await?;
                // Metadata needs less of it than data may.
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

    /// Discards data that was given up, as far as it stays given up whatever happens. Whether there was any.
    async fn discard_early(self: &Rc<Self>) -> Result<bool> {
        // Whoever walks a view needs no checkpoint to come to its end.
        if !self.options.discard || self.meta.borrow().space.view().is_some() {
            return Ok(false);
        }
        let dead = self.pending_free_data().await?;
        if dead.is_empty() {
            return Ok(false);
        }
        // A commit may come to wait for the checkpoint that waits here.
        let mut unbound = pin!(self.commit_sealed());
        if !planted(Bug::DeadDiscardedBeforeDurable)
            && unless(&mut unbound, self.runtime.sleep(RETRY_AFTER)).await.is_none_or(|outcome| outcome.is_err())
        {
            return Ok(false);
        }
        // Readers may be on their way there, and a write may yet publish what it was handed.
        self.generations.barrier().await;
        let dead = self
            .retry_no_alloc(|meta| {
                let mut dead = meta.space.still_pending(&dead).map_err(|miss| Failure::Stop(miss.into()))?;
                let journal = &mut meta.journal;
                let durable = if planted(Bug::DeadDiscardedBeforeDurable) { u64::MAX } else { journal.durable_seq() };
                dead.retain(|&(first, pages)| {
                    meta.space.lost_until(first.block()) <= durable && journal.may_overwrite(first, pages)
                });
                meta.space.mark_discarded(&dead);
                Ok(dead)
            })
            .await?;
        self.discard_freed(&dead).await;
        Ok(!dead.is_empty())
    }

    /// Data that nothing refers to any more, some of it if it is much.
    async fn pending_free_data(&self) -> Result<Runs> {
        let (mut dead, mut pages, mut from) = (Runs::new(), 0, Some(Block(0)));
        while let Some(block) = from.filter(|_| pages < EARLY_FREE_PAGES) {
            let (more, next) = self
                .retry_no_alloc(|meta| meta.space.pending_free_runs(block).map_err(|miss| Failure::Stop(miss.into())))
                .await?;
            pages += more.iter().map(|&(_, pages)| pages).sum::<u64>();
            dead.extend(more);
            from = next;
            yield_now().await;
        }
        Ok(dead)
    }
}
