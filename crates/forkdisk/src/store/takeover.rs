//! Recovery from the volatile log of a process that died (see `journal::volatile`).
//!
//! 0. Replay of the journal ends where the log says that the process had ended it.
//! 1. After replay: apply the records that the journal does not have, in order, in memory.
//! 2. Commit them under the incarnation of the process that died: data flushed, group written, flushed. Until
//!    that ends the log stays valid, whatever ends this process; each record keeps its number, which tells
//!    whether it is in the journal.
//! 3. Write a superblock with a new incarnation: from here on the log is invalid.
//! 4. If this open writes a volatile log, it begins now.

use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::journal::{GroupEnd, RecoveredRecord, invalidate, last_base, recover};
use crate::planted::correct;
use crate::store::replay;

use super::Store;
use super::checkpoint_steps;

/// Returns where the journal of the process that died ends: replay ignores an early group behind it (see `early`).
pub(super) fn last_taken<D: Device>(store: &Store<D>) -> Option<GroupEnd> {
    let superblock = store.superblock.borrow();
    store.options.volatile.as_ref().and_then(|log| last_base(log, superblock.checksum_uuid, superblock.incarnation))
}

/// Applies the records that the journal does not have; returns their number.
pub(super) async fn replay_volatile<D: Device>(store: &Store<D>) -> Result<u64> {
    let Some(log) = &store.options.volatile else { return Ok(0) };
    let left = {
        let (superblock, meta) = (store.superblock.borrow(), store.meta.borrow());
        let (uuid, incarnation) = (superblock.checksum_uuid, superblock.incarnation);
        let is_place = |place| meta.journal.has_group_end(place);
        correct!(
            recover(log, uuid, incarnation, is_place),
            Bug::VolatileEndedEarly => ended(log, recover(log, uuid, incarnation, is_place))
        )
    };
    let next = store.meta.borrow().journal.next();
    let is_new = |left: &&RecoveredRecord| correct!(left.sequence >= next, Bug::VolatileReplayedTwice => true);
    let mut taken = 0;
    for left in left.iter().filter(is_new) {
        correct!(
            replay::replay_record(store, &left.record).await?,
            Bug::VolatileForgetsAttributes => match &left.record {
                crate::format::Record::SetAttributes { .. } => (),
                record => replay::replay_record(store, record).await?,
            }
        );
        if !store.options.read_only {
            store.meta.borrow_mut().journal.append_recovered(left);
        }
        taken += 1;
    }
    Ok(taken)
}

/// Discards the volatile log; `left` are its records.
#[cfg(feature = "planted")]
fn ended(log: &crate::journal::VolatileLog, left: Vec<RecoveredRecord>) -> Vec<RecoveredRecord> {
    crate::journal::invalidate(&log.memory);
    left
}

/// Makes durable what was replayed from the volatile log, under the incarnation that wrote it.
pub(super) async fn commit_left_behind<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    // A commit or checkpoint of a new incarnation would invalidate the log before its records are
    // durable.
    correct!(store.active.set(true), Bug::VolatileTakenOverActive => store.active.set(false));
    let outcome = store.clone().commit().await;
    store.active.set(false);
    outcome
}

/// Begins the volatile log of this open, or ends the one that was recovered.
pub(super) async fn begin_volatile<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    let Some(log) = &store.options.volatile else { return Ok(()) };
    if !log.write {
        invalidate(&log.memory);
        return Ok(());
    }
    checkpoint_steps::activate(store).await?;
    store.meta.borrow_mut().journal.write_volatile(log);
    Ok(())
}
