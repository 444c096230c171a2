//! Control operations in the model: each happens completely or not at all.

use super::content::{Cell, Content, SETTLED, Time, Version, settled};
use super::{Bad, Key, Lifetime, Listing, Model, Properties, Rule, SECTORS_PER_PAGE, Volume};
use crate::pattern::{SECTOR, Value};

/// A control operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// Creates a volume with this name and size.
    Create(String, u64),
    /// Creates volumes with these names, one size, and the same properties.
    CreateAll(Vec<String>, u64, Properties),
    /// Snapshots of several volumes at one instant, each with its short name.
    Snapshot(Vec<(Key, String)>),
    /// Creates a volume with the contents of another or of a snapshot.
    Clone(Key, String),
    /// Creates volumes with the contents of another or of a snapshot.
    CloneAll(Key, Vec<String>),
    /// Creates volumes with the contents of others or of snapshots: everything in a folder, elsewhere.
    Fork(Vec<(Key, String)>),
    /// Snapshots of everything in a folder, each with its short name.
    SnapshotFolder(Vec<(Key, String)>),
    /// The snapshots of a volume become those of a new one with this name.
    KeepSnapshots(Key, String),
    /// Volumes in a folder get the contents of their snapshots.
    RollbackAll(Vec<(Key, Key)>),
    /// Sets properties of a volume.
    Set(Key, Properties),
    /// A volume gets the contents of its snapshot.
    Rollback(Key, Key),
    /// Renames a volume.
    Rename(Key, String),
    /// Gives all of these their new names: two volumes or folders have exchanged theirs.
    Swap(Vec<(Key, String)>),
    /// Resizes a volume.
    Resize(Key, u64),
    /// Deletes all of them.
    Delete(Vec<Key>),
    /// A volume gets the contents and the size of another or of a snapshot.
    Replace(Key, Key),
    /// The same, as a verb: the volume is not open.
    RollbackTo(Key, Key),
    /// A volume takes the name of another, which is deleted.
    Usurp(Key, Key),
    /// A volume or snapshot gets a lifetime.
    SetLifetime(Key, Lifetime),
    /// An extended attribute of a volume gets a value; 0: it is removed.
    SetXattr(Key, u32),
    /// The new volumes or snapshots of another operation have a lifetime.
    WithLifetime(Box<Control>, Lifetime),
}

impl Control {
    /// The operation without the lifetime of what it makes.
    pub fn inner(&self) -> &Control {
        match self {
            Control::WithLifetime(inner, _) => inner.inner(),
            control => control,
        }
    }

    /// Whether it depends on which volumes are in a folder.
    pub fn is_of_folder(&self) -> bool {
        matches!(
            self.inner(),
            Control::Fork(_)
                | Control::SnapshotFolder(_)
                | Control::RollbackAll(_)
                | Control::Swap(_)
                | Control::KeepSnapshots(..)
        )
    }
}

/// A control operation that has started.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The operation.
    pub control: Control,
    /// When it started.
    pub start: Time,
    /// The keys of what it creates.
    keys: Vec<Key>,
    /// A volume that lost writes while this was in flight, although they were acknowledged: a flush of its disk
    /// failed. A copy of it may show what is left.
    pub damaged: Option<Key>,
}

impl Pending {
    /// Returns what it creates of what: (source, copy).
    pub fn news(&self) -> Vec<(Key, Key)> {
        match self.control.inner() {
            Control::Snapshot(sources) | Control::SnapshotFolder(sources) | Control::Fork(sources) => {
                sources.iter().map(|s| s.0).zip(self.keys.iter().copied()).collect()
            }
            Control::Clone(source, _) => vec![(*source, self.keys[0])],
            Control::CloneAll(source, _) => self.keys.iter().map(|&key| (*source, key)).collect(),
            _ => Vec::new(),
        }
    }
}

/// Whether an interrupted control operation happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It did.
    Yes,
    /// It did not.
    No,
    /// Names and sizes do not tell; the contents must.
    Unknown,
}

