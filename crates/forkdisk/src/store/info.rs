//! Properties of a pool, also of one that is not open, and settings and figures of copying.

use crate::catalog::Catalog;
use crate::copier::CopyStats;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, CopierSettings, SUPERBLOCK_PAGES, Superblock, Throttle, VolumeRecord, VolumeState};
use crate::types::{BLOCK_PAGES, Mode, NO_ACCOUNT, PAGE_SIZE};

use super::Store;

/// Most levels of tables that a write to an empty volume creates.
const MAX_MAP_LEVELS: u64 = 4;

/// Properties of a pool. All amounts in bytes.
///
/// With the feature `serde` it is serialised as the control protocol and the metrics show it, without `unused`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PoolInfo {
    /// Identity.
    #[cfg_attr(feature = "serde", serde(with = "crate::names::uuid"))]
    pub uuid: [u8; 16],
    /// Time of creation, in seconds since 1970.
    #[cfg_attr(feature = "serde", serde(default))]
    pub created: u64,
    /// What it accepts at the moment.
    pub mode: Mode,
    /// Length.
    pub size: u64,
    /// In use.
    pub used: u64,
    /// What new writes can use: `unused` without the needs of the next checkpoint and of the tables of such
    /// writes.
    pub free: u64,
    /// Not in use.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub unused: u64,
    /// Freed, and usable after the next checkpoint (estimate).
    pub freeing: u64,
    /// Free space below which it is low.
    pub low_water: u64,
    /// Low, counting what the next checkpoint frees, or out of data space.
    pub low: bool,
    /// Of `used`: superblock, counts and journal.
    pub metadata: u64,
    /// Number of volumes.
    pub volumes: u64,
    /// Of them, origins.
    #[cfg_attr(feature = "serde", serde(default))]
    pub origins: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Exceptions of origins.
    #[cfg_attr(feature = "serde", serde(default))]
    pub kept: u64,
    /// Mapped by volumes, each counted separately.
    pub referenced: u64,
    /// Of that, scattered; see [`VolumeInfo::scattered`].
    pub scattered: u64,
    /// Dirty metadata.
    pub dirty: u64,
    /// Length of the journal.
    pub journal_size: u64,
    /// Of it, what replay would read.
    pub journal_used: u64,
    /// Rises with every superblock.
    pub generation: u64,
    /// Closed in order before it was opened.
    #[cfg_attr(feature = "serde", serde(default))]
    pub clean: bool,
}

/// Settings and figures of a pool's copier.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CopierInfo {
    /// Its settings.
    pub settings: CopierSettings,
    /// Figures of all copies since the pool was opened.
    pub stats: CopyStats,
    /// Bytes of buffers in use.
    pub buffers_in_use: u64,
}

/// Settings and figures of the copies of a volume.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct VolumeCopying {
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// Limit of its copies, besides that of the pool.
    pub throttle: Throttle,
    /// Figures of its copies since the pool was opened.
    pub stats: CopyStats,
}

/// Offsets of the two superblocks of a pool, in bytes; each is [`PAGE_SIZE`] long.
pub const SUPERBLOCK_AT: [u64; 2] =
    [SUPERBLOCK_PAGES[0].0 * PAGE_SIZE as u64, SUPERBLOCK_PAGES[1].0 * PAGE_SIZE as u64];

/// Contents of a superblock that describe the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// Identity of the pool.
    pub uuid: [u8; 16],
    /// Rises with every superblock.
    pub generation: u64,
    /// Closed in order, with nothing left to do.
    pub clean: bool,
}

/// Decodes `page`, read from superblock slot `slot` (0 or 1), without opening the pool. `None` if it is no
/// valid superblock. The newer of the two counts.
pub fn recorded(slot: usize, page: &[u8]) -> Option<Recorded> {
    let whole = page.get(..PAGE_SIZE)?;
    let superblock = Superblock::decode(*SUPERBLOCK_PAGES.get(slot)?, whole).ok()?;
    Some(Recorded { uuid: superblock.uuid, generation: superblock.generation, clean: superblock.clean })
}

/// Whether less space is free than the options say, or none can be used, in the pool or the host file system.
pub fn is_low<D: Device>(store: &Store<D>) -> bool {
    if mode(store) == Mode::OutOfDataSpace {
        return true;
    }
    let meta = store.meta.borrow();
    let free = (meta.space.free() + meta.space.pending()) * PAGE_SIZE as u64;
    free < store.options.low_water.bytes(meta.size())
}

