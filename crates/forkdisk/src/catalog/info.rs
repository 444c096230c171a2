//! Properties of volumes and snapshots, as callers see them.

use super::Catalog;
use crate::catalog::directory::descent;
use crate::catalog::exceptions;
use crate::format::{Attributes, BreakPolicy, GatherPolicy, OriginFull, SnapshotFlags, VolumeRecord, VolumeState};
use crate::types::{PAGE_SIZE, VolumeId};

/// Protection of an origin.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Protection {
    /// Most bytes copied ahead of a sequential writer.
    pub copy_ahead: u64,
    /// What happens to a write if there is no space for the old contents.
    pub when_full: OriginFull,
    /// Closed in order and not written since.
    pub clean: bool,
    /// The snapshot of a running rollback, as `volume@snapshot`.
    pub rolling: Option<String>,
}

/// Properties of a volume or snapshot.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VolumeInfo {
    /// Number.
    pub id: VolumeId,
    /// `volume` or `volume@snapshot`.
    pub name: String,
    /// A snapshot.
    pub snapshot: bool,
    /// An origin: a device that is protected in place.
    pub protected: bool,
    /// Protection of an origin.
    pub protection: Option<Protection>,
    /// Flags of a snapshot.
    pub flags: SnapshotFlags,
    /// Length in bytes.
    pub size: u64,
    /// Chunk: space that a first write reserves, in bytes.
    pub chunk: u64,
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// When its scattered pages are gathered by policy.
    pub gather: GatherPolicy,
    /// Bytes mapped.
    pub referenced: u64,
    /// Of them, scattered: not behind the page before them in their block of 1 MiB.
    pub scattered: u64,
    /// Most bytes that it may have mapped; 0: no limit.
    pub quota: u64,
    /// Current name of the volume or snapshot that it was cloned from; of an origin the path of its device;
    /// empty if there is none.
    pub origin: String,
    /// Number of the volume or snapshot that it was cloned from, if that exists.
    pub origin_id: Option<VolumeId>,
    /// The snapshot of an origin that is its backing; empty if there is none.
    pub depends_on: String,
    /// Time of creation, in seconds since 1970.
    pub created: u64,
    /// Open handles.
    pub in_use: usize,
    /// Attributes as a file; `None` if they were never set.
    pub attributes: Option<Attributes>,
}

impl VolumeInfo {
    /// Fragmentation: scattered pages in percent of mapped pages.
    pub fn fragmentation(&self) -> f64 {
        if self.referenced == 0 { 0.0 } else { 100.0 * self.scattered as f64 / self.referenced as f64 }
    }
}

impl Catalog {
    /// The snapshot of an origin that is the backing of a clone; empty if there is none.
    fn base_name(&self, record: &VolumeRecord) -> String {
        let base = self.directory.get(record.base).filter(|_| record.state != VolumeState::Origin);
        base.map_or(String::new(), |v| self.directory.full_name(&v.record))
    }

    /// The volume or snapshot that it was cloned from, if it exists and has a name.
    fn origin_of(&self, record: &VolumeRecord) -> Option<&VolumeRecord> {
        let ancestor = descent::ancestor(&self.directory, record).filter(|_| !record.origin.is_empty());
        ancestor.map(|v| &v.record).filter(|v| !v.name.is_empty())
    }

    /// Properties of a volume that has `in_use` open handles.
    pub fn info_of(&self, record: &VolumeRecord, in_use: usize) -> VolumeInfo {
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
                rolling: exceptions::rollback_snapshot(self, record.id),
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
            in_use,
            attributes: record.attributes,
        }
    }
}
