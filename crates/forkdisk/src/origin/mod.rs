//! A device that is protected in place: an *origin*. Its data stays in place; the pool keeps the
//! *exceptions*: old contents of chunks that were overwritten since its snapshots were taken.
//!
//! Before the first write to a chunk since the newest snapshot, its old contents are copied into the pool and
//! recorded, once for all snapshots. The order is: copy durable in the pool → record durable → write to the
//! origin (`copy.rs`, `write.rs`). `exceptions.rs` says which exceptions there are and which snapshots they
//! belong to, `read.rs` reads through them, `rollback.rs` rolls back.
//!
//! Invariants:
//!
//! - A read of an origin's chunk for a snapshot locks the chunk *shared*, and so does a write to a chunk that
//!   was copied out. Copying a chunk out locks it exclusively. So nothing is written under a reader, and no
//!   copy is taken under a writer.
//! - No request waits for a chunk while it has a plan: the holder of the chunk may wait for a checkpoint,
//!   which waits for plans.
//! - A failed or full pool fails writes of the origin that need a copy; it never lets them through.

mod accounting;
mod copy;
mod flush;
mod lookahead;
mod plan;
mod read;
mod rollback;
mod running_copies;
mod sample;
mod statistics;
mod verbs;
mod write;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::device::{CachedDevice, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Record, VolumeRecord};
use crate::planted::correct;
use crate::store::publish::publish_admitted;
use crate::store::{Store, deleted_error};
use crate::sync::{Flushes, LockMode, RangeLocks};
use crate::types::VolumeId;
pub use statistics::OriginStatistics;
pub use verbs::{OriginChange, OriginInfo, OriginPlace, ProtectOptions};

/// An origin whose device is open.
pub struct Origin<D> {
    pub id: VolumeId,
    pub device: Rc<CachedDevice<D>>,
    /// Length in bytes.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// By chunk: shared by reads and writes in place, exclusive for copying out.
    pub locks: Rc<RangeLocks>,
    /// By chunk, exclusive: the order of copies.
    copy_locks: Rc<RangeLocks>,
    /// Partially written blocks of the device, by block.
    pub edges: Rc<RangeLocks>,
    streams: Rc<RefCell<lookahead::Streams>>,
    hot_ranges: RefCell<lookahead::HotRanges>,
    running_copies: Rc<running_copies::RunningCopies>,
    flushes: Flushes,
    counters: statistics::Counters,
    rollback_task: rollback::RollbackTask,
    /// The error after which nothing is acknowledged.
    failed: RefCell<Option<Error>>,
    /// Snapshots, with their groups, whose record must not be durable before the origin was flushed.
    unflushed_snapshots: RefCell<Vec<VolumeId>>,
    /// Held by commits that flush for snapshots.
    flush_lock: Rc<RangeLocks>,
    /// The pool has recorded durably that the origin is in use.
    marked_dirty: Cell<bool>,
    /// Contents by which the device is recognised after a crash.
    sample: sample::Sample,
    /// Records of written zones are durable once the journal is durable up to this sequence number.
    noted_until: Cell<u64>,
    /// Something was written since the last flush.
    pub is_dirty: Cell<bool>,
}

/// An announced write; see [`Volume::announce_write`](crate::Volume::announce_write).
pub struct WriteIntent {
    _announced: lookahead::QueuedRange,
}

