//! The directory of volumes: every volume's record, indexed by number and by name.
//!
//! It is in memory as a whole (about 2.5 KiB per volume or snapshot). On the device each record has a slot of
//! 512 bytes; a checkpoint writes the pages whose slots changed.

pub mod descent;
pub mod extensions;
pub mod hard_links;
pub mod names;
pub mod remnants;
pub mod within;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    Bound, DirectorySlot, Extension, GatherPolicy, NO_VOLUME, SLOTS_PER_PAGE, VolumeRecord, VolumeState,
};
use crate::planted::correct;
use crate::types::{AccountId, Epoch, NO_ACCOUNT, VolumeId};

pub use descent::clones_of;
use extensions::Extensions;
pub use names::{check_volume_name, within_folder};
pub use within::Within;

/// The entry of a volume or snapshot in memory; [`Live`](crate::volume::Live) is separate.
pub struct CatalogEntry {
    pub record: VolumeRecord,
    slot: u64,
    /// Not visible yet: the snapshot that creates it has not been acknowledged.
    pub pending: bool,
    /// See [`Directory::last_shared_at`].
    holder: Cell<SharingSnapshot>,
    /// Its extension, and the slot of that.
    extension: Option<Box<(u64, Extension)>>,
    /// The bounded folder that it is in.
    pub within: Within,
}

/// The snapshot that is known to share what a volume has not changed since.
#[derive(Clone, Copy, Default)]
enum SharingSnapshot {
    /// Must be searched.
    #[default]
    Unknown,
    None,
    Snapshot(VolumeId),
}

impl CatalogEntry {
    fn is_snapshot(&self) -> bool {
        matches!(self.record.state, VolumeState::Snapshot)
    }

    /// Its extension, if it has one.
    pub fn extension(&self) -> Option<&Extension> {
        self.extension.as_ref().map(|both| &both.1)
    }

    /// Its bound, if it has one.
    pub fn bound(&self) -> Option<&Bound> {
        self.extension()?.bound.as_ref()
    }

    /// Its own account, if it has one.
    pub fn own_account(&self) -> AccountId {
        self.bound().map_or(NO_ACCOUNT, |bound| bound.account)
    }

    /// The account that new pages of it are charged to: its own, or that of the nearest folder with one.
    pub fn account(&self) -> AccountId {
        self.bound().map_or(self.within.account, |bound| bound.account)
    }

    /// What its slot of this number has.
    fn contents_of(&self, slot: u64) -> DirectorySlot {
        match &self.extension {
            Some(both) if both.0 == slot => DirectorySlot::Extension(self.record.id, both.1.clone()),
            _ => DirectorySlot::Volume(self.record.clone()),
        }
    }
}

/// The living snapshots of one volume, by age.
#[derive(Default)]
pub struct Chain {
    /// Those that share exceptions.
    pub chained: BTreeSet<VolumeId>,
    /// Those with separate copies.
    pub independent: BTreeSet<VolumeId>,
    /// The deletion of others is durable once the journal is up to this sequence number.
    pub deleted_until: u64,
    /// The start of a rollback to one of them is durable once the journal is up to this sequence number.
    pub rolled_until: u64,
}

/// See the module.
#[derive(Default)]
pub struct Directory {
    chains: BTreeMap<VolumeId, Chain>,
    /// Pairs of source and clone: sources of records.
    descent: BTreeSet<(VolumeId, VolumeId)>,
    /// Boxed: a node of the tree has space for 11 and is about half full.
    volumes: BTreeMap<VolumeId, Box<CatalogEntry>>,
    names: BTreeMap<(VolumeId, Arc<str>), VolumeId>,
    /// Ascends whenever a name is added, removed, or becomes visible.
    names_version: u64,
    free_slots: BTreeSet<u64>,
    slots: u64,
    by_slot: BTreeMap<u64, VolumeId>,
    changed: BTreeSet<u64>,
    /// Pages that the last freeze took: with those changed since, all whose roots may have moved.
    frozen: BTreeSet<u64>,
    /// Dead volumes, and volumes with mappings beyond their end: work of the reaper.
    dead: BTreeSet<VolumeId>,
    tails: BTreeSet<VolumeId>,
    /// Volumes with a gather policy.
    gathering: BTreeSet<VolumeId>,
    /// Pairs of a file and a hard link of it.
    hard_links: BTreeSet<(VolumeId, VolumeId)>,
    /// What the extensions of volumes say, and those that were loaded before their volumes.
    extensions: Extensions,
    /// Volumes in bounded folders with changes that the sums of these do not have yet.
    uncounted: Vec<VolumeId>,
}

