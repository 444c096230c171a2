//! Hard links: further names of a file. Each has a slot of its own, and in its record the number of the file as parent;
//! the name in the record of the file itself is its *own name*. A snapshot of the file belongs to the name under which
//! it was taken.

use std::collections::BTreeSet;

use super::{Directory, remnants};
#[cfg(feature = "planted")]
use crate::format::VolumeRecord;
use crate::format::{NO_VOLUME, VolumeState};
use crate::types::VolumeId;

/// Most names of a file.
pub const MAX_NAMES_COUNT: usize = 1000;

/// The number of the file that has this name: another one only for a hard link.
pub fn file_of(directory: &Directory, id: VolumeId) -> VolumeId {
    match directory.get(id).map(|volume| &volume.record) {
        Some(record) if record.state == VolumeState::HardLink => record.parent,
        _ => id,
    }
}

/// The hard links of a file, the oldest first.
pub fn links_of(directory: &Directory, file: VolumeId) -> impl Iterator<Item = VolumeId> + use<'_> {
    directory.hard_links.range((file, NO_VOLUME)..=(file, VolumeId(u64::MAX))).map(|&(_, link)| link)
}

/// The names of a file besides this one, sorted.
pub fn other_names(directory: &Directory, file: VolumeId, name: &str) -> Vec<String> {
    let all = [file].into_iter().chain(links_of(directory, file)).filter_map(|id| directory.get(id));
    let mut names: Vec<String> = all.map(|v| v.record.name.to_string()).filter(|other| other != name).collect();
    names.sort();
    names
}

/// Whether a file has several names.
pub fn has_some(directory: &Directory) -> bool {
    !directory.hard_links.is_empty()
}

/// Adds the hard links of those of these that are files.
pub fn with_links(directory: &Directory, mut ids: Vec<VolumeId>) -> Vec<VolumeId> {
    let links: BTreeSet<VolumeId> = ids.iter().flat_map(|&id| links_of(directory, id)).collect();
    let named: BTreeSet<VolumeId> = ids.iter().copied().collect();
    ids.extend(links.difference(&named));
    ids
}

/// Of these names and snapshots, what goes with them: a file does with the last of its names.
pub fn gone_with(directory: &Directory, ids: &BTreeSet<VolumeId>) -> BTreeSet<VolumeId> {
    let files = ids.iter().map(|&id| file_of(directory, id));
    let is_last = |file: &VolumeId| ids.contains(file) && links_of(directory, *file).all(|link| ids.contains(&link));
    files.filter(is_last).collect()
}

/// Divides names that are to be deleted: what goes, and files that keep another name, each with the oldest of the hard
/// links that stay.
pub fn divided(directory: &Directory, ids: Vec<VolumeId>) -> (Vec<VolumeId>, Vec<(VolumeId, VolumeId)>) {
    let named: BTreeSet<VolumeId> = ids.iter().copied().collect();
    let heir = |&id: &VolumeId| links_of(directory, id).find(|link| !named.contains(link)).map(|link| (id, link));
    let kept: Vec<(VolumeId, VolumeId)> = ids.iter().filter_map(heir).collect();
    (ids.into_iter().filter(|id| kept.iter().all(|(file, _)| file != id)).collect(), kept)
}

/// A file takes the name of one of its hard links, which is removed; its own name is free. The snapshots that were
/// taken under the name stay with it.
pub fn take_name(directory: &mut Directory, file: VolumeId, link: VolumeId, until: u64) {
    let name = directory.get(link).expect("an existing hard link").record.name.clone();
    remnants::move_snapshots(directory, link, file);
    directory.mark_dead(link, until);
    directory.rename(file, &name);
}

/// Notes a hard link that exists from now on.
pub(super) fn note(directory: &mut Directory, file: VolumeId, link: VolumeId) {
    directory.hard_links.insert((file, link));
}

/// Refuses a directory with hard links of files that do not exist.
pub fn refuse_strays(directory: &Directory) -> Result<(), String> {
    let is_file = |id| directory.get(id).is_some_and(|volume| volume.record.state == VolumeState::Volume);
    match directory.hard_links.iter().find(|(file, _)| !is_file(*file)) {
        None => Ok(()),
        Some((file, link)) => Err(format!("{} is a hard link of volume {}, which does not exist", link.0, file.0)),
    }
}

/// Takes over a record that was read from the device; a hard link does not count as a name of its file.
#[cfg(feature = "planted")]
pub(super) fn place_uncounted(directory: &mut Directory, record: VolumeRecord, slot: u64) {
    let pair = (record.parent, record.id);
    directory.place(record, slot);
    directory.hard_links.remove(&pair);
}
