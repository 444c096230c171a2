//! Properties of volumes and snapshots, as callers see them.

use std::collections::BTreeMap;

use crate::catalog::directory::{descent, hard_links};
use crate::catalog::exceptions;
use crate::error::Result;
use crate::format::{
    Attributes, BreakPolicy, FileKind, GatherPolicy, Inherited, OriginFull, SnapshotFlags, VolumeRecord, VolumeState,
    Writes, Zeroes,
};
use crate::types::{PAGE_SIZE, VolumeId, VolumeKind};

use super::Catalog;

/// Protection of an origin.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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
///
/// With the feature `serde` it is serialised as the control protocol shows it, without `in_use` and `attributes`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VolumeInfo {
    /// Number.
    #[cfg_attr(feature = "serde", serde(default = "unknown_id"))]
    pub id: VolumeId,
    /// `volume` or `volume@snapshot`.
    pub name: String,
    /// What it is.
    #[cfg_attr(feature = "serde", serde(rename = "type"))]
    pub kind: VolumeKind,
    /// Length in bytes.
    pub size: u64,
    /// Bytes mapped.
    pub referenced: u64,
    /// Of them, scattered: not behind the page before them in their block of 1 MiB.
    pub scattered: u64,
    /// Chunk: space that a first write reserves, in bytes.
    pub chunk: u64,
    /// What a first write to a shared chunk does.
    #[cfg_attr(feature = "serde", serde(rename = "break"))]
    pub break_policy: BreakPolicy,
    /// When its scattered pages are gathered by policy.
    pub gather: GatherPolicy,
    /// Most bytes that it may have mapped; 0: no limit.
    #[cfg_attr(feature = "serde", serde(with = "crate::names::none_if_zero"))]
    pub quota: u64,
    /// Most bytes of new pages that it, its snapshots and clones may hold beyond what it was when this was set; 0: no
    /// bound.
    #[cfg_attr(feature = "serde", serde(default, with = "crate::names::none_if_zero"))]
    pub diverge: u64,
    /// Bytes of new pages that it can write whatever else takes space, beyond what it was when this or `diverge` was
    /// set first; 0: none.
    #[cfg_attr(feature = "serde", serde(default, with = "crate::names::none_if_zero"))]
    pub reserve: u64,
    /// Bytes of the new pages that its bounds count, without those of writes under way.
    #[cfg_attr(feature = "serde", serde(default))]
    pub diverged: u64,
    /// Current name of the volume or snapshot that it was cloned from; of an origin the path of its device;
    /// empty if there is none.
    #[cfg_attr(feature = "serde", serde(with = "crate::names::none_if_empty"))]
    pub origin: String,
    /// Number of the volume or snapshot that it was cloned from, if that exists.
    #[cfg_attr(feature = "serde", serde(default))]
    pub origin_id: Option<VolumeId>,
    /// The snapshot of an origin that is its backing; empty if there is none.
    #[cfg_attr(feature = "serde", serde(with = "crate::names::none_if_empty"))]
    pub depends_on: String,
    /// Time of creation, in seconds since 1970.
    pub created: u64,
    /// What made it; empty: not known.
    #[cfg_attr(feature = "serde", serde(default, with = "crate::names::none_if_empty"))]
    pub created_by: String,
    /// Time of the last open for I/O or close, in seconds since 1970; 0: not known.
    #[cfg_attr(feature = "serde", serde(default, with = "crate::names::none_if_zero"))]
    pub last_used: u64,
    /// When it expires, in seconds since 1970; 0: never.
    #[cfg_attr(feature = "serde", serde(default, with = "crate::names::none_if_zero"))]
    pub expires: u64,
    /// What it is deleted after, `connection` or the number of a process; empty: nothing.
    #[cfg_attr(feature = "serde", serde(default, with = "crate::names::none_if_empty"))]
    pub lease: String,
    /// Labels: keys and values.
    #[cfg_attr(feature = "serde", serde(default))]
    pub labels: BTreeMap<String, String>,
    /// What it does with written bytes that are there already.
    #[cfg_attr(feature = "serde", serde(default))]
    pub writes: Writes,
    /// What it does with written pages of zeroes.
    #[cfg_attr(feature = "serde", serde(default))]
    pub zeroes: Zeroes,
    /// Of a folder: properties that clones which are made below it inherit.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "clone", default, skip_serializing_if = "BTreeMap::is_empty", with = "crate::names::inherited")
    )]
    pub inherited: Inherited,
    /// Flags of a snapshot.
    pub flags: SnapshotFlags,
    /// Protection of an origin.
    pub protection: Option<Protection>,
    /// Open handles.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub in_use: usize,
    /// The other names of the file, sorted: its hard links.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub hard_links: Vec<String>,
    /// Extended attributes as a file: names without `user.`, and values.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Attributes as a file; `None` if they were never set.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub attributes: Option<Attributes>,
}

