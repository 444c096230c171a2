//! When volumes were changed last, for mounts that show them as files.
//!
//! A write sets a mark in memory and nothing else. The time is taken when it is asked for and when it is recorded. It
//! is recorded by a commit that writes records anyway, by the first commit that comes a commit interval after the
//! mark, and by a close: no flush costs a request more. Each commit records at most one time for each volume. Without
//! a clock ([`OpenOptions::clock`](super::OpenOptions::clock)) no times are kept.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::format::{Attributes, Record, VolumeState};
use crate::types::VolumeId;

use super::{Inner, Meta};

/// How far the time of a volume's last change is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastChange {
    /// The record of the volume has it, or it was set.
    #[default]
    Recorded,
    /// The volume was changed since.
    Marked,
    /// The volume in memory has it, the journal does not.
    Taken,
}

/// Volumes whose last change is not recorded.
#[derive(Default)]
pub struct Times {
    volumes: RefCell<Vec<VolumeId>>,
    /// When the first of them was marked, by the clock of the runtime.
    since: Cell<Duration>,
}

impl<D: Device> Inner<D> {
    /// The contents or the length of the volume were changed.
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

    /// Takes the time of a volume that is marked, for a reader of its record in memory.
    pub fn take_time(&self, meta: &mut Meta, id: VolumeId) {
        let (Some(clock), Some(volume)) = (self.options.clock, meta.directory.get_mut(id)) else { return };
        let Some(live) = meta.live.get(id) else { return };
        let is_shown = !matches!(volume.record.state, VolumeState::Dead | VolumeState::Folder);
        if live.last_change.get() == LastChange::Marked && is_shown {
            live.last_change.set(LastChange::Taken);
            let now = clock();
            let known = volume.record.attributes.unwrap_or_else(|| Attributes::of_no_owner(volume.record.created));
            volume.record.attributes = Some(Attributes { modified: now, changed: now, ..known });
        }
    }

    /// Records the time of a volume that is marked.
    pub fn record_time(&self, meta: &mut Meta, id: VolumeId) {
        self.take_time(meta, id);
        if meta.live.get(id).is_none_or(|live| live.last_change.get() != LastChange::Taken) {
            return;
        }
        let attributes = meta.directory.change(id).expect("its time was taken").record.attributes;
        meta.live.set_change_recorded(id);
        // A commit that vouches for its data goes on doing so.
        meta.journal.append_unordered(&Record::SetAttributes { id, attributes });
    }

    /// Records all times that are not.
    pub fn record_times(&self) {
        let volumes = self.times.volumes.take();
        let mut meta = self.meta.borrow_mut();
        volumes.into_iter().for_each(|id| self.record_time(&mut meta, id));
    }

    /// A commit begins: records the times if it writes records anyway, or if they have waited long. Otherwise has a
    /// later commit do so.
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
