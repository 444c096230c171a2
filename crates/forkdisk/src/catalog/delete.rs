//! What may be deleted.

use std::collections::BTreeSet;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{NO_VOLUME, VolumeRecord, VolumeState};
use crate::types::VolumeId;

use super::directory::names;
use super::{Catalog, CatalogEntry};

/// The volumes and snapshots of these names, snapshots first; refuses if something else needs one of them.
pub fn deletable(meta: &Catalog, names: &[&str]) -> Result<Vec<VolumeId>> {
    let (mut ids, mut named) = (Vec::new(), BTreeSet::new());
    for &name in names {
        let record = &meta.directory.find(name)?.record;
        let id = names::named(&meta.directory, name)?;
        if record.state == VolumeState::Origin {
            let why = format!("{name:?} is an origin; unprotect it, and it is an ordinary disk again");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if named.insert(id) {
            ids.push(id);
        }
    }
    for &id in &ids {
        let left = meta.directory.snapshots_of(id).into_iter().find(|s| !named.contains(s));
        if let Some(left) = left.and_then(|s| meta.directory.get(s)) {
            let snapshot = meta.directory.full_name(&left.record);
            let why = format!("it has snapshots, such as {snapshot:?}; delete them first or with it (-r)");
            return Err(Error::new(ErrorKind::Busy, why));
        }
    }
    // Nothing else is the base of a volume or what an origin is rolled back to.
    if ids.iter().any(|&id| meta.is_origin_snapshot(id)) {
        refuse_held(meta, &named)?;
    }
    // A record must never name the snapshot of a deleted volume.
    ids.sort_by_key(|id| meta.directory.get(*id).map(|v| v.record.state != VolumeState::Snapshot));
    Ok(ids)
}

/// Refuses the deletion of snapshots of origins that something else needs.
fn refuse_held(meta: &Catalog, named: &BTreeSet<VolumeId>) -> Result<()> {
    let stays = |record: &&VolumeRecord| record.state != VolumeState::Dead && !named.contains(&record.id);
    let rolling =
        |record: &VolumeRecord| record.origin_record.as_ref().map_or(NO_VOLUME, |protects| protects.rollback_to);
    let holds = |record: &VolumeRecord| [record.base, rolling(record)];
    let records = meta.directory.iter().map(|volume| &volume.record).filter(stays);
    match records.flat_map(holds).find(|id| named.contains(id)) {
        Some(id) => meta.directory.refuse_with_clones(id),
        None => Ok(()),
    }
}

/// Refuses to remove an origin, and a snapshot of one that is in use or the backing of a volume.
pub fn refuse_origin(meta: &Catalog, volume: &CatalogEntry, in_use: usize) -> Result<()> {
    let id = volume.record.id;
    if volume.record.state == VolumeState::Origin {
        let why = "it is an origin; unprotect it, and it is an ordinary disk again";
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    if in_use > 0 && meta.is_origin_snapshot(id) {
        return Err(Error::new(ErrorKind::Busy, "it is a snapshot of an origin and in use; close it first"));
    }
    meta.directory.refuse_with_clones(id)
}

pub fn refuse_with_snapshots(meta: &Catalog, id: VolumeId) -> Result<()> {
    match meta.directory.snapshots_of(id).first().and_then(|s| meta.directory.get(*s)) {
        None => Ok(()),
        Some(snapshot) => {
            let name = meta.directory.full_name(&snapshot.record);
            Err(Error::new(ErrorKind::Busy, format!("it has snapshots, such as {name:?}; delete them first")))
        }
    }
}
