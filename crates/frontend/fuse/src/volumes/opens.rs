//! How often each volume is open, and which volumes the kernel may keep its cache of until they are opened again.
//!
//! Between two opens the kernel is not notified of changes by other doors of the pool. So with the last close of a file
//! the time of its last change is noted: if it is the same at the next open, the kernel keeps its cache. Every change
//! of contents sets that time, whatever door it came by, and programs cannot set it.

use std::collections::HashMap;

use forkdisk::{Device, Volume, VolumeId};

use super::Volumes;

/// Most volumes that are not open and have a kept cache.
const MAX_KEPT_COUNT: usize = 16_384;

#[derive(Clone, Copy, Default)]
struct Count {
    all: usize,
    writing: usize,
    /// The kernel had nothing old in its cache, or has dropped it since.
    is_fresh: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Opens {
    open: HashMap<VolumeId, Count>,
    /// Volumes that are not open, and the times of their last changes.
    kept: HashMap<VolumeId, i64>,
}

impl Opens {
    /// Counts a handle, with which the kernel keeps its cache or drops it.
    pub fn add(&mut self, id: VolumeId, writes: bool, keeps: bool) {
        let count = self.open.entry(id).or_default();
        count.all += 1;
        count.writing += usize::from(writes);
        count.is_fresh |= keeps;
        self.kept.remove(&id);
    }

    /// Notes that the kernel uses a handle: it has carried out what the reply to the open told.
    pub fn used(&mut self, id: VolumeId) {
        if let Some(count) = self.open.get_mut(&id) {
            count.is_fresh = true;
        }
    }

    /// Ends a handle. Returns whether it was the last one.
    fn remove(&mut self, id: VolumeId, writes: bool) -> bool {
        let Some(count) = self.open.get_mut(&id) else { return true };
        count.all = count.all.saturating_sub(1);
        count.writing = count.writing.saturating_sub(usize::from(writes));
        if count.all == 0 {
            self.open.remove(&id);
        }
        !self.open.contains_key(&id)
    }

    /// Whether a program has the volume open.
    pub fn has(&self, id: VolumeId) -> bool {
        self.open.contains_key(&id)
    }

    /// Whether a program has it open for writing.
    pub fn has_writer(&self, id: VolumeId) -> bool {
        self.open.get(&id).is_some_and(|count| count.writing > 0)
    }

    /// Whether a program has any volume open for writing.
    pub fn has_writers(&self) -> bool {
        self.open.values().any(|count| count.writing > 0)
    }

    fn is_fresh(&self, id: VolumeId) -> bool {
        self.open.get(&id).is_some_and(|count| count.is_fresh)
    }

    fn is_kept(&self, id: VolumeId, last_change: i64) -> bool {
        self.kept.get(&id) == Some(&last_change)
    }

    /// Notes the last change of a volume that is not open any more. Returns the volumes that are not kept for that.
    fn keep(&mut self, id: VolumeId, last_change: i64) -> Vec<VolumeId> {
        let given_up = match self.kept.len() >= MAX_KEPT_COUNT {
            true => std::mem::take(&mut self.kept).into_keys().collect(),
            false => Vec::new(),
        };
        self.kept.insert(id, last_change);
        given_up
    }
}

impl<D: Device> Volumes<D> {
    /// Returns whether the kernel may keep what it has cached of a volume that is being opened.
    pub(super) fn keeps_cache(&self, volume: &Volume<D>) -> bool {
        let (id, opens) = (volume.id(), self.opens.borrow());
        // While it is open, the kernel is told of changes. But it may not have dropped yet what was old at an open.
        self.options.alone
            || volume.read_only()
            || opens.is_fresh(id)
            || last_change(volume).is_some_and(|time| opens.is_kept(id, time))
    }

    /// Ends a handle of a volume.
    pub(super) fn closed(&self, volume: &Volume<D>, writes: bool) {
        let id = volume.id();
        if !self.opens.borrow_mut().remove(id, writes) || self.options.alone {
            return;
        }
        // The kernel drops its cache of what is not kept at the next open.
        let dropped = match last_change(volume) {
            Some(time) => self.opens.borrow_mut().keep(id, time),
            None => vec![id],
        };
        dropped.into_iter().for_each(|id| self.cached.remove(id));
    }
}

/// Returns the time of the last change of contents or attributes, in nanoseconds since 1970; `None` if none was ever
/// recorded, such as without a clock.
fn last_change<D: Device>(volume: &Volume<D>) -> Option<i64> {
    volume.info().attributes.map(|attributes| attributes.changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_kept_until_the_volume_changes() {
        let (mut opens, a) = (Opens::default(), VolumeId(1));
        opens.add(a, true, false);
        opens.add(a, false, false);
        assert!(opens.has(a) && opens.has_writer(a) && !opens.is_fresh(a));
        opens.used(a);
        assert!(opens.is_fresh(a));
        assert!(!opens.remove(a, true) && opens.has(a) && !opens.has_writer(a));
        assert!(opens.remove(a, false) && !opens.has(a));
        assert!(!opens.is_kept(a, 7));
        assert!(opens.keep(a, 7).is_empty());
        assert!(opens.is_kept(a, 7) && !opens.is_kept(a, 8));
        opens.add(a, false, true);
        assert!(!opens.is_kept(a, 7) && opens.is_fresh(a), "it is open");
    }

    #[test]
    fn too_many_are_given_up_together() {
        let mut opens = Opens::default();
        for n in 0..MAX_KEPT_COUNT as u64 {
            assert!(opens.keep(VolumeId(n), 1).is_empty());
        }
        assert_eq!(opens.keep(VolumeId(1 << 40), 1).len(), MAX_KEPT_COUNT);
        assert!(opens.is_kept(VolumeId(1 << 40), 1) && !opens.is_kept(VolumeId(3), 1));
    }
}