/// The number in a record of a version that did not write it.
#[cfg(feature = "serde")]
fn unknown_id() -> VolumeId {
    VolumeId(0)
}

impl VolumeInfo {
    /// Whether it is a snapshot.
    pub fn is_snapshot(&self) -> bool {
        self.kind == VolumeKind::Snapshot
    }

    /// Whether it is an origin: a device that is protected in place.
    pub fn is_origin(&self) -> bool {
        self.kind == VolumeKind::Origin
    }

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

    /// Properties of the volume or snapshot with this name, which may be one of several.
    pub fn info_by_name(&self, name: &str, in_use: impl Fn(VolumeId) -> usize) -> Result<VolumeInfo> {
        let record = &self.directory.find(name)?.record;
        let mut info = self.info_of(record, in_use(record.id));
        if record.state != VolumeState::Snapshot && *record.name != *name {
            info.name = name.to_string();
            info.hard_links = hard_links::other_names(&self.directory, record.id, name);
        }
        Ok(info)
    }

    /// Properties of a volume that has `in_use` open handles.
    pub fn info_of(&self, record: &VolumeRecord, in_use: usize) -> VolumeInfo {
        let origin = self.origin_of(record);
        let extension = self.directory.get(record.id).and_then(|v| v.extension()).cloned().unwrap_or_default();
        VolumeInfo {
            id: record.id,
            name: self.directory.full_name(record),
            kind: match record.state {
                VolumeState::Snapshot => VolumeKind::Snapshot,
                VolumeState::Origin => VolumeKind::Origin,
                VolumeState::Folder => VolumeKind::Folder,
                _ => match record.kind() {
                    FileKind::File | FileKind::Folder => VolumeKind::Volume,
                    FileKind::Link => VolumeKind::Link,
                    FileKind::Fifo => VolumeKind::Fifo,
                    FileKind::Socket => VolumeKind::Socket,
                },
            },
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
            diverge: extension.bound.map_or(0, |bound| bound.diverge),
            reserve: extension.bound.map_or(0, |bound| bound.reserve),
            diverged: extension.bound.map_or(0, |bound| self.space.accounts.pages(bound.account) * PAGE_SIZE as u64),
            origin: match record.origin_record {
                Some(_) => record.origin.clone(),
                None => origin.map_or(String::new(), |origin| self.directory.full_name(origin)),
            },
            origin_id: origin.map(|origin| origin.id),
            depends_on: self.base_name(record),
            created: record.created,
            created_by: extension.created_by,
            last_used: extension.last_used,
            expires: extension.expires,
            lease: extension.lease.map_or(String::new(), |lease| lease.to_string()),
            labels: extension.labels,
            writes: extension.writes.writes,
            zeroes: extension.writes.zeroes,
            inherited: extension.inherited,
            in_use,
            hard_links: hard_links::other_names(&self.directory, record.id, &record.name),
            xattrs: extension.xattrs,
            attributes: record.attributes,
        }
    }
}
