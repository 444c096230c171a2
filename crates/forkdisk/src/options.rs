//! Constructors and setters of the public options. New options may be added to each, so that outside of this
//! crate they are made by `new` or `default` and changed by `with_…`, never listed in full.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::catalog::{Changes, CreateOptions, ExtensionChanges, ForkOptions};
use crate::format::{
    BreakPolicy, CloneProperty, CopierSettings, GatherPolicy, Lease, OriginFull, SnapshotFlags, Throttle, Writes,
    Zeroes,
};
use crate::journal::{VolatileLog, VolatileMemory};
use crate::origin::{OriginPlace, ProtectOptions};
use crate::store::{DiscardPolicy, EarlyGroups, FormatOptions, HostIdentity, LowWater, OpenOptions, WhenFull};

/// Default chunk of an origin, in bytes.
const DEFAULT_ORIGIN_CHUNK_BYTES: u64 = 64 << 10;

/// Declares setters of options: `with_cache cache: usize` for a field `cache`. The crates of forkdisk use it.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($($options:ty { $($setter:ident $field:ident: $kind:ty),* $(,)? })*) => {
        $(impl $options { $(
            #[doc = concat!(
                "The same options with another [`", stringify!($field), "`](Self::", stringify!($field), ").",
            )]
            #[must_use]
            pub fn $setter(self, $field: $kind) -> Self {
                Self { $field: $field.into(), ..self }
            }
        )* })*
    };
}

setters! {
    FormatOptions {
        with_journal journal: impl Into<Option<u64>>,
        with_preallocated preallocated: bool,
    }
    ForkOptions {
        with_changes changes: Changes,
        with_uid uid: impl Into<Option<u32>>,
        with_gid gid: impl Into<Option<u32>>,
        with_mode mode: impl Into<Option<u32>>,
    }
    OpenOptions {
        with_read_only read_only: bool,
        with_cache cache: usize,
        with_shared_cache shared_cache: u64,
        with_dirty dirty: usize,
        with_when_full when_full: WhenFull,
        with_discard discard: impl Into<DiscardPolicy>,
        with_low_water low_water: LowWater,
        with_volatile volatile: impl Into<Option<VolatileLog>>,
        with_commit_interval commit_interval: Duration,
        with_background_commit background_commit: u64,
        with_early_groups early_groups: EarlyGroups,
        with_host host: impl Into<Option<HostIdentity>>,
        with_clock clock: Option<fn() -> i64>,
        with_keep_removed keep_removed: bool,
    }
    CreateOptions {
        with_chunk chunk: u64,
        with_break_policy break_policy: BreakPolicy,
        with_quota quota: u64,
        with_gather gather: GatherPolicy,
        with_extension extension: ExtensionChanges,
    }
    Changes {
        with_chunk chunk: impl Into<Option<u64>>,
        with_break_policy break_policy: impl Into<Option<BreakPolicy>>,
        with_throttle throttle: impl Into<Option<Throttle>>,
        with_quota quota: impl Into<Option<u64>>,
        with_gather gather: impl Into<Option<GatherPolicy>>,
        with_copy_ahead copy_ahead: impl Into<Option<u64>>,
        with_when_full when_full: impl Into<Option<OriginFull>>,
        with_extension extension: ExtensionChanges,
    }
    ExtensionChanges {
        with_expires expires: impl Into<Option<u64>>,
        with_lease lease: impl Into<Option<Option<Lease>>>,
        with_created_by created_by: impl Into<Option<String>>,
        with_labels labels: BTreeMap<String, Option<String>>,
        with_writes writes: impl Into<Option<Writes>>,
        with_zeroes zeroes: impl Into<Option<Zeroes>>,
        with_diverge diverge: impl Into<Option<u64>>,
        with_reserve reserve: impl Into<Option<u64>>,
        with_inherited inherited: BTreeMap<CloneProperty, Option<u64>>,
    }
    ProtectOptions {
        with_chunk chunk: u64,
        with_copy_ahead copy_ahead: u64,
        with_when_full when_full: OriginFull,
    }
    OriginPlace {
        with_identity identity: impl Into<String>,
    }
    CopierSettings {
        with_subjob_size subjob_size: u32,
        with_split_count split_count: u32,
        with_buffers buffers: u64,
        with_throttle throttle: Throttle,
        with_offload offload: bool,
    }
    VolatileLog {
        with_write write: bool,
    }
}

impl FormatOptions {
    /// A pool of `size` bytes with this UUID, formatted at `now` (seconds since 1970), with the default journal.
    pub fn new(size: u64, uuid: [u8; 16], now: u64) -> FormatOptions {
        FormatOptions { size, uuid, now, journal: None, preallocated: false }
    }
}

impl ProtectOptions {
    /// Protects the device at `place` from `now` on (seconds since 1970), with chunks of 64 KiB, without copying
    /// ahead; a write without space for the old contents fails.
    pub fn new(place: OriginPlace, now: u64) -> ProtectOptions {
        let (chunk, when_full) = (DEFAULT_ORIGIN_CHUNK_BYTES, OriginFull::Error);
        ProtectOptions { place, chunk, copy_ahead: 0, when_full, now }
    }
}

impl HostIdentity {
    /// The host `name`, with a number of this boot of the machine and a random number of this open.
    pub fn new(name: impl Into<String>, boot: [u8; 16], open: [u8; 16]) -> HostIdentity {
        HostIdentity { name: name.into(), boot, open }
    }
}

impl VolatileLog {
    /// A log in `memory` that belongs to `identity` and that this open also writes.
    pub fn new(memory: VolatileMemory, identity: [u8; 32]) -> VolatileLog {
        VolatileLog { memory, identity, write: true }
    }
}

impl SnapshotFlags {
    /// No flag.
    pub const NONE: SnapshotFlags = SnapshotFlags { independent: false, droppable: false, writable: false };

    /// The same flags with another [`independent`](Self::independent).
    #[must_use]
    pub const fn with_independent(self, independent: bool) -> SnapshotFlags {
        SnapshotFlags { independent, ..self }
    }

    /// The same flags with another [`droppable`](Self::droppable).
    #[must_use]
    pub const fn with_droppable(self, droppable: bool) -> SnapshotFlags {
        SnapshotFlags { droppable, ..self }
    }

    /// The same flags with another [`writable`](Self::writable).
    #[must_use]
    pub const fn with_writable(self, writable: bool) -> SnapshotFlags {
        SnapshotFlags { writable, ..self }
    }
}

impl Throttle {
    /// At most this percentage of the time (1 to 100) and this many bytes per second (0: no limit).
    pub const fn new(percent: u8, bytes_per_second: u64) -> Throttle {
        Throttle { percent, bytes_per_second }
    }
}
