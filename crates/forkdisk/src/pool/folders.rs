//! Verbs of folders: everything that is in one is kept, forked and rolled back together, at one instant.

use std::collections::{BTreeMap, BTreeSet};

use crate::catalog::directory::{hard_links, names, remnants, within_folder};
use crate::catalog::{
    Catalog, CatalogEntry, ForkOptions, VolumeInfo, check_origin_text, deletable, is_folder, no_such_snapshot,
    plan_fork, writable_volume,
};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{FileKind, Record, SnapshotFlags, VolumeState};
use crate::planted::correct;
use crate::store::transaction::retry_after_checkpoint;
use crate::types::VolumeId;

use super::Pool;
use super::verbs::begin_rollback;

impl<D: Device> Pool<D> {
    /// Names of all volumes in a folder and in the folders in it, sorted.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder, `Invalid` if it is a volume.
    pub fn volumes_in(&self, folder: &str) -> Result<Vec<String>> {
        let meta = self.store.meta.borrow();
        refuse_volume(&meta, folder)?;
        let is_volume = |id: VolumeId| {
            let found = meta.directory.get(hard_links::file_of(&meta.directory, id)).filter(|v| !v.pending);
            found.is_some_and(|v| v.record.state != VolumeState::Folder)
        };
        let all = names::entries_within(&meta.directory, folder).filter(|&(_, id)| is_volume(id));
        Ok(all.map(|(name, _)| name.to_string()).collect())
    }

    /// Names of the snapshots of the volumes in a folder, without the volumes' part, each once.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder, `Invalid` if it is a volume.
    pub fn snapshot_names_in(&self, folder: &str) -> Result<BTreeSet<String>> {
        let meta = self.store.meta.borrow();
        refuse_volume(&meta, folder)?;
        let ids = within_folder(&meta.directory, folder).flat_map(|id| meta.directory.snapshots_of(id));
        let seen = ids.filter_map(|id| meta.directory.get(id)).filter(|v| !v.pending);
        Ok(seen.map(|v| v.record.name.to_string()).collect())
    }

    /// Whether a volume in a folder has a snapshot of this name.
    pub fn has_snapshot_in(&self, folder: &str, snapshot: &str) -> bool {
        let meta = self.store.meta.borrow();
        let mut all = within_folder(&meta.directory, folder);
        all.any(|id| names::snapshot_named(&meta.directory, id, snapshot).is_some())
    }

    /// Whether there are snapshots of what was in a folder, or had this name, and was removed or renamed.
    pub fn has_kept(&self, folder: &str) -> bool {
        !remnants::kept_within(&self.store.meta.borrow().directory, folder).is_empty()
    }

    /// Names of what was directly in a folder at the time of this snapshot, sorted, each with its kind.
    pub fn children_of_snapshot(&self, folder: &str, snapshot: &str) -> Vec<(String, FileKind)> {
        let meta = self.store.meta.borrow();
        let kept = remnants::kept_within(&meta.directory, folder);
        let here = names::entries_within(&meta.directory, folder).chain(kept.iter().map(|(n, id)| (n.as_str(), *id)));
        let below = if folder.is_empty() { 0 } else { folder.len() + 1 };
        let found: BTreeMap<String, FileKind> = here
            .filter_map(|(name, id)| {
                let of_name = meta.directory.get(names::snapshot_named(&meta.directory, id, snapshot)?)?;
                let rest = name.get(below..)?;
                Some(match rest.split_once('/') {
                    Some((child, _)) => (child.to_string(), FileKind::Folder),
                    None => (rest.to_string(), of_name.record.kind()),
                })
            })
            .collect();
        found.into_iter().collect()
    }

