//! Emptying the log of counts between two checkpoints: what it says goes to the count pages, and a superblock
//! that says nothing else new refers to these.
//!
//! A checkpoint that finds the log full writes all count pages that it is about, while somebody waits for the
//! checkpoint. So it is emptied when it is half full, as soon as that is little beside what has been written.
//! Writers and commits go on meanwhile; a checkpoint waits until it has ended. Nothing depends on it: where the host has
//! no room for a count page, or one cannot be read, it is left for later.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::format::Superblock;
use crate::planted::{Bug, planted};
use crate::sync::Event;
use crate::types::PAGE_SIZE;

use super::Inner;

/// Pages of data that must have been written since the log was empty, for each count page that it is about.
const WRITTEN_PAGES_PER_LEAF: u64 = 64;

/// Whether it runs, and when it is worth it.
#[derive(Default)]
pub struct CountLogFlush {
    running: Cell<bool>,
    ended: Event,
    /// Bytes of data that had been written when the log was empty last, or was to be.
    written: Cell<u64>,
}

impl<D: Device> Inner<D> {
    /// Starts emptying the log if it is time. For whoever has written data: it is to be little beside that.
    pub fn flush_count_log_soon(self: &Rc<Self>) {
        let is_busy = self.count_log_flush.running.get() || self.checkpoint_runs() || self.is_blocked();
        if is_busy || self.closing.get() || self.failed.borrow().is_some() || !self.is_count_log_due() {
            return;
        }
        self.count_log_flush.running.set(true);
        let inner = self.clone();
        self.runtime.spawn(Box::pin(async move {
            if let Err(error) = inner.flush_count_log().await {
                inner.fail(&error);
            }
            // It may have had to wait for some.
            inner.host.unblock();
            inner.count_log_flush.running.set(false);
            inner.count_log_flush.ended.notify();
        }));
    }

    fn is_count_log_due(&self) -> bool {
        let meta = self.meta.borrow();
        let written = self.data_written() - self.count_log_flush.written.get();
        // How long the pool is now is for a checkpoint to say.
        meta.space.log_is_half_full()
            && written >= meta.space.logged_leaves() * WRITTEN_PAGES_PER_LEAF * PAGE_SIZE as u64
            && meta.size() == self.superblock.borrow().size
    }

    fn data_written(&self) -> u64 {
        self.counters.data_writes.read().bytes
    }

    /// The log is empty now, or will not be for a while: not before as much has been written again.
    pub(super) fn postpone_count_log(&self) {
        self.count_log_flush.written.set(self.data_written());
    }

    /// Whether the log is being emptied.
    pub(super) fn is_flushing_count_log(&self) -> bool {
        self.count_log_flush.running.get()
    }

    /// Waits until the log is not being emptied.
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
        // A page that is not referred to any more may still be on its way to somebody who wants to know what it says.
        self.generations.barrier().await;
        Ok(())
    }
}
