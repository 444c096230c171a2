//! The store: the device of a pool and the catalog in memory.
//!
//! The catalog changes in short synchronous sections (`Store::retry_on_miss`); what they miss is loaded between
//! two attempts. Device I/O happens outside of them: records are written by commits, everything else by
//! checkpoints. What only layers above can do is called through [`Hooks`].

pub mod checkpoint;
pub mod checkpoint_steps;
pub mod commit;
mod early;
pub mod events;
mod heartbeat;
mod host_enospc;
mod info;
pub mod last_used;
pub mod load;
pub mod open;
mod options;
mod overlap;
pub mod publish;
mod replay;
pub mod retained;
mod takeover;
pub mod transaction;
pub mod view;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};

use crate::catalog::Catalog;
use crate::copier::{Client, Copier};
use crate::counters::PoolCounters;
use crate::device::{CachedDevice, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Superblock;
use crate::journal::invalidate;
use crate::live::LiveVolumes;
use crate::runtime::{LocalFuture, Runtime};
use crate::sync::{Event, Flushes, Generations, RangeLocks};
use crate::types::{PageAddr, VolumeId};

pub use early::write_early;
pub use events::PoolEvent;
pub use heartbeat::HostIdentity;
pub use host_enospc::HostShortage;
pub use info::{
    CopierInfo, PoolInfo, PoolSpace, Recorded, SUPERBLOCK_AT, VolumeCopying, is_low, mode, pool_info, pool_space,
    recorded, volume_copying,
};
pub use load::{EditError, REPAIR_HINT, Retry, changed_error, damaged_table_error, deleted_error, no_space_error};
pub use open::{FormatOptions, OpenedPool, format, read_superblock};
pub use options::{DiscardPolicy, EarlyGroups, LowWater, OpenOptions, Recovery, WhenFull};
pub use view::{Root, View, roots_of};

/// The device of an open pool, its catalog, and what writes the one to the other.
pub struct Store<D> {
    pub device: Rc<CachedDevice<D>>,
    pub runtime: Rc<dyn Runtime>,
    pub options: OpenOptions,
    pub meta: RefCell<Catalog>,
    /// State of open volumes.
    pub live: RefCell<LiveVolumes>,
    /// The layers above.
    pub hooks: StoreHooks,
    /// Origins may have snapshots for which they were not flushed.
    pub unflushed_snapshots: Cell<bool>,
    /// Volumes without a name or a handle could not be deleted for lack of space.
    pub orphans_left: Cell<bool>,
    /// The superblock on the device.
    pub superblock: RefCell<Superblock>,
    pub copier: Copier<CachedDevice<D>>,
    pub generations: Generations,
    pub commits: commit::Commits,
    pub interval: commit::Interval,
    /// Volumes with a last change that is not recorded.
    pub times: commit::Times,
    pub flushes: Flushes,
    pub checkpoints: checkpoint::Checkpoints,
    pub count_log_flush: checkpoint::CountLogFlush,
    pub host_enospc: host_enospc::HostEnospc,
    pub retained: retained::RetainedSpace,
    /// The error after which nothing is acknowledged.
    pub failed: RefCell<Option<Error>>,
    /// Space was freed, or the pool failed: waiting requests check again.
    pub space_changed: Event,
    /// Whether the reaper runs.
    pub reaping: Cell<bool>,
    pub reaped: Event,
    /// Walks over a frozen checkpoint view; writers do not wait for them.
    pub views: view::Views,
    /// Pages of metadata that are being loaded.
    pub loading: RefCell<BTreeSet<PageAddr>>,
    pub loaded: Event,
    /// The slot that was newer when the pool was opened.
    pub superblock_slot: Cell<usize>,
    /// Held while the superblock is written: an older one must never follow a newer one.
    pub superblock_lock: Rc<RangeLocks>,
    /// The superblock carries the incarnation of this open.
    pub active: Cell<bool>,
    pub full: Cell<bool>,
    /// The pool is closing: nothing waits for a full host.
    pub closing: Cell<bool>,
    pub closed: Cell<bool>,
    pub counters: PoolCounters,
    pub observer: RefCell<Option<events::Observer>>,
    pub recovery: Cell<Recovery>,
    /// The open has ended. Before that no background task runs, so that every record is either replayed or in
    /// the volatile log.
    pub opened: Cell<bool>,
    /// Damage of the other superblock slot.
    pub superblock_flaw: RefCell<Option<String>>,
    /// The other slot has an older superblock.
    pub superblocks_differ: Cell<bool>,
    /// Heartbeat for other hosts.
    pub beats: heartbeat::Beats,
}

impl<D: Device> Store<D> {
    /// Refuses if the pool cannot be written.
    pub fn check_writable(&self) -> Result<()> {
        self.check_alive()?;
        if self.options.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the pool was opened for reading only"));
        }
        Ok(())
    }

    /// Refuses after a failure.
    pub fn check_alive(&self) -> Result<()> {
        if let Some(error) = &*self.failed.borrow() {
            return Err(error.clone());
        }
        if self.closed.get() {
            return Err(Error::new(ErrorKind::Failed, "the pool has been closed"));
        }
        Ok(())
    }

    /// Fails the pool: nothing is acknowledged from now on.
    pub fn fail(&self, cause: &Error) -> Error {
        let error = match self.closing.get() && cause.is_full_host() {
            // The journal has everything that the checkpoint would contain.
            true => Error::new(ErrorKind::NoSpace, cause.to_string()),
            false => {
                Error::new(ErrorKind::Failed, format!("{cause}; the pool refuses writes until it is opened again"))
            }
        };
        self.failed.borrow_mut().get_or_insert(error.clone());
        self.space_changed.notify();
        self.reaped.notify();
        error
    }
}