    /// Before a file is removed or renamed on a mount: its snapshots are kept under the name that it has now, so that
    /// snapshots of its folder stay as they were. Visible at once, durable with the next flush. Without snapshots
    /// nothing changes.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `Busy` if its name is too long for that, `Invalid` for an origin; and
    /// those of [changing](crate#errors).
    pub fn keep_snapshots(&self, name: &str, now: u64) -> Result<()> {
        let has_some = |meta: &Catalog| -> Result<bool> {
            let volume = meta.directory.find(name)?;
            let is_remnant = name.starts_with(&format!("{}/", remnants::REMNANTS));
            writable_volume(volume, name)?;
            Ok(!is_remnant && !meta.directory.snapshots_of(names::named(&meta.directory, name)?).is_empty())
        };
        if !has_some(&self.store.meta.borrow())? {
            return Ok(());
        }
        self.store.note(|meta| {
            let id = names::named(&meta.directory, name)?;
            let (record, remnant) = (&meta.directory.get(id).expect("found").record, VolumeId(meta.next_id));
            let place = remnants::remnant_name(record).filter(|place| meta.directory.find(place).is_err());
            let full = || Error::new(ErrorKind::Busy, format!("{name:?} has snapshots, which cannot be kept apart"));
            Ok((Record::KeepSnapshots { id, remnant, now, name: place.ok_or_else(full)? }, ()))
        })
    }

    /// Deletes the snapshots of this name of all volumes in a folder, all or none; visible at once, durable with the
    /// next flush.
    ///
    /// # Errors
    /// `NotFound` if no volume in it has the snapshot, `Busy` if something needs one of them or has it open; and those
    /// of [changing](crate#errors).
    pub fn remove_snapshots_in(&self, folder: &str, snapshot: &str) -> Result<()> {
        self.store.note(|meta| {
            let kept = remnants::kept_within(&meta.directory, folder);
            let all = names::entries_within(&meta.directory, folder);
            let all = all.chain(kept.iter().map(|(name, id)| (name.as_str(), *id)));
            let found = all.filter_map(|(name, id)| {
                Some((format!("{name}@{snapshot}"), names::snapshot_named(&meta.directory, id, snapshot)?))
            });
            let (names, ids): (Vec<String>, Vec<VolumeId>) = found.unzip();
            let mut remnants = remnants::idle_remnants(&meta.directory, &ids);
            remnants.retain(|&id| self.store.handles(id) == 0);
            if names.is_empty() {
                return Err(no_such_snapshot(folder, snapshot));
            }
            names.iter().zip(ids).try_for_each(|(name, id)| self.store.refuse_in_use(id, name))?;
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let mut ids = deletable(meta, &names)?;
            ids.extend(remnants);
            Ok((Record::Delete { ids }, ()))
        })?;
        self.upkeep.start_reaping();
        Ok(())
    }

