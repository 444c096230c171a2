//! Bounds of folders: limits of what all volumes below a folder hold together.
//!
//! A folder with a bound (`diverge`) has an account, as a volume with one has. New pages of a volume are charged to its
//! own account or, if it has none, to that of the nearest folder above it that has one. The sums of a folder are those
//! of all accounts and volumes below it; they follow every charge and every change of names.

use crate::format::{Bound, Extension, NO_VOLUME, Record, VolumeState};
use crate::planted::correct;
use crate::space::folders::BoundedFolder;
use crate::types::{NO_ACCOUNT, PAGE_SIZE, VolumeId};

use super::directory::names::entries_within;
use super::directory::within::{count_referenced, counted_pages, nearest, set_reaped};
use super::directory::{self, extensions};
use super::{Catalog, CatalogEntry, Directory, Failure, VolumeInfo};

/// Follows what a record did to names.
pub fn follow(catalog: &mut Catalog, record: &Record) {
    if catalog.space.accounts.folders.is_empty() {
        return;
    }
    match record {
        Record::Create { id, .. }
        | Record::Clone { id, .. }
        | Record::NameVolume { id, .. }
        | Record::Unlink { id }
        | Record::Rename { id, .. } => {
            correct!(place(catalog, *id), Bug::MoveKeepsFolder => if !matches!(record, Record::Rename { .. }) {
                place(catalog, *id)
            })
        }
        Record::RenameOver { id, replaced, .. } => [*id, *replaced].into_iter().for_each(|id| place(catalog, id)),
        Record::TakeName { file, .. } => place(catalog, *file),
        Record::RenameFolder { to, .. } => place_within(catalog, to),
        Record::Exchange { a, b } => [a, b].into_iter().for_each(|name| place_within(catalog, name)),
        Record::Delete { ids } => ids.iter().for_each(|&id| place(catalog, id)),
        _ => {}
    }
}

fn place_within(catalog: &mut Catalog, name: &str) {
    // Folders come before what is in them.
    let all: Vec<VolumeId> = entries_within(&catalog.directory, name).map(|(_, id)| id).collect();
    all.into_iter().for_each(|id| place(catalog, id));
}

/// Finds out which bounded folder a volume or folder is in, and moves what is counted for it there.
fn place(catalog: &mut Catalog, id: VolumeId) {
    let folders = &catalog.space.accounts.folders;
    let Some(entry) = catalog.directory.get(id) else { return };
    let (record, own) = (&entry.record, entry.own_account());
    let folder = match record.state {
        VolumeState::Volume | VolumeState::Folder => nearest(&catalog.directory, folders, &record.name),
        // It is written on, and counts until it is deleted.
        VolumeState::Orphan if folders.get(entry.within.folder).is_some() => entry.within.folder,
        VolumeState::Dead => entry.bound().map_or(NO_VOLUME, |bound| bound.folder),
        _ => NO_VOLUME,
    };
    let is_folder = record.state == VolumeState::Folder;
    let is_ended = folders.get(id).is_some() && !is_folder;
    let counted = if folder == NO_VOLUME { 0 } else { counted_pages(record) };
    let accounts = &mut catalog.space.accounts;
    let account = accounts.folders.account_of(folder);
    let entry = catalog.directory.get_mut(id).expect("found above");
    let old = (entry.within.folder, std::mem::replace(&mut entry.within.counted, counted));
    (entry.within.folder, entry.within.account) = (folder, account);
    if is_folder && accounts.folders.get(id).is_some() {
        accounts.folders.move_to(id, folder, own);
        accounts.move_to(own, id);
    } else if !is_folder {
        accounts.folders.change(old.0, 0, -(old.1 as i64));
        accounts.folders.change(folder, 0, counted as i64);
        accounts.move_to(own, folder);
        accounts.folders.note_moved();
    }
    if is_ended {
        end(catalog, id);
    }
}

/// Follows a change of the bound or the quota of a volume or folder.
pub fn limits_changed(catalog: &mut Catalog, id: VolumeId) {
    match catalog.directory.get(id).map(|entry| entry.record.state) {
        Some(VolumeState::Folder) => set_limits(catalog, id),
        _ if catalog.space.accounts.folders.is_empty() => {}
        _ => place(catalog, id),
    }
}

fn set_limits(catalog: &mut Catalog, id: VolumeId) {
    let Some(entry) = catalog.directory.get(id) else { return };
    let (diverge, quota) = (entry.bound().map_or(0, |bound| bound.diverge), entry.record.quota);
    if entry.bound().is_none() && quota == 0 {
        return end(catalog, id);
    }
    let name = entry.record.name.clone();
    catalog.space.accounts.folders.set_limits(id, diverge / PAGE_SIZE as u64, quota / PAGE_SIZE as u64);
    place_within(catalog, &name);
}

