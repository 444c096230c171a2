//! Writing: plan, write the data, publish the mappings, acknowledge.
//!
//! A write in place needs one lookup in the map. All others queue behind earlier writes to the same and
//! neighbouring blocks, so that writes reach the device in the order of acceptance.

use std::ops::Range;

use crate::catalog::{Catalog, Failure, pages_of};
use crate::device::{Buf, Device, Segments};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Record, WritePolicy};
use crate::planted::correct;
use crate::space::alloc;
use crate::store::{HostShortage, Retry, commit, events, retained};
use crate::sync::{Admitted, LockMode, PlanGuard, QueuedWrite, RangeGuard};
use crate::types::PAGE_SIZE;

use super::Volume;
use super::backing::Backing;
use super::fault::{Fault, WritePlan};
use super::pending_write::PendingWrite;

/// A write that changes no metadata: its segments, and what it holds until it ends.
struct InPlace {
    segments: Segments,
    held: (Option<RangeGuard>, PlanGuard),
}

/// A write that has arrived.
pub(super) struct WriteRequest {
    /// Its offset in bytes.
    pub offset: u64,
    /// The pages that it changes.
    pub pages: Range<u64>,
    /// More writes follow before this one is acknowledged.
    pub more: bool,
}

impl<D: Device> Volume<D> {
    /// Writes `buf`: to the origin, over a backing, or to pages of the volume's own.
    pub(super) async fn write_range(&self, offset: u64, buf: Buf, fua: bool, more: bool) -> (Result<()>, Buf) {
        if let Err(e) = self.check_write(offset, buf.len() as u64) {
            return (Err(e), buf);
        }
        if buf.is_empty() {
            return (Ok(()), buf);
        }
        let buf = match self.has_backing() && buf.is_shared() {
            false => buf,
            true => match self.own_copy(buf) {
                Ok(buf) => buf,
                Err((e, buf)) => return (Err(e), buf),
            },
        };
        let (result, buf) = match self.backing() {
            // Boxed: these paths are rare or wait for a device, and this future is moved with every write.
            Backing::Origin(origin) => return Box::pin(origin.write(&self.store, offset, buf, fua)).await,
            Backing::Snapshot(..) => Box::pin(self.write_with_backing(offset, buf, more)).await,
            Backing::None if self.live.writes.get() != WritePolicy::ALL => {
                Box::pin(self.write_by_policy(offset, buf, more)).await
            }
            Backing::None => self.write_stored(offset, buf, more).await,
        };
        if result.is_ok() && correct!(fua, Bug::FuaWithoutCommit => false) {
            return (Box::pin(self.store.commit_for_client()).await, buf);
        }
        (result, buf)
    }

    /// Writes to pages of the volume's own: in place if that changes nothing else, otherwise behind earlier writes.
    pub(super) async fn write_stored(&self, offset: u64, buf: Buf, more: bool) -> (Result<()>, Buf) {
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
        self.live.more.set(more);
        let buf = match correct!(self.own_copy(buf), Bug::SharedMemoryNotCopied => Ok(buf)) {
            Ok(buf) => buf,
            Err((e, buf)) => return (Err(e), buf),
        };
        Box::pin(self.write_queued(WriteRequest { offset, pages, more }, buf)).await
    }

    /// Returns the contents in memory that nothing else changes: their checksum and what is written have to agree.
    pub(super) fn own_copy(&self, buf: Buf) -> std::result::Result<Buf, (Error, Buf)> {
        if !buf.is_shared() {
            return Ok(buf);
        }
        let mut own = self.store.device.buffer(buf.len());
        own.copy_from_slice(&buf);
        match buf.is_lost() {
            false => Ok(own),
            true => Err((Error::new(ErrorKind::Invalid, "the memory of a write was taken away"), buf)),
        }
    }

    /// Writes in the order of the write queue: after earlier writes to the same and neighbouring blocks.
    async fn write_queued(&self, write: WriteRequest, buf: Buf) -> (Result<()>, Buf) {
        let (buf, queued) = if self.live.breaks.borrow().is_empty() {
            (buf, self.live.write_queue.enter(write.pages.clone()))
        } else {
            match self.join_copy(write.offset, buf, &write.pages).await {
                Ok(buf) => return (Ok(()), buf),
                Err(not_joined) => not_joined,
            }
        };
        let outcome = self.write_with_retry(&write, buf, queued).await;
        self.store.commit_soon();
        self.store.checkpoint_soon();
        self.store.flush_count_log_soon();
        outcome
    }