    /// Takes a snapshot `name` of every volume in a folder, at one instant, all or none.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder or no volume in it; and those of
    /// [`snapshot_with`](Self::snapshot_with).
    pub async fn snapshot_folder(
        &self,
        folder: &str,
        name: &str,
        flags: SnapshotFlags,
        now: u64,
    ) -> Result<Vec<VolumeInfo>> {
        let volumes = self.volumes_in(folder)?;
        if volumes.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no volume in the folder {folder:?}")));
        }
        let sources: Vec<(&str, &str)> = volumes.iter().map(|volume| (volume.as_str(), name)).collect();
        self.snapshot_with(&sources, flags, now).await
    }

    /// Makes writable clones of a volume, a snapshot or a folder under all of these names, all or none, all of one
    /// instant, in a time that does not depend on its size. A fork of a folder has everything that is in it, folders
    /// and their attributes, too. `folder@snapshot` stands for the snapshots of this name of the volumes in the folder;
    /// volumes without one are left out. Returns the new volumes.
    ///
    /// # Errors
    /// `NotFound` if there is no such source, `Exists` if a name is taken or given twice, `Invalid` for an origin, a
    /// bad name or a bad option; and those of [changing](crate#errors).
    pub async fn fork(&self, source: &str, names: &[&str], options: &ForkOptions) -> Result<Vec<VolumeInfo>> {
        let made = retry_after_checkpoint(&self.store, |meta| {
            let fork = plan_fork(meta, source, names, options)?;
            self.store.publish_parts(meta, fork.parts)?;
            for &(from, id) in &fork.copies {
                meta.directory.get_mut(id).expect("just made").pending = true;
                self.store.hooks.note_cloned(meta, from, id);
            }
            Ok(fork.copies)
        });
        let copies = made.await?;
        self.store.generations.barrier().await;
        let committed = self.store.clone().commit().await;
        for &(_, id) in &copies {
            self.store.meta.borrow_mut().directory.show(id);
        }
        committed?;
        copies.into_iter().map(|(_, id)| self.store.info(id)).collect()
    }

    /// Gives every volume in a folder that has a snapshot `snapshot` its contents and size, all or none. Volumes
    /// without one, and all snapshots, stay as they are. Returns the names of the volumes that were rolled back.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder, or no volume in it has the snapshot; `Busy` if one of them is in use;
    /// `Invalid` if one is an origin; and those of [changing](crate#errors).
    pub async fn rollback_folder(&self, folder: &str, snapshot: &str) -> Result<Vec<String>> {
        let names = self.store.verb_of_parts(|meta| {
            let targets = rollback_targets(meta, folder, snapshot)?;
            targets.iter().try_for_each(|(name, id, _)| self.store.refuse_in_use(*id, name))?;
            Ok((self.begin_rollbacks(meta, &targets), targets.into_iter().map(|(name, ..)| name).collect()))
        });
        let names = names.await?;
        self.upkeep.start_reaping();
        Ok(names)
    }

    /// As [`rollback_folder`](Self::rollback_folder), while volumes are in use: requests in flight of all of them end
    /// before, and those that come meanwhile wait, so that no request shows one volume before and one after it. Handles
    /// stay open. What clients have cached themselves is theirs to drop.
    ///
    /// # Errors
    /// Those of [`rollback_folder`](Self::rollback_folder) but `Busy`; `Invalid`, too, if a volume shows through to an
    /// origin.
    pub async fn rollback_folder_live(&self, folder: &str, snapshot: &str) -> Result<Vec<String>> {
        loop {
            let targets = rollback_targets(&self.store.meta.borrow(), folder, snapshot)?;
            let mut volumes = Vec::new();
            for (name, ..) in &targets {
                volumes.push(self.volume(name)?);
            }
            if let Some(through) = volumes.iter().find(|volume| volume.has_backing()) {
                let name = through.name();
                let why = format!("{name:?} shows through to an origin; disconnect the clients first");
                return Err(Error::new(ErrorKind::Invalid, why));
            }
            // Two at once take the volumes in the same order.
            volumes.sort_by_key(|volume| volume.id());
            let mut suspended = Vec::new();
            for volume in &volumes {
                suspended.push(volume.suspend().await?);
            }
            let rolled = retry_after_checkpoint(&self.store, |meta| {
                // Meanwhile a volume may have come, gone, or got another name.
                let is_same = rollback_targets(meta, folder, snapshot)? == targets;
                let parts = if is_same { self.begin_rollbacks(meta, &targets) } else { Vec::new() };
                self.store.publish_parts(meta, parts)?;
                Ok(is_same)
            });
            let is_done = rolled.await?;
            drop(suspended);
            if is_done {
                correct!(self.store.clone().commit().await?, Bug::LiveRollbackNotDurable => ());
                self.upkeep.start_reaping();
                return Ok(targets.into_iter().map(|(name, ..)| name).collect());
            }
        }
    }

    /// The records that roll back these volumes; what belongs to their old contents is forgotten.
    fn begin_rollbacks(&self, meta: &mut Catalog, targets: &[RollbackTarget]) -> Vec<Record> {
        let count = correct!(targets.len(), Bug::FolderRollbackLeavesLast => targets.len().max(2) - 1);
        let numbered = targets.iter().take(count).zip((meta.next_id..).map(VolumeId));
        let rollback = |(&(_, volume, snapshot), dead): (&RollbackTarget, VolumeId)| {
            begin_rollback(&self.store, meta, volume);
            Record::Rollback { volume, snapshot, dead }
        };
        numbered.map(rollback).collect()
    }

    /// Exchanges the names of two volumes or folders: `a` takes the place of `b`, and the other way round. Snapshots,
    /// open handles and everything in a folder go with their volumes.
    ///
    /// # Errors
    /// `NotFound` if one of them does not exist, `Invalid` if one is a snapshot, or in the other, or a name gets too
    /// long; and those of [changing](crate#errors).
    pub async fn swap(&self, a: &str, b: &str) -> Result<()> {
        let record = |meta: &mut Catalog| {
            check_exchange(meta, a, b)?;
            Ok((Record::Exchange { a: a.to_string(), b: b.to_string() }, ()))
        };
        correct!(self.store.verb(record).await, Bug::SwapInSteps => swap_in_steps(self, a, b).await)
    }

    /// Like [`swap`](Self::swap), on a mount: visible at once, durable with the next flush.
    ///
    /// # Errors
    /// Those of [`swap`](Self::swap).
    pub fn swap_files(&self, a: &str, b: &str) -> Result<()> {
        self.store.note(|meta| {
            check_exchange(meta, a, b)?;
            Ok((Record::Exchange { a: a.to_string(), b: b.to_string() }, ()))
        })
    }

    /// Names of the volumes in a folder that [`rollback_folder`](Self::rollback_folder) would roll back.
    ///
    /// # Errors
    /// `NotFound` and `Invalid`, as [`rollback_folder`](Self::rollback_folder).
    pub fn check_rollback_folder(&self, folder: &str, snapshot: &str) -> Result<Vec<String>> {
        let targets = rollback_targets(&self.store.meta.borrow(), folder, snapshot)?;
        Ok(targets.into_iter().map(|(name, ..)| name).collect())
    }
}

