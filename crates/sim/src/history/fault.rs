//! What a run expects while requests fail or the pool is full: promises P8 and P9.

use forkdisk::Mode;

use super::Violation;
use super::ops::bound::{has_bound, has_reserve};
use super::ops::folder_bound::in_bounded_folder;
use super::ops::quota::has_quota;
use super::ops::unnamed::NAMING;
use super::run::{Inflight, Run, spare_bytes};
use crate::driver::Class;
use crate::model::Time;

/// Steps after a failed flush in which every task of the engine has run.
const GRACE_STEPS: u64 = 400;

/// Failures in this life of the engine.
#[derive(Default)]
pub(super) struct Failure {
    /// The pool has become full at least once.
    pub full: bool,
    /// Time from which on nothing may be acknowledged.
    failed: Option<Time>,
    /// The step at which a flush was made to fail.
    struck: Option<u64>,
}

/// Called at every step: notes from when on the pool must have failed.
pub fn watch_faults(run: &mut Run) {
    run.end_of_faults(now(run));
    if run.world.failure.failed.is_some() || run.session.disk.faults_hit() == 0 {
        return;
    }
    let now = now(run);
    if run.world.failure.struck.is_none() && run.session.disk.flush_faults_hit() > 0 {
        run.world.failure.struck = Some(now);
    }
    let overdue = run.world.failure.struck.is_some_and(|at| now > at + GRACE_STEPS);
    if overdue || run.session.pool.info().mode == Mode::Failed {
        run.world.failure.failed = Some(run.known.model.tick());
    }
}

pub fn now(run: &Run) -> u64 {
    run.session.exec.steps()
}

/// P8: nothing that began after the failure is acknowledged.
pub fn judge_success(run: &Run, op: &Inflight) -> Result<(), Violation> {
    let acknowledges = matches!(op.class, Class::Change | Class::Flush | Class::Control(_)) || op.class.is(NAMING);
    match run.world.failure.failed {
        Some(failed) if acknowledges && op.start > failed => {
            Err(Violation::new("P8", format!("acknowledged after the pool had failed: {}", op.text)))
        }
        _ => Ok(()),
    }
}

/// P9: ENOSPC only from what needs space, and only when there is none.
pub fn judge_full(run: &mut Run, op: &Inflight, message: String) -> Result<(), Violation> {
    if run.session.disk.faults_hit() > 0 {
        return note_failure(run, op, message);
    }
    let by_quota = message.contains("quota");
    let by_bound = message.contains("diverged");
    run.world.failure.full |= !by_quota && !by_bound;
    if !op.needs_space {
        return Err(Violation::new("P9", format!("needs no space, but was refused for want of it: {message}")));
    }
    if by_quota && has_quota(run, &op.keys) || by_bound && has_bound(run, &op.keys) {
        return Ok(());
    }
    if in_bounded_folder(run, &op.keys, &message) {
        return Ok(());
    }
    let info = run.session.pool.info();
    if matches!(op.class, Class::Change)
        && let Some(what) = has_reserve(run, &op.keys)
    {
        return Err(Violation::new("P13", format!("{what}, but: {message}")));
    }
    let spare = spare_bytes(run);
    if spare > info.size / 2 {
        let what = format!("{spare} of {} bytes are free, but: {message}", info.size);
        return Err(Violation::new("P9", what));
    }
    Ok(())
}

/// Notes that a request failed and its operation with it, as it must.
pub fn note_failure(run: &mut Run, op: &Inflight, message: String) -> Result<(), Violation> {
    let failed = run.session.pool.info().mode == Mode::Failed;
    // Its records are not written, and the next flush covers them.
    let refused = message.contains("the file system under the pool is full");
    if matches!(op.class, Class::Flush) && !failed && !refused {
        return Err(Violation::new("P8", format!("a flush failed and the pool goes on: {message}")));
    }
    Ok(())
}
