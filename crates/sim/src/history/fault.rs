//! What a run expects while requests fail or the pool is full: promises P8 and P9.

use forkdisk::Mode;

use super::launch::changes;
use super::run::{AllowedFailure, Inflight, OperationState, Run};
use super::{Op, Profile, Violation};
use crate::disk::{Crash, Fault, ReadDamage, Request, When};
use crate::model::{Pending, Time};
use crate::rng::Rng;

/// Steps after a failed flush in which every task of the engine has run.
const GRACE_STEPS: u64 = 400;
/// Most steps for which faults stay armed.
const MAX_FAULT_STEPS: u64 = 20_000;

/// Faults and failures in this life of the engine.
#[derive(Default)]
pub(super) struct Trouble {
    /// The pool has become full at least once.
    pub full: bool,
    /// Control operations that failed together with the pool.
    pub unsure: Vec<Pending>,
    /// Operations until the pool is reopened.
    pub patience: Option<u32>,
    /// Operations until the faults are disarmed.
    pub armed: Option<u32>,
    /// The step from which on they are disarmed in any case: operations that wait for space on the host wait
    /// until then.
    armed_until: u64,
    /// Time from which on nothing may be acknowledged.
    failed: Option<Time>,
    /// The step at which a flush was made to fail.
    struck: Option<u64>,
}

impl Run<'_> {
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
        self.trouble.armed = Some(4 + rng.below(20) as u32);
        self.trouble.armed_until = self.now() + MAX_FAULT_STEPS;
    }

    /// Leaves the file system under the pool little space or none, until faults are disarmed.
    fn fill_host(&mut self, rng: &mut Rng) {
        let reach = *rng.pick(&[1, 4, 30, 200]);
        let pages = rng.below(reach);
        self.say(|| format!("from now on the host has room for {pages} pages"));
        self.session.disk.leave_room(pages);
        self.trouble.armed = Some(8 + rng.below(50) as u32);
        self.trouble.armed_until = self.now() + MAX_FAULT_STEPS;
    }

    /// Disarms faults and reopens failed pools when due.
    pub(super) fn watch_trouble(&mut self) -> Result<(), Violation> {
        if let Some(left) = &mut self.trouble.armed {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.disarm();
            }
        }
        if self.trouble.patience.is_none() && self.session.pool.info().mode == Mode::Failed {
            self.trouble.patience = Some(4);
        }
        match &mut self.trouble.patience {
            Some(0) => {
                let kind = if self.rng.one_in(4) { Crash::Kill } else { Crash::Power };
                let mask = self.rng.next();
                self.cut(kind, mask)
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn disarm(&mut self) {
        self.trouble.armed = None;
        self.session.disk.disarm();
        self.say(|| "faults disarmed".into());
    }

    /// Called at every step: notes from when on the pool must have failed.
    pub(super) fn watch_faults(&mut self) {
        if self.trouble.armed.is_some() && self.now() > self.trouble.armed_until {
            self.disarm();
        }
        if self.trouble.failed.is_some() || self.session.disk.faults_hit() == 0 {
            return;
        }
        let now = self.now();
        if self.trouble.struck.is_none() && self.session.disk.flush_faults_hit() > 0 {
            self.trouble.struck = Some(now);
        }
        let overdue = self.trouble.struck.is_some_and(|at| now > at + GRACE_STEPS);
        if overdue || self.session.pool.info().mode == Mode::Failed {
            self.trouble.failed = Some(self.model.tick());
        }
    }

    fn now(&self) -> u64 {
        self.session.exec.steps()
    }

    /// P8: nothing that began after the failure is acknowledged.
    pub(super) fn judge_success(&self, op: &Inflight) -> Result<(), Violation> {
        let acknowledges = changes(&op.doing)
            || matches!(op.doing, OperationState::Flush | OperationState::Control(_) | OperationState::Naming);
        match self.trouble.failed {
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
        self.trouble.full |= !by_quota;
        let free = match &op.doing {
            OperationState::Read { .. } | OperationState::Flush | OperationState::Keeping => true,
            OperationState::Change { spare, .. } => *spare != AllowedFailure::Nothing,
            OperationState::Control(pending) => matches!(pending.control, crate::model::Control::Delete(_)),
            OperationState::Unnamed | OperationState::Naming => false,
            OperationState::Upkeep(_) => true,
        };
        if free {
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
        if matches!(op.doing, OperationState::Flush) && !failed && !refused {
            return Err(Violation::new("P8", format!("a flush failed and the pool goes on: {message}")));
        }
        Ok(())
    }
}
