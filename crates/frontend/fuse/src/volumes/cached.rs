//! Which parts of volumes the kernel may have in its page cache.
//!
//! Direct writes are asynchronous (`FUSE_ASYNC_DIO`). The kernel drops cached pages of the range before it sends such
//! a write, and not again afterwards: a page that a buffered read fills in between would keep the old contents. So the
//! ranges of all requests of the page cache are noted, and before the reply to a direct write the kernel drops what it
//! may have of them. A file that is only read and written directly costs nothing here.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Poll, Waker};

use forkdisk::{Device, LocalFuture, VolumeId};

use super::Volumes;

/// Ranges are noted in units of this size: a reader in order leaves one range, and one notification drops a unit.
const UNIT_BYTES: u64 = 1 << 20;
/// Most ranges of a volume; beyond that they are joined to one.
const MAX_RANGE_COUNT: usize = 16_384;

/// What the kernel may have cached of all volumes of a mount.
#[derive(Default)]
pub(super) struct Cached {
    volumes: RefCell<HashMap<VolumeId, OfVolume>>,
    /// Writes that wait until the kernel has dropped something.
    waiting: RefCell<Vec<Waker>>,
}

#[derive(Default)]
struct OfVolume {
    ranges: Ranges,
    /// What the kernel is dropping. Noted in `ranges` again if it is read meanwhile.
    leaving: Vec<Range<u64>>,
}

impl Cached {
    /// Notes that the kernel fills or keeps pages of this range, when it requests it.
    pub(super) fn add(&self, id: VolumeId, offset: u64, len: u64) {
        self.volumes.borrow_mut().entry(id).or_default().ranges.add(units(offset, len));
    }

    /// Notes that the kernel may have anything of a volume.
    pub(super) fn add_all(&self, id: VolumeId) {
        self.add(id, 0, u64::MAX);
    }

    /// Returns whether something is noted of a volume.
    pub(super) fn has(&self, id: VolumeId) -> bool {
        self.volumes.borrow().contains_key(&id)
    }

    /// Removes the notes of a volume: the kernel drops its pages before they can be read again.
    pub(super) fn remove(&self, id: VolumeId) {
        let mut volumes = self.volumes.borrow_mut();
        if volumes.get(&id).is_some_and(|volume| volume.leaving.is_empty()) {
            volumes.remove(&id);
        }
    }

    /// Takes all noted units that overlap `range`, to be dropped. Returns the range from the first one to the last.
    fn take(&self, id: VolumeId, range: &Range<u64>) -> Option<Range<u64>> {
        let mut volumes = self.volumes.borrow_mut();
        let volume = volumes.get_mut(&id)?;
        let taken = volume.ranges.take(range)?;
        volume.leaving.push(taken.clone());
        Some(taken)
    }