/// When a group of snapshots was taken: after the start of every write that it shows and before the end of
/// every write that it does not show. Reads tighten both bounds.
#[derive(Clone)]
pub(super) struct Instant {
    after: Time,
    before: Time,
    open: Vec<(Key, u64, Cell)>,
}

impl Model {
    /// Starts a control operation.
    pub fn begin(&mut self, control: Control) -> Pending {
        let news = match control.inner() {
            Control::Create(..) | Control::Clone(..) | Control::KeepSnapshots(..) => 1,
            Control::Snapshot(sources) | Control::SnapshotFolder(sources) | Control::Fork(sources) => {
                sources.len() as Key
            }
            Control::CreateAll(names, ..) | Control::CloneAll(_, names) => names.len() as Key,
            _ => 0,
        };
        let keys = (self.next_key..self.next_key + news).collect();
        self.next_key += news;
        Pending { start: self.tick(), control, keys, damaged: None }
    }

    /// Applies a control operation, which happened some time between its start and now.
    pub fn apply(&mut self, pending: &Pending) {
        self.spread();
        self.tick();
        self.acks += 1;
        let Pending { control, keys, .. } = pending;
        match control {
            Control::Create(name, size) => self.insert(keys[0], name, None, *size, Content::default(), None),
            Control::CreateAll(names, size, properties) => {
                for (name, &key) in names.iter().zip(keys) {
                    self.insert(key, name, None, *size, Content::default(), None);
                    self.volumes.get_mut(&key).expect("just made").properties = *properties;
                }
            }
            Control::Set(key, properties) => {
                self.volumes.get_mut(key).expect("a volume").properties = *properties;
            }
            Control::SetLifetime(key, lifetime) => {
                set_lifetime(self.volumes.get_mut(key).expect("a volume or snapshot"), *lifetime);
            }
            Control::SetXattr(key, xattr) => self.volumes.get_mut(key).expect("a volume").lifetime.xattr = *xattr,
            Control::WithLifetime(inner, lifetime) => {
                self.apply(&Pending { control: (**inner).clone(), ..pending.clone() });
                for key in keys {
                    set_lifetime(self.volumes.get_mut(key).expect("just made"), *lifetime);
                }
            }
            Control::Snapshot(sources) | Control::SnapshotFolder(sources) => {
                let mut instant = Instant { after: 0, before: Time::MAX, open: Vec::new() };
                for ((source, name), &key) in sources.iter().zip(keys) {
                    let content = self.capture(*source, pending, key, &mut instant);
                    let size = self.share(*source);
                    self.insert(key, name, Some(*source), size, content, Some(*source));
                    self.volumes.get_mut(&key).expect("just made").instant = Some(self.instants.len());
                }
                self.instants.push(instant);
            }
            Control::Clone(source, name) => self.add_clone(*source, pending, keys[0], name),
            Control::CloneAll(source, names) => {
                names.iter().zip(keys).for_each(|(name, &key)| self.add_clone(*source, pending, key, name));
            }
            Control::Fork(pairs) => {
                pairs.iter().zip(keys).for_each(|((source, name), &key)| self.add_clone(*source, pending, key, name));
            }
            Control::RollbackAll(all) => {
                all.iter().for_each(|&(volume, snapshot)| self.roll_back(volume, snapshot, pending.start));
            }
            Control::Rollback(volume, snapshot) => self.roll_back(*volume, *snapshot, pending.start),
            Control::KeepSnapshots(volume, name) => {
                self.insert(keys[0], name, None, 0, Content::default(), None);
                let properties = Properties { chunk: 64 << 10, ..Properties::default() };
                self.volumes.get_mut(&keys[0]).expect("just made").properties = properties;
                self.volumes.values_mut().filter(|v| v.of == Some(*volume)).for_each(|v| v.of = Some(keys[0]));
            }
            Control::Rename(key, name) => self.volumes.get_mut(key).expect("a volume").name.clone_from(name),
            Control::Swap(new) => {
                for (key, name) in new {
                    self.volumes.get_mut(key).expect("a volume").name.clone_from(name);
                }
            }
            Control::Resize(key, size) => {
                let volume = self.volumes.get_mut(key).expect("a volume");
                volume.size = *size;
                volume.content.truncate(size / SECTOR as u64);
            }
            Control::Delete(keys) => self.delete(keys),
            Control::Replace(target, source) | Control::RollbackTo(target, source) => {
                self.replace(*target, *source, pending)
            }
            Control::Usurp(key, victim) => {
                let name = self.volumes.remove(victim).expect("a volume").name;
                self.volumes.get_mut(key).expect("a volume").name = name;
            }
        }
    }

