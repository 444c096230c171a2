//! Writing: plan, write the data, publish the mappings, answer.
//!
//! What goes in place at once needs no more than a look at the map. Everything else takes its turn
//! behind earlier writes to the same and neighbouring blocks, so that they reach the device in the order
//! in which they were accepted.

use std::ops::Range;

use crate::device::{Buf, Device, Segments};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::planted::{Bug, planted};
use crate::pool::HostShortage;
use crate::sync::{Came, Hold, PlanGuard, RangeGuard, Turn};
use crate::types::PAGE_SIZE;

use super::Volume;
use super::fault::WritePlan;
use super::through::Under;
use super::turn::Work;

/// A write that changes no metadata: where it goes, and what it holds meanwhile.
struct InPlace {
    segments: Segments,
    held: (Option<RangeGuard>, PlanGuard),
}

impl<D: Device> Volume<D> {
    pub(super) async fn write_range(&self, offset: u64, buf: Buf, fua: bool) -> (Result<()>, Buf) {
        if let Err(e) = self.check_write(offset, buf.len() as u64) {
            return (Err(e), buf);
        }
        if buf.is_empty() {
            return (Ok(()), buf);
        }
        let (result, buf) = match self.under() {
            // What is rare, or waits for a device anyway, lies elsewhere: this future is moved about with every write.
            Under::Itself(origin) => return Box::pin(origin.write(&self.inner, offset, buf, fua)).await,
            Under::Snapshot(..) => Box::pin(self.write_over(offset, buf)).await,
            Under::Nothing => self.write_locked(offset, buf).await,
        };
        if result.is_ok() && fua && !planted(Bug::FuaWithoutCommit) {
            return (Box::pin(self.inner.commit_for_client()).await, buf);
        }
        (result, buf)
    }

    pub(super) async fn write_locked(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let page = PAGE_SIZE as u64;
        let pages = offset / page..(offset + buf.len() as u64).div_ceil(page);
        if self.turns.lets_pass(&pages)
            && let Some(InPlace { segments, held }) = self.in_place(offset, buf.len(), &pages)
        {
            self.inner.counters.data_writes.add(&segments);
            let (result, buf) = self.inner.device.write(buf, segments, false).await;
            drop(held);
            return (self.explain(offset, result), buf);
        }
        Box::pin(self.write_behind(offset, buf, &pages)).await
    }

    /// Writes behind those who came before to the same or neighbouring blocks.
    async fn write_behind(&self, offset: u64, buf: Buf, pages: &Range<u64>) -> (Result<()>, Buf) {
        let (buf, turn) = match self.join_copy(offset, buf, pages).await {
            Ok(buf) => return (Ok(()), buf),
            Err(not) => not,
        };
        let outcome = self.write_again(offset, buf, pages, turn).await;
        self.inner.commit_soon();
        self.inner.checkpoint_soon();
        self.inner.empty_log_soon();
        outcome
    }

    /// Writes in turn, and again if the host was full and need not be. What was to go elsewhere only because recovery
    /// might ask for its pages goes in place as soon as recovery will not; what was given up may come back.
    async fn write_again(&self, offset: u64, buf: Buf, pages: &Range<u64>, turn: Turn<Buf>) -> (Result<()>, Buf) {
        let (mut buf, mut turn, mut unbound) = (buf, turn, false);
        let mut shortage = HostShortage::new(self.inner.has_pending_space());
        loop {
            let (result, back, moved) = self.write_in_turn(offset, buf, pages.clone(), turn).await;
            buf = back;
            let Err(e) = result else { return (Ok(()), buf) };
            let again = match moved && e.kind() == ErrorKind::NoSpace && !unbound {
                true => {
                    unbound = true;
                    self.inner.unbind().await.map(|()| true)
                }
                false if e.is_full_host() => {
                    if shortage.begins(self.inner.waits_for_space()) {
                        self.inner.tell_waiting(self.id);
                    }
                    self.inner.room_on_host(&mut shortage).await
                }
                false => Ok(false),
            };
            match again {
                Ok(true) => turn = self.turns.enter(pages.clone()),
                Ok(false) if e.is_full_host() => return (self.inner.tell_if_full(self.id, Err(e)), buf),
                Ok(false) => return (Err(e), buf),
                Err(e) => return (Err(e), buf),
            }
        }
    }

