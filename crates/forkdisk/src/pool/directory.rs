//! The directory of volumes: every volume's record, found by number and by name.
//!
//! It is in memory as a whole (about 400 bytes per volume). On the device each record has a slot
//! of 512 bytes; a checkpoint writes the pages whose slots changed.

use std::cell::{Cell, OnceCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

use crate::copier::User;
use crate::counters::{VolumeCounters, VolumeStatistics};
use crate::device::Buf;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{GatherPolicy, MAX_NAME, NO_VOLUME, SLOTS_PER_PAGE, VolumeRecord, VolumeState};
use crate::origin::check_origin_text;
use crate::planted::{Bug, planted};
use crate::sync::{RangeLocks, Turns};
use crate::types::{Epoch, VolumeId};
use crate::volume::{Claims, Copies, Rest};

/// A volume in memory.
pub struct Volume {
    pub record: VolumeRecord,
    slot: u64,
    /// Open handles; shared with them.
    pub open: Rc<Cell<usize>>,
    /// Not shown yet: the snapshot that makes it has not been acknowledged.
    pub pending: bool,
    /// Ranges that requests hold at the moment.
    pub locks: Rc<RangeLocks>,
    /// What was done to it; made when it is first opened for I/O.
    pub counters: OnceCell<Rc<VolumeCounters>>,
    /// Writes accepted and not yet submitted.
    pub turns: Rc<Turns<Buf>>,
    /// Chunks that are being copied at the moment, and on whose behalf.
    pub copies: Rc<Copies>,
    /// Pages that are being completed with what shows through from an origin.
    pub edges: Rc<RangeLocks>,
    /// Whether what it was cloned from still shows through; shared with its handles.
    pub rest: Rc<Rest>,
    /// See [`Directory::held_until`].
    holder: Cell<Holder>,
    /// What writes under way will add to what it refers to.
    pub claims: Rc<Claims>,
}

/// The snapshot that is known to share what a volume has not changed since.
#[derive(Clone, Copy, Default)]
enum Holder {
    /// To be looked for.
    #[default]
    Unknown,
    Nobody,
    Snapshot(VolumeId),
}

impl Volume {
    fn is_snapshot(&self) -> bool {
        self.record.state == VolumeState::Snapshot
    }
}

/// What a name in a folder was found by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Volume,
    /// The record of a folder.
    Folder,
    /// Something in a folder.
    Inside,
}

/// The snapshots of one volume that live, by age.
#[derive(Default)]
pub struct Chain {
    /// Those that share what is kept.
    pub chained: BTreeSet<VolumeId>,
    /// Those that have copies of their own.
    pub independent: BTreeSet<VolumeId>,
    /// The deletion of others is durable once the journal is up to this sequence number.
    pub deleted_until: u64,
    /// That a rollback to one of them has begun is durable once the journal is up to this.
    pub rolled_until: u64,
}

/// See the module.
#[derive(Default)]
pub struct Directory {
    chains: BTreeMap<VolumeId, Chain>,
    /// Pairs of what was cloned and what became of it: sources of records.
    descent: BTreeSet<(VolumeId, VolumeId)>,
    volumes: BTreeMap<VolumeId, Volume>,
    names: BTreeMap<(VolumeId, String), VolumeId>,
    /// Rises whenever a name comes, goes, or is shown.
    names_version: u64,
    free_slots: BTreeSet<u64>,
    slots: u64,
    by_slot: BTreeMap<u64, VolumeId>,
    changed: BTreeSet<u64>,
    /// Pages that the last freeze took: with those changed since, all whose roots may have moved.
    frozen: BTreeSet<u64>,
    /// Dead volumes, and volumes with something mapped beyond their end: what the reaper looks for.
    dead: BTreeSet<VolumeId>,
    tails: BTreeSet<VolumeId>,
    /// Volumes whose scattered pages are brought together without anybody asking.
    gathering: BTreeSet<VolumeId>,
    /// What was done to volumes that were deleted since.
    gone: VolumeStatistics,
}