    /// Deletes volumes and snapshots, and remnants that have no other snapshots.
    fn delete(&mut self, keys: &[Key]) {
        let parents: Vec<Key> = keys.iter().filter_map(|key| self.volumes.get(key)?.of).collect();
        self.volumes.retain(|key, _| !keys.contains(key));
        let is_idle = |key: &Key| {
            let is_remnant = |v: &Volume| v.name.starts_with(".snapshots/") && v.size == 0;
            self.volumes.get(key).is_some_and(is_remnant) && self.volumes.values().all(|v| v.of != Some(*key))
        };
        let idle: Vec<Key> = parents.into_iter().filter(is_idle).collect();
        self.volumes.retain(|key, _| !idle.contains(key));
    }

    /// The properties of a clone: which writes are not stored is a property of the volume only, not of its snapshot.
    fn properties_of_clone(&self, source: Key) -> Properties {
        let of = &self.volumes[&source];
        let Properties { compares, makes_holes, .. } = of.of.map_or(of, |volume| &self.volumes[&volume]).properties;
        Properties { compares, makes_holes, ..of.properties.of_clone() }
    }

    fn add_clone(&mut self, source: Key, pending: &Pending, key: Key, name: &str) {
        let mut unused = Instant { after: 0, before: Time::MAX, open: Vec::new() };
        let content = self.capture(source, pending, key, &mut unused);
        let size = self.share(source);
        self.insert(key, name, None, size, content, Some(source));
        self.share(key);
    }

    fn replace(&mut self, target: Key, source: Key, pending: &Pending) {
        let mut unused = Instant { after: 0, before: Time::MAX, open: Vec::new() };
        let content = self.capture(source, pending, target, &mut unused);
        let (size, now) = (self.share(source), self.now());
        let kin = self.volumes[&source].kin.clone();
        let volume = self.volumes.get_mut(&target).expect("a volume");
        volume.kin.extend(kin);
        (volume.content, volume.size, volume.shared, volume.flushed) = (content, size, true, now);
    }

    fn insert(&mut self, key: Key, name: &str, of: Option<Key>, size: u64, content: Content, source: Option<Key>) {
        let (name, flushed) = (name.to_owned(), self.now());
        let mut kin = source.map_or_else(Default::default, |source| self.volumes[&source].kin.clone());
        kin.insert(key);
        let properties = source.map_or_else(Properties::default, |source| self.properties_of_clone(source));
        let xattr = source.map_or(0, |source| self.volumes[&source].lifetime.xattr);
        let (shared, instant, lifetime) = (false, None, Lifetime { xattr, ..Lifetime::default() });
        self.volumes
            .insert(key, Volume { name, of, size, properties, lifetime, shared, kin, content, flushed, instant });
    }

    /// Notes that other volumes refer to its contents; returns its size.
    fn share(&mut self, key: Key) -> u64 {
        let volume = self.volumes.get_mut(&key).expect("a volume");
        volume.shared = true;
        volume.size
    }

    /// Captures the contents at some instant between the start of the operation and now.
    fn capture(&self, source: Key, pending: &Pending, target: Key, instant: &mut Instant) -> Content {
        let volume = &self.volumes[&source];
        let is_damaged = pending.damaged == Some(source);
        let mut content = volume.content.clone();
        for first in volume.content.unsettled() {
            for sector in first..first + SECTORS_PER_PAGE {
                let versions = volume.content.versions(sector);
                let mut seen = self.candidates(volume, &versions, Rule::Since(pending.start));
                if is_damaged {
                    let left = self.candidates(volume, &versions, Rule::Crash);
                    seen.extend(left.into_iter().filter(|v| !seen.contains(v)).collect::<Cell>());
                } else if seen.len() > 1 {
                    instant.open.push((target, sector, seen.clone()));
                }
                content.set(sector, seen.into_iter().map(|v| Version { rec: SETTLED, ..v }).collect());
            }
        }
        content.settle(|_| {});
        content
    }