impl<D: Device> Origin<D> {
    fn new(id: VolumeId, device: Rc<CachedDevice<D>>, size: u64, chunk: u64, written: u32) -> Origin<D> {
        Origin {
            id,
            device,
            size,
            chunk,
            locks: Rc::default(),
            copy_locks: Rc::default(),
            edges: Rc::default(),
            streams: Rc::default(),
            hot_ranges: RefCell::default(),
            running_copies: Rc::default(),
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

    /// Chunks that contain the bytes from `offset` to `end`.
    pub fn chunks(&self, offset: u64, end: u64) -> std::ops::Range<u64> {
        offset / self.chunk..end.div_ceil(self.chunk)
    }

    /// Announces a write from `offset` to `end`: a copy that runs before it includes its chunks.
    pub fn announce(&self, offset: u64, end: u64) -> WriteIntent {
        WriteIntent { _announced: lookahead::Streams::announce(&self.streams, offset, end) }
    }

    /// Refuses after a failed flush.
    pub fn check_alive(&self) -> Result<()> {
        self.failed.borrow().as_ref().map_or(Ok(()), |e| Err(e.clone()))
    }
}

impl<D: Device> Origin<D> {
    /// Whether a rollback runs, or its end is not durable.
    fn is_rolling_back(&self, store: &Store<D>) -> bool {
        self.rollback_task.ending.get() || store.meta.borrow().rollback(self.id).is_some()
    }

    /// A group of snapshots was published, one of them of this origin.
    pub fn note_snapshots(&self, store: &Store<D>, group: &[VolumeId]) {
        store.unflushed_snapshots.set(true);
        self.unflushed_snapshots.borrow_mut().extend(group);
    }

    /// Flushes for the snapshots published since the last call; returns those whose record must not become
    /// durable.
    async fn flush_new_snapshots(&self) -> Vec<VolumeId> {
        // They stay in the list during the flush: every other commit has to wait for a flush, too.
        let covered = correct!(
            self.unflushed_snapshots.borrow().clone(),
            Bug::SettledTooEarly => self.unflushed_snapshots.take()
        );
        if covered.is_empty() {
            return Vec::new();
        }
        let flushed = self.flush().await;
        // Another flush may have handled some of them, or they may have been withdrawn: decide only on those
        // still in the list.
        let decided: Vec<VolumeId> =
            self.unflushed_snapshots.borrow_mut().extract_if(.., |id| covered.contains(id)).collect();
        match flushed {
            Ok(()) => Vec::new(),
            Err(_) => correct!(decided, Bug::SettledFromCopy => covered),
        }
    }
}

/// The origins of a pool whose devices are open.
pub struct Origins<D: Device> {
    store: Rc<Store<D>>,
    open: RefCell<BTreeMap<VolumeId, Rc<Origin<D>>>>,
}

impl<D: Device> Origins<D> {
    /// None is open.
    pub fn new(store: &Rc<Store<D>>) -> Rc<Origins<D>> {
        Rc::new(Origins { store: store.clone(), open: RefCell::default() })
    }

    /// Whether origins have to be flushed before records of new snapshots become durable.
    pub fn has_unflushed_snapshots(&self) -> bool {
        self.open.borrow().values().any(|origin| !origin.unflushed_snapshots.borrow().is_empty())
    }

    /// Before records become durable: flushes the origins of new snapshots. Snapshots of an origin whose
    /// flush fails are deleted with the same commit.
    pub async fn flush_snapshotted_origins(&self) -> Result<()> {
        let ids: Vec<VolumeId> = self.open.borrow().keys().copied().collect();
        for id in ids {
            let Some(settling) = self.open.borrow().get(&id).map(|origin| origin.flush_lock.clone()) else {
                continue;
            };
            // The lock comes before the use of the origin: a commit that waits here is no user.
            let _held = settling.lock(0..1, LockMode::Shared).await;
            let Some(origin) = self.open.borrow().get(&id).cloned() else { continue };
            let lost = origin.flush_new_snapshots().await;
            let mut meta = self.store.meta.borrow_mut();
            let ids: Vec<VolumeId> = lost.into_iter().filter(|&id| meta.directory.is_snapshot(id)).collect();
            if !ids.is_empty() {
                publish_admitted(&self.store, &mut meta, &Record::Delete { ids })?;
            }
        }
        Ok(())
    }

    /// Flushes origins that were written.
    pub async fn flush_origins(&self) {
        let ids: Vec<VolumeId> = self.open.borrow().keys().copied().collect();
        for id in ids {
            let Some(settling) = self.open.borrow().get(&id).map(|origin| origin.flush_lock.clone()) else {
                continue;
            };
            let _held = settling.lock(0..1, LockMode::Shared).await;
            let Some(origin) = self.open.borrow().get(&id).filter(|o| o.is_dirty.get()).cloned() else { continue };
            // After a failure the origin refuses requests with the reason.
            let _ = origin.flush().await;
        }
    }

    /// Stops the rollbacks of all origins until they are opened again.
    pub async fn stop_rolling(&self) {
        let origins: Vec<Rc<Origin<D>>> = self.open.borrow().values().cloned().collect();
        for origin in origins {
            origin.stop_rolling().await;
        }
    }

    /// The origin, if its device is open.
    pub fn attached(&self, id: VolumeId) -> Result<Rc<Origin<D>>> {
        let meta = self.store.meta.borrow();
        let record = &meta.directory.get(id).ok_or_else(deleted_error)?.record;
        self.attached_with(record)
    }

    /// The origin with this record, if its device is open.
    pub fn attached_with(&self, record: &VolumeRecord) -> Result<Rc<Origin<D>>> {
        self.open.borrow().get(&record.id).cloned().ok_or_else(|| {
            let why = format!("the device of {:?} is not open; it was last at {:?}", record.name, record.origin);
            Error::new(ErrorKind::Busy, why)
        })
    }
}
