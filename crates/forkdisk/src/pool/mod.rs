//! An open pool: the single owner of all metadata.
//!
//! Metadata changes in short synchronous sections (`Inner::retry_on_miss`); what they miss is loaded between
//! two attempts. Device I/O happens outside of them.

mod check;
mod checkpoint;
mod commit;
mod compare;
mod copying;
mod count_log_flush;
mod directory;
mod events;
mod files;
mod flush;
mod gather;
mod heartbeat;
mod host_enospc;
mod identity;
mod info;
mod interval;
mod load;
mod meta;
mod open;
mod quota;
mod reap;
mod repair;
mod replay;
mod statistics;
mod takeover;
mod times;
mod unnamed;
mod verbs;
mod view;
mod walk;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use crate::copier::Copier;
use crate::counters::PoolCounters;
use crate::device::{Buf, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Superblock;
use crate::journal::{VolatileLog, invalidate};
use crate::origin::Origin;
use crate::runtime::Runtime;
use crate::sync::{Event, Flushes, Generations, RangeLocks};
use crate::types::{PageAddr, VolumeId};

pub use check::CheckReport;
pub use compare::{DiffClass, DiffPart, DiffRun};
pub use copying::{CopierInfo, VolumeCopying};
pub use directory::{NAME_MARKS, is_name_character};
pub use events::PoolEvent;
pub use files::Child;
pub use gather::GatherReport;
pub use heartbeat::HostIdentity;
pub use identity::{set_heartbeat, set_uuid};
pub use info::{Mode, PoolInfo, Protection, Recorded, SUPERBLOCK_AT, Usage, VolumeInfo, recorded};
pub use open::FormatOptions;
pub use repair::{Repair, Replacement, replace_pages};
pub use verbs::CreateOptions;

pub(crate) use directory::{CatalogEntry, Chain};
pub(crate) use host_enospc::HostShortage;
pub(crate) use load::{EditError, deleted_error, no_space_error};
pub(crate) use meta::{Failure, Meta, pages_of};
pub(crate) use reap::yield_now;
pub(crate) use times::LastChange;
pub(crate) use verbs::{check_size, refuse_in_use};

/// What happens to a write that needs space when there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits this long for space, then fails with ENOSPC.
    Wait(Duration),
    /// The write fails with ENOSPC at once.
    Error,
}

/// Free space below which a pool is low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowWater {
    /// Percent of the pool.
    Percent(u8),
    /// Bytes.
    Bytes(u64),
}

impl LowWater {
    /// The limit in a pool of `size` bytes; 0: never low.
    pub fn bytes(self, size: u64) -> u64 {
        match self {
            LowWater::Percent(percent) => size / 100 * u64::from(percent),
            LowWater::Bytes(bytes) => bytes,
        }
    }
}

/// Options of opening a pool.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Nothing is written, not even by recovery.
    pub read_only: bool,
    /// Bytes of clean metadata kept in memory (default 32 MiB).
    pub cache: usize,
    /// Most bytes of dirty metadata (default 64 MiB).
    pub dirty: usize,
    /// What happens to a write that needs space when there is none (default: `Error`).
    pub when_full: WhenFull,
    /// Whether freed space is discarded on the device, which makes holes in a pool file (default true).
    pub discard: bool,
    /// Free space below which the pool is reported as low (default 5 %).
    pub low_water: LowWater,
    /// Memory that outlives the process: with it, a crash of the process alone loses nothing acknowledged
    /// (default: none).
    pub volatile: Option<VolatileLog>,
    /// Longest time for which an acknowledged change waits before it is committed with a flush; zero (the
    /// default): no limit. The program sets 5 s.
    pub commit_interval: Duration,
    /// Identity of this host: required for a pool with a heartbeat.
    pub host: Option<HostIdentity>,
    /// Clock in nanoseconds since 1970. With it, volumes record the time of their last change
    /// ([`Attributes`](crate::Attributes)); without (the default) only
    /// [`set_attributes`](Pool::set_attributes) does.
    pub clock: Option<fn() -> i64>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        let (cache, dirty) = (32 << 20, 64 << 20);
        let (when_full, low_water) = (WhenFull::Error, LowWater::Percent(5));
        let (volatile, commit_interval) = (None, Duration::ZERO);
        OpenOptions {
            read_only: false,
            cache,
            dirty,
            when_full,
            discard: true,
            low_water,
            volatile,
            commit_interval,
            host: None,
            clock: None,
        }
    }
}