    /// Notes that a snapshot's sector that could have held several values was read as this one.
    pub(super) fn observe(&mut self, key: Key, sector: u64, value: Value) -> Result<(), Bad> {
        let volume = self.volumes.get_mut(&key).expect("a snapshot");
        *volume.content.cell_mut(sector) = settled(value);
        let Some(number) = volume.instant else {
            return Ok(());
        };
        let instant = &mut self.instants[number];
        let Some(at) = instant.open.iter().position(|o| (o.0, o.1) == (key, sector)) else {
            return Ok(());
        };
        let (.., cell) = instant.open.swap_remove(at);
        let same: Vec<_> = cell.iter().filter(|v| v.value == value).collect();
        let [shown] = same[..] else { return Ok(()) };
        let shown = self.recs[shown.rec as usize];
        instant.after = instant.after.max(shown.start);
        for hidden in cell.iter().map(|v| &self.recs[v.rec as usize]).filter(|w| w.start > shown.end && w.ok) {
            instant.before = instant.before.min(hidden.end);
        }
        let (after, before) = (instant.after, instant.before);
        if after <= before {
            return Ok(());
        }
        let what = format!(
            "{} is no point in time: it shows a write that began at {after}, but one acknowledged at {before} is \
             missing (sector {sector})",
            self.name(key)
        );
        Err(Bad { promise: "P5", what })
    }

    /// Rolls back; writes in flight at the same time may come before or after it.
    fn roll_back(&mut self, key: Key, snapshot: Key, start: Time) {
        let rec = self.start();
        self.recs[rec as usize].start = start;
        self.end(rec, true, true);
        self.share(snapshot);
        let (mut content, size) = (self.volumes[&snapshot].content.clone(), self.volumes[&snapshot].size);
        let old = &self.volumes[&key].content;
        for first in old.unsettled() {
            for sector in (first..first + SECTORS_PER_PAGE).filter(|s| s * (SECTOR as u64) < size) {
                let beside = |v: &&Version| self.recs[v.rec as usize].end >= start;
                let cell = old.versions(sector);
                let mut beside: Cell = cell.iter().filter(beside).copied().collect();
                if !beside.is_empty() {
                    let rolled = content.versions(sector).into_iter().map(|v| Version { rec, ..v });
                    beside.extend(rolled);
                    content.set(sector, beside);
                }
            }
        }
        let volume = self.volumes.get_mut(&key).expect("a volume");
        (volume.content, volume.size, volume.shared) = (content, size, true);
    }

    /// Whether an interrupted control operation happened, as far as names and sizes tell.
    ///
    /// # Errors If it happened in part.
    pub fn applied(&self, pending: &Pending, found: &Listing) -> Result<Applied, Bad> {
        let (before, mut model) = (self.listing(), self.clone());
        model.apply(pending);
        let after = model.listing();
        let touched: Vec<&String> =
            before.keys().chain(after.keys()).filter(|n| before.get(*n) != after.get(*n)).collect();
        if touched.is_empty() {
            return Ok(Applied::Unknown);
        }
        let like = |listing: &Listing| touched.iter().all(|n| listing.get(*n) == found.get(*n));
        match (like(&before), like(&after)) {
            (true, _) => Ok(Applied::No),
            (_, true) => Ok(Applied::Yes),
            _ => {
                let seen: Vec<String> = touched.iter().map(|n| format!("{n}: {:?}", found.get(*n))).collect();
                let what = format!("{:?} took place by half; sizes found: {}", pending.control, seen.join(", "));
                Err(Bad { promise: "P4", what })
            }
        }
    }
}

/// Sets a lifetime and the label; the extended attribute stays.
fn set_lifetime(volume: &mut Volume, lifetime: Lifetime) {
    volume.lifetime = Lifetime { xattr: volume.lifetime.xattr, ..lifetime };
}
