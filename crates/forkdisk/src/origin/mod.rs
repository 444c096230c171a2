//! A device that is protected in place: an *origin*. Its data stays where it is; the pool keeps what
//! was overwritten since its snapshots were taken.
//!
//! Before the first write to a chunk since the newest snapshot the old contents are copied into the
//! pool and recorded, once however many snapshots there are. The order is: copy durable in the pool →
//! record durable → write to the origin (`copy.rs`, `write.rs`). What is kept, and for whom, is the
//! business of `kept.rs`; reading through it of `read.rs`; a rollback of `rolling.rs`.
//!
//! Invariants:
//! - Whoever reads an origin's chunk for a snapshot holds it *shared*, and so does whoever writes a
//!   chunk that is kept. Copying a chunk out holds it alone. So nothing is written under a reader,
//!   and no copy is taken under a writer.
//! - Nobody waits for a chunk while a plan is under way: whoever holds the chunk may wait for a
//!   checkpoint, which waits for plans.
//! - A failed or full pool fails writes of the origin that need a copy; it never lets them through.

mod accounting;
mod copy;
mod exceptions;
mod flush;
mod hot_ranges;
mod out_of_space;
mod plan;
mod read;
mod rollback;
mod sample;
mod statistics;
mod stream;
mod verbs;
mod write;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::planted::{Bug, planted};
use crate::pool::Inner;
use crate::sync::{Flushes, LockMode, RangeLocks};
use crate::types::VolumeId;

pub use exceptions::ExceptionView;
pub use read::PageSource;
pub use rollback::refuse_during_rollback;
pub use statistics::OriginStatistics;
pub use verbs::{OriginChange, OriginInfo, OriginPlace, ProtectOptions, check_origin_text};

/// An origin whose device is at hand.
pub struct Origin<D> {
    pub id: VolumeId,
    pub device: Rc<D>,
    /// Bytes.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// By chunk: shared by who reads or writes in place, alone for who copies.
    pub locks: Rc<RangeLocks>,
    /// By chunk, alone: whose turn to copy it is.
    copy_locks: Rc<RangeLocks>,
    /// Blocks of the device that are written in part, by block.
    pub edges: Rc<RangeLocks>,
    streams: Rc<RefCell<stream::Streams>>,
    hot_ranges: RefCell<hot_ranges::HotRanges>,
    flushes: Flushes,
    counters: statistics::Counters,
    rollback_task: rollback::RollbackTask,
    /// Why nothing is acknowledged any more.
    failed: RefCell<Option<Error>>,
    /// Snapshots, with their groups, whose record must not be durable before what the origin holds is.
    unflushed_snapshots: RefCell<Vec<VolumeId>>,
    /// Held by commits that see to that.
    flush_lock: Rc<RangeLocks>,
    /// Whether the pool knows, durably, that the origin is being written.
    marked_dirty: Cell<bool>,
    /// Which of its contents still tell it from another device after a crash.
    sample: sample::Sample,
    /// What was noted of that is durable once the journal is up to this sequence number.
    noted_until: Cell<u64>,
    /// Whether something was written that no flush has covered.
    pub is_dirty: Cell<bool>,
}

/// A write that is announced: held until it is made, see [`Volume::announce_write`](crate::Volume::announce_write).
pub struct WriteIntent {
    _announced: stream::QueuedRange,
}

impl<D: Device> Origin<D> {
    fn new(id: VolumeId, device: D, size: u64, chunk: u64, written: u32) -> Origin<D> {
        Origin {
            id,
            device: Rc::new(device),
            size,
            chunk,
            locks: Rc::default(),
            copy_locks: Rc::default(),
            edges: Rc::default(),
            streams: Rc::default(),
            hot_ranges: RefCell::default(),
            flushes: Flushes::default(),
            counters: statistics::Counters::default(),
            rollback_task: rollback::RollbackTask::default(),
            failed: RefCell::new(None),
            unflushed_snapshots: RefCell::default(),
            flush_lock: Rc::default(),
            marked_dirty: Cell::new(false),
            sample: sample::Sample::new(size, written),
            noted_until: Cell::new(0),
            is_dirty: Cell::new(false),
        }
    }

    /// Chunks that hold the bytes from `offset` to `end`.
    pub fn chunks(&self, offset: u64, end: u64) -> std::ops::Range<u64> {
        offset / self.chunk..end.div_ceil(self.chunk)
    }