impl Directory {
    /// Adds a volume in the lowest free slot.
    pub fn add(&mut self, record: VolumeRecord) {
        let slot = self.free_slots.pop_first().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        });
        self.place(record, slot);
        self.changed.insert(slot / SLOTS_PER_PAGE as u64);
    }

    fn place(&mut self, record: VolumeRecord, slot: u64) {
        self.names_version += 1;
        if !matches!(record.state, VolumeState::Dead | VolumeState::Orphan) {
            self.names.insert((record.parent, record.name.clone()), record.id);
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
        let user = if record.protects.is_some() { User::Origin } else { User::Break };
        let copies = Rc::new(Copies::new(user, record.throttle));
        let (open, locks, turns, counters, edges) = Default::default();
        let (holder, claims, rest) = Default::default();
        let volume =
            Volume { record, slot, open, pending: false, locks, turns, counters, copies, holder, claims, edges, rest };
        self.volumes.insert(id, volume);
        self.judge_tail(id);
        self.judge_gathering(id);
    }

    /// To be called when a volume's policy of gathering has changed.
    pub fn judge_gathering(&mut self, id: VolumeId) {
        let wants = |v: &Volume| v.record.state == VolumeState::Volume && v.record.gather != GatherPolicy::Off;
        match self.get(id).is_some_and(wants) {
            true => self.gathering.insert(id),
            false => self.gathering.remove(&id),
        };
    }

    /// Volumes whose scattered pages are brought together without anybody asking.
    pub fn gathering(&self) -> impl Iterator<Item = &Volume> {
        self.gathering.iter().filter_map(|id| self.volumes.get(id))
    }

    /// To be called when a volume's length or the end of its tail has changed.
    pub fn judge_tail(&mut self, id: VolumeId) {
        let is_live = |v: &Volume| matches!(v.record.state, VolumeState::Volume | VolumeState::Orphan);
        let has_tail = |v: &Volume| is_live(v) && v.record.trim_end > v.record.size;
        match self.get(id).is_some_and(has_tail) {
            true => self.tails.insert(id),
            false => self.tails.remove(&id),
        };
    }

    /// Whether `id` is a snapshot that lives.
    pub fn is_snapshot(&self, id: VolumeId) -> bool {
        self.get(id).is_some_and(|v| v.record.state == VolumeState::Snapshot)
    }

    /// The living snapshots of a volume, if it ever had any.
    pub fn chain(&self, of: VolumeId) -> Option<&Chain> {
        self.chains.get(&of)
    }

    /// A rollback of this origin begins; that is durable once the journal is up to `until`.
    pub fn rollback_begins(&mut self, origin: VolumeId, until: u64) {
        self.chains.entry(origin).or_default().rolled_until = until;
    }

    /// A volume that shows through to snapshot `id` of an origin, if there is one, or the origin that is being
    /// rolled back to it.
    pub fn resting_on(&self, id: VolumeId) -> Option<&Volume> {
        let rolls = |v: &&Volume| v.record.protects.is_some_and(|p| p.rolling == id);
        let origin = self.get(id).and_then(|v| self.get(v.record.parent)).filter(rolls);
        origin.or_else(|| self.iter().find(|v| v.record.base == id && v.record.state != VolumeState::Dead))
    }

    /// A volume shows through to another snapshot of an origin, or to none.
    pub fn rest_on(&mut self, id: VolumeId, base: VolumeId) {
        let volume = self.change(id).expect("an existing volume");
        let before = std::mem::replace(&mut volume.record.base, base);
        match base {
            NO_VOLUME if before != NO_VOLUME => volume.rest.end(),
            // Nobody has it open.
            _ => volume.rest = Rc::default(),
        }
    }

    /// Refuses if a volume shows through to snapshot `id` of an origin.
    pub fn refuse_held(&self, id: VolumeId) -> Result<()> {
        let (Some(held), Some(by)) = (self.get(id), self.resting_on(id)) else { return Ok(()) };
        let rolls = by.record.protects.is_some();
        let (held, by) = (self.full_name(&held.record), self.full_name(&by.record));
        let why = match rolls {
            true => format!("{by:?} is being rolled back to {held:?}; wait until that has ended"),
            false => format!("{held:?} is held by {by:?}, which was cloned from it; flatten or delete that first"),
        };
        Err(Error::new(ErrorKind::Busy, why))
    }

    /// The dead volume with the lowest number.
    pub fn first_dead(&self) -> Option<VolumeId> {
        self.dead.first().copied()
    }

    /// The volume with the lowest number that was shortened and still has its tail.
    pub fn first_tail(&self) -> Option<VolumeId> {
        self.tails.first().copied()
    }

    /// Takes over a page read from the device.
    pub fn load_page(&mut self, page: u64, records: Vec<Option<VolumeRecord>>) -> std::result::Result<(), String> {
        for (i, record) in records.into_iter().enumerate() {
            let slot = page * SLOTS_PER_PAGE as u64 + i as u64;
            self.slots = self.slots.max(slot + 1);
            match record {
                None => {
                    self.free_slots.insert(slot);
                }
                Some(record) => {
                    if self.volumes.contains_key(&record.id) {
                        return Err(format!("volume {} is there twice", record.id.0));
                    }
                    self.place(record, slot);
                }
            }
        }
        Ok(())
    }

    pub fn get(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(&id)
    }

    /// The volume, to be changed: its page goes into the next checkpoint.
    pub fn change(&mut self, id: VolumeId) -> Option<&mut Volume> {
        let volume = self.volumes.get_mut(&id)?;
        self.changed.insert(volume.slot / SLOTS_PER_PAGE as u64);
        Some(volume)
    }

    /// A volume in memory whose record on the device stays as it is.
    pub fn get_mut(&mut self, id: VolumeId) -> Option<&mut Volume> {
        self.volumes.get_mut(&id)
    }

    /// All volumes, by number.
    pub fn iter(&self) -> impl Iterator<Item = &Volume> {
        self.volumes.values()
    }

    /// A volume becomes dead: its name is free. That is durable once the journal is up to `until`.
    pub fn bury(&mut self, id: VolumeId, until: u64) {
        let parent = self.get(id).expect("an existing volume").record.parent;
        self.bequeath(id);
        self.unname(id);
        let volume = self.change(id).expect("an existing volume");
        volume.record.state = VolumeState::Dead;
        volume.record.base = NO_VOLUME;
        volume.record.cursor = 0;
        volume.record.origin.clear();
        volume.record.attributes = None;
        let counters = volume.counters.take();
        if let Some(counters) = counters {
            self.gone.merge(&counters.read());
        }
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

    /// A volume is from now on what was cloned from `source`.
    pub fn descend(&mut self, id: VolumeId, source: VolumeId) {
        let record = &mut self.change(id).expect("an existing volume").record;
        let before = std::mem::replace(&mut record.source, source);
        self.descent.remove(&(before, id));
        if source != NO_VOLUME {
            self.descent.insert((source, id));
        }
    }

    /// Volume or snapshot `id` goes: what was cloned from it descends from what it was itself a snapshot of or cloned
    /// from, and no longer has an origin that could be named.
    fn bequeath(&mut self, id: VolumeId) {
        let record = &self.get(id).expect("an existing volume").record;
        let above = if record.state == VolumeState::Snapshot { record.parent } else { record.source };
        let heirs: Vec<VolumeId> = self.clones_of(id).collect();
        for heir in heirs {
            self.descend(heir, if above == heir { NO_VOLUME } else { above });
            self.change(heir).expect("an existing volume").record.origin.clear();
        }
        self.descend(id, NO_VOLUME);
    }

    /// What was cloned from this volume or snapshot, or from what was and is gone.
    fn clones_of(&self, id: VolumeId) -> impl Iterator<Item = VolumeId> {
        self.descent.range((id, NO_VOLUME)..=(id, VolumeId(u64::MAX))).map(|&(_, clone)| clone)
    }

    /// What a volume was cloned from, or the nearest of its ancestors that is there still.
    pub fn ancestor(&self, record: &VolumeRecord) -> Option<&Volume> {
        match record.source {
            _ if record.protects.is_some() || record.origin.is_empty() && record.source == NO_VOLUME => None,
            // Made by a version that kept the name only. One that took the name later is another.
            NO_VOLUME => self.find(&record.origin).ok().filter(|v| v.record.id < record.id),
            source => self.get(source),
        }
    }

    /// A volume loses its name and goes on without one.
    pub fn orphan(&mut self, id: VolumeId) {
        self.unname(id);
        self.change(id).expect("an existing volume").record.state = VolumeState::Orphan;
        self.judge_gathering(id);
    }

    /// An orphan gets a name that is free, and is a volume from now on.
    pub fn adopt(&mut self, id: VolumeId, name: &str) {
        self.names_version += 1;
        let record = &mut self.change(id).expect("an existing volume").record;
        debug_assert!(record.state == VolumeState::Orphan && record.name.is_empty());
        (record.state, record.name) = (VolumeState::Volume, name.to_string());
        self.names.insert((NO_VOLUME, name.to_string()), id);
        self.judge_tail(id);
        self.judge_gathering(id);
    }

    fn unname(&mut self, id: VolumeId) {
        self.names_version += 1;
        let volume = self.change(id).expect("an existing volume");
        let key = (volume.record.parent, std::mem::take(&mut volume.record.name));
        if self.names.get(&key) == Some(&id) {
            self.names.remove(&key);
        }
    }

    /// What was done to all volumes, those deleted meanwhile included.
    pub fn statistics(&self) -> VolumeStatistics {
        let mut sum = self.gone;
        self.volumes.values().filter_map(|v| v.counters.get()).for_each(|c| sum.merge(&c.read()));
        sum
    }

    /// A dead volume is gone for good.
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
        let kept = planted(Bug::RenameNotCheckpointed);
        let volume = if kept { self.get_mut(id) } else { self.change(id) }.expect("an existing volume");
        let old = std::mem::replace(&mut volume.record.name, name.to_string());
        let parent = volume.record.parent;
        self.names.remove(&(parent, old));
        self.names.insert((parent, name.to_string()), id);
    }

    /// Renames a folder's own record and everything in the folder.
    pub fn rename_folder(&mut self, from: &str, to: &str) {
        let within = format!("{from}/");
        let from_here = self.names.range((NO_VOLUME, from.to_string())..);
        let all = from_here.take_while(|((parent, name), _)| *parent == NO_VOLUME && name.starts_with(from));
        let all = all.filter(|((_, name), _)| name == from || name.starts_with(&within));
        let moved: Vec<(VolumeId, String)> =
            all.map(|((_, name), &id)| (id, format!("{to}{}", &name[from.len()..]))).collect();
        moved.iter().for_each(|(id, name)| self.rename(*id, name));
    }

    /// Whether every name in the folder may begin with `to` in place of `from`.
    pub fn check_renamed(&self, from: &str, to: &str) -> Result<()> {
        let within = format!("{from}/");
        let names = self.names.range((NO_VOLUME, within.clone())..);
        let mut inside = names.take_while(|((parent, name), _)| *parent == NO_VOLUME && name.starts_with(&within));
        inside.try_for_each(|((_, name), &id)| {
            let name = format!("{to}{}", &name[from.len()..]);
            check_volume_name(&name)?;
            match self.get(id).filter(|v| v.record.protects.is_some()) {
                Some(origin) => check_origin_text(&name, &origin.record.origin),
                None => Ok(()),
            }
        })
    }

    /// A snapshot or clone that was pending can be seen from now on.
    pub fn show(&mut self, id: VolumeId) {
        self.names_version += 1;
        if let Some(volume) = self.get_mut(id) {
            volume.pending = false;
        }
    }

    /// A number that is another one whenever a name has come or gone.
    pub fn names_version(&self) -> u64 {
        self.names_version
    }

    /// The volumes whose names come behind `after`, in the order of their names.
    fn volumes_after(&self, after: &str) -> impl Iterator<Item = (&str, VolumeId)> {
        let behind = self.names.range((Bound::Excluded((NO_VOLUME, after.to_string())), Bound::Unbounded));
        let all =
            behind.take_while(|((parent, _), _)| *parent == NO_VOLUME).map(|((_, name), &id)| (name.as_str(), id));
        all.filter(|(_, id)| self.get(*id).is_some_and(|v| !v.pending && v.record.state != VolumeState::Folder))
    }

    /// Names of at most `most` volumes and, with `snapshots`, snapshots, each volume before its snapshots: those that
    /// come behind the name `after`, whether there is one of that name or not.
    pub fn names_after(&self, after: &str, most: usize, snapshots: bool) -> Vec<String> {
        let of = |volume: VolumeId, name: &str, after: &str| -> Vec<String> {
            let behind = self.names.range((Bound::Excluded((volume, after.to_string())), Bound::Unbounded));
            let all = behind.take_while(|((parent, _), _)| *parent == volume && snapshots);
            let all = all.filter(|(_, id)| self.get(**id).is_some_and(|v| !v.pending));
            all.take(most).map(|((_, snapshot), _)| format!("{name}@{snapshot}")).collect()
        };
        let (volume, snapshot) = after.split_once('@').unwrap_or((after, ""));
        let mut names = match self.names.get(&(NO_VOLUME, volume.to_string())) {
            Some(&id) => of(id, volume, snapshot),
            None => Vec::new(),
        };
        for (name, id) in self.volumes_after(volume) {
            if names.len() >= most {
                break;
            }
            names.push(name.to_string());
            names.extend(of(id, name, ""));
        }
        names.truncate(most);
        names
    }

    /// Snapshots of a volume.
    pub fn snapshots_of(&self, id: VolumeId) -> Vec<VolumeId> {
        let from = (id, String::new());
        self.names.range(from..).take_while(|((parent, _), _)| *parent == id).map(|(_, &id)| id).collect()
    }

    /// A snapshot of this volume has been taken.
    pub fn note_snapshot(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get(&id) {
            volume.holder.set(Holder::Unknown);
        }
    }

    /// What a volume maps and was born in this epoch or before is most likely shared with a snapshot that
    /// still exists: the newest of its own, or the one it was cloned from. A hint that saves asking the
    /// counts. It errs where another volume's range was cloned, and after a rollback to an older snapshot.
    pub fn held_until(&self, id: VolumeId) -> Option<Epoch> {
        let volume = self.volumes.get(&id)?;
        let born = |id: VolumeId| self.volumes.get(&id).filter(|v| v.is_snapshot()).map(|v| v.record.shared_at);
        match volume.holder.get() {
            Holder::Nobody => return None,
            Holder::Snapshot(holder) if born(holder).is_some() => return born(holder),
            Holder::Unknown | Holder::Snapshot(_) => {}
        }
        let found = self.find_holder(&volume.record);
        volume.holder.set(found.map_or(Holder::Nobody, Holder::Snapshot));
        found.and_then(born)
    }

    fn find_holder(&self, volume: &VolumeRecord) -> Option<VolumeId> {
        let own = self.snapshots_of(volume.id).into_iter();
        if let Some(newest) = own.max_by_key(|id| self.volumes[id].record.shared_at) {
            return Some(newest);
        }
        let origin = self.ancestor(volume).filter(|v| v.is_snapshot())?;
        // One that took the name later is another.
        (origin.record.shared_at <= volume.shared_at).then_some(origin.record.id)
    }

    /// `volume` or `volume@snapshot`, if it exists and is to be seen.
    pub fn find(&self, name: &str) -> Result<&Volume> {
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no volume or snapshot {name:?}"));
        let (volume, snapshot) = match name.split_once('@') {
            Some((v, s)) => (v, Some(s)),
            None => (name, None),
        };
        let mut id = *self.names.get(&(NO_VOLUME, volume.to_string())).ok_or_else(missing)?;
        if let Some(snapshot) = snapshot {
            id = *self.names.get(&(id, snapshot.to_string())).ok_or_else(missing)?;
        }
        match self.get(id).filter(|v| !v.pending) {
            Some(v) if v.record.state == VolumeState::Folder => {
                Err(Error::new(ErrorKind::NotFound, format!("{name:?} is a folder, not a volume")))
            }
            found => found.ok_or_else(missing),
        }
    }

    /// The record of a folder, if it has one of its own; the root's name is empty.
    pub fn folder(&self, name: &str) -> Option<&VolumeRecord> {
        let record = &self.get(*self.names.get(&(NO_VOLUME, name.to_string()))?)?.record;
        (record.state == VolumeState::Folder).then_some(record)
    }

    /// Whether there is anything in the folder `name`.
    pub fn has_children(&self, name: &str) -> bool {
        self.next_child(name, "").is_some()
    }

    /// The first name directly in `folder` that does not lie before `from`, and what it is.
    fn next_child(&self, folder: &str, from: &str) -> Option<(&str, Found)> {
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut all = self.names.range((NO_VOLUME, format!("{prefix}{from}"))..);
        all.find_map(|((parent, name), id)| {
            if *parent != NO_VOLUME || !name.starts_with(&prefix) {
                return Some(None);
            }
            let volume = self.get(*id).filter(|v| !v.pending && !name.is_empty())?;
            let rest = &name[prefix.len()..];
            Some(Some(match rest.split_once('/') {
                Some((child, _)) => (child, Found::Inside),
                None if volume.record.state == VolumeState::Folder => (rest, Found::Folder),
                None => (rest, Found::Volume),
            }))
        })
        .flatten()
    }

    /// Everything directly in `folder` (empty: the root), each with whether it is a folder.
    pub fn children(&self, folder: &str) -> Vec<(String, bool)> {
        let (mut out, mut from) = (Vec::new(), String::new());
        while let Some((child, found)) = self.next_child(folder, &from) {
            // The smallest name behind this one, or behind all that is in the folder: `0` comes after `/`.
            from = format!("{child}{}", if found == Found::Inside { '0' } else { '\0' });
            let path = if folder.is_empty() { child.to_string() } else { format!("{folder}/{child}") };
            // A folder with a record of its own comes before what is in it, with other names in between.
            if found != Found::Inside || self.folder(&path).is_none() {
                out.push((child.to_string(), found != Found::Volume));
            }
        }
        out
    }

    /// The name people use.
    pub fn full_name(&self, volume: &VolumeRecord) -> String {
        match self.get(volume.parent) {
            Some(parent) if volume.state == VolumeState::Snapshot => format!("{}@{}", parent.record.name, volume.name),
            _ => volume.name.clone(),
        }
    }

    /// Whether `name` may be given to a new volume (`parent` none) or snapshot.
    pub fn check_new(&self, parent: VolumeId, name: &str) -> Result<()> {
        match parent {
            NO_VOLUME => check_volume_name(name)?,
            _ => check_part(name, name)?,
        }
        let taken = |what: &str| Err(Error::new(ErrorKind::Exists, format!("{name:?} {what}; choose another name")));
        if parent == NO_VOLUME && self.folder(name).is_some() {
            return taken("is a folder");
        }
        if self.names.contains_key(&(parent, name.to_string())) {
            return taken("exists already");
        }
        if parent != NO_VOLUME {
            return Ok(());
        }
        let folder = format!("{name}/");
        let inside = self.names.range((NO_VOLUME, folder.clone())..).next();
        if inside.is_some_and(|((p, n), _)| *p == NO_VOLUME && n.starts_with(&folder)) {
            return taken("is a folder with volumes in it");
        }
        for (i, _) in name.match_indices('/') {
            let above = &name[..i];
            if self.names.contains_key(&(NO_VOLUME, above.to_string())) && self.folder(above).is_none() {
                return taken(&format!("would lie in {:?}, which is a volume and not a folder", &name[..i]));
            }
        }
        Ok(())
    }

    /// Pages whose slots changed since the last checkpoint, with their records.
    pub fn peek_changed(&self) -> Vec<(u64, [Option<VolumeRecord>; SLOTS_PER_PAGE])> {
        let page_of = |&page: &u64| {
            let slot = |i: usize| self.by_slot.get(&(page * SLOTS_PER_PAGE as u64 + i as u64));
            (page, std::array::from_fn(|i| slot(i).map(|id| self.volumes[id].record.clone())))
        };
        self.changed.iter().map(page_of).collect()
    }

    /// All pages count as unchanged from now on.
    pub fn take_changed(&mut self) {
        self.frozen = std::mem::take(&mut self.changed);
    }

    /// Volumes whose roots may have no address yet, or got one from the checkpoint that is ending:
    /// those on pages that it wrote or that changed since.
    pub fn unsettled(&self) -> Vec<VolumeId> {
        let slots = |&page: &u64| page * SLOTS_PER_PAGE as u64..(page + 1) * SLOTS_PER_PAGE as u64;
        self.frozen.union(&self.changed).flat_map(|page| self.by_slot.range(slots(page)).map(|(_, &id)| id)).collect()
    }

    /// Whether anything changed since the last checkpoint.
    pub fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Whether this volume's page changed since the last checkpoint.
    pub fn has_changed(&self, id: VolumeId) -> bool {
        self.get(id).is_some_and(|v| self.changed.contains(&(v.slot / SLOTS_PER_PAGE as u64)))
    }

    /// Pages that changed since the last checkpoint.
    pub fn changed_pages(&self) -> usize {
        self.changed.len()
    }

    /// Pages the directory takes.
    pub fn pages(&self) -> u64 {
        self.slots.div_ceil(SLOTS_PER_PAGE as u64)
    }
}

