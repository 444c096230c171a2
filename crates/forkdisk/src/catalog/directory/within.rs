//! Which bounded folder a volume is in, and what the sums of that have of it.

use crate::format::{NO_VOLUME, VolumeRecord, VolumeState};
use crate::space::folders::Folders;
use crate::types::{AccountId, VolumeId};

use super::Directory;

/// See the module.
#[derive(Clone, Copy, Default)]
pub struct Within {
    /// The nearest bounded folder, or none.
    pub folder: VolumeId,
    /// The account that its new pages are charged to if it has none.
    pub account: AccountId,
    /// Pages that the volume refers to, as the folder counts them.
    pub counted: u64,
    /// It is being deleted, and its account counts in the folder until nothing is charged to it.
    pub keeps_account: bool,
    /// It may refer to another number of pages than is counted.
    is_changed: bool,
}

impl Within {
    /// Notes a change of volume `id`.
    pub(super) fn note_change(&mut self, id: VolumeId, changed: &mut Vec<VolumeId>) {
        if self.folder != NO_VOLUME && !std::mem::replace(&mut self.is_changed, true) {
            changed.push(id);
        }
    }
}

/// Adds what volumes in bounded folders refer to, since this was called last, to the sums of these.
pub fn count_referenced(directory: &mut Directory, folders: &mut Folders) {
    for id in std::mem::take(&mut directory.uncounted) {
        let Some(volume) = directory.volumes.get_mut(&id) else { continue };
        volume.within.is_changed = false;
        if volume.within.folder != NO_VOLUME {
            let referenced = counted_pages(&volume.record);
            let counted = std::mem::replace(&mut volume.within.counted, referenced);
            folders.change(volume.within.folder, 0, referenced as i64 - counted as i64);
        }
    }
}

/// Pages that a quota of a folder counts for what has this record.
pub fn counted_pages(record: &VolumeRecord) -> u64 {
    if matches!(record.state, VolumeState::Volume | VolumeState::Orphan) { record.referenced } else { 0 }
}

/// The nearest bounded folder that something with this name is in, or none.
pub fn nearest(directory: &Directory, folders: &Folders, name: &str) -> VolumeId {
    let above = name.rmatch_indices('/').filter_map(|(end, _)| directory.folder(&name[..end]));
    above.map(|folder| folder.id).find(|&id| folders.get(id).is_some()).unwrap_or(NO_VOLUME)
}

/// Sets whether the reaper skips a dead volume with a kept account.
pub fn set_reaped(directory: &mut Directory, id: VolumeId, is_reaped: bool) {
    match is_reaped {
        true => directory.dead.remove(&id),
        false => directory.dead.insert(id),
    };
}