/// Invalidates the volatile log of this open.
pub fn end_volatile<D: Device>(store: &Store<D>) {
    if let Some(log) = store.options.volatile.as_ref().filter(|log| log.write) {
        invalidate(&log.memory);
    }
}

/// The copier's client for a volume, if that exists.
pub fn copy_client<D: Device>(store: &Store<D>, id: VolumeId) -> Option<Rc<Client>> {
    let meta = store.meta.borrow();
    let record = &meta.directory.get(id)?.record;
    Some(store.live.borrow_mut().activity_or_create(record).copies.clone())
}

/// Calls from the store and from volumes to the layers above them.
pub trait Hooks {
    /// Whether origins have to be flushed before records of new snapshots become durable.
    fn has_unflushed_snapshots(&self) -> bool;
    /// Flushes them. Snapshots of an origin that could not be flushed are deleted with the same commit.
    fn flush_snapshotted_origins(&self) -> LocalFuture<Result<()>>;
    /// Flushes origins that were written.
    fn flush_origins(&self) -> LocalFuture<()>;
    /// Waits until all deleted space is free and reusable.
    fn wait_freed(&self) -> LocalFuture<Result<()>>;
    /// There may be space of deleted volumes to free.
    fn reap_soon(&self);
    /// There may be pages to gather.
    fn gather_soon(&self);
    /// `copy` has just become a clone of `source`.
    fn note_cloned(&self, catalog: &Catalog, source: VolumeId, copy: VolumeId);
}

/// The hooks of a store; none once the pool and its volumes were dropped.
#[derive(Default)]
pub struct StoreHooks(OnceCell<Weak<dyn Hooks>>);

impl StoreHooks {
    /// Connects the layers above.
    ///
    /// # Panics
    /// If there are some already.
    pub fn connect(&self, hooks: Weak<dyn Hooks>) {
        assert!(self.0.set(hooks).is_ok(), "a store has one upkeep");
    }

    /// The layers above; none while the pool is being opened or dropped.
    pub fn get(&self) -> Option<Rc<dyn Hooks>> {
        self.0.get().and_then(Weak::upgrade)
    }

    /// Whether origins have to be flushed before records of new snapshots become durable.
    pub fn has_unflushed_snapshots(&self) -> bool {
        self.get().is_some_and(|hooks| hooks.has_unflushed_snapshots())
    }

    /// Before records become durable: flushes the origins of new snapshots.
    pub async fn flush_snapshotted_origins(&self) -> Result<()> {
        match self.get().filter(|hooks| hooks.has_unflushed_snapshots()) {
            Some(hooks) => hooks.flush_snapshotted_origins().await,
            None => Ok(()),
        }
    }

    /// Waits until all deleted space is free and reusable.
    pub async fn wait_freed(&self) -> Result<()> {
        match self.get() {
            Some(hooks) => hooks.wait_freed().await,
            None => Err(Error::new(ErrorKind::Failed, "the pool has been dropped")),
        }
    }

    /// Starts freeing space of deleted volumes if there is some.
    pub fn reap_soon(&self) {
        if let Some(hooks) = self.get() {
            hooks.reap_soon();
        }
    }

    /// `copy` has just become a clone of `source`.
    pub fn note_cloned(&self, catalog: &Catalog, source: VolumeId, copy: VolumeId) {
        if let Some(hooks) = self.get() {
            hooks.note_cloned(catalog, source, copy);
        }
    }

    /// Starts gathering pages if some are scattered.
    pub fn gather_soon(&self) {
        if let Some(hooks) = self.get() {
            hooks.gather_soon();
        }
    }
}