/// Whether the account of a volume or folder goes on to count in the folder above it after it has ended: else what
/// others refer to of its pages would count no longer.
pub fn keeps_account(catalog: &Catalog, id: VolumeId) -> bool {
    let Some(entry) = catalog.directory.get(id) else { return false };
    let (own, accounts) = (entry.own_account(), &catalog.space.accounts);
    let is_bounded = own != NO_ACCOUNT && accounts.folders.account_of(entry.within.folder) != NO_ACCOUNT;
    correct!(is_bounded && accounts.pages(own) > 0, Bug::DeletedAccountForgotten => false)
}

/// The folder has no bound any more.
fn end(catalog: &mut Catalog, id: VolumeId) {
    let folders = &mut catalog.space.accounts.folders;
    let (below, above) = (folders.within(id), folders.from(id).nth(1).map_or(NO_VOLUME, |(above, _)| above));
    folders.remove(id);
    let directly = catalog.directory.iter().filter(|entry| entry.within.folder == id);
    let directly: Vec<VolumeId> = directly.map(|entry| entry.record.id).collect();
    for id in directly {
        if catalog.directory.get(id).is_some_and(|entry| entry.record.state == VolumeState::Dead) {
            extensions::set_folder(&mut catalog.directory, id, above);
        }
        place(catalog, id);
        end_kept(catalog, id);
    }
    for folder in below {
        let name = catalog.directory.get(folder).map(|entry| entry.record.name.clone());
        name.into_iter().for_each(|name| place_within(catalog, &name));
        end_kept(catalog, folder);
    }
}

/// The folders with a bound or a quota.
fn bounded(directory: &Directory) -> impl Iterator<Item = VolumeId> {
    let folders = directory.iter().filter(|entry| entry.record.state == VolumeState::Folder);
    let bounded = folders.filter(|entry| entry.bound().is_some() || entry.record.quota != 0);
    bounded.map(|entry| entry.record.id)
}

/// The folders with properties: those of [`bounded`], and those that give clones some.
pub fn with_properties(directory: &Directory) -> impl Iterator<Item = VolumeId> {
    let folders = directory.iter().filter(|entry| entry.record.state == VolumeState::Folder);
    let gives = |entry: &CatalogEntry| entry.extension().is_some_and(|extension| !extension.inherited.is_empty());
    let all = folders.filter(move |entry| entry.bound().is_some() || entry.record.quota != 0 || gives(entry));
    all.map(|entry| entry.record.id)
}

/// Whether a folder has properties, or there is an account that was kept because of a bound.
pub fn has_folder_properties(directory: &Directory) -> bool {
    with_properties(directory).next().is_some() || directory.iter().filter_map(|entry| entry.bound()).any(is_kept)
}

/// Whether a record gives a folder a property.
pub fn sets_folder_property(catalog: &Catalog, record: &Record) -> bool {
    let is_folder = |id: VolumeId, made: &[Record]| {
        let is_made = made.iter().any(|part| matches!(part, Record::MakeFolder { id: new, .. } if *new == id));
        is_made || catalog.directory.get(id).is_some_and(|entry| entry.record.state == VolumeState::Folder)
    };
    let parts = if let Record::Transaction { parts } = record { &parts[..] } else { std::slice::from_ref(record) };
    parts.iter().any(|part| match part {
        Record::SetExtension { id, extension } => {
            (extension.bound.is_some() || !extension.inherited.is_empty()) && is_folder(*id, parts)
        }
        Record::SetQuota { id, quota } => *quota != 0 && is_folder(*id, parts),
        _ => false,
    })
}

/// Ends an account that was kept for a folder if it counts in none any more.
fn end_kept(catalog: &mut Catalog, id: VolumeId) {
    let Some(entry) = catalog.directory.get(id) else { return };
    let Some(bound) = entry.bound().copied().filter(is_kept) else { return };
    if catalog.space.accounts.folders.account_of(entry.within.folder) == NO_ACCOUNT {
        let is_dead = entry.record.state == VolumeState::Dead;
        let extension = entry.extension().cloned().unwrap_or_default();
        catalog.space.accounts.close(bound.account);
        extensions::set(&mut catalog.directory, id, Extension { bound: None, ..extension });
        match is_dead {
            true => set_reaped(&mut catalog.directory, id, false),
            false => limits_changed(catalog, id),
        }
    }
}

/// Whether it is only there because its account was kept.
fn is_kept(bound: &Bound) -> bool {
    bound.diverge == 0 && bound.reserve == 0
}

/// Begins the bounds of folders that were loaded; the accounts are there.
pub fn open(catalog: &mut Catalog) {
    let ids: Vec<VolumeId> = bounded(&catalog.directory).collect();
    ids.into_iter().for_each(|id| set_limits(catalog, id));
    let dead: Vec<VolumeId> = directory::dead(&catalog.directory).into_iter().collect();
    dead.into_iter().for_each(|id| place(catalog, id));
}

