//! Writing: plan, write the data, publish the mappings, acknowledge.
//!
//! A write in place needs one lookup in the map. All others queue behind earlier writes to the same and
//! neighbouring blocks, so that writes reach the device in the order of acceptance.

use std::ops::Range;

use crate::device::{Buf, Device, Segments};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::planted::{Bug, planted};
use crate::space::alloc;
use crate::store::{HostShortage, events};
use crate::sync::{Admitted, LockMode, PlanGuard, QueuedWrite, RangeGuard};
use crate::types::PAGE_SIZE;

use super::Volume;
use super::backing::Backing;
use super::fault::WritePlan;
use super::pending_write::PendingWrite;

/// A write that changes no metadata: its segments, and what it holds until it ends.
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
        let (result, buf) = match self.backing() {
            // Boxed: these paths are rare or wait for a device, and this future is moved with every write.
            Backing::Origin(origin) => return Box::pin(origin.write(&self.store, offset, buf, fua)).await,
            Backing::Snapshot(..) => Box::pin(self.write_with_backing(offset, buf)).await,
            Backing::None => self.write_unaligned(offset, buf).await,
        };
        if result.is_ok() && fua && !planted(Bug::FuaWithoutCommit) {
            return (Box::pin(self.store.commit_for_client()).await, buf);
        }
        (result, buf)
    }

    pub(super) async fn write_unaligned(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let page = PAGE_SIZE as u64;
        let pages = offset / page..(offset + buf.len() as u64).div_ceil(page);
        if self.live.write_queue.may_pass(&pages)
            && let Some(InPlace { segments, held }) = self.in_place(offset, buf.len(), &pages)
        {
            self.store.counters.data_writes.add(&segments);
            let (result, buf) = self.store.device.write(buf, segments, false).await;
            drop(held);
            return (self.device_error(offset, result), buf);
        }
        Box::pin(self.write_queued(offset, buf, &pages)).await
    }

    /// Writes in the order of the write queue: after earlier writes to the same and neighbouring blocks.
    async fn write_queued(&self, offset: u64, buf: Buf, pages: &Range<u64>) -> (Result<()>, Buf) {
        let (buf, queued) = match self.join_copy(offset, buf, pages).await {
            Ok(buf) => return (Ok(()), buf),
            Err(not) => not,
        };
        let outcome = self.write_with_retry(offset, buf, pages, queued).await;
        self.store.commit_soon();
        self.store.checkpoint_soon();
        self.store.flush_count_log_soon();
        outcome
    }

    /// Writes and retries: once after a sealed commit (pages covered by a checksum may be overwritten then),
    /// and after a checkpoint returned freed space, or while a full host file system is waited for.
    async fn write_with_retry(
        &self,
        offset: u64,
        buf: Buf,
        pages: &Range<u64>,
        queued: QueuedWrite<Buf>,
    ) -> (Result<()>, Buf) {
        let (mut buf, mut queued, mut sealed) = (buf, queued, false);
        let mut shortage = HostShortage::new(self.store.has_pending_space());
        loop {
            let (result, back, moved) = self.write_once(offset, buf, pages.clone(), queued).await;
            buf = back;
            let Err(e) = result else { return (Ok(()), buf) };
            let again = match moved && e.kind() == ErrorKind::NoSpace && !sealed {
                true => {
                    sealed = true;
                    self.store.commit_sealed().await.map(|()| true)
                }
                false if e.is_full_host() => {
                    if shortage.begins(self.store.waits_for_space()) {
                        events::report_waiting(&self.store, self.id);
                    }
                    self.store.wait_for_host_space(&mut shortage).await
                }
                false => Ok(false),
            };
            match again {
                Ok(true) => queued = self.live.write_queue.enter(pages.clone()),
                Ok(false) if e.is_full_host() => return (events::report_if_full(&self.store, self.id, Err(e)), buf),
                Ok(false) => return (Err(e), buf),
                Err(e) => return (Err(e), buf),
            }
        }
    }

    /// Plans the write if all of it goes in place, according to what is in memory, and no other request is in
    /// the way.
    fn in_place(&self, offset: u64, len: usize, pages: &Range<u64>) -> Option<InPlace> {
        let mut plan = WritePlan::new(offset, len as u64, self.store.device.block_size(), None);
        if !plan.is_in_place(&mut self.store.meta.borrow_mut(), self.id) {
            return None;
        }
        let lock = self.live.locks.try_lock(pages.clone(), LockMode::Shared)?;
        let lock = (!planted(Bug::LockReleasedEarly)).then_some(lock);
        Some(InPlace { segments: plan.segments, held: (lock, self.store.generations.enter()) })
    }

    /// The flag tells whether pages were, or may have been, relocated.
    async fn write_once(
        &self,
        offset: u64,
        buf: Buf,
        pages: Range<u64>,
        queued: QueuedWrite<Buf>,
    ) -> (Result<()>, Buf, bool) {
        let (buf, has_waited) = match queued.admitted(buf).await {
            Admitted::Immediately(buf) => (buf, false),
            Admitted::AfterWait(buf) => (buf, true),
            Admitted::Merged(result, buf) => return (result, buf, true),
        };
        // An earlier write may have broken these pages for this volume.
        if has_waited && let Some(InPlace { segments, held }) = self.in_place(offset, buf.len(), &pages) {
            self.store.counters.data_writes.add(&segments);
            let write = self.store.device.write(buf, segments, false);
            queued.submitted(&[]);
            let (result, buf) = write.await;
            drop(held);
            return (self.device_error(offset, result), buf, false);
        }
        let (copying, held) = self.break_range(pages);
        let lock = self.live.locks.lock(held.clone(), LockMode::Exclusive).await;
        let mut lock = (!planted(Bug::LockReleasedEarly)).then_some(lock);
        let mut work = PendingWrite::new(offset, buf.len(), self.store.device.block_size(), copying, held);
        let guard = match self.plan(&queued, &mut work, &mut lock).await {
            Ok(guard) => guard,
            Err(e) => return (Err(e), buf, false),
        };
        let moved = work.plan.faults.iter().any(|fault| fault.relocated);
        let (result, buf) = match work.plan.copies.is_empty() {
            true => self.write_planned(queued, &mut work, buf).await,
            false => self.write_copying(queued, &mut work, buf).await,
        };
        drop((guard, lock));
        if let Err(e) = &result {
            // On a full pool the write that needs space starts the checkpoint.
            alloc::write_off(&mut self.store.meta.borrow_mut().space, work.plan.unpublished());
            self.store.full.set(self.store.full.get() || e.is_full_host());
        }
        work.complete_merged(&result);
        (result, buf, moved)
    }

    /// Writes the planned data and maps it.
    async fn write_planned(&self, queued: QueuedWrite<Buf>, work: &mut PendingWrite, buf: Buf) -> (Result<()>, Buf) {
        let early = planted(Bug::MappedBeforeWritten);
        if early && let Err(e) = self.publish(&work.plan).await {
            return (Err(e), buf);
        }
        let pages = match self.completed(work, &buf).await {
            Ok(pages) => pages,
            Err(e) => return (Err(e), buf),
        };
        let (written, buf) = self.submit_planned(queued, work, pages, buf).await;
        let result = match written {
            Ok(()) if !early => self.publish(&work.plan).await,
            Err(e) if planted(Bug::FailedWritePublished) => self.publish(&work.plan).await.and(Err(e)),
            other => other,
        };
        (result, buf)
    }

    /// Turns the error of a device request into one that names the volume and offset.
    pub(super) fn device_error(&self, offset: u64, result: std::io::Result<()>) -> Result<()> {
        result.map_err(|e| Error::io(format!("writing {} at {offset}", self.shown_name()), e))
    }

    /// Maps the new pages.
    pub(super) async fn publish(&self, plan: &WritePlan) -> Result<()> {
        for fault in &plan.faults {
            self.store
                .retry_no_alloc(|meta| {
                    let before = self.record(meta).referenced;
                    meta.map(self.id, fault.at, fault.len, fault.to)?;
                    plan.claim.commit(self.record(meta).referenced - before);
                    let len = fault.len as u32;
                    let record = Record::Map { volume: self.id, at: fault.at, len, to: fault.to };
                    meta.journal.append_map(&record, fault.sum);
                    Ok(())
                })
                .await?;
            plan.published.set(plan.published.get() + fault.len);
            if !fault.relocated {
                self.activity.counters.fault(fault.shared, fault.len * PAGE_SIZE as u64);
            }
        }
        Ok(())
    }
}
