//! What can be asked of a pool without changing it.

use crate::device::Device;
use crate::error::Result;
use crate::format::{
    Attributes, BreakPolicy, GatherPolicy, OriginFull, SUPERBLOCK_PAGES, SnapshotFlags, Superblock, VolumeRecord,
    VolumeState,
};
use crate::types::{BLOCK_PAGES, PAGE_SIZE, VolumeId};

use super::{Inner, Meta, Pool};

/// Levels of tables that a write to an empty volume makes.
const MAX_MAP_LEVELS: u64 = 4;

/// What a pool will do at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Everything.
    ReadWrite,
    /// Reading only: it was opened so.
    ReadOnly,
    /// Everything that needs no new space.
    OutOfDataSpace,
    /// Reading only, until it is opened again: a flush or a write of metadata failed.
    Failed,
}

/// The pool as a whole. All amounts in bytes.
#[derive(Clone, Debug)]
pub struct PoolInfo {
    /// Its identity.
    pub uuid: [u8; 16],
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// What it will do at the moment.
    pub mode: Mode,
    /// Its length.
    pub size: u64,
    /// What is in use.
    pub used: u64,
    /// What new writes can use: of `unused`, without what the next checkpoint and the tables of such writes need.
    pub free: u64,
    /// What nothing uses.
    pub unused: u64,
    /// What was given up and can be used after the next checkpoint (estimate).
    pub freeing: u64,
    /// Below how much free space it is low.
    pub low_water: u64,
    /// Whether it is, counting what can be used after the next checkpoint, or out of data space.
    pub low: bool,
    /// Of `used`: superblock, counts and journal.
    pub metadata: u64,
    /// Number of volumes.
    pub volumes: u64,
    /// Of them, origins.
    pub origins: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// What is kept for snapshots of origins.
    pub kept: u64,
    /// What volumes have mapped, each for itself.
    pub referenced: u64,
    /// Of that, what does not lie behind what is before it; see [`VolumeInfo::scattered`].
    pub scattered: u64,
    /// Metadata changed and not yet in a checkpoint.
    pub dirty: u64,
    /// Length of the journal.
    pub journal_size: u64,
    /// Of it, what replay would read.
    pub journal_used: u64,
    /// Rises with every superblock.
    pub generation: u64,
    /// Whether it was closed cleanly before it was opened.
    pub clean: bool,
}

/// How an origin is protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Most bytes kept ahead of a sequential writer.
    pub copy_ahead: u64,
    /// What happens to a write whose old contents find no space.
    pub when_full: OriginFull,
    /// Whether it was stopped cleanly and has not been written since.
    pub clean: bool,
    /// The snapshot that a rollback under way brings back, as `volume@snapshot`.
    pub rolling: Option<String>,
}

/// One volume or snapshot.
#[derive(Clone, Debug)]
pub struct VolumeInfo {
    /// Its number.
    pub id: VolumeId,
    /// `volume` or `volume@snapshot`.
    pub name: String,
    /// Whether it is a snapshot.
    pub snapshot: bool,
    /// Whether it is an origin: a device that is protected in place.
    pub protected: bool,
    /// How an origin is protected.
    pub protection: Option<Protection>,
    /// What was said of a snapshot when it was taken.
    pub flags: SnapshotFlags,
    /// Its length in bytes.
    pub size: u64,
    /// How much room a first write reserves, in bytes.
    pub chunk: u64,
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// When its scattered pages are brought together.
    pub gather: GatherPolicy,
    /// Bytes mapped.
    pub referenced: u64,
    /// Of them, bytes that do not lie behind those before them in their block of 1 MiB.
    pub scattered: u64,
    /// Most bytes it may have mapped; 0: no bound.
    pub quota: u64,
    /// Name of what it was cloned from, as it is now; of an origin the path of its device; empty if nothing, or if
    /// that is gone.
    pub origin: String,
    /// The number of what it was cloned from, if that is there still.
    pub origin_id: Option<VolumeId>,
    /// The snapshot of an origin that shows through to it, which it holds; empty if none does.
    pub depends_on: String,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// Open handles.
    pub in_use: usize,
    /// What it has as a file; `None` until somebody sets any of it.
    pub attributes: Option<Attributes>,
}