impl Directory {
    /// Adds a volume in the lowest free slot.
    pub fn add(&mut self, record: VolumeRecord) {
        let slot = take_slot(self);
        self.place(record, slot);
    }

    fn place(&mut self, record: VolumeRecord, slot: u64) {
        self.names_version += 1;
        if !matches!(record.state, VolumeState::Dead | VolumeState::Orphan) {
            self.names.insert((scope_of(&record), record.name.clone()), record.id);
        }
        if record.state == VolumeState::HardLink {
            hard_links::note(self, record.parent, record.id);
        }
        self.by_slot.insert(slot, record.id);
        if record.source != NO_VOLUME {
            self.descent.insert((record.source, record.id));
        }
        let id = record.id;
        if record.state == VolumeState::Snapshot {
            let chain = self.chains.entry(record.parent).or_default();
            let part = if record.flags.independent { &mut chain.independent } else { &mut chain.chained };
            part.insert(id);
        }
        if record.state == VolumeState::Dead {
            self.dead.insert(id);
        }
        let (holder, within) = (Cell::default(), Within::default());
        let volume = CatalogEntry { record, slot, pending: false, holder, extension: None, within };
        self.volumes.insert(id, Box::new(volume));
        self.update_tail(id);
        self.update_gathering(id);
    }

    /// Must be called when a volume's gather policy has changed.
    pub fn update_gathering(&mut self, id: VolumeId) {
        let wants = |v: &CatalogEntry| v.record.state == VolumeState::Volume && v.record.gather != GatherPolicy::Off;
        match self.get(id).is_some_and(wants) {
            true => self.gathering.insert(id),
            false => self.gathering.remove(&id),
        };
    }

    /// Returns the volumes with a gather policy.
    pub fn gathering(&self) -> impl Iterator<Item = &CatalogEntry> {
        self.gathering.iter().filter_map(|id| self.get(*id))
    }

    /// Must be called when a volume's length or the end of its tail has changed.
    pub fn update_tail(&mut self, id: VolumeId) {
        let is_live = |v: &CatalogEntry| matches!(v.record.state, VolumeState::Volume | VolumeState::Orphan);
        let has_tail = |v: &CatalogEntry| is_live(v) && v.record.trim_end > v.record.size;
        match self.get(id).is_some_and(has_tail) {
            true => self.tails.insert(id),
            false => self.tails.remove(&id),
        };
    }

    /// Whether `id` is a living snapshot.
    pub fn is_snapshot(&self, id: VolumeId) -> bool {
        self.get(id).is_some_and(|v| v.record.state == VolumeState::Snapshot)
    }

    /// Returns the living snapshots of a volume, if it ever had any.
    pub fn chain(&self, of: VolumeId) -> Option<&Chain> {
        self.chains.get(&of)
    }

    /// Notes that a rollback of this origin begins; that is durable once the journal is up to `until`.
    pub fn rollback_begins(&mut self, origin: VolumeId, until: u64) {
        self.chains.entry(origin).or_default().rolled_until = until;
    }

    /// Returns a volume whose backing is snapshot `id` of an origin, if there is one, or the origin that is
    /// being rolled back to it.
    pub fn clones_backed_by(&self, id: VolumeId) -> Option<&CatalogEntry> {
        let rolls = |v: &&CatalogEntry| v.record.origin_record.as_ref().is_some_and(|p| p.rollback_to == id);
        // Only a snapshot of an origin is needed by others.
        let origin = self.get(self.get(id)?.record.parent).filter(|v| v.record.origin_record.is_some())?;
        Some(origin)
            .filter(rolls)
            .or_else(|| self.iter().find(|v| v.record.base == id && v.record.state != VolumeState::Dead))
    }

    /// Sets the snapshot of an origin that is the backing of a volume, or none.
    pub fn set_base(&mut self, id: VolumeId, base: VolumeId) {
        let volume = self.change(id).expect("an existing volume");
        volume.record.base = base;
    }