    /// A write from `offset` to `end` will be made as soon as its data is there: what is copied before it anyway
    /// reaches so far at once.
    pub fn announce(&self, offset: u64, end: u64) -> WriteIntent {
        WriteIntent { _announced: stream::Streams::announce(&self.streams, offset, end) }
    }

    /// Refuses once a flush has failed.
    pub fn check_alive(&self) -> Result<()> {
        self.failed.borrow().as_ref().map_or(Ok(()), |e| Err(e.clone()))
    }
}

impl<D: Device> Origin<D> {
    /// A group of snapshots has been published, one of them of this origin.
    pub fn note_snapshots(&self, group: &[VolumeId]) {
        self.unflushed_snapshots.borrow_mut().extend(group);
    }

    /// Makes durable what snapshots that were published since the last call show; otherwise returns
    /// those that must not be.
    async fn flush_new_snapshots(&self) -> Vec<VolumeId> {
        // They stay in the list meanwhile: every other commit has to wait for a flush, too.
        let covered = self.unflushed_snapshots.borrow().clone();
        if covered.is_empty() {
            return Vec::new();
        }
        if planted(Bug::SettledTooEarly) {
            self.unflushed_snapshots.take();
        }
        let flushed = self.flush().await;
        // Another flush may have settled some of them, or taken them back, while this one ran: only those that are
        // still in the list are this flush's to decide.
        let decided: Vec<VolumeId> =
            self.unflushed_snapshots.borrow_mut().extract_if(.., |id| covered.contains(id)).collect();
        match flushed {
            Ok(()) => Vec::new(),
            Err(_) if planted(Bug::SettledFromCopy) => covered,
            Err(_) => decided,
        }
    }
}

impl<D: Device> Inner<D> {
    /// Whether there are new snapshots whose origins are to be flushed before their records are.
    pub fn has_unflushed_snapshots(&self) -> bool {
        self.origins.borrow().values().any(|origin| !origin.unflushed_snapshots.borrow().is_empty())
    }

    /// Before records become durable: so does whatever new snapshots of origins show. Those of an
    /// origin that fails to do so are gone with the same commit.
    pub async fn flush_snapshotted_origins(&self) -> Result<()> {
        let ids: Vec<VolumeId> = self.origins.borrow().keys().copied().collect();
        for id in ids {
            let Some(settling) = self.origins.borrow().get(&id).map(|origin| origin.flush_lock.clone()) else {
                continue;
            };
            // Before the origin is: who waits here is no user either.
            let _held = settling.lock(0..1, LockMode::Shared).await;
            let Some(origin) = self.origins.borrow().get(&id).cloned() else { continue };
            let lost = origin.flush_new_snapshots().await;
            let mut meta = self.meta.borrow_mut();
            let ids: Vec<VolumeId> = lost.into_iter().filter(|&id| meta.directory.is_snapshot(id)).collect();
            if !ids.is_empty() {
                self.publish(&mut meta, &Record::Delete { ids })?;
            }
        }
        Ok(())
    }

    /// Flushes origins that were written.
    pub async fn flush_origins(&self) {
        let ids: Vec<VolumeId> = self.origins.borrow().keys().copied().collect();
        for id in ids {
            let Some(settling) = self.origins.borrow().get(&id).map(|origin| origin.flush_lock.clone()) else {
                continue;
            };
            let _held = settling.lock(0..1, LockMode::Shared).await;
            let Some(origin) = self.origins.borrow().get(&id).filter(|o| o.is_dirty.get()).cloned() else { continue };
            // One that fails refuses what comes, and says why.
            let _ = origin.flush().await;
        }
    }

    /// No origin's rollback goes on until it is opened again.
    pub async fn stop_rolling(&self) {
        let origins: Vec<Rc<Origin<D>>> = self.origins.borrow().values().cloned().collect();
        for origin in origins {
            origin.stop_rolling().await;
        }
    }

    /// The origin's device, if it is at hand.
    pub fn attached(&self, id: VolumeId) -> Result<Rc<Origin<D>>> {
        self.origins.borrow().get(&id).cloned().ok_or_else(|| {
            let meta = self.meta.borrow();
            let (name, path) =
                meta.directory.get(id).map_or(Default::default(), |v| (v.record.name.clone(), v.record.origin.clone()));
            let why = format!("the device of {name:?} is not open; it was last at {path:?}");
            Error::new(ErrorKind::Busy, why)
        })
    }
}
