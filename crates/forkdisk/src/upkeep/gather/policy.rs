//! Gathering by policy: which volume is next, and when.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use crate::catalog::Catalog;
use crate::device::Device;
use crate::error::Result;
use crate::format::{GatherPolicy, VolumeRecord};
use crate::space::count_images;
use crate::sync::{Event, RangeLocks};
use crate::types::{BLOCK_PAGES, PAGE_SIZE, VirtualPage, VolumeId};

use super::super::Upkeep;
use super::{GatherMode, Outcome, gather_for, next_scattered, wait_space_freed};

/// The pool is idle after this time without reads and writes.
const IDLE_AFTER: Duration = Duration::from_millis(200);
/// A volume is gathered again when its seams exceed those left by one in `REGATHER_PART` of them and by
/// `REGATHER_SEAMS`.
const REGATHER_PART: u64 = 8;
const REGATHER_SEAMS: u64 = 16;
/// With `auto` a volume is gathered where more than this part of its pages are seams: one of this many.
const AUTO_PART: u64 = 256;
/// Size from which on `auto` does not process a volume again only because some volume was deleted, in pages.
const LARGE_VOLUME_PAGES: u64 = (16 << 30) / PAGE_SIZE as u64;
/// A volume that was processed in vain repeatedly is processed again after at most this many deletions of
/// others.
const MAX_PATIENCE_VOLUMES: u64 = 16;
/// When this many pages have been moved for each count page with logged changes, the count pages are written,
/// too: while the pool is idle, and a small cost next to the moves.
const MOVED_PAGES_PER_LEAF: u64 = 8;
/// If more volumes than this have a policy, they are examined at most once per [`IDLE_AFTER`].
const MANY_VOLUMES: usize = 64;

/// State of gathering.
#[derive(Default)]
pub struct GatherScheduler {
    /// Held for one virtual block.
    pub(super) lock: Rc<RangeLocks>,
    running: Cell<bool>,
    /// Device requests made for gathering.
    pub(super) requests: Cell<u64>,
    ended: Event,
    /// The volumes were examined recently; whether gathering was asked for since.
    resting: Cell<bool>,
    awaited: Cell<bool>,
    left: RefCell<BTreeMap<VolumeId, LastPass>>,
    /// Volumes for which gathering was requested.
    requested: Rc<RefCell<BTreeSet<VolumeId>>>,
}

/// A request to gather a volume, while this exists.
pub(super) struct GatherRequest {
    id: VolumeId,
    all: Rc<RefCell<BTreeSet<VolumeId>>>,
}

impl Drop for GatherRequest {
    fn drop(&mut self) {
        self.all.borrow_mut().remove(&self.id);
    }
}

/// State of a volume at the end of its last pass.
#[derive(Clone, Copy)]
struct LastPass {
    seams: u64,
    /// Volumes that had been released completely by then.
    reaped: u64,
    /// This many have to be released before it is processed again: twice as many each time that nothing was
    /// moved, so that a fruitless search is not repeated with every deletion.
    patience: u64,
}

impl GatherScheduler {
    /// Requests gathering of this volume; `None` if it is requested already.
    pub(super) fn request(&self, id: VolumeId) -> Option<GatherRequest> {
        let is_first = self.requested.borrow_mut().insert(id);
        is_first.then(|| GatherRequest { id, all: Rc::clone(&self.requested) })
    }

    fn is_due(&self, record: &VolumeRecord, reaped: u64) -> bool {
        let is_scattered = match record.gather {
            GatherPolicy::Off => false,
            GatherPolicy::Auto => record.seams * AUTO_PART > record.referenced,
            GatherPolicy::Idle => record.seams > 0,
            GatherPolicy::Above(percent) => record.seams * 100 > record.referenced * u64::from(percent),
        };
        let left = self.left.borrow();
        let goes_by_reaped = record.gather != GatherPolicy::Auto || record.referenced <= LARGE_VOLUME_PAGES;
        let fits = |left: &LastPass| {
            let given_back = goes_by_reaped && reaped - left.reaped >= left.patience;
            given_back || record.seams > left.seams + left.seams / REGATHER_PART + REGATHER_SEAMS
        };
        is_scattered && left.get(&record.id).is_none_or(fits)
    }

    /// Notes a pass. Nothing was moved if it was `in_vain`; `seams` is `None` if the volume is deleted.
    fn note_pass(&self, id: VolumeId, seams: Option<u64>, reaped: u64, in_vain: bool) {
        let mut left = self.left.borrow_mut();
        let before = left.remove(&id);
        let Some(seams) = seams else { return };
        let patience = match before {
            Some(before) if in_vain && reaped - before.reaped >= before.patience => {
                (2 * before.patience).min(MAX_PATIENCE_VOLUMES)
            }
            // It was processed because it had become more scattered: that tells nothing about deletions.
            Some(before) if in_vain => before.patience,
            _ => 1,
        };
        left.insert(id, LastPass { seams, reaped, patience });
    }