    /// Fails if snapshot `id` of an origin is the backing of a volume.
    pub fn refuse_with_clones(&self, id: VolumeId) -> Result<()> {
        let (Some(held), Some(by)) = (self.get(id), self.clones_backed_by(id)) else { return Ok(()) };
        let rolls = by.record.origin_record.is_some();
        let (held, by) = (self.full_name(&held.record), self.full_name(&by.record));
        let why = match rolls {
            true => format!("{by:?} is being rolled back to {held:?}; wait until that has ended"),
            false => format!("{held:?} is held by {by:?}, which was cloned from it; flatten or delete that first"),
        };
        Err(Error::new(ErrorKind::Busy, why))
    }

    /// Returns the dead volume with the lowest number.
    pub fn first_dead(&self) -> Option<VolumeId> {
        self.dead.first().copied()
    }

    /// Returns the volume with the lowest number that was shrunk and still has its tail.
    pub fn first_tail(&self) -> Option<VolumeId> {
        self.tails.first().copied()
    }

    /// Takes over a page read from the device.
    pub fn load_page(&mut self, page: u64, slots: Vec<Option<DirectorySlot>>) -> std::result::Result<(), String> {
        for (i, content) in slots.into_iter().enumerate() {
            let slot = page * SLOTS_PER_PAGE as u64 + i as u64;
            self.slots = self.slots.max(slot + 1);
            match content {
                None => {
                    self.free_slots.insert(slot);
                }
                Some(DirectorySlot::Extension(of, extension)) => extensions::load(self, of, slot, extension)?,
                Some(DirectorySlot::Volume(record)) => {
                    if self.volumes.contains_key(&record.id) {
                        return Err(format!("volume {} is there twice", record.id.0));
                    }
                    let id = record.id;
                    correct!(
                        self.place(record, slot),
                        Bug::LoadedHardLinkNotCounted => hard_links::place_uncounted(self, record, slot)
                    );
                    extensions::join_volume(self, id);
                }
            }
        }
        Ok(())
    }

