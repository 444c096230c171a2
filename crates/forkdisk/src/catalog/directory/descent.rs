//! Descent: clones from their sources, and the snapshots that most likely share a volume's data.

use crate::format::{NO_VOLUME, VolumeRecord, VolumeState};
use crate::types::{Epoch, VolumeId};

use super::super::{CatalogEntry, Directory};
use super::SharingSnapshot;

impl Directory {
    /// Returns the snapshots of a volume.
    pub fn snapshots_of(&self, id: VolumeId) -> Vec<VolumeId> {
        self.names.range((id, "".into())..).take_while(|((parent, _), _)| *parent == id).map(|(_, &id)| id).collect()
    }
}

/// Notes that a volume was cloned from `source`.
pub fn descend(directory: &mut Directory, id: VolumeId, source: VolumeId) {
    let record = &mut directory.change(id).expect("an existing volume").record;
    let before = std::mem::replace(&mut record.source, source);
    directory.descent.remove(&(before, id));
    if source != NO_VOLUME {
        directory.descent.insert((source, id));
    }
}

/// Called when volume or snapshot `id` is deleted: its clones descend from what it was itself a snapshot
/// of or cloned from, and no longer have an origin with a name.
pub(super) fn inherit_source(directory: &mut Directory, id: VolumeId) {
    let record = &directory.get(id).expect("an existing volume").record;
    let above = if record.state == VolumeState::Snapshot { record.parent } else { record.source };
    let heirs: Vec<VolumeId> = clones_of(directory, id).collect();
    for heir in heirs {
        descend(directory, heir, if above == heir { NO_VOLUME } else { above });
        directory.change(heir).expect("an existing volume").record.origin.clear();
    }
    descend(directory, id, NO_VOLUME);
}

/// Returns what was cloned from this volume or snapshot, directly or from a deleted clone.
pub fn clones_of(directory: &Directory, id: VolumeId) -> impl Iterator<Item = VolumeId> + use<'_> {
    directory.descent.range((id, NO_VOLUME)..=(id, VolumeId(u64::MAX))).map(|&(_, clone)| clone)
}

/// Returns what a volume was cloned from, or its nearest ancestor that still exists.
pub fn ancestor<'a>(directory: &'a Directory, record: &VolumeRecord) -> Option<&'a CatalogEntry> {
    match record.source {
        _ if record.origin_record.is_some() || record.origin.is_empty() && record.source == NO_VOLUME => None,
        // Created by a version that stored the name only. A volume that took the name later is another.
        NO_VOLUME => directory.find(&record.origin).ok().filter(|v| v.record.id < record.id),
        source => directory.get(source),
    }
}

/// Notes that a snapshot of this volume has been taken.
pub fn note_snapshot(directory: &mut Directory, id: VolumeId) {
    if let Some(volume) = directory.volumes.get(&id) {
        volume.holder.set(SharingSnapshot::Unknown);
    }
}

/// Returns an epoch: what a volume maps and was born then or before is most likely shared with a snapshot
/// that still exists, the newest of its own or the one it was cloned from. A hint that avoids lookups of
/// counts. It is wrong where another volume's range was cloned, and after a rollback to an older
/// snapshot.
pub fn last_shared_at(directory: &Directory, id: VolumeId) -> Option<Epoch> {
    let volume = directory.volumes.get(&id)?;
    let born = |id: VolumeId| directory.volumes.get(&id).filter(|v| v.is_snapshot()).map(|v| v.record.shared_at);
    match volume.holder.get() {
        SharingSnapshot::None => return None,
        SharingSnapshot::Snapshot(holder) if born(holder).is_some() => return born(holder),
        SharingSnapshot::Unknown | SharingSnapshot::Snapshot(_) => {}
    }
    let found = find_sharing_snapshot(directory, &volume.record);
    volume.holder.set(found.map_or(SharingSnapshot::None, SharingSnapshot::Snapshot));
    found.and_then(born)
}

fn find_sharing_snapshot(directory: &Directory, volume: &VolumeRecord) -> Option<VolumeId> {
    let own = directory.snapshots_of(volume.id).into_iter();
    if let Some(newest) = own.max_by_key(|id| directory.volumes[id].record.shared_at) {
        return Some(newest);
    }
    let origin = ancestor(directory, volume).filter(|v| v.is_snapshot())?;
    // A volume that took the name later is another.
    (origin.record.shared_at <= volume.shared_at).then_some(origin.record.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_of_a_deleted_volume_descend_from_the_source_of_that() {
        let mut d = Directory::default();
        let of = |id, name: &str, origin: &str, source| VolumeRecord {
            origin: origin.into(),
            source: VolumeId(source),
            ..VolumeRecord::empty(VolumeId(id), name, 0)
        };
        d.add(of(1, "base", "", 0));
        let snapshot = VolumeRecord { parent: VolumeId(1), ..of(2, "g", "", 0) };
        d.add(VolumeRecord { state: VolumeState::Snapshot, ..snapshot });
        d.add(of(3, "c1", "base@g", 2));
        d.add(of(4, "c2", "c1", 3));
        let above = |d: &Directory, id| ancestor(d, &d.get(VolumeId(id)).unwrap().record).map(|v| v.record.id.0);
        assert_eq!((above(&d, 4), above(&d, 3), above(&d, 1)), (Some(3), Some(2), None));
        d.mark_dead(VolumeId(3), 0);
        assert_eq!(above(&d, 4), Some(2));
        assert!(d.get(VolumeId(4)).unwrap().record.origin.is_empty(), "what is gone is not named");
        d.mark_dead(VolumeId(2), 0);
        assert_eq!(above(&d, 4), Some(1));
        d.mark_dead(VolumeId(1), 0);
        assert_eq!((above(&d, 4), d.descent.len()), (None, 0));
    }
}
