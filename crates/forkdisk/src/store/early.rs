//! Early groups: the record of a first write is written to the journal together with its data.
//!
//! A program that makes each change durable writes and flushes in turns. A flush would write a group with the record
//! and then flush the device, one after the other. The group is known when the data is submitted: the record, the
//! checksum of the data, and the place. So if each of the last two flushes found one record, it is written at the same
//! time. The commit of the flush finds that what it would write is there already. If something else was recorded
//! meanwhile, it writes its own groups to the same place.
//!
//! An early group changes nothing in memory, and promises nothing:
//!
//! - After a crash of the machine recovery accepts it only if the data has its checksum. Then the write has taken
//!   place, as it may have with a request that was in flight.
//! - After a kill the volatile log says where the journal ends: what lies behind is ignored, since another record may
//!   have been published under the same number.
//! - A commit waits for its end. If it would write anything else, it overwrites the early group with zeroes before it
//!   takes the records: from then on the volatile log says that the journal ends behind its own groups.
//!
//! With more than one record between flushes nothing is written early, but a commit without a flush begins when all
//! of them are there (see `commit`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::device::{Buf, Device, Segments};
use crate::format::Record;
use crate::journal::{Outgoing, appended_in_order, group_of, is_next_group};
use crate::planted::correct;
use crate::sync::Event;
use crate::types::PAGE_SIZE;

use super::{EarlyGroups, Store};

/// After an early group that had to be overwritten none is written for so many flushes: several clients flush in turns.
const PAUSE_FLUSHES: u32 = 64;

/// An early group, and how far it is.
struct Group {
    outgoing: Outgoing,
    progress: Cell<Progress>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    InFlight,
    Written,
    Failed,
}

/// What flushes find, and the early group that may lie behind the end of the journal.
#[derive(Default)]
pub struct Early {
    /// Number of records ever appended, at the last flush: all but times of changes.
    at_flush: Cell<u64>,
    /// Records that the last flush found.
    found: Cell<u64>,
    /// Records that the next flush probably finds; 0 if nothing is known.
    expected: Cell<u64>,
    /// Flushes until an early group may be written again.
    pause: Cell<u32>,
    group: RefCell<Option<Rc<Group>>>,
    ended: Event,
}

impl Early {
    /// Notes that a flush was requested when `appended` records had ever been appended.
    pub fn flush_requested(&self, appended: u64) {
        let found = appended - self.at_flush.replace(appended);
        self.pause.set(self.pause.get().saturating_sub(1));
        self.expected.set(if self.found.replace(found) == found { found } else { 0 });
    }

    /// Returns whether all records are there that the next flush probably finds.
    pub fn is_due(&self, appended: u64) -> bool {
        let expected = self.expected.get();
        expected > 0 && appended - self.at_flush.get() == expected
    }

    /// Waits until no early group is being written.
    pub async fn settled(&self) {
        let is_in_flight = || {
            let group = self.group.borrow();
            group.as_ref().is_some_and(|group| group.progress.get() == Progress::InFlight)
        };
        while is_in_flight() {
            self.ended.wait().await;
        }
    }

    /// Returns whether an early group may lie behind the end of the journal.
    pub fn is_any(&self) -> bool {
        self.group.borrow().is_some()
    }

    /// Takes the early group; the caller overwrites it if it is not what it writes.
    pub fn take(&self) -> Option<EarlyGroup> {
        self.group.take().map(EarlyGroup)
    }
}

/// An early group behind the end of the journal.
pub struct EarlyGroup(Rc<Group>);

impl EarlyGroup {
    /// Returns whether the device has acknowledged exactly this group.
    pub fn is(&self, group: &Outgoing) -> bool {
        self.0.progress.get() == Progress::Written && self.0.outgoing == *group
    }

    pub fn position(&self) -> u64 {
        self.0.outgoing.position
    }
}

/// Begins to write the group of a first write if a flush probably follows. The data has just been submitted; `sum` is
/// its checksum.
pub fn write_early<D: Device>(store: &Rc<Store<D>>, record: &Record, sum: u64) {
    let early = store.commits.early();
    let group = {
        let journal = &store.meta.borrow().journal;
        let is_expected = match store.options.early_groups {
            EarlyGroups::Never => false,
            EarlyGroups::Expected if early.pause.get() > 0 => false,
            EarlyGroups::Expected => early.expected.get() == 1 && early.is_due(appended_in_order(journal) + 1),
            EarlyGroups::Always => true,
        };
        if !is_expected || early.is_any() || store.commits.is_running() || !store.active.get() {
            return;
        }
        group_of(journal, record, sum)
    };
    let Some(outgoing) = group.filter(|group| group.bytes.len() == PAGE_SIZE && store.check_alive().is_ok()) else {
        return;
    };
    let segments: Segments = store.meta.borrow().journal.segments(outgoing.position, PAGE_SIZE).into();
    let mut buf: Buf = store.device.buffer(PAGE_SIZE);
    buf.copy_from_slice(&outgoing.bytes);
    store.counters.journal_writes.add(&segments);
    let write = store.device.write(buf, segments, false);
    let group = Rc::new(Group { outgoing, progress: Cell::new(Progress::InFlight) });
    *early.group.borrow_mut() = Some(group.clone());
    let (runtime, store) = (store.runtime.clone(), store.clone());
    runtime.spawn(Box::pin(async move {
        // After an error the commit writes the group again, and reports its own.
        let written = write.await.0;
        group.progress.set(if written.is_ok() { Progress::Written } else { Progress::Failed });
        store.commits.early().ended.notify();
    }));
}

/// Takes an early group that is not what a commit would write now. It has to be erased before records are taken.
pub(super) fn take_other<D: Device>(store: &Store<D>) -> Option<EarlyGroup> {
    let early = store.commits.early();
    let is_next = {
        let mut meta = store.meta.borrow_mut();
        // Limits the data that recovery verifies, as before records are taken.
        meta.dirty_state(store.options.dirty);
        let group = early.group.borrow();
        group.as_ref().is_none_or(|group| {
            group.progress.get() == Progress::Written && is_next_group(&meta.journal, &group.outgoing)
        })
    };
    let stays = correct!(is_next, Bug::EarlyGroupErasedLate => true, Bug::EarlyGroupTakenUnseen => true);
    if stays {
        return None;
    }
    early.pause.set(PAUSE_FLUSHES);
    early.take()
}

/// Overwrites an early group that belongs to no record, if it still lies behind the end of the journal.
pub(super) async fn erase_early<D: Device>(store: &Store<D>, group: &EarlyGroup) {
    if store.meta.borrow().journal.head() != group.position() {
        return;
    }
    let segments: Segments = store.meta.borrow().journal.segments(group.position(), PAGE_SIZE).into();
    let mut zeroes = store.device.buffer(PAGE_SIZE);
    zeroes.fill(0);
    store.counters.journal_writes.add(&segments);
    // A device that fails here fails the next commit, too.
    let _ = store.device.write(zeroes, segments, false).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_equal_turns_tell_the_next_one() {
        let early = Early::default();
        assert!(!early.is_due(0));
        early.flush_requested(3);
        assert!(!early.is_due(6), "one turn");
        early.flush_requested(6);
        assert!(!early.is_due(6) && !early.is_due(8) && early.is_due(9) && !early.is_due(10));
        early.flush_requested(10);
        assert!(!early.is_due(13) && !early.is_due(14), "the last two turns differ");
        early.flush_requested(10);
        early.flush_requested(10);
        assert!(!early.is_due(10) && !early.is_due(11), "flushes without records");
    }
}
