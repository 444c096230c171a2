//! Options of opening a pool.

use std::time::Duration;

use crate::journal::VolatileLog;

use super::HostIdentity;

/// What happens to a write that needs space when there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhenFull {
    /// It waits this long for space, then fails with ENOSPC.
    Wait(Duration),
    /// The write fails with ENOSPC at once.
    Error,
}

/// Free space below which a pool is low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

/// When freed space is discarded on the device, which makes holes in a pool file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiscardPolicy {
    /// Before it can be used again.
    AtOnce,
    /// It is retained, and used again before other space. It is discarded when there are more than `bytes` of it; when
    /// it has been free for `time`, at the latest after twice that (zero: no limit); when the host file system has no
    /// space for a write; and when the pool is closed. What a process retained that was killed stays allocated in the
    /// host until it is used and freed again. In a preallocated pool the same as `Never`.
    Later {
        /// Most bytes retained; zero: as `AtOnce`.
        bytes: u64,
        /// How long they are retained.
        time: Duration,
    },
    /// Never.
    Never,
}

impl DiscardPolicy {
    /// Discards late, with the usual limits: 1 GiB, 10 minutes.
    pub const LATER: DiscardPolicy = DiscardPolicy::Later { bytes: 1 << 30, time: Duration::from_secs(600) };

    /// What holds in a pool, if it is `preallocated` or not: there, what is not to be discarded at once never is.
    pub(crate) fn in_pool(self, preallocated: bool) -> DiscardPolicy {
        if preallocated && self != DiscardPolicy::AtOnce { DiscardPolicy::Never } else { self }
    }

    /// Most bytes that are retained.
    pub(crate) fn retained_bytes(self) -> u64 {
        if let DiscardPolicy::Later { bytes, .. } = self { bytes } else { 0 }
    }
}

impl From<bool> for DiscardPolicy {
    /// At once or never.
    fn from(discard: bool) -> DiscardPolicy {
        if discard { DiscardPolicy::AtOnce } else { DiscardPolicy::Never }
    }
}

/// Options of opening a pool.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Nothing is written, not even by recovery.
    pub read_only: bool,
    /// Bytes of clean metadata kept in memory (default 32 MiB).
    pub cache: usize,
    /// Most bytes of data kept in memory that several volumes or snapshots refer to, so that each page is read once
    /// (default 256 MiB; 0: none).
    pub shared_cache: u64,
    /// Most bytes of dirty metadata (default 64 MiB).
    pub dirty: usize,
    /// What happens to a write that needs space when there is none (default: `Error`).
    pub when_full: WhenFull,
    /// When freed space is discarded on the device (default: [`DiscardPolicy::LATER`]).
    pub discard: DiscardPolicy,
    /// Free space below which the pool is reported as low (default 5 %).
    pub low_water: LowWater,
    /// Memory that outlives the process: with it, a crash of the process alone loses nothing acknowledged
    /// (default: none).
    pub volatile: Option<VolatileLog>,
    /// Longest time for which an acknowledged change waits before it is committed with a flush; zero (the
    /// default): no limit. The program sets 5 s.
    pub commit_interval: Duration,
    /// Bytes of new records after which they are written to the journal although no request waits for that, so that
    /// the next flush has little left to write (default 256 KiB).
    pub background_commit: u64,
    /// Whether the record of a first write is written together with its data, so that a flush behind it has nothing
    /// left to write (default [`EarlyGroups::Expected`]).
    pub early_groups: EarlyGroups,
    /// Identity of this host: required for a pool with a heartbeat.
    pub host: Option<HostIdentity>,
    /// Clock in nanoseconds since 1970. With it, volumes record the time of their last change
    /// ([`Attributes`](crate::Attributes)); without (the default) only
    /// [`set_attributes`](Pool::set_attributes) does.
    pub clock: Option<fn() -> i64>,
    /// Keep volumes that were removed while they were open until the first checkpoint, so that handles to them can be
    /// taken again ([`Pool::volume_by_id`]): for a process that continues the work of another one.
    pub keep_removed: bool,
}

/// When the record of a first write is written to the journal together with its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EarlyGroups {
    /// Never.
    Never,
    /// While clients flush after each write.
    #[default]
    Expected,
    /// Whenever it is possible.
    Always,
}

impl Default for OpenOptions {
    fn default() -> Self {
        let (cache, shared_cache, dirty) = (32 << 20, 256 << 20, 64 << 20);
        let (when_full, low_water) = (WhenFull::Error, LowWater::Percent(5));
        let (volatile, commit_interval, background_commit) = (None, Duration::ZERO, 256 << 10);
        OpenOptions {
            read_only: false,
            cache,
            shared_cache,
            dirty,
            when_full,
            discard: DiscardPolicy::LATER,
            low_water,
            volatile,
            commit_interval,
            background_commit,
            early_groups: EarlyGroups::default(),
            host: None,
            clock: None,
            keep_removed: false,
        }
    }
}

/// What the open found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// The pool had been closed in order.
    pub clean: bool,
    /// Records replayed from the journal.
    pub journal: u64,
    /// Records replayed from the volatile log of a process that died.
    pub volatile: u64,
}