/// What the open found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// The pool had been closed in order.
    pub clean: bool,
    /// Records replayed from the journal.
    pub journal: u64,
    /// Records replayed from the volatile log of a process that died.
    pub volatile: u64,
}

/// An open pool, for use on one thread (`!Send`). Cheap to clone; all clones are the same pool.
///
/// Run the futures of its methods to their end (spawn a task for each request).
pub struct Pool<D: Device>(pub(crate) Rc<Inner<D>>);

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Pool(self.0.clone())
    }
}

pub(crate) struct Inner<D> {
    pub device: Rc<D>,
    pub runtime: Rc<dyn Runtime>,
    pub options: OpenOptions,
    pub meta: RefCell<Meta>,
    /// Origins whose devices are open.
    pub origins: RefCell<BTreeMap<VolumeId, Rc<Origin<D>>>>,
    /// The superblock on the device.
    pub superblock: RefCell<Superblock>,
    pub copier: Copier<D>,
    pub generations: Generations,
    pub commits: commit::Commits,
    pub interval: interval::Interval,
    /// Volumes with a last change that is not recorded.
    pub times: times::Times,
    pub flushes: Flushes,
    pub checkpoints: checkpoint::Checkpoints,
    pub count_log_flush: count_log_flush::CountLogFlush,
    pub host_enospc: host_enospc::HostEnospc,
    /// The error after which nothing is acknowledged.
    pub failed: RefCell<Option<Error>>,
    /// Space was freed, or the pool failed: waiting requests check again.
    pub space_changed: Event,
    /// Whether the reaper runs.
    pub reaping: Cell<bool>,
    pub reaped: Event,
    /// Walks over a frozen checkpoint view; writers do not wait for them.
    pub views: view::Views,
    /// Held by the reaper during a step, and by a check so that nothing is reaped meanwhile.
    pub reap_lock: Rc<RangeLocks>,
    /// The scheduler of gathering.
    pub gathering: gather::GatherScheduler,
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
    /// Heartbeat for other hosts.
    pub beats: heartbeat::Beats,
}

impl<D: Device> Inner<D> {
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

    /// Invalidates the volatile log of this open.
    pub fn end_volatile(&self) {
        if let Some(log) = self.options.volatile.as_ref().filter(|log| log.write) {
            invalidate(&log.memory);
        }
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

impl<D: Device> Pool<D> {
    /// What the open of this pool found.
    pub fn recovery(&self) -> Recovery {
        self.0.recovery.get()
    }

    /// A buffer of `len` bytes fit for the device, with unspecified contents.
    pub fn buffer(&self, len: usize) -> Buf {
        self.0.device.buffer(len)
    }

    /// The device below.
    pub fn device(&self) -> &D {
        &self.0.device
    }

    /// Makes all acknowledged changes durable.
    pub async fn flush(&self) -> Result<()> {
        self.0.commit_for_client().await
    }

    /// Waits until all changes of names and attributes survive a crash of this process, in a pool opened with
    /// [`OpenOptions::volatile`]. Returns at once unless the volatile log was full. Call it before such a
    /// change is acknowledged without a flush; writes, discards and changes of size call it themselves.
    pub async fn wait_process_safe(&self) -> Result<()> {
        self.0.wait_process_safe().await
    }

    /// Whether [`wait_process_safe`](Self::wait_process_safe) would return at once.
    pub fn is_process_safe(&self) -> bool {
        self.0.is_process_safe()
    }

    /// Writes a checkpoint: afterwards there is nothing to replay.
    pub async fn checkpoint(&self) -> Result<()> {
        self.0.check_writable()?;
        self.0.clone().checkpoint().await?;
        self.0.reset_background_mark();
        Ok(())
    }
}
