//! Checkpoints: all metadata, durable at new places, without stopping writers; and flushes of the count log between two
//! of them. Here is when they begin and what waits for them; `checkpoint_steps.rs` has the steps.
//!
//! Flushing the count log between two checkpoints: its changes are written to the count pages, and a
//! superblock that is otherwise the last one refers to them.
//!
//! A checkpoint that finds the log full writes all count pages that it changes, and requests wait for that.
//! So the log is flushed when it is half full, as soon as the cost is small against the data written since.
//! Writers and commits go on meanwhile; a checkpoint waits for the end. It is optional: if the host has no
//! space for a count page or one cannot be read, it is postponed.

use std::cell::Cell;
use std::rc::Rc;

use crate::catalog::{DUE_CHECKPOINT_PAGES, DirtyState, SOME_CHECKPOINT_PAGES};
use crate::device::Device;
use crate::error::Result;
use crate::format::Superblock;
use crate::planted::correct;
use crate::space::{count_images, tree};
use crate::sync::Event;
use crate::types::PAGE_SIZE;

use super::{Store, checkpoint_steps};

/// The checkpoint that runs, and the tasks that wait for it.
#[derive(Default)]
pub struct Checkpoints {
    running: Cell<bool>,
    done: Cell<u64>,
    changed: Event,
}

impl<D: Device> Store<D> {
    /// Writes a checkpoint of everything published before this call. Returns ENOSPC instead of waiting for a
    /// full host file system if the pool does not wait for space.
    pub async fn checkpoint(self: Rc<Self>) -> Result<()> {
        self.unless_full(self.clone().patient_checkpoint()).await
    }

    /// Writes a checkpoint of everything published before this call; waits for a full host file system as
    /// long as necessary.
    pub async fn patient_checkpoint(self: Rc<Self>) -> Result<()> {
        self.check_alive()?;
        // A running one may have been frozen before this call: wait for it and for one more.
        while self.checkpoints.running.get() {
            self.checkpoints.changed.wait().await;
            self.check_alive()?;
        }
        start_checkpoint(&self);
        let wanted = self.checkpoints.done.get() + 1;
        while self.checkpoints.done.get() < wanted {
            self.checkpoints.changed.wait().await;
        }
        self.check_failed()
    }

    /// Starts a checkpoint in the background if enough has changed, or if a request waits for the space it
    /// frees.
    pub fn checkpoint_soon(self: &Rc<Self>) {
        let due = {
            let meta = self.meta.borrow();
            let journal = meta.journal.used() + meta.journal.pending() as u64;
            let wanted = self.full.get() && meta.space.pending() > 0;
            wanted
                || meta.is_filling(self.options.dirty)
                || meta.is_short_of_space(DUE_CHECKPOINT_PAGES)
                || journal > meta.journal.length() / 2
        };
        if due && !self.checkpoints.running.get() {
            start_checkpoint(self);
        }
    }

    /// Waits while the limit of dirty metadata is reached.
    pub async fn wait_below_dirty_limit(self: &Rc<Self>) -> Result<()> {
        loop {
            let room = self.meta.borrow_mut().dirty_state(self.options.dirty);
            match room {
                DirtyState::BelowLimit => return Ok(()),
                DirtyState::NeedsCheckpoint => {}
                // Recovery no longer verifies the data of the last commit.
                DirtyState::NeedsSeal => {
                    self.check_writable()?;
                    self.commit_sealed().await?;
                    continue;
                }
                DirtyState::NeedsCommit => {
                    self.check_writable()?;
                    self.clone().commit().await?;
                    continue;
                }
            }
            self.check_writable()?;
            // A running checkpoint lowers the amount; another one would write more than necessary.
            let ends = async {
                if !self.checkpoints.running.get() {
                    return self.clone().patient_checkpoint().await;
                }
                wait_checkpoint_end(self).await;
                Ok(())
            };
            Box::pin(self.unless_full(ends)).await?;
        }
    }
}

/// A change was refused for lack of space: starts a checkpoint if that makes space.
pub fn start_for_space<D: Device>(store: &Rc<Store<D>>) {
    let helps = {
        let meta = store.meta.borrow();
        meta.changed_pages() >= SOME_CHECKPOINT_PAGES || meta.space.pending() > 0
    };
    if helps {
        start_checkpoint(store);
    }
}

fn start_checkpoint<D: Device>(store: &Rc<Store<D>>) {
    if store.checkpoints.running.replace(true) {
        return;
    }
    let runtime = store.runtime.clone();
    // As for a commit.
    let (store, above) = (store.clone(), store.hooks.get());
    runtime.spawn(Box::pin(async move {
        let _above = above;
        if let Err(error) = checkpoint_steps::checkpoint_once(&store).await {
            store.fail(&error);
        }
        store.checkpoints.running.set(false);
        store.host_enospc.unblock();
        store.checkpoints.done.set(store.checkpoints.done.get() + 1);
        store.checkpoints.changed.notify();
        store.space_changed.notify();
    }));
}

/// Waits for the end of the running checkpoint, or of one that this call starts; it may have failed.
pub async fn next_checkpoint<D: Device>(store: &Rc<Store<D>>) {
    start_checkpoint(store);
    wait_checkpoint_end(store).await;
}

/// Waits for the end of the running checkpoint, if any.
pub async fn wait_checkpoint_end<D: Device>(store: &Store<D>) {
    if store.checkpoints.running.get() {
        store.checkpoints.changed.wait().await;
    }
}

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
        if self.count_log_flush.running.get() || self.checkpoints.running.get() || !is_count_log_due(self) {
            return;
        }
        if self.is_blocked() || self.closing.get() || self.failed.borrow().is_some() {
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
    tree::log_is_half_full(&meta.space)
        && written >= tree::logged_leaves(&meta.space) * WRITTEN_PAGES_PER_LEAF * PAGE_SIZE as u64
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
    checkpoint_steps::activate(store).await?;
    if !is_count_log_due(store) {
        return Ok(());
    }
    count_images::begin_log_flush(&mut store.meta.borrow_mut().space);
    let counted = match checkpoint_steps::write_counts(store).await {
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
    checkpoint_steps::write_superblock(store, &superblock).await?;
    count_images::end_log_flush(&mut store.meta.borrow_mut().space);
    postpone_count_log(store);
    // A page that nothing refers to any more may still be read.
    store.generations.barrier().await;
    Ok(())
}
