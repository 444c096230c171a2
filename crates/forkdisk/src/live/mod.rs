//! State of volumes in use, apart from what the catalog keeps of every volume.
//!
//! [`Live`] is made at the first open of a volume and dropped at the last close: an idle volume or snapshot has none.
//! [`Activity`], the figures of a volume and its clients of the copier, is made at first use and stays until the
//! volume is deleted, since statistics count from the open of the pool.

mod backing;
mod breaks;
mod claims;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::copier::{Client, CopyClass};
use crate::counters::{VolumeCounters, VolumeStatistics};
use crate::device::Buf;
use crate::format::{Throttle, VolumeRecord};
use crate::sync::{RangeLocks, WriteQueue};
use crate::types::VolumeId;

pub use backing::BackingState;
pub use breaks::{CopyPart, InflightBreak};
pub use claims::{QuotaClaim, QuotaClaims};

/// State of the time of a volume's last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastChange {
    /// In the record of the volume.
    #[default]
    Recorded,
    /// Changed since: the time is not taken yet.
    Marked,
    /// Taken in memory, not in the journal.
    Taken,
}

/// State of a volume that has handles; all of them share it.
#[derive(Default)]
pub struct Live {
    /// Handles.
    pub open: Cell<usize>,
    /// Ranges that requests hold.
    pub locks: Rc<RangeLocks>,
    /// Writes accepted and not yet submitted.
    pub write_queue: Rc<WriteQueue<Buf>>,
    /// What the latest write said: more writes follow. For a request that merges several.
    pub more: Cell<bool>,
    /// Chunks being copied by a break.
    pub breaks: RefCell<Vec<Rc<InflightBreak>>>,
    /// Pages being completed with contents of the backing.
    pub edges: Rc<RangeLocks>,
    /// Whether the volume still reads its backing.
    pub backing: BackingState,
    /// Quota promised to writes under way.
    pub claims: Rc<QuotaClaims>,
    /// Whether the time of the last change is recorded.
    pub last_change: Cell<LastChange>,
}

/// What was done to a volume since the pool was opened, and on whose behalf the copier copies for it.
pub struct Activity {
    pub counters: VolumeCounters,
    /// The volume was opened for I/O.
    pub opened: Cell<bool>,
    /// Client for breaks, flattening and copies of an origin.
    pub copies: Rc<Client>,
    /// Client for gathering.
    pub gather: Rc<Client>,
}

impl Activity {
    fn of(record: &VolumeRecord) -> Activity {
        let class = if record.origin_record.is_some() { CopyClass::Origin } else { CopyClass::Break };
        let client = |class| Rc::new(Client::new(class, record.throttle));
        Activity {
            counters: VolumeCounters::default(),
            opened: Cell::default(),
            copies: client(class),
            gather: client(CopyClass::Gather),
        }
    }

    /// Limits all copies for the volume from now on.
    pub fn set_throttle(&self, throttle: Throttle) {
        self.copies.set_throttle(throttle);
        self.gather.set_throttle(throttle);
    }
}

/// The volumes in use and the figures of those that were.
#[derive(Default)]
pub struct LiveVolumes {
    live: BTreeMap<VolumeId, Rc<Live>>,
    activity: BTreeMap<VolumeId, Rc<Activity>>,
    /// Sums of the figures of deleted volumes.
    deleted: VolumeStatistics,
}

impl LiveVolumes {
    /// The live state of a volume, if it has any.
    pub fn get(&self, id: VolumeId) -> Option<&Rc<Live>> {
        self.live.get(&id)
    }

    /// The live state of a volume; creates it if there is none.
    pub fn get_or_create(&mut self, id: VolumeId) -> &Rc<Live> {
        self.live.entry(id).or_default()
    }

    /// Handles of a volume.
    pub fn handles(&self, id: VolumeId) -> usize {
        self.live.get(&id).map_or(0, |live| live.open.get())
    }

    /// Drops the live state of a volume that has no handle and no change whose time is to be recorded.
    pub fn release(&mut self, id: VolumeId) {
        let is_idle = |live: &Rc<Live>| live.open.get() == 0 && live.last_change.get() == LastChange::Recorded;
        if self.live.get(&id).is_some_and(is_idle) {
            self.live.remove(&id);
        }
    }

    /// The volume of `id` reads the backing that its record names from now on; `has_backing`: whether it names one.
    pub fn set_backing(&self, id: VolumeId, has_backing: bool) {
        match self.live.get(&id) {
            Some(live) if has_backing => live.backing.reset(),
            Some(live) => live.backing.remove(),
            None => {}
        }
    }

    /// Marks the time of the last change as recorded.
    pub fn set_change_recorded(&mut self, id: VolumeId) {
        if let Some(live) = self.live.get(&id) {
            live.last_change.set(LastChange::Recorded);
            self.release(id);
        }
    }

    /// The figures of a volume, if it was used since the pool was opened.
    pub fn activity(&self, id: VolumeId) -> Option<&Rc<Activity>> {
        self.activity.get(&id)
    }

    /// The figures of the volume with this record; creates them if there are none.
    pub fn activity_or_create(&mut self, record: &VolumeRecord) -> &Rc<Activity> {
        self.activity.entry(record.id).or_insert_with(|| Rc::new(Activity::of(record)))
    }

    /// Drops the live state of a deleted volume, and adds its figures to the sum of all such.
    pub fn note_deleted(&mut self, id: VolumeId) {
        let live = self.live.remove(&id);
        debug_assert!(live.is_none_or(|live| live.open.get() == 0), "a volume with a handle is not deleted");
        if let Some(activity) = self.activity.remove(&id) {
            self.deleted.merge(&activity.counters.read());
        }
    }

    /// What was done to all volumes, deleted ones included.
    pub fn statistics(&self) -> VolumeStatistics {
        let mut sum = self.deleted;
        self.activity.values().for_each(|activity| sum.merge(&activity.counters.read()));
        sum
    }
}