/// Space of a pool, known without a walk over its volumes. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolSpace {
    /// Length.
    pub size: u64,
    /// That new writes can use, as in [`PoolInfo`].
    pub free: u64,
    /// That the next checkpoint makes free.
    pub freeing: u64,
    /// Number of volumes, snapshots and folders, with the deleted ones that still hold space.
    pub entries: u64,
}

/// Space of the pool.
pub fn pool_space<D: Device>(store: &Store<D>) -> PoolSpace {
    let meta = store.meta.borrow();
    let page = PAGE_SIZE as u64;
    let (free, freeing) = (writable_pages(&meta) * page, meta.space.pending() * page);
    PoolSpace { size: meta.size(), free, freeing, entries: meta.directory.iter().len() as u64 }
}

/// Properties of the pool.
pub fn pool_info<D: Device>(store: &Store<D>) -> PoolInfo {
    let (meta, superblock) = (store.meta.borrow(), store.superblock.borrow());
    let page = PAGE_SIZE as u64;
    let layout = meta.space.layout();
    let Sums { volumes, origins, snapshots, kept, referenced, seams } = sums(&meta);
    let (unused, freeing) = (meta.space.free() * page, meta.space.pending() * page);
    PoolInfo {
        uuid: superblock.uuid,
        created: superblock.created,
        mode: mode(store),
        size: meta.size(),
        used: meta.size().saturating_sub(unused + freeing),
        free: writable_pages(&meta) * page,
        unused,
        freeing,
        low_water: store.options.low_water.bytes(meta.size()),
        low: is_low(store),
        metadata: layout.reserved_pages() * page + meta.journal.length(),
        volumes: volumes + origins,
        origins,
        snapshots,
        kept: kept * page,
        referenced: referenced * page,
        scattered: seams * page,
        dirty: meta.dirty_bytes() as u64,
        journal_size: meta.journal.length(),
        journal_used: meta.journal.used(),
        generation: superblock.generation,
        clean: superblock.clean,
    }
}

/// Pages that writes can get together. A write needs more than its data: the pages of the next
/// checkpoint, and a table for each block that it does not fill.
fn writable_pages(catalog: &Catalog) -> u64 {
    let held = catalog.space.accounts.held_for_others(NO_ACCOUNT);
    let left = catalog.space.unreserved(catalog.checkpoint_pages()).saturating_sub(held);
    left.saturating_sub(left / BLOCK_PAGES + MAX_MAP_LEVELS)
}

/// Numbers of volumes and pages, over all volumes.
#[derive(Default)]
struct Sums {
    volumes: u64,
    origins: u64,
    snapshots: u64,
    /// Exceptions of all origins, in pages.
    kept: u64,
    referenced: u64,
    seams: u64,
}

fn sums(catalog: &Catalog) -> Sums {
    let mut sums = Sums::default();
    for volume in catalog.directory.iter() {
        let (record, is_visible) = (&volume.record, u64::from(!volume.pending));
        match record.state {
            VolumeState::Volume => {
                sums.volumes += is_visible;
                sums.referenced += record.referenced;
                sums.seams += record.seams;
            }
            VolumeState::Origin => sums.origins += is_visible,
            VolumeState::Snapshot => {
                sums.snapshots += is_visible;
                // Of other snapshots the cursor is 0.
                if record.cursor > 0 && is_of_origin(catalog, record) {
                    sums.kept += record.cursor;
                }
            }
            _ => {}
        }
    }
    sums
}

fn is_of_origin(catalog: &Catalog, record: &VolumeRecord) -> bool {
    catalog.directory.get(record.parent).is_some_and(|volume| volume.record.origin_record.is_some())
}

/// What the pool accepts at the moment.
pub fn mode<D: Device>(store: &Store<D>) -> Mode {
    match () {
        () if store.failed.borrow().is_some() => Mode::Failed,
        () if store.options.read_only => Mode::ReadOnly,
        () if store.full.get() => Mode::OutOfDataSpace,
        () => Mode::ReadWrite,
    }
}

/// Settings and figures of the copies of one volume; refuses a snapshot, for which nothing is copied.
pub fn volume_copying<D: Device>(store: &Store<D>, name: &str) -> Result<VolumeCopying> {
    let meta = store.meta.borrow();
    let volume = meta.directory.find(name)?;
    let (VolumeState::Volume | VolumeState::Origin) = volume.record.state else {
        return Err(Error::new(ErrorKind::ReadOnly, format!("{name:?} is a snapshot; nothing is copied for it")));
    };
    let (break_policy, throttle) = (volume.record.break_policy, volume.record.throttle);
    let live = store.live.borrow();
    let stats = live.activity(volume.record.id).map(|activity| activity.copies.stats()).unwrap_or_default();
    Ok(VolumeCopying { break_policy, throttle, stats })
}
