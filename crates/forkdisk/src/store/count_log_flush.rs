//! Flushing the count log between two checkpoints: its changes are written to the count pages, and a
//! superblock that is otherwise the last one refers to them.
//!
//! A checkpoint that finds the log full writes all count pages that it changes, and requests wait for that.
//! So the log is flushed when it is half full, as soon as the cost is small against the data written since.
//! Writers and commits go on meanwhile; a checkpoint waits for the end. It is optional: if the host has no
//! space for a count page or one cannot be read, it is postponed.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::format::Superblock;
use crate::planted::correct;
use crate::space::{count_images, count_log};
use crate::store::checkpoint;
use crate::sync::Event;
use crate::types::PAGE_SIZE;

use super::Store;

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
        let is_busy = self.count_log_flush.running.get() || checkpoint::checkpoint_runs(self) || self.is_blocked();
        if is_busy || self.closing.get() || self.failed.borrow().is_some() || !is_count_log_due(self) {
            return;
        }
        self.count_log_flush.running.set(true);
        let store = self.clone();
        self.runtime.spawn(Box::pin(async move {
            if let Err(error) = flush_count_log(&store).await {
                store.fail(&error);
            }
            // It may have waited for space.
            store.host_enospc.unblock();
            store.count_log_flush.running.set(false);
            store.count_log_flush.ended.notify();
        }));
    }
}

fn is_count_log_due<D: Device>(store: &Store<D>) -> bool {
    let meta = store.meta.borrow();
    let written = data_written(store) - store.count_log_flush.written.get();
    // A new length of the pool is for the next checkpoint to write.
    count_log::log_is_half_full(&meta.space)
        && written >= count_log::logged_leaves(&meta.space) * WRITTEN_PAGES_PER_LEAF * PAGE_SIZE as u64
        && meta.size() == store.superblock.borrow().size
}

fn data_written<D: Device>(store: &Store<D>) -> u64 {
    store.counters.data_writes.read().bytes
}

/// The log is empty now or not worth a flush: wait until as much data was written again.
pub(super) fn postpone_count_log<D: Device>(store: &Store<D>) {
    store.count_log_flush.written.set(data_written(store));
}

/// Whether the log is being flushed.
pub(super) fn is_flushing_count_log<D: Device>(store: &Store<D>) -> bool {
    store.count_log_flush.running.get()
}

/// Waits until the log is not being flushed.
pub(super) async fn wait_count_log_flush<D: Device>(store: &Store<D>) {
    while store.count_log_flush.running.get() {
        store.count_log_flush.ended.wait().await;
    }
}

async fn flush_count_log<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    checkpoint::activate(store).await?;
    if !is_count_log_due(store) {
        return Ok(());
    }
    count_images::begin_log_flush(&mut store.meta.borrow_mut().space);
    let counted = match checkpoint::write_counts(store).await {
        Ok(counted) => counted,
        Err(_) => {
            count_images::abort_log_flush(&mut store.meta.borrow_mut().space);
            postpone_count_log(store);
            return store.check_failed();
        }
    };
    correct!(store.flush_device().await?, Bug::CountLogEmptiedEarly => ());
    let superblock = {
        let old = store.superblock.borrow();
        let (counts, count_log, large_counts) = (counted.roots, counted.log, counted.large);
        Superblock { generation: old.generation + 1, counts, count_log, large_counts, ..old.clone() }
    };
    checkpoint::write_superblock(store, &superblock).await?;
    count_images::end_log_flush(&mut store.meta.borrow_mut().space);
    postpone_count_log(store);
    // A page that nothing refers to any more may still be read.
    store.generations.barrier().await;
    Ok(())
}