fn check_part(part: &str, whole: &str) -> Result<()> {
    let bad = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("bad name {whole:?}: {why}")));
    if part.is_empty() {
        return bad("a part of it is empty");
    }
    if part == "." || part == ".." || part == ".snapshots" {
        return bad("'.', '..' and '.snapshots' are reserved");
    }
    if whole.len() > MAX_NAME {
        return bad("it is longer than 255 bytes");
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    match part.chars().find(|&c| !allowed(c)) {
        Some(c) => {
            bad(&format!("{c:?} is not allowed; use letters, digits, '.', '_' and '-', with '/' between folders"))
        }
        None => Ok(()),
    }
}

/// Whether `name` may be a volume's name.
pub fn check_volume_name(name: &str) -> Result<()> {
    name.split('/').try_for_each(|part| check_part(part, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Entry;
    use crate::types::Epoch;

    #[test]
    fn names_follow_the_rules() {
        for good in ["a", "a/b/c", "A-1_x.raw", &"x".repeat(255)] {
            assert!(check_volume_name(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "a/", "/a", "a//b", ".", "a/..", "a b", "a@b", "ä", ".snapshots", &"x".repeat(256)] {
            assert!(check_volume_name(bad).is_err(), "{bad}");
        }
    }

    /// Volumes, and folders (names that end with `/`), numbered from 1 on.
    fn directory(names: &[&str]) -> Directory {
        let mut d = Directory::default();
        for (i, name) in names.iter().enumerate() {
            let state = if name.ends_with('/') { VolumeState::Folder } else { VolumeState::Volume };
            let record = VolumeRecord::empty(VolumeId(i as u64 + 1), name.trim_end_matches('/'), 0);
            d.add(VolumeRecord { state, ..record });
        }
        d
    }

    #[test]
    fn names_are_listed_in_pieces_of_any_size() {
        let mut d = directory(&["a", "a-b", "e/", "e/x", "f"]);
        for (id, of, name) in [(10, 1, "2"), (11, 1, "1"), (12, 4, "s"), (13, 5, "t")] {
            let record = VolumeRecord { parent: VolumeId(of), ..VolumeRecord::empty(VolumeId(id), name, 0) };
            d.add(VolumeRecord { state: VolumeState::Snapshot, ..record });
        }
        let version = d.names_version();
        d.get_mut(VolumeId(13)).unwrap().pending = true;
        let all = ["a", "a@1", "a@2", "a-b", "e/x", "e/x@s", "f"];
        for most in 1..10 {
            let (mut names, mut after) = (Vec::new(), String::new());
            loop {
                let piece = d.names_after(&after, most, true);
                let Some(last) = piece.last() else { break };
                assert!(piece.len() <= most);
                after = last.clone();
                names.extend(piece);
            }
            assert_eq!(names, all, "in pieces of {most}");
        }
        assert_eq!(d.names_after("", 2, false), ["a", "a-b"]);
        assert_eq!(d.names_after("a", 9, false), ["a-b", "e/x", "f"]);
        assert_eq!(d.names_after("a@15", 2, true), ["a@2", "a-b"], "behind one that has gone");
        assert_eq!(d.names_after("b@1", 2, true), ["e/x", "e/x@s"]);
        d.show(VolumeId(13));
        assert_eq!(d.names_after("f", 2, true), ["f@t"]);
        assert!(d.names_version() > version);
    }

    #[test]
    fn a_folder_lists_what_is_directly_in_it_once() {
        let d = directory(&["a/b/c", "a/b/d", "a/x", "a.b", "a0", "e/", "f/", "f/g", "f.x", "f-y/z"]);
        let all = |folder: &str| -> Vec<String> {
            let mark = |(name, is_folder)| if is_folder { format!("{name}/") } else { name };
            d.children(folder).into_iter().map(mark).collect()
        };
        assert_eq!(all(""), ["a.b", "a/", "a0", "e/", "f/", "f-y/", "f.x"]);
        assert_eq!(
            (all("a"), all("a/b"), all("f")),
            (vec!["b/".into(), "x".into()], vec!["c".into(), "d".into()], vec!["g".into()])
        );
        assert!(all("e").is_empty() && all("none").is_empty() && !d.has_children("e") && d.has_children("a/b"));
    }

    #[test]
    fn a_folder_takes_along_what_is_in_it_and_nothing_beside() {
        let mut d = directory(&["a/", "a/b", "a/c/d", "ab", "a.b/c"]);
        d.rename_folder("a", "x/y");
        assert!(["x/y/b", "x/y/c/d", "ab", "a.b/c"].iter().all(|name| d.find(name).is_ok()));
        assert!(d.folder("x/y").is_some() && d.folder("a").is_none() && d.find("a/b").is_err());
        let long = "n".repeat(253);
        assert!(d.check_renamed("x/y", "z").is_ok() && d.check_renamed("x/y", &long).is_err());
    }

    #[test]
    fn folders_and_volumes_share_their_names() {
        let d = directory(&["f/", "v", "g/v"]);
        let refused = |name: &str| d.check_new(NO_VOLUME, name).is_err();
        assert!(refused("f") && refused("g") && refused("v") && refused("v/x"));
        assert!(!refused("f/x") && !refused("g/x") && d.find("f").is_err() && d.find("g").is_err());
    }

    #[test]
    fn an_orphan_has_no_name_and_takes_none_from_others() {
        let mut d = directory(&["/", "v"]);
        assert!(d.folder("").is_some());
        d.orphan(VolumeId(2));
        assert!(d.find("v").is_err() && d.check_new(NO_VOLUME, "v").is_ok());
        d.bury(VolumeId(2), 0);
        assert!(d.folder("").is_some(), "its empty name is the root's");
        assert_eq!(d.first_dead(), Some(VolumeId(2)));
    }

    fn record(id: u64, size: u64, trim_end: u64) -> VolumeRecord {
        VolumeRecord {
            id: VolumeId(id),
            state: VolumeState::Volume,
            parent: NO_VOLUME,
            name: format!("v{id}"),
            origin: String::new(),
            source: NO_VOLUME,
            size,
            trim_end,
            chunk: 65536,
            referenced: 0,
            seams: 0,
            level: 1,
            root: Entry::ABSENT,
            shared_at: Epoch(0),
            created: 0,
            cursor: 0,
            flags: Default::default(),
            base: NO_VOLUME,
            protects: None,
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
        d.judge_tail(VolumeId(3));
        d.bury(VolumeId(2), 0);
        assert_eq!((d.first_dead(), d.first_tail()), (Some(VolumeId(2)), Some(VolumeId(3))));
        d.change(VolumeId(3)).expect("there").record.trim_end = 0;
        d.judge_tail(VolumeId(3));
        d.remove(VolumeId(2));
        assert_eq!((d.first_dead(), d.first_tail()), (None, None));
    }

    #[test]
    fn roots_are_unsettled_on_pages_that_changed_before_and_since_the_freeze() {
        let mut d = Directory::default();
        (1..=24).for_each(|id| d.add(record(id, 10, 0)));
        d.take_changed();
        d.take_changed();
        assert!(d.unsettled().is_empty());
        d.change(VolumeId(9));
        d.take_changed();
        d.change(VolumeId(24));
        let ids: Vec<u64> = d.unsettled().iter().map(|id| id.0).collect();
        assert_eq!(ids, (9..=24).collect::<Vec<_>>());
    }

    #[test]
    fn what_was_cloned_from_a_volume_that_goes_descends_from_what_that_had_its_contents_from() {
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
        let above = |d: &Directory, id| d.ancestor(&d.get(VolumeId(id)).unwrap().record).map(|v| v.record.id.0);
        assert_eq!((above(&d, 4), above(&d, 3), above(&d, 1)), (Some(3), Some(2), None));
        d.bury(VolumeId(3), 0);
        assert_eq!(above(&d, 4), Some(2));
        assert!(d.get(VolumeId(4)).unwrap().record.origin.is_empty(), "what is gone is not named");
        d.bury(VolumeId(2), 0);
        assert_eq!(above(&d, 4), Some(1));
        d.bury(VolumeId(1), 0);
        assert_eq!((above(&d, 4), d.descent.len()), (None, 0));
    }
}