    /// Copies what is known of a source to its clone, as long as they are alike.
    pub fn note_clone(&self, source: &VolumeRecord, copy: &VolumeRecord) {
        // A copy's seams may have been estimated, which makes them fewer.
        let is_alike = source.referenced == copy.referenced && copy.seams <= source.seams;
        let mut all = self.left.borrow_mut();
        // What was known of other contents is useless in any case.
        all.remove(&copy.id);
        if let Some(&left) = all.get(&source.id).filter(|_| is_alike && source.gather == copy.gather) {
            all.insert(copy.id, left);
        }
    }

    /// Forgets a deleted volume.
    pub fn forget(&self, id: VolumeId) {
        self.left.borrow_mut().remove(&id);
    }

    fn next(&self, meta: &Catalog, reaped: u64) -> Option<VolumeId> {
        let mut all = meta.directory.gathering().map(|v| &v.record);
        all.find(|record| self.is_due(record, reaped)).map(|record| record.id)
    }
}

impl<D: Device> Upkeep<D> {
    /// The policy of a volume was changed.
    pub fn policy_changed(&self, id: VolumeId) {
        self.gathering.forget(id);
        self.start_gathering();
    }

    /// Resolves when nothing is being gathered by policy, and nothing is due.
    pub async fn wait_gathered(&self) {
        self.gathering.resting.set(false);
        self.start_gathering();
        while self.gathering.running.get() {
            self.gathering.ended.wait().await;
        }
    }
}

impl<D: Device> Upkeep<D> {
    /// Starts gathering by policy if something is due and it does not run.
    pub fn start_gathering(&self) {
        let idle = !self.store.opened.get()
            || self.store.options.read_only
            || self.store.closing.get()
            || self.store.failed.borrow().is_some();
        if idle || self.gathering.running.get() || is_resting(self) {
            return;
        }
        if next_to_gather(self).is_none() {
            return rest(self);
        }
        self.gathering.running.set(true);
        let Some(upkeep) = self.this.upgrade() else { return };
        self.store.runtime.spawn(Box::pin(async move {
            while let Some(id) = next_to_gather(&upkeep).filter(|_| may_gather(&upkeep)) {
                let reaped = upkeep.store.counters.reaped.get();
                let gathered = upkeep.store.counters.gathered.get();
                // A failure does no harm: the pages stay where they are, until more is due.
                let is_done = gather_by_policy(&upkeep, id).await.is_ok();
                let moved = upkeep.store.counters.gathered.get() - gathered;
                // As above.
                let _ = retire_count_log(&upkeep, moved / PAGE_SIZE as u64).await;
                let seams = upkeep.store.meta.borrow().directory.get(id).map(|volume| volume.record.seams);
                upkeep.gathering.note_pass(id, seams, reaped, is_done && moved == 0);
            }
            upkeep.gathering.running.set(false);
            upkeep.gathering.ended.notify();
        }));
    }
}

/// Whether nothing was due at a recent check.
fn is_resting<D: Device>(upkeep: &Upkeep<D>) -> bool {
    let is_resting = upkeep.gathering.resting.get();
    if is_resting {
        upkeep.gathering.awaited.set(true);
    }
    is_resting
}

/// Notes that nothing is due. If checking takes long it is not repeated for a while.
fn rest<D: Device>(upkeep: &Upkeep<D>) {
    if upkeep.store.meta.borrow().directory.gathering().count() <= MANY_VOLUMES {
        return;
    }
    upkeep.gathering.resting.set(true);
    // Must not keep the pool open.
    let (weak, pause) = (upkeep.this.clone(), upkeep.store.runtime.sleep(IDLE_AFTER));
    upkeep.store.runtime.spawn(Box::pin(async move {
        pause.await;
        let Some(upkeep) = weak.upgrade() else { return };
        upkeep.gathering.resting.set(false);
        if upkeep.gathering.awaited.take() {
            upkeep.start_gathering();
        }
    }));
}

fn next_to_gather<D: Device>(upkeep: &Upkeep<D>) -> Option<VolumeId> {
    upkeep.gathering.next(&upkeep.store.meta.borrow(), upkeep.store.counters.reaped.get())
}

fn may_gather<D: Device>(upkeep: &Upkeep<D>) -> bool {
    !upkeep.store.closing.get() && !upkeep.store.closed.get() && upkeep.store.failed.borrow().is_none()
}