    /// The record of a volume that has a handle: it is not removed before its last handle is gone.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn of_handle(&self, id: VolumeId) -> &VolumeRecord {
        &self.get(id).expect("a volume with a handle is not removed").record
    }

    pub fn get(&self, id: VolumeId) -> Option<&CatalogEntry> {
        self.volumes.get(&id).map(|volume| &**volume)
    }

    /// Returns the volume to be changed: its page goes into the next checkpoint.
    pub fn change(&mut self, id: VolumeId) -> Option<&mut CatalogEntry> {
        let volume = self.volumes.get_mut(&id)?;
        self.changed.insert(volume.slot / SLOTS_PER_PAGE as u64);
        volume.within.note_change(id, &mut self.uncounted);
        Some(volume)
    }

    /// Returns a volume in memory for changes that its record on the device does not have.
    pub fn get_mut(&mut self, id: VolumeId) -> Option<&mut CatalogEntry> {
        self.volumes.get_mut(&id).map(|volume| &mut **volume)
    }

    /// Iterates over all volumes, by number.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &CatalogEntry> {
        self.volumes.values().map(|volume| &**volume)
    }

    /// Marks a volume as dead: its name is free. That is durable once the journal is up to `until`.
    pub fn mark_dead(&mut self, id: VolumeId, until: u64) {
        let entry = self.get(id).expect("an existing volume");
        let (parent, of, remains) = (scope_of(&entry.record), entry.record.parent, extensions::remains(entry));
        self.hard_links.remove(&(of, id));
        correct!(extensions::set(self, id, remains), Bug::ExtensionOutlivesVolume => ());
        descent::inherit_source(self, id);
        self.unname(id);
        let volume = self.change(id).expect("an existing volume");
        volume.record.state = VolumeState::Dead;
        volume.record.base = NO_VOLUME;
        volume.record.cursor = 0;
        volume.record.origin.clear();
        volume.record.attributes = None;
        self.dead.insert(id);
        self.tails.remove(&id);
        if let Some(chain) = self.chains.get_mut(&parent) {
            chain.chained.remove(&id);
            chain.independent.remove(&id);
            chain.deleted_until = until;
        }
        self.chains.remove(&id);
        self.gathering.remove(&id);
    }

    /// Removes the name of a volume, which becomes an orphan.
    pub fn orphan(&mut self, id: VolumeId) {
        self.unname(id);
        self.change(id).expect("an existing volume").record.state = VolumeState::Orphan;
        self.update_gathering(id);
    }

    /// Gives an orphan a free name; it becomes a volume.
    pub fn adopt(&mut self, id: VolumeId, name: &str) {
        self.names_version += 1;
        let record = &mut self.change(id).expect("an existing volume").record;
        debug_assert!(record.state == VolumeState::Orphan && record.name.is_empty());
        (record.state, record.name) = (VolumeState::Volume, name.into());
        let name = record.name.clone();
        self.names.insert((NO_VOLUME, name), id);
        self.update_tail(id);
        self.update_gathering(id);
    }

    fn unname(&mut self, id: VolumeId) {
        self.names_version += 1;
        let volume = self.change(id).expect("an existing volume");
        let key = (scope_of(&volume.record), std::mem::take(&mut volume.record.name));
        if self.names.get(&key) == Some(&id) {
            self.names.remove(&key);
        }
    }

    /// Removes a dead volume for good.
    pub fn remove(&mut self, id: VolumeId) {
        let volume = self.volumes.remove(&id).expect("an existing volume");
        self.changed.insert(volume.slot / SLOTS_PER_PAGE as u64);
        self.by_slot.remove(&volume.slot);
        self.free_slots.insert(volume.slot);
        self.dead.remove(&id);
        self.tails.remove(&id);
    }

    pub fn rename(&mut self, id: VolumeId, name: &str) {
        self.names_version += 1;
        let volume = correct!(self.change(id), Bug::RenameNotCheckpointed => self.get_mut(id));
        let volume = volume.expect("an existing volume");
        let name: Arc<str> = name.into();
        let old = std::mem::replace(&mut volume.record.name, name.clone());
        let parent = scope_of(&volume.record);
        self.names.remove(&(parent, old));
        self.names.insert((parent, name), id);
    }

    /// Makes a pending snapshot or clone visible.
    pub fn show(&mut self, id: VolumeId) {
        self.names_version += 1;
        if let Some(volume) = self.get_mut(id) {
            volume.pending = false;
        }
    }

    /// Returns the pages whose slots changed since the last checkpoint, with their records.
    pub fn changed_entries(&self) -> Vec<(u64, [Option<DirectorySlot>; SLOTS_PER_PAGE])> {
        let page_of = |&page: &u64| {
            let slot = |i: usize| {
                let slot = page * SLOTS_PER_PAGE as u64 + i as u64;
                self.by_slot.get(&slot).map(|id| self.volumes[id].contents_of(slot))
            };
            (page, std::array::from_fn(slot))
        };
        self.changed.iter().map(page_of).collect()
    }

    /// Marks all pages as unchanged.
    pub fn take_changed(&mut self) {
        self.frozen = std::mem::take(&mut self.changed);
    }

    /// Returns the volumes whose roots may have no address yet, or got one from the checkpoint that is
    /// ending: those on pages that it wrote or that changed since.
    pub fn moved_roots(&self) -> Vec<VolumeId> {
        let slots = |&page: &u64| page * SLOTS_PER_PAGE as u64..(page + 1) * SLOTS_PER_PAGE as u64;
        self.frozen.union(&self.changed).flat_map(|page| self.by_slot.range(slots(page)).map(|(_, &id)| id)).collect()
    }

    /// Whether this volume's page changed since the last checkpoint.
    #[cfg(feature = "planted")]
    pub fn has_changed(&self, id: VolumeId) -> bool {
        self.get(id).is_some_and(|v| self.changed.contains(&(v.slot / SLOTS_PER_PAGE as u64)))
    }

    /// Returns the snapshots of a volume.
    pub fn snapshots_of(&self, id: VolumeId) -> Vec<VolumeId> {
        self.names.range((id, "".into())..).take_while(|((parent, _), _)| *parent == id).map(|(_, &id)| id).collect()
    }

    /// Returns the number of pages that changed since the last checkpoint.
    pub fn changed_pages(&self) -> usize {
        self.changed.len()
    }

    /// Returns the number of pages of the directory.
    pub fn pages(&self) -> u64 {
        self.slots.div_ceil(SLOTS_PER_PAGE as u64)
    }
}

/// The parent that the name belongs to: a volume for the name of a snapshot, else none.
fn scope_of(record: &VolumeRecord) -> VolumeId {
    if record.state == VolumeState::Snapshot { record.parent } else { NO_VOLUME }
}

