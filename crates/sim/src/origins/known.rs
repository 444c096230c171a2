//! What is known of the pool while a history runs: the model, and facts that are not in the model.

use std::collections::{BTreeMap, BTreeSet};

use super::run::VOLUME_BYTES;
use super::{ORIGIN, Setup};
use crate::driver::{Knowledge, Violation};
use crate::model::{Control, Key, Listing, Model, Pending};

/// What is known of the pool: the model, and facts that are not in it.
#[derive(Clone)]
pub struct Known {
    /// What every volume may hold.
    pub model: Model,
    /// Returns the control operations that may or may not have happened.
    pub pending: Vec<Pending>,
    /// The origin.
    pub origin: Key,
    /// The backing of each clone: a snapshot of the origin. Snapshots of clones included.
    pub rests: BTreeMap<Key, Key>,
    /// Clones that may or may not have a backing any more.
    pub flattening: BTreeSet<Key>,
    /// Snapshots that may be deleted when the pool is full, unless the policy never was that.
    pub droppable: BTreeSet<String>,
    pub may_drop: bool,
    /// Snapshots of the origin that can be written.
    pub writable: BTreeSet<String>,
}

impl Known {
    pub fn new(setup: &Setup) -> Known {
        let mut model = Model::new();
        for (name, size) in [(ORIGIN, setup.origin), ("vol", VOLUME_BYTES)] {
            let pending = model.begin(Control::Create(name.into(), size));
            model.apply(&pending);
        }
        let origin = model.volumes().next().map_or(0, |(key, _)| key);
        let (rests, flattening, droppable, writable) = Default::default();
        Known { model, pending: Vec::new(), origin, rests, flattening, droppable, may_drop: true, writable }
    }

    /// Notes that a control operation has happened.
    pub fn apply(&mut self, pending: &Pending) {
        self.model.apply(pending);
        for (source, copy) in pending.news() {
            let of_origin = self.model.get(source).is_some_and(|v| v.of == Some(self.origin));
            let base = if of_origin { Some(source) } else { self.rests.get(&source).copied() };
            if let Some(base) = base.filter(|_| source != self.origin) {
                self.rests.insert(copy, base);
            }
        }
        self.rests.retain(|key, _| self.model.get(*key).is_some());
    }

    /// Notes the snapshots that were deleted because the pool was full.
    pub fn dropped(&mut self, found: &Listing) -> Result<(), Violation> {
        let gone: Vec<Key> = self
            .model
            .volumes()
            .map(|(key, _)| key)
            .filter(|&key| self.is_droppable(key) && !found.contains_key(&self.model.name(key)))
            .collect();
        for key in gone {
            if self.rests.values().any(|&base| base == key) {
                let what = format!("{} was dropped although a clone needs it", self.model.name(key));
                return Err(Violation::new("P5", what));
            }
            let pending = self.model.begin(Control::Delete(vec![key]));
            self.apply(&pending);
        }
        Ok(())
    }

    pub fn is_droppable(&self, key: Key) -> bool {
        self.may_drop && self.droppable.contains(&self.model.name(key))
    }

    /// Notes that a clone has no backing any more.
    pub fn flattened(&mut self, key: Key) {
        self.rests.remove(&key);
        self.flattening.remove(&key);
    }

    /// After a crash the pool reports which of the clones that were being flattened still have a backing.
    pub fn settle_flattened(&mut self, rests_on: impl Fn(&str) -> bool) {
        for key in std::mem::take(&mut self.flattening) {
            if self.model.get(key).is_some() && !rests_on(&self.model.name(key)) {
                self.flattened(key);
            }
        }
    }

    /// Whether it is the backing of no volume.
    pub fn is_free(&self, key: Key) -> bool {
        !self.rests.values().any(|&base| base == key)
    }

    /// Notes that a life of the engine has ended.
    pub fn open_again(&mut self) {
        self.pending.clear();
    }
}

impl Knowledge for Known {
    fn model(&self) -> &Model {
        &self.model
    }

    fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    fn pending(&mut self) -> &mut Vec<Pending> {
        &mut self.pending
    }
}
