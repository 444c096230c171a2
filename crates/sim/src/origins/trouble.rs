//! What a run expects while requests fail on either disk, or the pool is full.

use forkdisk::{Error, ErrorKind};

use super::Op;
use super::run::{Inflight, Run};
use crate::disk::{Fault, ReadDamage, Request, When};
use crate::driver::{Class, Life, Violation};
use crate::rng::Rng;

impl Run {
    /// Arms the fault of an operation, on one of the disks.
    pub fn arm(&mut self, op: &Op) {
        let mut rng = Rng::new(op.draws[0]);
        if op.draws[1].is_multiple_of(5) {
            let pages = rng.below(*rng.clone().pick(&[1, 4, 30]));
            self.say(|| format!("from now on the host has room for {pages} pages of the pool"));
            self.session.disks[0].leave_room(pages);
            self.armed(self.step, 4 + rng.below(30) as u32);
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
        self.armed(self.step, 4 + rng.below(20) as u32);
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
        self.armed(self.step, 6);
    }

    /// Checks the rules for every acknowledgement and refusal.
    pub fn judge_outcome(&mut self, op: &Inflight, error: Option<&Error>, vanished: bool) -> Result<(), Violation> {
        let of_origin = op.keys.first() == Some(&self.known.origin);
        let Some(error) = error else {
            let acknowledges = matches!(op.class, Class::Flush | Class::Change) && of_origin;
            return match self.world.origin_failed {
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
                if matches!(op.class, Class::Flush) && of_origin {
                    let now = self.known.model.tick();
                    self.world.origin_failed.get_or_insert(now);
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
        if !op.needs_space {
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
