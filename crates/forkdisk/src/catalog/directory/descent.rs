//! Descent: clones from their sources.

use crate::format::{NO_VOLUME, VolumeRecord, VolumeState};
use crate::types::VolumeId;

use super::super::{CatalogEntry, Directory};
use super::hard_links::file_of;

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
    let is_snapshot = record.state == VolumeState::Snapshot;
    let above = if is_snapshot { file_of(directory, record.parent) } else { record.source };
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

/// Names of the volumes that volume or snapshot `id` descends from: its own (empty if it has none), that of its
/// source, and so on, at most `most`. Other volumes without a name are left out.
pub fn line_of(directory: &Directory, id: VolumeId, most: usize) -> Vec<String> {
    let volume_of = |id: VolumeId| {
        let record = &directory.get(id)?.record;
        let volume = if record.state == VolumeState::Snapshot { file_of(directory, record.parent) } else { id };
        directory.get(volume)
    };
    let (mut line, mut names, mut next) = (Vec::new(), Vec::new(), volume_of(id));
    while let Some(volume) = next.filter(|v| line.len() < most && !line.contains(&v.record.id)) {
        line.push(volume.record.id);
        if names.is_empty() || !volume.record.name.is_empty() {
            names.push(volume.record.name.to_string());
        }
        next = ancestor(directory, &volume.record).and_then(|v| volume_of(v.record.id));
    }
    names
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