/// Refuses `more` new pages of volume `id` if a folder above it does not allow them.
pub fn admit_new_pages(catalog: &Catalog, id: VolumeId, more: u64) -> Result<(), Failure> {
    let pages = |folder: &BoundedFolder| folder.charged + folder.new_pages.pages() + more;
    let is_over = |folder: &BoundedFolder| folder.diverge != 0 && pages(folder) > folder.diverge;
    match bounded_above(catalog, id).find(|(_, folder)| is_over(folder)) {
        Some((folder, _)) => Err(Failure::OverBound(folder)),
        None => Ok(()),
    }
}

/// Refuses `more` pages that volume `id` does not refer to yet if they exceed the quota of a folder above it.
pub fn admit_referenced(catalog: &mut Catalog, id: VolumeId, more: u64) -> Result<(), Failure> {
    if catalog.space.accounts.folders.is_empty() || more == 0 {
        return Ok(());
    }
    count_referenced(&mut catalog.directory, &mut catalog.space.accounts.folders);
    let pages = |folder: &BoundedFolder| folder.referenced + folder.claims.pages() + more;
    let is_over = |folder: &BoundedFolder| folder.quota != 0 && pages(folder) > folder.quota;
    match bounded_above(catalog, id).find(|(_, folder)| is_over(folder)) {
        Some((folder, _)) => Err(Failure::OverQuota(folder)),
        None => Ok(()),
    }
}

fn bounded_above(catalog: &Catalog, id: VolumeId) -> impl Iterator<Item = (VolumeId, &BoundedFolder)> {
    let folder = catalog.directory.get(id).map_or(NO_VOLUME, |entry| entry.within.folder);
    catalog.space.accounts.folders.from(folder)
}

/// The bounded folder that a volume is in.
pub fn folder_of(catalog: &Catalog, id: VolumeId) -> Option<&BoundedFolder> {
    bounded_above(catalog, id).next().map(|(_, folder)| folder)
}

/// Properties of a folder with a record: bounds, and what they count.
pub fn info_of_folder(catalog: &mut Catalog, id: VolumeId) -> Option<VolumeInfo> {
    count_referenced(&mut catalog.directory, &mut catalog.space.accounts.folders);
    let record = &catalog.directory.get(id).filter(|entry| entry.record.state == VolumeState::Folder)?.record;
    let sums = catalog.space.accounts.folders.get(id).map_or([0; 2], |folder| [folder.charged, folder.referenced]);
    let [diverged, referenced] = sums.map(|pages| pages * PAGE_SIZE as u64);
    Some(VolumeInfo { diverged, referenced, ..catalog.info_of(record, 0) })
}

/// The folders with properties, sorted by name.
pub fn folders_with_properties(catalog: &mut Catalog) -> Vec<VolumeInfo> {
    let ids: Vec<VolumeId> = with_properties(&catalog.directory).collect();
    let mut all: Vec<VolumeInfo> = ids.into_iter().filter_map(|id| info_of_folder(catalog, id)).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Compares the sums of folders with those of what has names below them; returns what is wrong.
pub fn wrong_sums(catalog: &mut Catalog) -> Vec<String> {
    count_referenced(&mut catalog.directory, &mut catalog.space.accounts.folders);
    let directory = &catalog.directory;
    let bounded = directory.iter().filter(|entry| catalog.space.accounts.folders.get(entry.record.id).is_some());
    bounded.filter_map(|entry| wrong_sum(catalog, directory, entry.record.id, &entry.record.name)).collect()
}

fn wrong_sum(catalog: &Catalog, directory: &Directory, id: VolumeId, name: &str) -> Option<String> {
    let accounts = &catalog.space.accounts;
    let is_below = |at: VolumeId| accounts.folders.from(at).any(|(folder, _)| folder == id);
    let is_nameless = |state| matches!(state, VolumeState::Orphan | VolumeState::Dead);
    let orphans = directory.iter().filter(|entry| is_nameless(entry.record.state));
    let orphans = orphans.filter(|entry| is_below(entry.within.folder));
    let named = entries_within(directory, name).filter_map(|(_, id)| directory.get(id));
    let (mut charged, mut referenced) = (0, 0);
    for entry in named.chain(orphans) {
        if entry.own_account() != NO_ACCOUNT {
            charged += accounts.pages(entry.own_account());
        }
        referenced += counted_pages(&entry.record);
    }
    let folder = accounts.folders.get(id)?;
    let (said, found) = ((folder.charged, folder.referenced), (charged, referenced));
    (said != found).then(|| format!("the folder {name:?} counts {said:?} new and mapped pages; below it are {found:?}"))
}