    /// Plans the write if it goes in place as a whole, judged by what is in memory, and nobody is in
    /// the way.
    fn in_place(&self, offset: u64, len: usize, pages: &Range<u64>) -> Option<InPlace> {
        let mut plan = WritePlan::new(offset, len as u64, self.inner.device.block_size(), None);
        if !plan.is_in_place(&mut self.inner.meta.borrow_mut(), self.id) {
            return None;
        }
        let lock = self.locks.try_lock(pages.clone(), Hold::Shared)?;
        let lock = (!planted(Bug::LockReleasedEarly)).then_some(lock);
        Some(InPlace { segments: plan.segments, held: (lock, self.inner.generations.enter()) })
    }

    /// Also tells whether any of it was moved, or may have been.
    async fn write_in_turn(
        &self,
        offset: u64,
        buf: Buf,
        pages: Range<u64>,
        turn: Turn<Buf>,
    ) -> (Result<()>, Buf, bool) {
        let (buf, has_waited) = match turn.come(buf).await {
            Came::AtOnce(buf) => (buf, false),
            Came::Now(buf) => (buf, true),
            Came::Done(result, buf) => return (result, buf, true),
        };
        // Whoever was before it may have made its pages this volume's own.
        if has_waited && let Some(InPlace { segments, held }) = self.in_place(offset, buf.len(), &pages) {
            self.inner.counters.data_writes.add(&segments);
            let write = self.inner.device.write(buf, segments, false);
            turn.submitted(&[]);
            let (result, buf) = write.await;
            drop(held);
            return (self.explain(offset, result), buf, false);
        }
        let (copying, held) = self.break_range(pages);
        let lock = self.locks.lock(held.clone(), Hold::Alone).await;
        let mut lock = (!planted(Bug::LockReleasedEarly)).then_some(lock);
        let mut work = Work::new(offset, buf.len(), self.inner.device.block_size(), copying, held);
        let guard = match self.plan(&turn, &mut work, &mut lock).await {
            Ok(guard) => guard,
            Err(e) => return (Err(e), buf, false),
        };
        let moved = work.plan.faults.iter().any(|fault| fault.moved);
        let (result, buf) = match work.plan.copies.is_empty() {
            true => self.write_planned(turn, &mut work, buf).await,
            false => self.write_copying(turn, &mut work, buf).await,
        };
        drop((guard, lock));
        if let Err(e) = &result {
            // A full pool has its checkpoint begun by whoever needs it.
            self.inner.meta.borrow_mut().space.abandon(work.plan.unpublished());
            self.inner.full.set(self.inner.full.get() || e.is_full_host());
        }
        work.deliver(&result);
        (result, buf, moved)
    }

    /// Writes what is planned and maps it.
    async fn write_planned(&self, turn: Turn<Buf>, work: &mut Work, buf: Buf) -> (Result<()>, Buf) {
        let early = planted(Bug::MappedBeforeWritten);
        if early && let Err(e) = self.publish(&work.plan).await {
            return (Err(e), buf);
        }
        let pages = match self.completed(work, &buf).await {
            Ok(pages) => pages,
            Err(e) => return (Err(e), buf),
        };
        let (written, buf) = self.put(turn, work, pages, buf).await;
        let result = match written {
            Ok(()) if !early => self.publish(&work.plan).await,
            Err(e) if planted(Bug::FailedWritePublished) => self.publish(&work.plan).await.and(Err(e)),
            other => other,
        };
        (result, buf)
    }

    /// Says where a device request failed.
    pub(super) fn explain(&self, offset: u64, result: std::io::Result<()>) -> Result<()> {
        result.map_err(|e| Error::io(format!("writing {} at {offset}", self.name()), e))
    }

    /// Maps what was written to new pages.
    pub(super) async fn publish(&self, plan: &WritePlan) -> Result<()> {
        for fault in &plan.faults {
            self.inner
                .look(|meta| {
                    let before = self.record(meta).referenced;
                    meta.map(self.id, fault.at, fault.len, fault.to)?;
                    plan.claim.redeem(self.record(meta).referenced - before);
                    let len = fault.len as u32;
                    let record = Record::Map { volume: self.id, at: fault.at, len, to: fault.to };
                    meta.journal.append_map(&record, fault.sum);
                    Ok(())
                })
                .await?;
            plan.published.set(plan.published.get() + fault.len);
            if !fault.moved {
                self.counters.fault(fault.shared, fault.len * PAGE_SIZE as u64);
            }
        }
        Ok(())
    }
}
