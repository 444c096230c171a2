//! A full file system under the pool. The pool may have free space then that the host has none for.
//!
//! Data that finds no room is refused, as in a full pool. Metadata waits: a checkpoint goes to places that nothing
//! refers to, so it tries again until there is room; the journal has its storage set aside. Waiting alone would be for
//! ever where it is the pool that fills the host, because what is given up comes back with the checkpoint that waits.
//! So it is given back *early*: pages of data that nothing refers to any more, if the journal says so durably, are
//! discarded before a checkpoint says so. Recovery begins with the old checkpoint and goes by the journal; on its way
//! it reads tables, but no data. It does read what a commit vouches for (`journal::witness`), so the device must have
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
use crate::space::Runs;
use crate::sync::Event;
use crate::types::Block;

use super::{Failure, Inner, WhenFull, yield_now};

/// Pause before metadata is written again.
const RETRY: Duration = Duration::from_secs(1);
/// Pages given back early before the metadata is tried again.
const ENOUGH: u64 = 16 << 10;

/// What is known of the file system under the pool.
#[derive(Default)]
pub struct Host {
    /// The checkpoint that runs waits for it to have room.
    stuck: Cell<bool>,
    is_stuck: Event,
    /// Pages given up in all, when there was nothing among them to be given back early.
    barren: Cell<u64>,
    /// A commit waits for a checkpoint.
    journal_is_full: Cell<bool>,
    /// There may be room, or something that can be given back.
    again: Event,
    /// The checkpoint that waits has tried again.
    tried: Event,
}

/// What came of looking for data to be given back.
enum Given {
    Some,
    /// There is some, and something is in the way.
    NotYet,
    Nothing,
}

impl Host {
    /// The checkpoint that had to wait has ended, or none had to.
    pub fn has_room(&self) {
        self.stuck.set(false);
        self.barren.set(0);
        self.tried.notify();
        // Nobody who has given up waiting stays noted.
        self.is_stuck.notify();
    }

    /// The checkpoint that waits, if one does, tries again at once.
    pub fn try_again(&self) {
        self.again.notify();
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
    pub fn is_stuck(&self) -> bool {
        self.host.stuck.get()
    }

    /// Refuses while a checkpoint waits for room.
    pub fn check_not_stuck(&self) -> Result<()> {
        if !self.is_stuck() {
            return Ok(());
        }
        let message = "the file system under the pool is full: give it room, then try again";
        Err(Error::new(ErrorKind::NoSpace, message))
    }

    /// What `work` brings, unless a checkpoint has to wait for room, and still has to when it has tried again.
    /// `work` only waits; it may be given up at any point.
    pub async fn unless_stuck<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.look_for_room().await;
        let mut work = pin!(work);
        loop {
            self.check_not_stuck()?;
            if let Some(outcome) = unless(&mut work, self.host.is_stuck.wait()).await {
                return outcome;
            }
        }
    }

    /// Has a checkpoint that waits try again.
    async fn look_for_room(&self) {
        if self.is_stuck() {
            let tried = self.host.tried.wait();
            self.host.try_again();
            tried.await;
        }
    }

    /// As [`unless_stuck`](Self::unless_stuck) where nobody wants to wait for space.
    pub async fn unless_full<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        if self.waits_for_space() { work.await } else { self.unless_stuck(work).await }
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
                self.look_for_room().await;
                self.check_not_stuck()?;
            }
            if let Some(outcome) = unless(&mut commit, self.host.is_stuck.wait()).await {
                return outcome;
            }
        }
    }

    /// Metadata found no room, which `error` says: gives back what can be, or waits a little. Refuses where nobody waits
    /// any more.
    pub async fn outlast_full_host(self: &Rc<Self>, error: Error) -> Result<()> {
        self.check_failed()?;
        self.full.set(true);
        let pending = self.meta.borrow().space.pending();
        match self.give_back_early().await? {
            Given::Some => return Ok(()),
            Given::Nothing => self.host.barren.set(pending),
            Given::NotYet => {}
        }
        if self.closing.get() {
            return Err(error);
        }
        self.host.stuck.set(true);
        self.host.is_stuck.notify();
        self.host.tried.notify();
        let mut pause = pin!(self.runtime.sleep(RETRY));
        unless(&mut pause, self.host.again.wait()).await;
        self.check_failed()
    }

    /// Has what was given up come back for a write that the host had no room for; whether that is worth another try.
    pub async fn take_back_for_host(self: &Rc<Self>) -> Result<bool> {
        let barren = self.is_stuck() && self.meta.borrow().space.pending() == self.host.barren.get();
        if !self.has_pending_space() || barren && !self.reaping.get() || self.closing.get() {
            return Ok(false);
        }
        while self.reaping.get() {
            self.check_writable()?;
            self.reaped.wait().await;
        }
        Ok(self.unless_stuck(self.clone().patient_checkpoint()).await.is_ok())
    }

    /// Discards data that was given up, as far as it stays given up whatever happens.
    async fn give_back_early(self: &Rc<Self>) -> Result<Given> {
        if !self.options.discard {
            return Ok(Given::Nothing);
        }
        // Whoever walks a view needs no checkpoint to come to its end.
        if self.meta.borrow().space.view().is_some() {
            return Ok(Given::NotYet);
        }
        let dead = self.dead_data().await?;
        if dead.is_empty() {
            return Ok(Given::Nothing);
        }
        // A commit may come to wait for the checkpoint that waits here.
        let mut unbound = pin!(self.unbind());
        if !planted(Bug::DeadDiscardedBeforeDurable)
            && unless(&mut unbound, self.runtime.sleep(RETRY)).await.is_none_or(|outcome| outcome.is_err())
        {
            return Ok(Given::NotYet);
        }
        // Readers may be on their way there, and a write may yet publish what it was handed.
        self.generations.barrier().await;
        let dead = self
            .look(|meta| {
                let mut dead = meta.space.still_dead(&dead).map_err(|miss| Failure::Stop(miss.into()))?;
                let journal = &mut meta.journal;
                let durable = if planted(Bug::DeadDiscardedBeforeDurable) { u64::MAX } else { journal.confirmed() };
                dead.retain(|&(first, pages)| {
                    meta.space.lost_until(first.block()) <= durable && journal.may_change(first, pages)
                });
                meta.space.mark_discarded(&dead);
                Ok(dead)
            })
            .await?;
        self.discard_freed(&dead).await;
        Ok(if dead.is_empty() { Given::NotYet } else { Given::Some })
    }

    /// Data that nothing refers to any more, some of it if it is much.
    async fn dead_data(&self) -> Result<Runs> {
        let (mut dead, mut pages, mut from) = (Runs::new(), 0, Some(Block(0)));
        while let Some(block) = from.filter(|_| pages < ENOUGH) {
            let (more, next) =
                self.look(|meta| meta.space.dead_data(block).map_err(|miss| Failure::Stop(miss.into()))).await?;
            pages += more.iter().map(|&(_, pages)| pages).sum::<u64>();
            dead.extend(more);
            from = next;
            yield_now().await;
        }
        Ok(dead)
    }
}
