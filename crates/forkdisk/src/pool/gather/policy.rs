//! Gathering without anybody asking: which volume is next, and when.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::error::Result;
use crate::format::{GatherPolicy, Record, VolumeRecord};
use crate::pool::verbs::{check_gather, writable_volume};
use crate::pool::{Inner, Meta, Pool};
use crate::sync::{Event, RangeLocks};
use crate::types::{BLOCK_PAGES, PAGE_SIZE, VirtualPage, VolumeId};

use super::{GatherMode, Outcome};

/// How long nobody may have read or written for the pool to be idle.
const IDLE_AFTER: Duration = Duration::from_millis(200);
/// A volume that was gone over is gone over again when it has more seams than were left by this part of them
/// and so many.
const REGATHER_PART: u64 = 8;
const REGATHER_SEAMS: u64 = 16;
/// By `auto` a volume is gathered where more than this part of its pages are seams.
const AUTO_PART: u64 = 256;
/// Pages of a volume that `auto` does not go over again only because some volume was given back.
const LARGE_VOLUME_PAGES: u64 = (16 << 30) / PAGE_SIZE as u64;
/// A volume that was gone over in vain, again and again, is gone over anew when at most so many others have been given
/// back.
const MAX_PATIENCE_VOLUMES: u64 = 16;
/// When so many pages have been moved for each count page of which something is logged, these are written, too: while
/// nobody waits for it, and next to what was moved it is little.
const MOVED_PAGES_PER_LEAF: u64 = 8;
/// With more volumes that have a policy they are looked through at most once in [`IDLE_AFTER`].
const MANY_VOLUMES: usize = 64;

/// Who gathers.
#[derive(Default)]
pub struct GatherScheduler {
    /// Held for one virtual block.
    pub(super) lock: Rc<RangeLocks>,
    running: Cell<bool>,
    /// Requests made for it.
    pub(super) requests: Cell<u64>,
    ended: Event,
    /// They were looked through a moment ago; whether somebody has asked for it since.
    resting: Cell<bool>,
    awaited: Cell<bool>,
    left: RefCell<BTreeMap<VolumeId, LastPass>>,
    /// What somebody is having gathered.
    requested: Rc<RefCell<BTreeSet<VolumeId>>>,
}

/// Somebody is having a volume gathered, while this exists.
pub(super) struct GatherRequest {
    id: VolumeId,
    all: Rc<RefCell<BTreeSet<VolumeId>>>,
}

impl Drop for GatherRequest {
    fn drop(&mut self) {
        self.all.borrow_mut().remove(&self.id);
    }
}

/// How a volume was when it had been gone over.
#[derive(Clone, Copy)]
struct LastPass {
    seams: u64,
    /// Volumes that had been given back by then.
    reaped: u64,
    /// So many have to be given back before it is gone over again: twice as many each time that nothing was moved, so
    /// that what is to be had from nobody is not looked for with every deletion.
    patience: u64,
}

impl GatherScheduler {
    /// Somebody wants this volume gathered; `None` if somebody does so already.
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

    /// Nothing was moved if it was `in_vain`; there are no `seams` if it is gone.
    fn note_pass(&self, id: VolumeId, seams: Option<u64>, reaped: u64, in_vain: bool) {
        let mut left = self.left.borrow_mut();
        let before = left.remove(&id);
        let Some(seams) = seams else { return };
        let patience = match before {
            Some(before) if in_vain && reaped - before.reaped >= before.patience => {
                (2 * before.patience).min(MAX_PATIENCE_VOLUMES)
            }
            // It was gone over because it had been scattered more: that says nothing about deletions.
            Some(before) if in_vain => before.patience,
            _ => 1,
        };
        left.insert(id, LastPass { seams, reaped, patience });
    }

    /// What is known of the one is true of the other as long as it is like it.
    fn note_clone(&self, source: &VolumeRecord, copy: &VolumeRecord) {
        // A copy's seams may have been estimated, which makes them fewer.
        let is_alike = source.referenced == copy.referenced && copy.seams <= source.seams;
        let mut all = self.left.borrow_mut();
        // What was known of other contents is of no use in any case.
        all.remove(&copy.id);
        if let Some(&left) = all.get(&source.id).filter(|_| is_alike && source.gather == copy.gather) {
            all.insert(copy.id, left);
        }
    }

    /// The volume is gone.
    pub fn forget(&self, id: VolumeId) {
        self.left.borrow_mut().remove(&id);
    }

    fn next(&self, meta: &Meta, reaped: u64) -> Option<VolumeId> {
        let mut all = meta.directory.gathering().map(|v| &v.record);
        all.find(|record| self.is_due(record, reaped)).map(|record| record.id)
    }
}

impl<D: Device> Pool<D> {
    /// When the volume's scattered pages are brought together without anybody asking. A clone has the policy
    /// of what it was cloned from.
    pub async fn set_gather(&self, name: &str, gather: GatherPolicy) -> Result<()> {
        check_gather(gather)?;
        let id = self
            .0
            .verb(|meta| {
                let volume = meta.directory.find(name)?;
                let id = writable_volume(volume, name)?;
                Ok((Record::SetGather { id, gather }, id))
            })
            .await?;
        self.0.gathering.left.borrow_mut().remove(&id);
        self.0.gather_soon();
        Ok(())
    }

    /// Resolves when nothing is being gathered by policy, and nothing is to be.
    pub async fn wait_gathered(&self) {
        self.0.gathering.resting.set(false);
        self.0.gather_soon();
        while self.0.gathering.running.get() {
            self.0.gathering.ended.wait().await;
        }
    }
}

