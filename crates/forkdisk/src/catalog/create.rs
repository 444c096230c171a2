//! New volumes: their options, and the records that create them.

use std::collections::BTreeSet;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, GatherPolicy, NO_VOLUME, Record, SnapshotFlags, Throttle, VolumeState};
use crate::types::VolumeId;

use super::directory::names;
use super::{Catalog, Directory, ExtensionChanges, refuse_during_rollback, writable_volume};

/// Default chunk of a volume, in bytes.
const DEFAULT_CHUNK_BYTES: u64 = 64 << 10;

/// Options of a new volume.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CreateOptions {
    /// Length in bytes, up to 1 PiB.
    pub size: u64,
    /// Chunk: space that a first write reserves, in bytes, a power of two from 4 KiB to 64 MiB.
    pub chunk: u64,
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// Most bytes that it may have mapped, at most 1 PiB; 0: no limit.
    pub quota: u64,
    /// When its scattered pages are gathered by policy.
    pub gather: GatherPolicy,
    /// Lifetime and labels.
    pub extension: ExtensionChanges,
    /// Seconds since 1970.
    pub now: u64,
}

impl CreateOptions {
    /// A volume of `size` bytes with the default chunk (64 KiB), break policy `split`, no quota, and
    /// gathering off.
    pub fn new(size: u64, now: u64) -> CreateOptions {
        let (break_policy, gather) = (BreakPolicy::Split, GatherPolicy::Off);
        let extension = ExtensionChanges::default();
        CreateOptions { size, chunk: DEFAULT_CHUNK_BYTES, break_policy, quota: 0, gather, extension, now }
    }
}

/// The numbers of the next `count` volumes.
pub fn new_ids(meta: &Catalog, count: usize) -> Vec<VolumeId> {
    (meta.next_id..).take(count).map(VolumeId).collect()
}

/// The records that create a volume with these options.
pub fn creation(id: VolumeId, name: &str, options: &CreateOptions) -> impl Iterator<Item = Record> {
    let CreateOptions { size, chunk, now, break_policy, quota, gather, .. } = *options;
    let throttle = Throttle::NONE;
    let create = Record::Create { id, name: name.to_string(), size, chunk, now };
    let copying = (break_policy != BreakPolicy::Split).then_some(Record::SetCopying { id, break_policy, throttle });
    let limit = (quota != 0).then_some(Record::SetQuota { id, quota });
    let gather = (gather != GatherPolicy::Off).then_some(Record::SetGather { id, gather });
    [Some(create), copying, limit, gather, options.extension.record_of_new(id)].into_iter().flatten()
}

/// Checks whether all of these names may be given to new volumes together.
pub fn check_new_names(directory: &Directory, names: &[&str]) -> Result<()> {
    let mut new = BTreeSet::new();
    for &name in names {
        directory.check_new(NO_VOLUME, name)?;
        if !new.insert(name) {
            return Err(Error::new(ErrorKind::Exists, format!("{name:?} is named twice; choose another name")));
        }
    }
    for &name in names {
        let mut above = name.match_indices('/').map(|(i, _)| &name[..i]);
        if let Some(volume) = above.find(|above| new.contains(above)) {
            let why = format!("{name:?} would lie in {volume:?}, which is to be a volume and not a folder");
            return Err(Error::new(ErrorKind::Exists, format!("{why}; choose another name")));
        }
    }
    Ok(())
}

/// The new snapshots of these volumes and names, as [`Record::Snapshot`] has them: source, number, name.
pub fn new_snapshots(
    meta: &Catalog,
    sources: &[(&str, &str)],
    flags: SnapshotFlags,
) -> Result<Vec<(VolumeId, VolumeId, String)>> {
    let mut of: Vec<(VolumeId, VolumeId, String)> = Vec::new();
    for &(source, name) in sources {
        let volume = meta.directory.find(source)?;
        let id = match volume.record.state {
            VolumeState::Origin => volume.record.id,
            _ => {
                writable_volume(volume, source)?;
                names::named(&meta.directory, source)?
            }
        };
        if volume.record.state == VolumeState::Origin {
            refuse_during_rollback(meta, id)?;
        } else if flags.independent {
            let why = format!("snapshots of {source:?} are independent anyway; only an origin's form a chain");
            return Err(Error::new(ErrorKind::Invalid, why));
        } else if flags.writable {
            let why = format!("a snapshot of {source:?} cannot be writable, only an origin's; clone it");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        meta.directory.check_new(id, name)?;
        if of.iter().any(|(v, _, n)| *v == id && n == name) {
            return Err(Error::new(ErrorKind::Exists, format!("{source}@{name} is named twice")));
        }
        of.push((id, VolumeId(meta.next_id + of.len() as u64), name.to_string()));
    }
    Ok(of)
}
