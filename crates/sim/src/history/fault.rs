//! What a run expects while requests fail or the pool is full: promises P8 and P9.

use forkdisk::Mode;

use super::names::NAMING;
use super::run::{Inflight, Run};
use super::{Op, Profile, Violation};
use crate::disk::{Fault, ReadDamage, Request, When};
use crate::driver::Class;
use crate::model::Time;
use crate::rng::Rng;

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

impl Run {
    /// Arms the fault of an operation.
    pub(super) fn arm(&mut self, op: &Op) {
        let mut rng = Rng::new(op.draws[0]);
        if self.setup.profile == Profile::Hosts && !rng.one_in(8) {
            return self.fill_host(&mut rng);
        }
        let on = *rng.pick(&[
            Request::Read,
            Request::Read,
            Request::Write,
            Request::Write,
            Request::Write,
            Request::Flush,
            Request::Flush,
            Request::Discard,
            Request::SetLen,
        ]);
        let harm = match on {
            Request::Flush | Request::Discard | Request::SetLen => ReadDamage::Eio,
            Request::Read => *rng.pick(&[ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Short]),
            Request::Write => {
                *rng.pick(&[ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Short, ReadDamage::Enospc])
            }
        };
        let reach = *rng.pick(&[1, 8, 40]);
        let n = 1 + rng.below(reach);
        let when = *rng.pick(&[When::Once(n), When::Once(n), When::From(n), When::Every(n + 1)]);
        self.say(|| format!("from now on {on:?} requests fail: {harm:?}, {when:?}"));
        self.session.disk.arm(Fault { on, harm, when, within: None });
        self.armed(self.now(), 4 + rng.below(20) as u32);
    }

    /// Leaves the file system under the pool little space or none, until faults are disarmed.
    fn fill_host(&mut self, rng: &mut Rng) {
        let reach = *rng.pick(&[1, 4, 30, 200]);
        let pages = rng.below(reach);
        self.say(|| format!("from now on the host has room for {pages} pages"));
        self.session.disk.leave_room(pages);
        self.armed(self.now(), 8 + rng.below(50) as u32);
    }

    /// Called at every step: notes from when on the pool must have failed.
    pub(super) fn watch_faults(&mut self) {
        self.end_of_faults(self.now());
        if self.world.failure.failed.is_some() || self.session.disk.faults_hit() == 0 {
            return;
        }
        let now = self.now();
        if self.world.failure.struck.is_none() && self.session.disk.flush_faults_hit() > 0 {
            self.world.failure.struck = Some(now);
        }
        let overdue = self.world.failure.struck.is_some_and(|at| now > at + GRACE_STEPS);
        if overdue || self.session.pool.info().mode == Mode::Failed {
            self.world.failure.failed = Some(self.known.model.tick());
        }
    }

    fn now(&self) -> u64 {
        self.session.exec.steps()
    }

    /// P8: nothing that began after the failure is acknowledged.
    pub(super) fn judge_success(&self, op: &Inflight) -> Result<(), Violation> {
        let acknowledges = matches!(op.class, Class::Change | Class::Flush | Class::Control(_)) || op.class.is(NAMING);
        match self.world.failure.failed {
            Some(failed) if acknowledges && op.start > failed => {
                Err(Violation::new("P8", format!("acknowledged after the pool had failed: {}", op.text)))
            }
            _ => Ok(()),
        }
    }

    /// P9: ENOSPC only from what needs space, and only when there is none.
    pub(super) fn judge_full(&mut self, op: &Inflight, message: String) -> Result<(), Violation> {
        if self.session.disk.faults_hit() > 0 {
            return self.note_failure(op, message);
        }
        let by_quota = message.contains("quota");
        self.world.failure.full |= !by_quota;
        if !op.needs_space {
            return Err(Violation::new("P9", format!("needs no space, but was refused for want of it: {message}")));
        }
        if by_quota && self.has_quota(&op.keys) {
            return Ok(());
        }
        let info = self.session.pool.info();
        if info.unused > info.size / 2 {
            let what = format!("{} of {} bytes are free, but: {message}", info.unused, info.size);
            return Err(Violation::new("P9", what));
        }
        Ok(())
    }

    /// Notes that a request failed and its operation with it, as it must.
    pub(super) fn note_failure(&mut self, op: &Inflight, message: String) -> Result<(), Violation> {
        let failed = self.session.pool.info().mode == Mode::Failed;
        // Its records are not written, and the next flush covers them.
        let refused = message.contains("the file system under the pool is full");
        if matches!(op.class, Class::Flush) && !failed && !refused {
            return Err(Violation::new("P8", format!("a flush failed and the pool goes on: {message}")));
        }
        Ok(())
    }
}
