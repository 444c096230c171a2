//! Flushing the count log between two checkpoints: its changes are written to the count pages, and a
//! superblock that is otherwise the last one refers to them.
//!
//! A checkpoint that finds the log full writes all count pages that it changes, and requests wait for that.
//! So the log is flushed when it is half full, as soon as the cost is small against the data written since.
//! Writers and commits go on meanwhile; a checkpoint waits for the end. It is optional: if the host has no
//! space for a count page or one cannot be read, it is postponed.

use std::cell::Cell;
use std::rc::Rc;

use super::Store;
use crate::device::Device;
use crate::error::Result;
use crate::format::Superblock;
use crate::planted::{Bug, planted};
use crate::sync::Event;
use crate::types::PAGE_SIZE;

/// Pages of data that must have been written since the log was empty, for each count page that it changes.
const WRITTEN_PAGES_PER_LEAF: u64 = 64;

/// Whether it runs, and since when.
#[derive(Default)]
pub struct CountLogFlush {
    running: Cell<bool>,
    ended: Event,
    /// Bytes of data written when the log was last empty or its flush was postponed.
    written: Cell<u64>,
}

impl<D: Device> Store<D> {
    /// Called after data writes: flushes the log only when that costs little against the data written since.
    pub fn flush_count_log_soon(self: &Rc<Self>) {
        let is_busy = self.count_log_flush.running.get() || self.checkpoint_runs() || self.is_blocked();
        if is_busy || self.closing.get() || self.failed.borrow().is_some() || !self.is_count_log_due() {
            return;
        }
        self.count_log_flush.running.set(true);
        let store = self.clone();
        self.runtime.spawn(Box::pin(async move {
            if let Err(error) = store.flush_count_log().await {
                store.fail(&error);
            }
            // It may have waited for space.
            store.host_enospc.unblock();
            store.count_log_flush.running.set(false);
            store.count_log_flush.ended.notify();
        }));
    }

    fn is_count_log_due(&self) -> bool {
        let meta = self.meta.borrow();
        let written = self.data_written() - self.count_log_flush.written.get();
        // A new length of the pool is for the next checkpoint to write.
        meta.space.log_is_half_full()
            && written >= meta.space.logged_leaves() * WRITTEN_PAGES_PER_LEAF * PAGE_SIZE as u64
            && meta.size() == self.superblock.borrow().size
    }

    fn data_written(&self) -> u64 {
        self.counters.data_writes.read().bytes
    }

    /// The log is empty now or not worth a flush: wait until as much data was written again.
    pub(super) fn postpone_count_log(&self) {
        self.count_log_flush.written.set(self.data_written());
    }

    /// Whether the log is being flushed.
    pub(super) fn is_flushing_count_log(&self) -> bool {
        self.count_log_flush.running.get()
    }

    /// Waits until the log is not being flushed.
    pub(super) async fn wait_count_log_flush(&self) {
        while self.count_log_flush.running.get() {
            self.count_log_flush.ended.wait().await;
        }
    }

    async fn flush_count_log(self: &Rc<Self>) -> Result<()> {
        self.activate().await?;
        if !self.is_count_log_due() {
            return Ok(());
        }
        self.meta.borrow_mut().space.begin_log_flush();
        let counted = match self.write_counts().await {
            Ok(counted) => counted,
            Err(_) => {
                self.meta.borrow_mut().space.abort_log_flush();
                self.postpone_count_log();
                return self.check_failed();
            }
        };
        if !planted(Bug::CountLogEmptiedEarly) {
            self.flush_device().await?;
        }
        let superblock = {
            let old = self.superblock.borrow();
            let (counts, count_log, large_counts) = (counted.roots, counted.log, counted.large);
            Superblock { generation: old.generation + 1, counts, count_log, large_counts, ..old.clone() }
        };
        self.write_superblock(&superblock).await?;
        self.meta.borrow_mut().space.end_log_flush();
        self.postpone_count_log();
        // A page that nothing refers to any more may still be read.
        self.generations.barrier().await;
        Ok(())
    }
}