    /// Writes and retries: once after a sealed commit (pages covered by a checksum may be overwritten then),
    /// and after a checkpoint returned freed space, or while a full host file system is waited for.
    async fn write_with_retry(&self, write: &WriteRequest, buf: Buf, queued: QueuedWrite<Buf>) -> (Result<()>, Buf) {
        let (mut buf, mut queued, mut sealed) = (buf, queued, false);
        let (may_end, mut shortage) = (self.store.has_pending_space(), None);
        loop {
            let (result, back, moved) = self.write_once(write, buf, queued).await;
            buf = back;
            let Err(e) = result else { return (Ok(()), buf) };
            // At once: later requests on these pages wait, whatever this one waits for.
            let next = self.live.write_queue.enter(write.pages.clone());
            if e.is_full_host() {
                next.yield_for_space();
            }
            let again = match moved && e.kind() == ErrorKind::NoSpace && !sealed {
                true => {
                    sealed = true;
                    self.store.commit_sealed().await.map(|()| true)
                }
                // Before anything waits or is reported.
                false if e.is_full_host() && retained::give_back(&self.store, false).await => Ok(true),
                false if e.is_full_host() => {
                    let shortage = shortage.get_or_insert_with(|| HostShortage::new(may_end));
                    if shortage.begins(self.store.waits_for_space()) {
                        events::report_waiting(&self.store, self.id);
                    }
                    self.store.wait_for_host_space(shortage).await
                }
                false => Ok(false),
            };
            match again {
                Ok(true) => {
                    next.rejoin();
                    queued = next;
                }
                Ok(false) if e.is_full_host() => return (events::report_if_full(&self.store, self.id, Err(e)), buf),
                Ok(false) => return (Err(e), buf),
                Err(e) => return (Err(e), buf),
            }
        }
    }

    /// The steps of a write, as in ARCHITECTURE, "The life of one 4 KiB write". The flag tells whether pages were, or
    /// may have been, relocated.
    async fn write_once(&self, write: &WriteRequest, buf: Buf, queued: QueuedWrite<Buf>) -> (Result<()>, Buf, bool) {
        // Queue: behind earlier writes to the same and neighbouring blocks.
        let (buf, has_waited) = match queued.admitted(buf).await {
            Admitted::Immediately(buf) => (buf, false),
            Admitted::AfterWait(buf) => (buf, true),
            Admitted::Merged(result, buf) => return (result, buf, true),
        };
        // An earlier write may have broken these pages for this volume.
        if has_waited
            && self.check_end(write, buf.len()).is_ok()
            && let Some(place) = self.in_place(write.offset, buf.len(), &write.pages)
        {
            return self.write_in_place(write, place, buf, queued).await;
        }
        // Plan: new pages for everything that cannot be overwritten.
        let (copying, held) = self.break_range(write.pages.clone());
        let lock = self.live.locks.lock(held.clone(), LockMode::Exclusive).await;
        if let Err(e) = self.check_end(write, buf.len()) {
            return (Err(e), buf, false);
        }
        let mut lock = correct!(Some(lock), Bug::LockReleasedEarly => crate::planted::released(lock));
        let mut work = PendingWrite::new(write, buf.len(), self.store.device.block_size(), copying, held);
        let guard = match self.plan(&queued, &mut work, &mut lock).await {
            Ok(guard) => guard,
            Err(e) => return (Err(e), buf, false),
        };
        work.plan.check();
        let (result, buf) = if work.plan.copies.is_empty() {
            // Compose: complete pages that are written in part.
            let composed = correct!(
                self.compose(&work, &buf).await,
                Bug::MappedBeforeWritten => match self.publish(&work.plan).await {
                    Ok(()) => self.compose(&work, &buf).await,
                    Err(e) => Err(e),
                }
            );
            match composed {
                Ok(pages) => {
                    // Write.
                    let (written, buf) = self.submit_planned(queued, &mut work, pages, buf).await;
                    // Publish.
                    (self.publish_written(&work.plan, written).await, buf)
                }
                Err(e) => (Err(e), buf),
            }
        } else {
            self.write_copying(queued, &mut work, buf).await
        };
        drop((guard, lock));
        let moved = self.end_write(work, &result);
        (result, buf, moved)
    }