/// Notes that this many pages have been moved.
async fn retire_count_log<D: Device>(upkeep: &Rc<Upkeep<D>>, moved: u64) -> Result<()> {
    let is_to_end = may_gather(upkeep)
        && count_images::retire_log(&mut upkeep.store.meta.borrow_mut().space, moved / MOVED_PAGES_PER_LEAF);
    if is_to_end { upkeep.store.unless_blocked(upkeep.store.clone().checkpoint()).await } else { Ok(()) }
}

/// Processes a volume once.
async fn gather_by_policy<D: Device>(upkeep: &Rc<Upkeep<D>>, id: VolumeId) -> Result<()> {
    let mut at = VirtualPage(0);
    let (mut last, mut has_taken_back) = (None, false);
    loop {
        let policy = upkeep.store.meta.borrow().directory.get(id).map(|volume| volume.record.gather);
        match policy {
            None | Some(GatherPolicy::Off) => return Ok(()),
            Some(GatherPolicy::Auto | GatherPolicy::Idle) => last = wait_idle(upkeep, last).await,
            Some(GatherPolicy::Above(_)) => {}
        }
        let way = if policy == Some(GatherPolicy::Auto) { GatherMode::Home } else { GatherMode::ByPolicy };
        if !may_gather(upkeep) {
            return Ok(());
        }
        if !has_taken_back {
            wait_space_freed(upkeep).await?;
            has_taken_back = true;
        }
        let Some(next) = next_scattered(upkeep, id, at).await? else { return Ok(()) };
        let outcome = gather_for(upkeep, id, next, way).await?;
        if matches!(outcome, Outcome::NoSpace | Outcome::HostFull) {
            return Ok(());
        }
        at = VirtualPage(next.0 + BLOCK_PAGES);
    }
}

/// Returns the number of requests for the data of volumes so far, without those of gathering.
fn activity<D: Device>(upkeep: &Upkeep<D>) -> u64 {
    let (reads, writes) =
        (upkeep.store.counters.data_reads.read().count, upkeep.store.counters.data_writes.read().count);
    reads + writes - upkeep.gathering.requests.get()
}

/// If there were reads or writes since `last`, or `last` is `None`: waits until the pool has been idle
/// for a while. Returns the activity at the end.
async fn wait_idle<D: Device>(upkeep: &Upkeep<D>, mut last: Option<u64>) -> Option<u64> {
    while may_gather(upkeep) {
        let now = Some(activity(upkeep));
        if now == last {
            break;
        }
        last = now;
        upkeep.store.runtime.sleep(IDLE_AFTER).await;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gathered_in_vain_is_not_looked_for_with_every_deletion() {
        let id = VolumeId(7);
        let record = |seams| VolumeRecord {
            gather: GatherPolicy::Auto,
            seams,
            referenced: 10_000,
            ..VolumeRecord::empty(id, "volume", 0)
        };
        let gathering = GatherScheduler::default();
        let mut looks = Vec::new();
        for reaped in 0..100 {
            if gathering.is_due(&record(100), reaped) {
                looks.push(reaped);
                gathering.note_pass(id, Some(100), reaped, true);
            }
        }
        assert_eq!(looks, [0, 1, 3, 7, 15, 31, 47, 63, 79, 95]);
        // Where something was moved there may be more, and pages scattered since are reason enough.
        assert!(!gathering.is_due(&record(100), 100) && gathering.is_due(&record(150), 100));
        gathering.note_pass(id, Some(100), 100, false);
        assert!(!gathering.is_due(&record(100), 100) && gathering.is_due(&record(100), 101));
        // Processed in vain because of writes, however often: one deletion is enough.
        for seams in [150, 200, 300, 400] {
            gathering.note_pass(id, Some(seams), 100, true);
        }
        assert!(!gathering.is_due(&record(400), 100) && gathering.is_due(&record(400), 101));
        // A clone is like it, until it is written.
        let clone = |seams| VolumeRecord { id: VolumeId(8), ..record(seams) };
        gathering.note_clone(&record(400), &VolumeRecord { referenced: 9_999, ..clone(400) });
        assert!(gathering.is_due(&clone(400), 100), "it is not all of it");
        gathering.note_clone(&record(400), &VolumeRecord { gather: GatherPolicy::Idle, ..clone(400) });
        assert!(gathering.is_due(&clone(400), 100), "what nobody looked for was not looked for in vain");
        gathering.note_clone(&record(400), &clone(399));
        assert!(!gathering.is_due(&clone(400), 100) && gathering.is_due(&clone(400), 101));
        assert!(gathering.is_due(&clone(500), 100));
        gathering.forget(VolumeId(8));
        gathering.note_pass(id, None, 101, true);
        assert!(gathering.left.borrow().is_empty(), "it is gone");
    }
}
