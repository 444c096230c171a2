//! What a run expects while requests fail on either disk, or the pool is full.

use forkdisk::{Error, ErrorKind, Mode};

use super::Op;
use super::run::{Inflight, OperationState, Run};
use crate::disk::{Crash, Fault, ReadDamage, Request, When};
use crate::history::Violation;
use crate::model::Time;
use crate::rng::Rng;

/// Most steps for which faults stay armed.
const MAX_TROUBLE_STEPS: u64 = 20_000;

/// Faults and failures in this life of the engine.
#[derive(Default)]
pub(super) struct Trouble {
    /// Operations until the faults are disarmed.
    pub armed: Option<u32>,
    /// The step from which on they are disarmed in any case: operations that wait for space on the host wait
    /// until then.
    pub armed_until: u64,
    /// Operations until both disks are cut and opened again.
    patience: Option<u32>,
    /// Time since when the origin acknowledges nothing any more.
    origin_failed: Option<Time>,
}

impl Run<'_> {
    pub fn pool_failed(&self) -> bool {
        self.session.pool.info().mode == Mode::Failed
    }

    /// Arms the fault of an operation, on one of the disks.
    pub fn arm(&mut self, op: &Op) {
        let mut rng = Rng::new(op.draws[0]);
        if op.draws[1].is_multiple_of(5) {
            let pages = rng.below(*rng.clone().pick(&[1, 4, 30]));
            self.say(|| format!("from now on the host has room for {pages} pages of the pool"));
            self.session.disks[0].leave_room(pages);
            self.trouble.armed = Some(4 + rng.below(30) as u32);
            self.trouble.armed_until = self.now() + MAX_TROUBLE_STEPS;
            return;
        }
        let disk = rng.index(2);
        let on = *rng.pick(&[Request::Read, Request::Read, Request::Write, Request::Write, Request::Flush]);
        let harm = match on {
            Request::Write => *rng.pick(&[ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Short]),
            _ => ReadDamage::Eio,
        };
        let n = 1 + rng.below(*rng.clone().pick(&[1, 8, 40]));
        let when = *rng.pick(&[When::Once(n), When::Once(n), When::From(n), When::Every(n + 1)]);
        self.say(|| format!("from now on {on:?} requests of disk {disk} fail: {harm:?}, {when:?}"));
        self.session.disks[disk].arm(Fault { on, harm, when, within: None });
        self.trouble.armed = Some(4 + rng.below(20) as u32);
        self.trouble.armed_until = self.now() + MAX_TROUBLE_STEPS;
    }

    /// Makes the n-th flush of a disk from now on fail.
    pub(super) fn arm_flush(&mut self, disk: usize, n: u64) {
        self.say(|| format!("flush {n} of disk {disk} from now on fails"));
        self.session.disks[disk].arm(Fault {
            on: Request::Flush,
            harm: ReadDamage::Eio,
            when: When::Once(n),
            within: None,
        });
        self.trouble.armed = Some(6);
        self.trouble.armed_until = self.now() + MAX_TROUBLE_STEPS;
    }

    /// Disarms faults after enough steps.
    pub(super) fn end_of_faults(&mut self) {
        if self.trouble.armed.is_some() && self.now() > self.trouble.armed_until {
            self.disarm();
        }
    }

    pub(super) fn disarm(&mut self) {
        self.trouble.armed = None;
        self.session.disks.iter().for_each(crate::disk::SimDisk::disarm);
        self.say(|| "faults disarmed".into());
    }

    /// Disarms faults and reopens what has failed when due.
    pub fn watch_trouble(&mut self) -> Result<(), Violation> {
        if let Some(left) = &mut self.trouble.armed {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.disarm();
            }
        }
        let failed = self.pool_failed() || self.trouble.origin_failed.is_some();
        match &mut self.trouble.patience {
            None if failed => {
                self.trouble.patience = Some(4);
                Ok(())
            }
            Some(0) => {
                let (kind, mask) = (if self.rng.one_in(4) { Crash::Kill } else { Crash::Power }, self.rng.next());
                self.cut(kind, mask)
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Checks the rules for every acknowledgement and refusal.
    pub fn judge_outcome(&mut self, op: &Inflight, error: Option<&Error>, vanished: bool) -> Result<(), Violation> {
        let of_origin = op.keys.first() == Some(&self.known.origin);
        let Some(error) = error else {
            let acknowledges =
                matches!(op.doing, OperationState::Flush(_) | OperationState::Change { .. }) && of_origin;
            return match self.trouble.origin_failed {
                Some(failed) if acknowledges && op.start > failed => {
                    Err(Violation::new("P8", format!("acknowledged after the origin had failed: {}", op.text)))
                }
                _ => Ok(()),
            };
        };
        let message = format!("{}: {error:?}", op.text);
        match error.kind() {
            ErrorKind::NoSpace => self.judge_full(op, message),
            ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt if self.session.faults_hit() > 0 => {
                if matches!(op.doing, OperationState::Flush(_)) && of_origin {
                    let now = self.known.model.tick();
                    self.trouble.origin_failed.get_or_insert(now);
                }
                Ok(())
            }
            ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt => {
                Err(Violation::new("P6", format!("an error although no request failed: {message}")))
            }
            ErrorKind::NotFound | ErrorKind::Busy if vanished => Ok(()),
            _ => Err(Violation::new("P4", format!("refused without a reason: {message}"))),
        }
    }

    /// P9: ENOSPC only from what needs space, and only when there is none.
    fn judge_full(&self, op: &Inflight, message: String) -> Result<(), Violation> {
        if self.session.faults_hit() > 0 {
            return Ok(());
        }
        if matches!(op.doing, OperationState::Read { .. } | OperationState::Flush(_) | OperationState::Upkeep) {
            let what = format!("needs no space, but was refused for want of it: {message}");
            return Err(Violation::new("P9", what));
        }
        let info = self.session.pool.info();
        if info.unused > info.size / 2 {
            let what = format!("{} of {} bytes are free, but: {message}", info.unused, info.size);
            return Err(Violation::new("P9", what));
        }
        Ok(())
    }
}
