//! Extensions of volumes in the directory: each has a slot of its own, which comes and goes with it.

use std::collections::{BTreeMap, BTreeSet};

use crate::format::{Bound, Extension, Lease, SLOTS_PER_PAGE};
use crate::planted::correct;
use crate::types::VolumeId;

use super::{CatalogEntry, Directory, take_slot};

/// What the extensions of all volumes say together.
#[derive(Default)]
pub struct Extensions {
    /// The volumes and snapshots that expire, with their times.
    expiring: BTreeSet<(u64, VolumeId)>,
    /// Those with a lease.
    leased: BTreeMap<VolumeId, Lease>,
    /// Number of volumes with an extension.
    count: usize,
    /// Loaded before their volumes: slots and contents.
    strays: BTreeMap<VolumeId, (u64, Extension)>,
}

/// Gives a volume this extension from now on; an empty one removes it.
pub fn set(directory: &mut Directory, id: VolumeId, extension: Extension) {
    let old = directory.volumes.get_mut(&id).expect("an existing volume").extension.take();
    if let Some(old) = &old {
        forget(&mut directory.extensions, id, &old.1);
    }
    let slot = match old {
        Some(old) if !extension.is_empty() => {
            correct!(directory.changed.insert(old.0 / SLOTS_PER_PAGE as u64), Bug::ExtensionNotCheckpointed => false);
            old.0
        }
        Some(old) => {
            directory.changed.insert(old.0 / SLOTS_PER_PAGE as u64);
            directory.by_slot.remove(&old.0);
            directory.free_slots.insert(old.0);
            return;
        }
        None if extension.is_empty() => return,
        None => take_slot(directory),
    };
    attach(directory, id, slot, extension);
}

fn attach(directory: &mut Directory, id: VolumeId, slot: u64, extension: Extension) {
    directory.by_slot.insert(slot, id);
    let all = &mut directory.extensions;
    all.count += 1;
    if extension.expires != 0 {
        all.expiring.insert((extension.expires, id));
    }
    all.leased.extend(extension.lease.map(|lease| (id, lease)));
    let volume = directory.volumes.get_mut(&id).expect("an existing volume");
    volume.extension = Some(Box::new((slot, extension)));
}

fn forget(all: &mut Extensions, id: VolumeId, extension: &Extension) {
    all.count -= 1;
    correct!(all.expiring.remove(&(extension.expires, id)), Bug::ExpiryIgnoresRenewal => false);
    all.leased.remove(&id);
}

/// Takes over an extension that was read from the device.
pub(super) fn load(directory: &mut Directory, of: VolumeId, slot: u64, extension: Extension) -> Result<(), String> {
    let has_one = directory.get(of).is_some_and(|volume| volume.extension.is_some());
    if has_one || directory.extensions.strays.insert(of, (slot, extension)).is_some() {
        return Err(format!("volume {} has two extensions", of.0));
    }
    if directory.get(of).is_some() {
        join_volume(directory, of);
    }
    Ok(())
}

/// Gives a volume that was just loaded its extension, if that was loaded before it.
pub(super) fn join_volume(directory: &mut Directory, id: VolumeId) {
    if let Some((slot, extension)) = directory.extensions.strays.remove(&id) {
        attach(directory, id, slot, extension);
    }
}

/// Refuses a directory with extensions of volumes that do not exist.
pub fn refuse_strays(directory: &Directory) -> Result<(), String> {
    match directory.extensions.strays.keys().next() {
        None => Ok(()),
        Some(id) => Err(format!("there is an extension of volume {}, which does not exist", id.0)),
    }
}

/// Returns what stays of the extension of a volume that is deleted: its account, if that is kept.
pub fn remains(volume: &CatalogEntry) -> Extension {
    let bound = volume.bound().filter(|_| volume.within.keeps_account);
    let bound = bound.map(|bound| Bound { diverge: 0, reserve: 0, folder: volume.within.folder, ..*bound });
    Extension { bound, ..Extension::default() }
}

/// The account of a deleted volume counts in this folder, or in none, from now on.
pub fn set_folder(directory: &mut Directory, id: VolumeId, folder: VolumeId) {
    if let Some(bound) = bound_mut(directory, id) {
        bound.folder = folder;
    }
}

/// Whether a volume or snapshot has an extension.
pub fn has_some(directory: &Directory) -> bool {
    directory.extensions.count > 0
}

/// Whether a volume has a bound.
pub fn has_bounds(directory: &Directory) -> bool {
    directory.iter().any(|volume| volume.bound().is_some())
}

/// Whether a file or folder has extended attributes.
pub fn has_xattrs(directory: &Directory) -> bool {
    directory.iter().filter_map(|volume| volume.extension()).any(|extension| !extension.xattrs.is_empty())
}

