//! Times of the last change of volumes, for mounts that show them as files.
//!
//! A write sets a mark in memory and nothing else. The time is taken when it is read or recorded. It is
//! recorded by a commit that writes records anyway, by the first commit after the commit interval, and by a
//! close: no flush costs an additional request. Each commit records at most one time for each volume. Without
//! a clock ([`OpenOptions::clock`](super::OpenOptions::clock)) no times are recorded.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::Store;
use crate::catalog::Catalog;
use crate::device::Device;
use crate::format::{Attributes, Record, VolumeState};
use crate::live::LastChange;
use crate::types::VolumeId;

/// Volumes whose last change is not recorded.
#[derive(Default)]
pub struct Times {
    volumes: RefCell<Vec<VolumeId>>,
    /// Time of the first mark, by the clock of the runtime.
    since: Cell<Duration>,
}

impl<D: Device> Store<D> {
    /// Marks a change of contents or length.
    pub fn mark_changed(&self, id: VolumeId, last: &Cell<LastChange>) {
        if self.options.clock.is_none() || last.replace(LastChange::Marked) != LastChange::Recorded {
            return;
        }
        let mut volumes = self.times.volumes.borrow_mut();
        if volumes.is_empty() {
            self.times.since.set(self.runtime.now());
        }
        volumes.push(id);
    }

    /// Takes the time of a marked volume, for a reader of its record.
    pub fn take_time(&self, meta: &mut Catalog, id: VolumeId) {
        let (Some(clock), Some(volume)) = (self.options.clock, meta.directory.get_mut(id)) else { return };
        let live = self.live.borrow();
        let Some(live) = live.get(id) else { return };
        let is_shown = !matches!(volume.record.state, VolumeState::Dead | VolumeState::Folder);
        if live.last_change.get() == LastChange::Marked && is_shown {
            live.last_change.set(LastChange::Taken);
            let now = clock();
            let known = volume.record.attributes.unwrap_or_else(|| Attributes::of_no_owner(volume.record.created));
            volume.record.attributes = Some(Attributes { modified: now, changed: now, ..known });
        }
    }

    /// Records the time of a marked volume.
    pub fn record_time(&self, meta: &mut Catalog, id: VolumeId) {
        self.take_time(meta, id);
        if self.live.borrow().get(id).is_none_or(|live| live.last_change.get() != LastChange::Taken) {
            return;
        }
        let attributes = meta.directory.change(id).expect("its time was taken").record.attributes;
        self.live.borrow_mut().set_change_recorded(id);
        // Unordered: a commit with checksums of its data stays one.
        meta.journal.append_unordered(&Record::SetAttributes { id, attributes });
    }

    /// Records all times.
    pub fn record_times(&self) {
        let volumes = self.times.volumes.take();
        let mut meta = self.meta.borrow_mut();
        volumes.into_iter().for_each(|id| self.record_time(&mut meta, id));
    }

    /// At the beginning of a commit: records the times if it writes records anyway, or if they have waited
    /// long; otherwise leaves them to a later commit.
    pub fn record_times_along(self: &Rc<Self>) {
        if self.times.volumes.borrow().is_empty() {
            return;
        }
        let interval = self.options.commit_interval;
        let waited = self.runtime.now().saturating_sub(self.times.since.get());
        if self.meta.borrow().journal.pending() > 0 || !interval.is_zero() && waited >= interval {
            return self.record_times();
        }
        self.note_dirty();
    }
}
