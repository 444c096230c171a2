//! Snapshots of files that were removed or renamed on a mount: an empty volume, the *remnant*, has them. Its name tells
//! which name the file had: `.snapshots/NAME/~NUMBER`, with the number of the file. So what a folder had at the time of
//! a snapshot stays as it was, whatever happens to the folder.

use super::names::entries_within;
use super::{Directory, names};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{MAX_NAME_BYTES, NO_VOLUME, VolumeRecord, VolumeState};
use crate::planted::correct;
use crate::types::VolumeId;

/// The folder of all remnants. No other volume can be created in it.
pub const REMNANTS: &str = ".snapshots";

/// The name of the remnant of a volume's snapshots; `None` if it would be too long.
pub fn remnant_name(record: &VolumeRecord) -> Option<String> {
    let name = format!("{REMNANTS}/{}/~{}", record.name, record.id.0);
    (name.len() <= MAX_NAME_BYTES).then_some(name)
}

/// The folder of the remnants of what was in a folder.
pub fn remnants_of(folder: &str) -> String {
    if folder.is_empty() { REMNANTS.to_string() } else { format!("{REMNANTS}/{folder}") }
}

/// Iterates over the remnants of what was in a folder (empty: the root), each with the name that the file had.
pub fn kept_within(directory: &Directory, folder: &str) -> Vec<(String, VolumeId)> {
    let place = remnants_of(folder);
    let former = |(name, id): (&str, VolumeId)| {
        let is_remnant = directory.get(id).is_some_and(|v| v.record.state == VolumeState::Volume);
        let (former, mark) = name.strip_prefix(REMNANTS)?.strip_prefix('/')?.rsplit_once('/')?;
        (is_remnant && mark.starts_with('~')).then(|| (former.to_string(), id))
    };
    entries_within(directory, &place).filter_map(former).collect()
}

/// Returns the snapshot of this name of a file that had the name `volume`.
pub fn kept_snapshot(directory: &Directory, volume: &str, snapshot: &str) -> Option<VolumeId> {
    let all = kept_within(directory, volume).into_iter().filter(|(former, _)| former == volume);
    all.filter_map(|(_, remnant)| names::snapshot_named(directory, remnant, snapshot)).next()
}

/// Refuses the name `to` for a volume with a snapshot that a file of this name has had.
pub fn check_snapshots(directory: &Directory, id: VolumeId, to: &str) -> Result<()> {
    let taken = |v: &&VolumeRecord| kept_snapshot(directory, to, &v.name).is_some();
    let own = directory.snapshots_of(id).into_iter().filter_map(|s| directory.get(s)).map(|v| &v.record);
    match own.filter(|_| !to.contains('@')).find(taken) {
        None => Ok(()),
        Some(v) => {
            let why = format!("there is a snapshot \"{to}@{}\" of a file that had this name", v.name);
            Err(Error::new(ErrorKind::Exists, format!("{why}; delete it, or choose another name")))
        }
    }
}

/// Gives the snapshots of volume `from` to volume `to`.
pub fn move_snapshots(directory: &mut Directory, from: VolumeId, to: VolumeId) {
    directory.names_version += 1;
    for id in directory.snapshots_of(from) {
        let record = &mut directory.change(id).expect("listed above").record;
        record.parent = correct!(to, Bug::KeptSnapshotStaysWithVolume => from);
        let name = record.name.clone();
        directory.names.remove(&(from, name.clone()));
        directory.names.insert((to, name), id);
    }
    if let Some(chain) = directory.chains.remove(&from) {
        directory.chains.insert(to, chain);
    }
    [from, to].into_iter().for_each(|id| super::note_snapshot(directory, id));
}

/// Returns the remnants that would have nothing to keep without these snapshots, and have no contents themselves.
pub fn idle_remnants(directory: &Directory, snapshots: &[VolumeId]) -> Vec<VolumeId> {
    let parents = snapshots.iter().filter_map(|&id| directory.get(id)).map(|v| v.record.parent);
    let mut remnants: Vec<VolumeId> = parents
        .filter(|&id| id != NO_VOLUME)
        .filter(|&id| {
            let remnant = directory.get(id).map(|v| &v.record);
            let is_remnant = |r: &VolumeRecord| r.name.starts_with(".snapshots/") && r.size == 0 && r.root.is_absent();
            remnant.is_some_and(is_remnant) && directory.snapshots_of(id).iter().all(|s| snapshots.contains(s))
        })
        .collect();
    remnants.sort();
    remnants.dedup();
    remnants
}