    /// Ends a drop that [`take`](Self::take) began.
    fn dropped(&self, id: VolumeId, range: &Range<u64>) {
        let mut volumes = self.volumes.borrow_mut();
        if let Some(volume) = volumes.get_mut(&id) {
            if let Some(at) = volume.leaving.iter().position(|leaving| leaving == range) {
                volume.leaving.swap_remove(at);
            }
            if volume.leaving.is_empty() && volume.ranges.0.is_empty() {
                volumes.remove(&id);
            }
        }
        drop(volumes);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Waits until the kernel drops nothing that overlaps `range`.
    async fn settled(&self, id: VolumeId, range: &Range<u64>) {
        poll_fn(|cx| {
            let volumes = self.volumes.borrow();
            let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
            if !volumes.get(&id).is_some_and(|volume| volume.leaving.iter().any(overlaps)) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl<D: Device> Volumes<D> {
    /// Makes a write of (offset, length) visible to all programs: drops what the kernel may have cached of it, and
    /// tells the watcher. `None` if nothing has to be done.
    pub(super) fn make_visible(
        self: &Rc<Self>,
        id: VolumeId,
        (offset, len): (u64, u64),
        is_direct: bool,
    ) -> Option<LocalFuture<()>> {
        let told = self.watcher.get().map(|watcher| watcher(id, offset, len));
        if !is_direct || !self.cached.has(id) {
            return told;
        }
        let volumes = self.clone();
        Some(Box::pin(async move {
            volumes.drop_cached(id, offset, len).await;
            if let Some(told) = told {
                told.await;
            }
        }))
    }

    /// Makes the kernel drop what it may have cached of a range, which was changed by a direct write. After it
    /// returns, programs read the new contents.
    pub(super) async fn drop_cached(&self, id: VolumeId, offset: u64, len: u64) {
        let range = units(offset, len);
        let taken = self.cached.take(id, &range);
        if let Some(taken) = &taken {
            // 0: to the end.
            let len = if taken.end == u64::MAX { 0 } else { taken.end - taken.start };
            self.changed(id, taken.start, len).await;
            self.cached.dropped(id, taken);
        }
        // Another write's notification may be on its way to the same pages.
        self.cached.settled(id, &range).await;
    }
}

/// Returns the whole units around a range.
fn units(offset: u64, len: u64) -> Range<u64> {
    let end = offset.saturating_add(len).checked_next_multiple_of(UNIT_BYTES).unwrap_or(u64::MAX);
    offset / UNIT_BYTES * UNIT_BYTES..end
}

/// A set of bytes: ranges that neither overlap nor touch, by start with their ends.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn add(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if let Some((_, &last)) = self.0.range(..=start).next_back()
            && last >= end
        {
            return;
        }
        while let Some((&other, &last)) = self.0.range(..=end).next_back()
            && last >= start
        {
            self.0.remove(&other);
            (start, end) = (start.min(other), end.max(last));
        }
        self.0.insert(start, end);
        if self.0.len() > MAX_RANGE_COUNT {
            let (first, last) = (self.0.keys().next().copied(), self.0.values().next_back().copied());
            self.0 = first.zip(last).into_iter().collect();
        }
    }

    /// Removes what overlaps `range`, as far as it does; returns its hull.
    fn take(&mut self, range: &Range<u64>) -> Option<Range<u64>> {
        let mut hull: Option<Range<u64>> = None;
        while let Some((&start, &end)) = self.0.range(..range.end).next_back()
            && end > range.start
        {
            self.0.remove(&start);
            if start < range.start {
                self.0.insert(start, range.start);
            }
            if end > range.end {
                self.0.insert(range.end, end);
            }
            let part = start.max(range.start)..end.min(range.end);
            hull = Some(hull.map_or(part.clone(), |hull| part.start..hull.end));
        }
        hull
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = UNIT_BYTES;

    fn list(ranges: &Ranges) -> Vec<(u64, u64)> {
        ranges.0.iter().map(|(&start, &end)| (start / UNIT, end / UNIT)).collect()
    }

    #[test]
    fn ranges_that_touch_become_one() {
        let mut ranges = Ranges::default();
        for unit in [5, 1, 2, 9, 3, 2] {
            ranges.add(units(unit * UNIT + 7, 100));
        }
        assert_eq!(list(&ranges), [(1, 4), (5, 6), (9, 10)]);
        ranges.add(units(4 * UNIT, UNIT));
        assert_eq!(list(&ranges), [(1, 6), (9, 10)]);
        ranges.add(units(0, 20 * UNIT));
        assert_eq!(list(&ranges), [(0, 20)]);
    }

    #[test]
    fn what_is_taken_is_gone_and_the_rest_stays() {
        let mut ranges = Ranges::default();
        ranges.add(units(0, 4 * UNIT));
        ranges.add(units(8 * UNIT, 2 * UNIT));
        assert_eq!(ranges.take(&units(5 * UNIT, UNIT)), None);
        assert_eq!(ranges.take(&units(3 * UNIT, 6 * UNIT)), Some(3 * UNIT..9 * UNIT), "the hull");
        assert_eq!(list(&ranges), [(0, 3), (9, 10)]);
        assert_eq!(ranges.take(&units(UNIT, 1)), Some(UNIT..2 * UNIT), "a hole in the middle");
        assert_eq!(list(&ranges), [(0, 1), (2, 3), (9, 10)]);
    }

    #[test]
    fn all_of_a_volume_is_one_range() {
        let mut ranges = Ranges::default();
        ranges.add(units(0, u64::MAX));
        assert_eq!(ranges.take(&units(7 * UNIT, 1)), Some(7 * UNIT..8 * UNIT));
        assert_eq!(ranges.take(&units(1 << 50, u64::MAX)), Some(1 << 50..u64::MAX));
    }

    #[test]
    fn very_many_ranges_are_joined() {
        let mut ranges = Ranges::default();
        (0..=MAX_RANGE_COUNT as u64).for_each(|n| ranges.add(units(2 * n * UNIT, 1)));
        assert_eq!(list(&ranges), [(0, 2 * MAX_RANGE_COUNT as u64 + 1)]);
    }

    #[test]
    fn notes_are_removed_with_the_last_drop() {
        let (cached, id) = (Cached::default(), VolumeId(7));
        cached.add(id, 0, 10);
        let taken = cached.take(id, &units(0, 1)).unwrap();
        cached.remove(id);
        assert!(cached.has(id), "it is being dropped");
        cached.dropped(id, &taken);
        assert!(!cached.has(id));
        cached.add_all(id);
        cached.remove(id);
        assert!(!cached.has(id));
    }
}