    /// Refuses pages beyond the end: the volume may have been shortened since the write was accepted.
    fn check_end(&self, write: &WriteRequest, len: usize) -> Result<()> {
        match write.pages.end <= pages_of(self.size()) {
            true => Ok(()),
            false => self.check_range(write.offset, len as u64),
        }
    }

    /// Writes in place after a wait in the queue.
    async fn write_in_place(
        &self,
        write: &WriteRequest,
        place: InPlace,
        buf: Buf,
        queued: QueuedWrite<Buf>,
    ) -> (Result<()>, Buf, bool) {
        self.store.counters.data_writes.add(&place.segments);
        let written = self.store.device.write(buf, place.segments, false);
        queued.submitted(&[]);
        let (result, buf) = written.await;
        drop(place.held);
        (self.device_error(write.offset, result), buf, false)
    }

    /// Ends a planned write; returns whether it relocated pages.
    fn end_write(&self, work: PendingWrite, result: &Result<()>) -> bool {
        let moved = work.plan.faults.iter().any(|fault| fault.relocated);
        if let Err(e) = result {
            // On a full pool the write that needs space starts the checkpoint.
            alloc::write_off(&mut self.store.meta.borrow_mut().space, work.plan.unpublished());
            let is_full = e.is_full_host() && !retained::is_any(&self.store);
            self.store.full.set(self.store.full.get() || is_full);
            commit::commit_failed_write(&self.store);
        }
        work.complete_merged(result);
        moved
    }

    /// Plans the write if all of it goes in place, according to what is in memory, and no other request is in
    /// the way.
    fn in_place(&self, offset: u64, len: usize, pages: &Range<u64>) -> Option<InPlace> {
        let mut plan = WritePlan::new(offset, len as u64, self.store.device.block_size(), None);
        if !plan.is_in_place(&mut self.store.meta.borrow_mut(), self.id) {
            return None;
        }
        let lock = self.live.locks.try_lock(pages.clone(), LockMode::Shared)?;
        let lock = correct!(Some(lock), Bug::LockReleasedEarly => crate::planted::released(lock));
        Some(InPlace { segments: plan.segments, held: (lock, self.store.generations.enter()) })
    }

    /// Publishes after a successful write.
    async fn publish_written(&self, plan: &WritePlan, written: Result<()>) -> Result<()> {
        match written {
            Ok(()) => correct!(self.publish(plan).await, Bug::MappedBeforeWritten => Ok(())),
            Err(e) => correct!(Err(e), Bug::FailedWritePublished => self.publish(plan).await.and(Err(e))),
        }
    }

    /// Turns the error of a device request into one that names the volume and offset.
    pub(super) fn device_error(&self, offset: u64, result: std::io::Result<()>) -> Result<()> {
        result.map_err(|e| Error::io(format!("writing {} at {offset}", self.shown_name()), e))
    }

    /// Maps the new pages.
    pub(super) async fn publish(&self, plan: &WritePlan) -> Result<()> {
        for fault in &plan.faults {
            let mut retry = Retry::new(&self.store);
            loop {
                let mapped = self.map_fault(&mut self.store.meta.borrow_mut(), plan, fault);
                let Err(failure) = mapped else { break };
                retry.missed(failure).await?;
            }
            plan.published.set(plan.published.get() + fault.len);
            if !fault.relocated {
                self.activity.counters.fault(fault.shared, fault.len * PAGE_SIZE as u64);
            }
        }
        Ok(())
    }

    /// Maps the new pages of one fault and appends the record.
    fn map_fault(&self, meta: &mut Catalog, plan: &WritePlan, fault: &Fault) -> std::result::Result<(), Failure> {
        let before = self.record(meta).referenced;
        meta.map(self.id, fault.at, fault.len, fault.to)?;
        plan.claim.commit(self.record(meta).referenced - before);
        plan.new_pages.commit(fault.len);
        let record = Record::Map { volume: self.id, at: fault.at, len: fault.len as u32, to: fault.to };
        meta.journal.append_map(&record, fault.sum);
        Ok(())
    }
}