impl VolumeInfo {
    /// How scattered it is, in percent: pages that do not lie behind the page before them, of all that are mapped.
    pub fn fragmentation(&self) -> f64 {
        if self.referenced == 0 { 0.0 } else { 100.0 * self.scattered as f64 / self.referenced as f64 }
    }
}

/// How much of what a volume refers to is its own. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Mapped.
    pub referenced: u64,
    /// What deleting this one alone would free, tables included.
    pub exclusive: u64,
}

/// Where the two superblocks of a pool lie, in bytes; each is [`PAGE_SIZE`] long.
pub const SUPERBLOCK_AT: [u64; 2] =
    [SUPERBLOCK_PAGES[0].0 * PAGE_SIZE as u64, SUPERBLOCK_PAGES[1].0 * PAGE_SIZE as u64];

/// What a superblock says of the pool as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The pool's identity.
    pub uuid: [u8; 16],
    /// Rises with every superblock written.
    pub generation: u64,
    /// Whether the pool was closed and nothing was left to be done then.
    pub clean: bool,
}

/// What the superblock in slot `slot` (0 or 1) says that was read as `page`: a look from outside, without opening the
/// pool. `None` if that is no whole superblock. The newer of the two holds.
pub fn recorded(slot: usize, page: &[u8]) -> Option<Recorded> {
    let whole = page.get(..PAGE_SIZE)?;
    let superblock = Superblock::decode(*SUPERBLOCK_PAGES.get(slot)?, whole).ok()?;
    Some(Recorded { uuid: superblock.uuid, generation: superblock.generation, clean: superblock.clean })
}

impl Meta {
    /// The snapshot of an origin that shows through to a clone; empty if none does.
    fn base_name(&self, record: &VolumeRecord) -> String {
        let base = self.directory.get(record.base).filter(|_| record.state != VolumeState::Origin);
        base.map_or(String::new(), |v| self.directory.full_name(&v.record))
    }

    /// What it was cloned from, if that is there still and has a name.
    fn origin_of(&self, record: &VolumeRecord) -> Option<&VolumeRecord> {
        let ancestor = self.directory.ancestor(record).filter(|_| !record.origin.is_empty());
        ancestor.map(|v| &v.record).filter(|v| !v.name.is_empty())
    }

    pub(crate) fn info_of(&self, record: &VolumeRecord) -> VolumeInfo {
        let origin = self.origin_of(record);
        VolumeInfo {
            id: record.id,
            name: self.directory.full_name(record),
            snapshot: record.state == VolumeState::Snapshot,
            protected: record.state == VolumeState::Origin,
            protection: record.origin_record.as_ref().map(|protects| Protection {
                copy_ahead: protects.copy_ahead,
                when_full: protects.when_full,
                clean: protects.clean,
                rolling: self.rollback_snapshot(record.id),
            }),
            flags: record.flags,
            size: record.size,
            chunk: record.chunk,
            break_policy: record.break_policy,
            gather: record.gather,
            referenced: record.referenced * PAGE_SIZE as u64,
            scattered: record.seams * PAGE_SIZE as u64,
            quota: record.quota,
            origin: match record.origin_record {
                Some(_) => record.origin.clone(),
                None => origin.map_or(String::new(), |origin| self.directory.full_name(origin)),
            },
            origin_id: origin.map(|origin| origin.id),
            depends_on: self.base_name(record),
            created: record.created,
            in_use: self.live.handles(record.id),
            attributes: record.attributes,
        }
    }
}

impl Meta {
    /// Pages that writes can have together. A write needs more than its own: what the checkpoint takes that follows,
    /// and a table for each block that it does not fill with one.
    fn writable_pages(&self) -> u64 {
        let left = self.space.unreserved(self.checkpoint_pages());
        left.saturating_sub(left / BLOCK_PAGES + MAX_MAP_LEVELS)
    }

    /// Pages kept for snapshots of origins.
    fn kept_pages(&self) -> u64 {
        let of_origin =
            |r: &&VolumeRecord| self.directory.get(r.parent).is_some_and(|v| v.record.origin_record.is_some());
        let snapshots = self.directory.iter().map(|v| &v.record).filter(|r| r.state == VolumeState::Snapshot);
        snapshots.filter(of_origin).map(|r| r.cursor).sum()
    }
}

