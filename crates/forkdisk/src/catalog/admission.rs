//! Admission of records of verbs: none of them leaves a directory that the next checkpoint cannot write (I9).

use std::collections::{BTreeMap, BTreeSet};

use crate::format::{Extension, Record};
use crate::space::Need;
use crate::types::{NO_ACCOUNT, PAGE_SIZE, VolumeId};

use super::Catalog;
use super::bounds::more_held;
use super::directory::{clones_of, extensions, hard_links, unchanged_page_of, unchanged_pages_of_new, within_folder};

/// What a record changes in the directory.
#[derive(Default)]
struct Effect {
    /// Existing volumes that get other records.
    changed: Vec<VolumeId>,
    /// Number of new records.
    new: usize,
    /// Number of new accounts.
    accounts: usize,
    /// Sizes of new volumes.
    sizes: BTreeMap<VolumeId, u64>,
    /// Pages that have to be kept free from now on.
    held: u64,
    /// Leads to free space: admitted down to the last page that the checkpoint does not need.
    frees: bool,
    /// Makes something that stays.
    stays: bool,
}

/// Refuses `record` if the next checkpoint would find no space for it; `Err` has the bytes that are needed.
pub fn admit(catalog: &Catalog, record: &Record) -> Result<(), u64> {
    let mut effect = Effect::default();
    collect(catalog, record, &mut effect);
    if effect.changed.is_empty() && effect.new == 0 && effect.held == 0 {
        return Ok(());
    }
    let directory = &catalog.directory;
    let both = |&id: &VolumeId| [unchanged_page_of(directory, id), extensions::unchanged_page_of(directory, id)];
    let of_changed = effect.changed.iter().flat_map(both).flatten();
    let pages: BTreeSet<u64> = unchanged_pages_of_new(directory, effect.new).chain(of_changed).collect();
    // With each page at most one path of tables of the directory's map; a table above a root that was too low.
    let checkpoint = catalog.checkpoint_pages() + 2 * (pages.len() + effect.accounts) as u64 + 1;
    let need = match effect.held {
        0 if effect.frees && !effect.stays => Need::Release,
        0 => Need::Step,
        held => Need::Write(held),
    };
    let refused = |_| catalog.space.pages_for(need, checkpoint) * PAGE_SIZE as u64;
    catalog.space.reserve(need, checkpoint, NO_ACCOUNT).map(drop).map_err(refused)
}

fn collect(catalog: &Catalog, record: &Record, effect: &mut Effect) {
    match record {
        Record::Create { id, size, .. } | Record::CreateUnnamed { id, size, .. } => {
            effect.sizes.insert(*id, *size);
            effect.new += 1;
            effect.stays = true;
        }
        Record::MakeFolder { .. } | Record::Protect { .. } | Record::MakeHardLink { .. } => {
            effect.new += 1;
            effect.stays = true;
        }
        Record::Snapshot { of, .. } => {
            effect.changed.extend(of.iter().map(|&(source, ..)| hard_links::file_of(&catalog.directory, source)));
            effect.new += of.len();
            effect.stays = true;
        }
        Record::KeepSnapshots { id, .. } => {
            effect.changed.extend(catalog.directory.snapshots_of(*id));
            effect.new += 1;
            effect.stays = true;
        }
        Record::Clone { source, id, .. } => {
            effect.sizes.extend(catalog.directory.get(*source).map(|volume| (*id, volume.record.size)));
            effect.changed.push(*source);
            effect.new += 1;
            effect.stays = true;
        }
        Record::TakeName { file, link } => {
            effect.changed.extend([*file, *link]);
            effect.changed.extend(catalog.directory.snapshots_of(*link));
            effect.frees = true;
        }
        Record::Rollback { volume, snapshot, .. } => {
            effect.changed.push(*volume);
            if !catalog.directory.is_snapshot(*snapshot) {
                effect.changed.push(*snapshot);
            }
            effect.new += 1;
            effect.frees = true;
        }
        Record::Replace { volume, source, .. } => {
            effect.changed.extend([*volume, *source]);
            effect.new += 1;
            effect.frees = true;
        }
        Record::Delete { ids } => {
            effect.changed.extend(ids);
            // What was cloned from it has another source from now on.
            ids.iter().for_each(|&id| effect.changed.extend(clones_of(&catalog.directory, id)));
            effect.frees = true;
        }
        Record::RenameOver { id, replaced, .. } => {
            effect.changed.extend([*id, *replaced]);
            effect.changed.extend(clones_of(&catalog.directory, *replaced));
            effect.frees = true;
        }
        Record::Exchange { a, b } => {
            [a, b].into_iter().for_each(|name| effect.changed.extend(within_folder(&catalog.directory, name)));
            effect.frees = true;
        }
        Record::RenameFolder { from, .. } => effect.changed.extend(within_folder(&catalog.directory, from)),
        // A full pool must not keep origins from being opened, closed and rolled back.
        Record::Resize { id, size } => {
            let bound = catalog.directory.get(*id).and_then(|volume| volume.bound());
            effect.held += more_held(catalog, *id, *size, bound);
            effect.changed.push(*id);
            effect.frees = true;
        }
        Record::Unlink { id }
        | Record::Flatten { id }
        | Record::SetOrigin { id, .. }
        | Record::Identify { id, .. }
        | Record::Stamp { id, .. }
        | Record::ZonesWritten { id, .. }
        | Record::RollbackProgress { origin: id, .. } => {
            effect.changed.push(*id);
            effect.frees = true;
        }
        Record::Rename { id, .. }
        | Record::NameVolume { id, .. }
        | Record::SetChunk { id, .. }
        | Record::SetCopying { id, .. }
        | Record::SetQuota { id, .. }
        | Record::SetAttributes { id, .. }
        | Record::SetGather { id, .. } => effect.changed.push(*id),
        Record::SetExtension { id, extension } => collect_extension(catalog, *id, extension, effect),
        Record::Grow { .. } | Record::SetCopier { .. } => {}
        Record::Transaction { parts } => parts.iter().for_each(|part| collect(catalog, part, effect)),
        // Admitted by the pages that they take.
        Record::Map { .. }
        | Record::Unmap { .. }
        | Record::CloneRange { .. }
        | Record::CopyOut { .. }
        | Record::ChunksRolledBack { .. }
        | Record::Gather { .. } => {}
    }
}

fn collect_extension(catalog: &Catalog, id: VolumeId, extension: &Extension, effect: &mut Effect) {
    let volume = catalog.directory.get(id);
    let has_one = volume.is_some_and(|volume| volume.extension().is_some());
    let is_bounded = volume.is_some_and(|volume| volume.bound().is_some());
    let size = effect.sizes.get(&id).copied().or(volume.map(|volume| volume.record.size));
    effect.held += more_held(catalog, id, size.unwrap_or(0), extension.bound.as_ref());
    effect.accounts += usize::from(extension.bound.is_some() && !is_bounded);
    effect.changed.push(id);
    effect.new += usize::from(!has_one && !extension.is_empty());
}