impl<D: Device> Inner<D> {
    /// Starts gathering by policy if there is something to do and it does not run.
    pub fn gather_soon(self: &Rc<Self>) {
        let idle = !self.opened.get() || self.options.read_only || self.closing.get() || self.failed.borrow().is_some();
        if idle || self.gathering.running.get() || self.is_resting() {
            return;
        }
        if self.next_to_gather().is_none() {
            return self.rest();
        }
        self.gathering.running.set(true);
        let inner = self.clone();
        self.runtime.spawn(Box::pin(async move {
            while let Some(id) = inner.next_to_gather().filter(|_| inner.may_gather()) {
                let reaped = inner.counters.reaped.get();
                let gathered = inner.counters.gathered.get();
                // What goes wrong hurts nobody: the pages stay where they are, until there is more to do.
                let is_done = inner.gather_by_policy(id).await.is_ok();
                let moved = inner.counters.gathered.get() - gathered;
                // As above.
                let _ = inner.retire_count_log(moved / PAGE_SIZE as u64).await;
                let seams = inner.meta.borrow().directory.get(id).map(|volume| volume.record.seams);
                inner.gathering.note_pass(id, seams, reaped, is_done && moved == 0);
            }
            inner.gathering.running.set(false);
            inner.gathering.ended.notify();
        }));
    }

    /// `copy` has just become a clone of `source`: what was looked for in vain there need not be looked for here.
    pub fn note_cloned(&self, meta: &Meta, source: VolumeId, copy: VolumeId) {
        if let (Some(source), Some(copy)) = (meta.directory.get(source), meta.directory.get(copy)) {
            self.gathering.note_clone(&source.record, &copy.record);
        }
    }

    /// Whether nothing was to be done when it was looked a moment ago.
    fn is_resting(&self) -> bool {
        let is_resting = self.gathering.resting.get();
        if is_resting {
            self.gathering.awaited.set(true);
        }
        is_resting
    }

    /// Nothing is to be done. Where looking takes its time it is not looked again for a while.
    fn rest(self: &Rc<Self>) {
        if self.meta.borrow().directory.gathering().count() <= MANY_VOLUMES {
            return;
        }
        self.gathering.resting.set(true);
        // Nobody keeps a pool open for it.
        let (inner, pause) = (Rc::downgrade(self), self.runtime.sleep(IDLE_AFTER));
        self.runtime.spawn(Box::pin(async move {
            pause.await;
            let Some(inner) = inner.upgrade() else { return };
            inner.gathering.resting.set(false);
            if inner.gathering.awaited.take() {
                inner.gather_soon();
            }
        }));
    }

    fn next_to_gather(&self) -> Option<VolumeId> {
        self.gathering.next(&self.meta.borrow(), self.counters.reaped.get())
    }

    fn may_gather(&self) -> bool {
        !self.closing.get() && !self.closed.get() && self.failed.borrow().is_none()
    }

    /// So many pages have been moved.
    async fn retire_count_log(self: &Rc<Self>, moved: u64) -> Result<()> {
        let is_to_end = self.may_gather() && self.meta.borrow_mut().space.retire_log(moved / MOVED_PAGES_PER_LEAF);
        if is_to_end { self.unless_blocked(self.clone().checkpoint()).await } else { Ok(()) }
    }

    /// Goes over a volume once.
    async fn gather_by_policy(self: &Rc<Self>, id: VolumeId) -> Result<()> {
        let mut at = VirtualPage(0);
        let (mut last, mut has_taken_back) = (None, false);
        loop {
            let policy = self.meta.borrow().directory.get(id).map(|volume| volume.record.gather);
            match policy {
                None | Some(GatherPolicy::Off) => return Ok(()),
                Some(GatherPolicy::Auto | GatherPolicy::Idle) => last = self.wait_idle(last).await,
                Some(GatherPolicy::Above(_)) => {}
            }
            let way = if policy == Some(GatherPolicy::Auto) { GatherMode::Home } else { GatherMode::ByPolicy };
            if !self.may_gather() {
                return Ok(());
            }
            if !has_taken_back {
                self.wait_space_freed().await?;
                has_taken_back = true;
            }
            let Some(next) = self.next_scattered(id, at).await? else { return Ok(()) };
            let outcome = self.gather_for(id, next, way).await?;
            if matches!(outcome, Outcome::NoSpace | Outcome::HostFull) {
                return Ok(());
            }
            at = VirtualPage(next.0 + BLOCK_PAGES);
        }
    }

    /// Requests for the data of volumes so far, without those of gathering.
    fn activity(&self) -> u64 {
        let (reads, writes) = (self.counters.data_reads.read().count, self.counters.data_writes.read().count);
        reads + writes - self.gathering.requests.get()
    }

    /// If anybody has read or written since `last`, or nobody has looked yet: waits until nobody has for a while. What
    /// it is then.
    async fn wait_idle(&self, mut last: Option<u64>) -> Option<u64> {
        while self.may_gather() {
            let now = Some(self.activity());
            if now == last {
                break;
            }
            last = now;
            self.runtime.sleep(IDLE_AFTER).await;
        }
        last
    }
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
        // Where something was moved there may be more, and what has been scattered since is reason enough.
        assert!(!gathering.is_due(&record(100), 100) && gathering.is_due(&record(150), 100));
        gathering.note_pass(id, Some(100), 100, false);
        assert!(!gathering.is_due(&record(100), 100) && gathering.is_due(&record(100), 101));
        // Looked through in vain for what had been written, however often: one deletion is enough.
        for seams in [150, 200, 300, 400] {
            gathering.note_pass(id, Some(seams), 100, true);
        }
        assert!(!gathering.is_due(&record(400), 100) && gathering.is_due(&record(400), 101));
        // A clone is like it, until something is written.
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