impl<D: Device> Inner<D> {
    fn mode(&self) -> Mode {
        match () {
            () if self.failed.borrow().is_some() => Mode::Failed,
            () if self.options.read_only => Mode::ReadOnly,
            () if self.full.get() => Mode::OutOfDataSpace,
            () => Mode::ReadWrite,
        }
    }
}

impl<D: Device> Pool<D> {
    /// What it will do at the moment.
    pub fn mode(&self) -> Mode {
        self.0.mode()
    }

    /// Whether there is less free space than [`OpenOptions::low_water`](super::OpenOptions::low_water) says, or none that
    /// can be had, be it for the file system under it.
    pub fn is_low(&self) -> bool {
        if self.mode() == Mode::OutOfDataSpace {
            return true;
        }
        let meta = self.0.meta.borrow();
        let free = (meta.space.available() + meta.space.pending()) * PAGE_SIZE as u64;
        free < self.0.options.low_water.bytes(meta.size())
    }

    /// The pool as a whole.
    pub fn info(&self) -> PoolInfo {
        let inner = &self.0;
        let (meta, superblock) = (inner.meta.borrow(), inner.superblock.borrow());
        let page = PAGE_SIZE as u64;
        let layout = meta.space.layout();
        let seen = |state| meta.directory.iter().filter(|v| v.record.state == state && !v.pending).count() as u64;
        let volumes = || meta.directory.iter().map(|v| &v.record).filter(|r| r.state == VolumeState::Volume);
        let sum = |of: fn(&VolumeRecord) -> u64| volumes().map(of).sum::<u64>();
        let (unused, freeing) = (meta.space.available() * page, meta.space.pending() * page);
        PoolInfo {
            uuid: superblock.uuid,
            created: superblock.created,
            mode: inner.mode(),
            size: meta.size(),
            used: meta.size().saturating_sub(unused + freeing),
            free: meta.writable_pages() * page,
            unused,
            freeing,
            low_water: inner.options.low_water.bytes(meta.size()),
            low: self.is_low(),
            metadata: layout.reserved_pages() * page + meta.journal.length(),
            volumes: seen(VolumeState::Volume) + seen(VolumeState::Origin),
            origins: seen(VolumeState::Origin),
            snapshots: seen(VolumeState::Snapshot),
            kept: meta.kept_pages() * page,
            referenced: sum(|record| record.referenced) * page,
            scattered: sum(|record| record.seams) * page,
            dirty: meta.dirty_bytes() as u64,
            journal_size: meta.journal.length(),
            journal_used: meta.journal.used(),
            generation: superblock.generation,
            clean: superblock.clean,
        }
    }

    /// All volumes and snapshots, by name.
    pub fn list(&self) -> Vec<VolumeInfo> {
        let meta = self.0.meta.borrow();
        let named = |state| matches!(state, VolumeState::Volume | VolumeState::Snapshot | VolumeState::Origin);
        let seen = meta.directory.iter().filter(|v| named(v.record.state) && !v.pending);
        let mut all: Vec<VolumeInfo> = seen.map(|v| meta.info_of(&v.record)).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The names of the volumes that volume or snapshot `id` has its contents from: its own (empty if it has
    /// none), that of which it was cloned, and so on, `most` at most. Others without a name are left out.
    pub fn line_of(&self, id: VolumeId, most: usize) -> Vec<String> {
        let meta = self.0.meta.borrow();
        let volume_of = |id: VolumeId| {
            let record = &meta.directory.get(id)?.record;
            let volume = if record.state == VolumeState::Snapshot { record.parent } else { id };
            meta.directory.get(volume)
        };
        let (mut line, mut names, mut next) = (Vec::new(), Vec::new(), volume_of(id));
        while let Some(volume) = next.filter(|v| line.len() < most && !line.contains(&v.record.id)) {
            line.push(volume.record.id);
            if names.is_empty() || !volume.record.name.is_empty() {
                names.push(volume.record.name.to_string());
            }
            next = meta.directory.ancestor(&volume.record).and_then(|v| volume_of(v.record.id));
        }
        names
    }

    /// One volume or snapshot, by its name.
    pub fn find(&self, name: &str) -> Result<VolumeInfo> {
        let meta = self.0.meta.borrow();
        Ok(meta.info_of(&meta.directory.find(name)?.record))
    }
}
