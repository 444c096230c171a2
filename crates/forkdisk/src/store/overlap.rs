//! Overlapping groups: the groups of the next commit are written while the device is flushed for the one before.
//!
//! With several clients that flush, requests arrive while the flush of a commit runs; the next commit is for them. What
//! its groups contain does not depend on that flush if they carry checksums of all their data. So they are written at
//! once, as those of a commit that leaves the flush out are (see `commit`), and the next commit begins with its flush.
//!
//! One task writes them, and the next commit takes records only after its end: groups follow each other in one order,
//! and the records in one area of the volatile log are always in the journal before the other area is used again.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::journal::{PendingCommit, Written};
use crate::planted::correct;
use crate::sync::Event;

use super::Store;
use super::commit::{merge_groups, write_groups};

/// Whether overlapping groups may be written and are.
#[derive(Default)]
pub struct Overlap {
    /// The flush runs that ends a commit.
    is_flushing: Cell<bool>,
    /// Number of the last flush request up to which all records were taken.
    taken: Cell<u64>,
    is_in_flight: Cell<bool>,
    ended: Event,
}

impl Overlap {
    /// Notes that the flush at the end of a commit begins or has ended.
    pub fn set_flushing(&self, is_flushing: bool) {
        self.is_flushing.set(is_flushing);
    }

    /// Notes that all records were taken that flushes up to this request have to make durable.
    pub fn records_taken(&self, request: u64) {
        self.taken.set(request);
    }

    /// Waits until no overlapping group is being written.
    pub async fn settled(&self) {
        while self.is_in_flight.get() {
            self.ended.wait().await;
        }
    }
}

/// Begins to write the pending records if the flush of a commit runs and another flush was requested since records were
/// last taken. Called when a flush is requested and when the flush of a commit begins.
pub fn write_overlapping<D: Device>(store: &Rc<Store<D>>) {
    let overlap = store.commits.overlap();
    if overlap.is_in_flight.get() {
        return;
    }
    let Some(mut taken) = take_overlapping(store) else { return };
    overlap.is_in_flight.set(true);
    let (runtime, store) = (store.runtime.clone(), store.clone());
    runtime.spawn(Box::pin(async move {
        loop {
            if let Err(error) = write_taken(&store, taken).await {
                store.fail(&error);
                break;
            }
            match take_overlapping(&store) {
                Some(more) => taken = more,
                None => break,
            }
        }
        store.commits.overlap().is_in_flight.set(false);
        store.commits.overlap().ended.notify();
    }));
}

async fn write_taken<D: Device>(store: &Rc<Store<D>>, taken: PendingCommit) -> Result<()> {
    for groups in merge_groups(taken.groups) {
        write_groups(store, groups).await?;
    }
    let journal = &mut store.meta.borrow_mut().journal;
    journal.written = Written { next: taken.next, claims_durable: taken.claims_durable };
    journal.committed(taken.next);
    Ok(())
}

/// Takes records, if a flush was requested since the last time, and if their groups need nothing to come before them.
fn take_overlapping<D: Device>(store: &Store<D>) -> Option<PendingCommit> {
    let (commits, overlap) = (&store.commits, store.commits.overlap());
    let requested = commits.flush_requested();
    if !overlap.is_flushing.get() || requested == overlap.taken.get() || commits.is_sealing() {
        return None;
    }
    if store.check_alive().is_err() || store.unflushed_snapshots.get() {
        return None;
    }
    let mut meta = store.meta.borrow_mut();
    // Limits the data that recovery verifies, as before the records of a commit are taken.
    meta.dirty_state(store.options.dirty);
    let journal = &mut meta.journal;
    let covers_data = correct!(journal.checksums.covers_data(), Bug::OverlappingGroupBeforeData => true);
    if journal.pending() == 0 || !covers_data || !journal.checksums.may_wait() || !journal.fits() {
        return None;
    }
    overlap.records_taken(requested);
    Some(journal.take())
}