/// Stores how many pages are charged to a volume with a bound.
pub fn set_charged(directory: &mut Directory, id: VolumeId, pages: u64) {
    if let Some(bound) = bound_mut(directory, id) {
        bound.charged = pages;
    }
}

/// The bound of a volume, which goes into the next checkpoint.
fn bound_mut(directory: &mut Directory, id: VolumeId) -> Option<&mut Bound> {
    let (slot, extension) = &mut **directory.volumes.get_mut(&id)?.extension.as_mut()?;
    let bound = extension.bound.as_mut()?;
    directory.changed.insert(*slot / SLOTS_PER_PAGE as u64);
    Some(bound)
}

/// Returns the volumes and snapshots that have expired at `now`, or have a lease that has ended.
pub fn expired(directory: &Directory, now: u64, has_ended: impl Fn(&Lease) -> bool) -> BTreeSet<VolumeId> {
    let all = &directory.extensions;
    let timed = all.expiring.range(..=(now, VolumeId(u64::MAX))).map(|&(_, id)| id);
    let leased = all.leased.iter().filter(|(_, lease)| has_ended(lease)).map(|(&id, _)| id);
    timed.chain(leased).collect()
}

/// When the next volume or snapshot expires that has not at `now`.
pub fn next_expiry(directory: &Directory, now: u64) -> Option<u64> {
    directory.extensions.expiring.range((now.saturating_add(1), VolumeId(0))..).next().map(|&(expires, _)| expires)
}

/// Iterates over the leases of all volumes and snapshots.
pub fn leases(directory: &Directory) -> impl Iterator<Item = Lease> + use<'_> {
    directory.extensions.leased.values().copied()
}

/// Returns the page of a volume's extension, if it has one and the next checkpoint does not write that page yet.
pub fn unchanged_page_of(directory: &Directory, id: VolumeId) -> Option<u64> {
    let page = directory.get(id)?.extension.as_ref()?.0 / SLOTS_PER_PAGE as u64;
    (!directory.changed.contains(&page)).then_some(page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{DirectorySlot, VolumeRecord};

    fn expiring(expires: u64) -> Extension {
        Extension { expires, ..Extension::default() }
    }

    fn directory(volumes: u64) -> Directory {
        let mut d = Directory::default();
        (1..=volumes).for_each(|id| d.add(VolumeRecord::empty(VolumeId(id), &format!("v{id}"), 0)));
        d
    }

    #[test]
    fn an_extension_comes_and_goes_with_its_slot() {
        let mut d = directory(8);
        d.take_changed();
        set(&mut d, VolumeId(1), expiring(5));
        assert_eq!((d.pages(), d.changed_pages()), (2, 1));
        set(&mut d, VolumeId(1), expiring(7));
        assert_eq!(d.get(VolumeId(1)).and_then(|v| v.extension()), Some(&expiring(7)));
        assert_eq!((next_expiry(&d, 0), next_expiry(&d, 7), expired(&d, 6, |_| true).len()), (Some(7), None, 0));
        assert_eq!(expired(&d, 7, |_| false), BTreeSet::from([VolumeId(1)]));
        d.take_changed();
        d.mark_dead(VolumeId(1), 0);
        assert!(!has_some(&d) && expired(&d, 9, |_| true).is_empty());
        assert_eq!(d.changed_pages(), 2, "its page and that of the volume");
        d.add(VolumeRecord::empty(VolumeId(9), "v9", 0));
        assert_eq!(d.pages(), 2, "the slot of the extension is free");
    }

    #[test]
    fn what_a_checkpoint_writes_is_loaded_in_any_order() {
        let mut d = directory(20);
        let lease = Lease::Connection(3);
        set(&mut d, VolumeId(17), expiring(5));
        set(&mut d, VolumeId(2), Extension { lease: Some(lease), ..Extension::default() });
        let mut pages = d.changed_entries();
        pages.reverse();
        let (mut loaded, mut lost) = (Directory::default(), Directory::default());
        for (number, slots) in pages {
            loaded.load_page(number, slots.to_vec()).unwrap();
            let without = |slot: &Option<DirectorySlot>| {
                slot.clone().filter(|slot| !matches!(slot, DirectorySlot::Volume(r) if r.id == VolumeId(2)))
            };
            lost.load_page(number, slots.iter().map(without).collect()).unwrap();
        }
        assert_eq!(refuse_strays(&loaded), Ok(()));
        assert_eq!(expired(&loaded, 5, |l| *l == lease), BTreeSet::from([VolumeId(2), VolumeId(17)]));
        assert!(refuse_strays(&lost).unwrap_err().contains("volume 2, which does not exist"));
        let twice = DirectorySlot::Extension(VolumeId(2), expiring(1));
        assert!(loaded.load_page(9, vec![Some(twice)]).unwrap_err().contains("two extensions"));
    }
}
