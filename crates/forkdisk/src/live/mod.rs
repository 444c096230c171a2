//! State of volumes in use, apart from what the catalog keeps of every volume.
//!
//! [`Live`] is made at the first open of a volume and dropped at the last close: an idle volume or snapshot has none.
//! [`Activity`], the figures of a volume and its clients of the copier, is made at first use and stays until the
//! volume is deleted, since statistics count from the open of the pool.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use crate::copier::{Client, CopyClass, JobHandle};
use crate::counters::{VolumeCounters, VolumeStatistics};
use crate::device::Buf;
use crate::error::Error;
use crate::format::{Throttle, VolumeRecord, WritePolicy};
use crate::space::claims::QuotaClaims;
use crate::space::folders::BoundedFolder;
use crate::sync::{Event, QueuedWrite, RangeLocks, WriteQueue};
use crate::types::VolumeId;

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
    /// New pages promised to writes under way, which the bound of the volume has to allow.
    pub new_pages: Rc<QuotaClaims>,
    /// How often it was given other contents as a whole while it was in use.
    pub rollbacks: Cell<u64>,
    /// Which writes are not stored.
    pub writes: Cell<WritePolicy>,
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

impl Live {
    /// The claims of its writes count in this bounded folder, too, or in none.
    pub fn link_claims(&self, folder: Option<&BoundedFolder>) {
        self.claims.link(folder.map(|folder| &folder.claims));
        self.new_pages.link(folder.map(|folder| &folder.new_pages));
    }
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

    /// Iterates over the volumes in use.
    pub fn iter(&self) -> impl Iterator<Item = (VolumeId, &Live)> {
        self.live.iter().map(|(&id, live)| (id, &**live))
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

/// A part of a volume that is being copied to a new place.
pub struct CopyPart {
    /// Range in the volume, in bytes.
    pub range: Range<u64>,
    /// The copy.
    pub ticket: JobHandle,
}

/// All copies that one write started.
pub struct InflightBreak {
    /// Its parts.
    pub parts: Vec<CopyPart>,
    /// Numbers in the write queue of the write that started them and of those that joined.
    pub queued_ids: RefCell<Vec<u64>>,
    /// Bytes of the volume before this offset are taken: a joining write begins behind it.
    pub joined: Cell<u64>,
    outcome: RefCell<Option<Result<(), Error>>>,
    ended: Event,
}

impl InflightBreak {
    /// The parts that together contain `range`, if they do.
    pub fn parts_of(&self, range: &Range<u64>) -> Option<Vec<&CopyPart>> {
        let overlap = |p: &&CopyPart| p.range.start < range.end && range.start < p.range.end;
        let parts: Vec<&CopyPart> = self.parts.iter().filter(overlap).collect();
        let held: u64 = parts.iter().map(|p| p.range.end.min(range.end) - p.range.start.max(range.start)).sum();
        (held == range.end - range.start).then_some(parts)
    }

    /// Waits for the end.
    pub async fn outcome(&self) -> Result<(), Error> {
        loop {
            if let Some(outcome) = &*self.outcome.borrow() {
                return outcome.clone();
            }
            self.ended.wait().await;
        }
    }
}

impl Live {
    /// Registers copies that writes may join from byte `from` of the volume on.
    pub fn begin_break(&self, parts: Vec<CopyPart>, queued: &QueuedWrite<Buf>, from: u64) -> Rc<InflightBreak> {
        let (outcome, ended) = Default::default();
        let new = Rc::new(InflightBreak {
            parts,
            queued_ids: RefCell::new(vec![queued.id()]),
            joined: Cell::new(from),
            outcome,
            ended,
        });
        self.breaks.borrow_mut().push(new.clone());
        new
    }

    /// Ends the copies: they were mapped, or failed.
    pub fn end_break(&self, ended: &Rc<InflightBreak>, outcome: Result<(), Error>) {
        self.breaks.borrow_mut().retain(|b| !Rc::ptr_eq(b, ended));
        *ended.outcome.borrow_mut() = Some(outcome);
        ended.ended.notify();
    }
}

/// State of the separation of a volume from its backing.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum BackingStage {
    /// Reads of unmapped pages go to the backing.
    #[default]
    InUse,
    /// The volume has pages for everything: the backing is not read any more. A hole would still show it
    /// after a crash.
    Unused,
    /// The volume has no backing.
    Removed,
}

/// Whether a volume still has a backing, and the number of its readers.
#[derive(Default)]
pub struct BackingState {
    stage: Cell<BackingStage>,
    lookers: Cell<usize>,
    left: Event,
}

/// A read of the backing under way.
pub struct BackingReader<'a>(&'a BackingState);

impl Drop for BackingReader<'_> {
    fn drop(&mut self) {
        self.0.lookers.set(self.0.lookers.get() - 1);
        if self.0.lookers.get() == 0 {
            self.0.left.notify();
        }
    }
}

impl BackingState {
    /// A read of the backing begins.
    pub fn reader(&self) -> BackingReader<'_> {
        self.lookers.set(self.lookers.get() + 1);
        BackingReader(self)
    }

    /// Stops new reads of the backing and waits for those under way.
    pub async fn stop_readers(&self) {
        self.stage.set(BackingStage::Unused);
        while self.lookers.get() > 0 {
            self.left.wait().await;
        }
    }

    /// The change could not be made durable: reads go to the backing again.
    pub fn reopen(&self) {
        self.stage.set(BackingStage::InUse);
    }

    /// The volume has no backing from now on.
    pub fn remove(&self) {
        self.stage.set(BackingStage::Removed);
    }

    /// The volume gets another backing; it must have no handle.
    pub fn reset(&self) {
        debug_assert_eq!(self.lookers.get(), 0);
        self.stage.set(BackingStage::InUse);
    }

    /// Whether reads of unmapped pages go to the backing.
    pub fn is_read(&self) -> bool {
        self.stage.get() == BackingStage::InUse
    }

    /// Whether the volume has no backing any more.
    pub fn is_removed(&self) -> bool {
        self.stage.get() == BackingStage::Removed
    }
}
