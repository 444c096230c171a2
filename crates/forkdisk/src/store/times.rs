//! Times of the last change of volumes, for mounts that show them as files.
//!
//! A write sets a mark in memory and nothing else. The time is taken when it is read or recorded. It is
//! recorded by a commit that writes records anyway, by the first commit after the commit interval, and by a
//! close: no flush costs an additional request. Each commit records at most one time for each volume. Without
//! a clock ([`OpenOptions::clock`](super::OpenOptions::clock)) no times are recorded.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::catalog::{Catalog, directory};
use crate::device::Device;
use crate::format::{Attributes, Record, VolumeState};
use crate::live::LastChange;
use crate::space::Need;
use crate::types::VolumeId;

use super::Store;

/// Volumes whose last change is not recorded.
#[derive(Default)]
pub struct Times {
    volumes: RefCell<Vec<VolumeId>>,
    /// Time of the first mark, by the clock of the runtime.
    since: Cell<Duration>,
}

/// Marks a change of contents or length.
pub fn mark_changed<D: Device>(store: &Store<D>, id: VolumeId, last: &Cell<LastChange>) {
    if store.options.clock.is_none() || last.replace(LastChange::Marked) != LastChange::Recorded {
        return;
    }
    let mut volumes = store.times.volumes.borrow_mut();
    if volumes.is_empty() {
        store.times.since.set(store.runtime.now());
    }
    volumes.push(id);
}

/// Takes the time of a marked volume, for a reader of its record.
pub fn take_time<D: Device>(store: &Store<D>, meta: &mut Catalog, id: VolumeId) {
    let (Some(clock), Some(volume)) = (store.options.clock, meta.directory.get_mut(id)) else { return };
    let live = store.live.borrow();
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
pub fn record_time<D: Device>(store: &Store<D>, meta: &mut Catalog, id: VolumeId) {
    take_time(store, meta, id);
    if store.live.borrow().get(id).is_none_or(|live| live.last_change.get() != LastChange::Taken) {
        return;
    }
    // On a full pool it waits until a checkpoint has written other pages.
    if directory::unchanged_page_of(&meta.directory, id).is_some() && meta.reserve(Need::Step).is_err() {
        return store.times.volumes.borrow_mut().push(id);
    }
    let attributes = meta.directory.change(id).expect("its time was taken").record.attributes;
    store.live.borrow_mut().set_change_recorded(id);
    // Unordered: a commit with checksums of its data stays one.
    meta.journal.append_unordered(&Record::SetAttributes { id, attributes });
}

/// Records all times.
pub fn record_times<D: Device>(store: &Store<D>) {
    let volumes = store.times.volumes.take();
    let mut meta = store.meta.borrow_mut();
    volumes.into_iter().for_each(|id| record_time(store, &mut meta, id));
}

/// At the beginning of a commit: records the times if it writes records anyway, or if they have waited
/// long; otherwise leaves them to a later commit.
pub fn record_times_along<D: Device>(store: &Rc<Store<D>>) {
    if store.times.volumes.borrow().is_empty() {
        return;
    }
    let interval = store.options.commit_interval;
    let waited = store.runtime.now().saturating_sub(store.times.since.get());
    if store.meta.borrow().journal.pending() > 0 || !interval.is_zero() && waited >= interval {
        return record_times(store);
    }
    store.note_dirty();
}