/// Takes the lowest free slot; its page goes into the next checkpoint.
fn take_slot(directory: &mut Directory) -> u64 {
    let slot = directory.free_slots.pop_first().unwrap_or_else(|| {
        directory.slots += 1;
        directory.slots - 1
    });
    directory.changed.insert(slot / SLOTS_PER_PAGE as u64);
    slot
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
    let origin = descent::ancestor(directory, volume).filter(|v| v.is_snapshot())?;
    // A volume that took the name later is another.
    (origin.record.shared_at <= volume.shared_at).then_some(origin.record.id)
}

/// Returns the dead volumes.
pub fn dead(directory: &Directory) -> BTreeSet<VolumeId> {
    directory.dead.clone()
}

/// Whether there is what older versions do not know: a symbolic link, a FIFO or a socket.
pub fn has_special_files(directory: &Directory) -> bool {
    directory.iter().any(|volume| volume.record.is_special())
}

/// Notes that a snapshot of this volume has been taken.
pub fn note_snapshot(directory: &mut Directory, id: VolumeId) {
    if let Some(volume) = directory.volumes.get(&id) {
        volume.holder.set(SharingSnapshot::Unknown);
    }
}

/// Returns the pages of this many new volumes that the next checkpoint does not write yet; a page with several of
/// them is returned several times.
pub fn unchanged_pages_of_new(directory: &Directory, volumes: usize) -> impl Iterator<Item = u64> {
    let new = directory.slots..directory.slots + volumes as u64;
    let pages = directory.free_slots.iter().copied().chain(new).take(volumes).map(|slot| slot / SLOTS_PER_PAGE as u64);
    pages.filter(|page| !directory.changed.contains(page))
}

/// Returns the page of the record of a volume, if the next checkpoint does not write it yet.
pub fn unchanged_page_of(directory: &Directory, id: VolumeId) -> Option<u64> {
    let page = directory.get(id)?.slot / SLOTS_PER_PAGE as u64;
    (!directory.changed.contains(&page)).then_some(page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::MapEntry;
    use crate::types::Epoch;

    fn record(id: u64, size: u64, trim_end: u64) -> VolumeRecord {
        VolumeRecord {
            id: VolumeId(id),
            state: VolumeState::Volume,
            parent: NO_VOLUME,
            name: format!("v{id}").into(),
            origin: String::new(),
            source: NO_VOLUME,
            size,
            trim_end,
            chunk: 65536,
            referenced: 0,
            seams: 0,
            level: 1,
            root: MapEntry::ABSENT,
            shared_at: Epoch(0),
            created: 0,
            cursor: 0,
            flags: Default::default(),
            base: NO_VOLUME,
            origin_record: None,
            stamp: None,
            break_policy: Default::default(),
            throttle: Default::default(),
            estimated: false,
            gather: GatherPolicy::Off,
            quota: 0,
            attributes: None,
        }
    }

    #[test]
    fn the_reaper_finds_the_dead_and_the_shortened() {
        let mut d = Directory::default();
        (1..=3).for_each(|id| d.add(record(id, 10, if id == 2 { 20 } else { 0 })));
        assert_eq!((d.first_dead(), d.first_tail()), (None, Some(VolumeId(2))));
        d.change(VolumeId(3)).expect("there").record.trim_end = 11;
        d.update_tail(VolumeId(3));
        d.mark_dead(VolumeId(2), 0);
        assert_eq!((d.first_dead(), d.first_tail()), (Some(VolumeId(2)), Some(VolumeId(3))));
        d.change(VolumeId(3)).expect("there").record.trim_end = 0;
        d.update_tail(VolumeId(3));
        d.remove(VolumeId(2));
        assert_eq!((d.first_dead(), d.first_tail()), (None, None));
    }

    #[test]
    fn roots_are_unsettled_on_pages_that_changed_before_and_since_the_freeze() {
        let mut d = Directory::default();
        (1..=24).for_each(|id| d.add(record(id, 10, 0)));
        d.take_changed();
        d.take_changed();
        assert!(d.moved_roots().is_empty());
        d.change(VolumeId(9));
        d.take_changed();
        d.change(VolumeId(24));
        let ids: Vec<u64> = d.moved_roots().iter().map(|id| id.0).collect();
        assert_eq!(ids, (9..=24).collect::<Vec<_>>());
    }
}