/// A volume to roll back: its name, its number, and the number of the snapshot.
type RollbackTarget = (String, VolumeId, VolumeId);

/// Volumes in a folder with their snapshots of this name.
fn rollback_targets(meta: &Catalog, folder: &str, snapshot: &str) -> Result<Vec<RollbackTarget>> {
    refuse_volume(meta, folder)?;
    let (mut targets, mut seen) = (Vec::new(), BTreeSet::new());
    for (name, id) in names::entries_within(&meta.directory, folder) {
        let Some(from) = names::snapshot_named(&meta.directory, id, snapshot) else { continue };
        let file = hard_links::file_of(&meta.directory, id);
        let volume = meta.directory.get(file).expect("it has a snapshot");
        if volume.record.state == VolumeState::Origin {
            let why = format!("{name:?} is an origin, which is rolled back alone: `rollback {name}@{snapshot}`");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        // One of several names is enough.
        if seen.insert(file) {
            targets.push((name.to_string(), writable_volume(volume, name)?, from));
        }
    }
    if targets.is_empty() {
        return Err(no_such_snapshot(folder, snapshot));
    }
    Ok(targets)
}

/// Exchanges the names of two volumes or folders by three renames.
#[cfg(feature = "planted")]
async fn swap_in_steps<D: Device>(pool: &Pool<D>, a: &str, b: &str) -> Result<()> {
    check_exchange(&pool.store.meta.borrow(), a, b)?;
    for (from, to) in [(a, "aside"), (b, a), ("aside", b)] {
        match pool.rename_folder(from, to) {
            Ok(()) => pool.flush().await?,
            Err(_) => pool.rename(from, to).await?,
        }
    }
    Ok(())
}

/// Refuses names that cannot be exchanged.
fn check_exchange(meta: &Catalog, a: &str, b: &str) -> Result<()> {
    for name in [a, b] {
        let is_of_remnants = name.split('/').next() == Some(remnants::REMNANTS);
        if name.contains('@') || name.is_empty() || is_of_remnants {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{name:?} is no volume or folder: only these are swapped"),
            ));
        }
        if !is_folder(meta, name) {
            meta.directory.find(name)?;
        }
    }
    if a == b || a.starts_with(&format!("{b}/")) || b.starts_with(&format!("{a}/")) {
        return Err(Error::new(ErrorKind::Invalid, format!("{a:?} and {b:?} are one, or one lies within the other")));
    }
    for (from, to) in [(a, b), (b, a)] {
        names::check_renamed(&meta.directory, from, to)?;
        if let Ok(CatalogEntry { record, .. }) = meta.directory.find(from)
            && record.origin_record.is_some()
        {
            check_origin_text(to, &record.origin, record.stamp.as_ref().map(|stamp| &*stamp.device))?;
        }
    }
    Ok(())
}

fn refuse_volume(meta: &Catalog, folder: &str) -> Result<()> {
    if folder.is_empty() || is_folder(meta, folder) || !remnants::kept_within(&meta.directory, folder).is_empty() {
        return Ok(());
    }
    match meta.directory.find(folder) {
        Ok(_) => Err(Error::new(ErrorKind::Invalid, format!("{folder:?} is a volume, not a folder"))),
        Err(_) => Err(Error::new(ErrorKind::NotFound, format!("there is no folder {folder:?}"))),
    }
}
