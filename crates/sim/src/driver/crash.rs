//! Crashes: beside the run, and of the run itself.

use forkdisk::{VolatileMemory, tear};

use super::world::{Instant, Knowledge, Life, Moment, World};
use super::{Class, Run, Violation};
use crate::disk::Crash;
use crate::rng::mix;

impl<W: World> Run<W> {
    /// Cuts the power beside the run if this is a step for it.
    pub(super) fn side_crash(&mut self) -> Result<(), Violation> {
        let common = W::common(&self.setup);
        let draw = mix(&[common.seed, W::CRASHES_SEED, self.step]);
        let masks = match self.aim {
            Some(aim) if aim.step == self.step => aim.mask.map_or_else(|| W::masks(self, draw), |mask| vec![mask]),
            None if W::cuts_here(self, draw) => W::masks(self, draw),
            _ => return Ok(()),
        };
        let one_in = if common.lasting { 2 } else { 8 };
        let kind = if mix(&[draw]).is_multiple_of(one_in) { Crash::Kill } else { Crash::Power };
        let instant = self.session.freeze(kind);
        let memory = self.memory_after(kind, draw);
        let known = self.known_after(memory.is_some());
        self.stats.cuts += 1;
        for mask in masks {
            self.stats.crash_states += 1;
            let drawn = instant.drawn(mask);
            let key = mix(&[instant.fingerprint(drawn), self.known.model().acks()]);
            if !self.seen.insert(key) && self.aim.is_none() {
                continue;
            }
            self.stats.distinct += 1;
            self.say(|| format!("side crash ({kind:?}, mask {mask}): {}", instant.describe(drawn)));
            let entrance = W::entrance(self, Moment::Beside(draw), mask);
            let left = (instant.crash(drawn), memory.as_ref().map(VolatileMemory::copy));
            W::recover(&self.setup, left, &known, entrance, &mut self.stats).map_err(|v| v.at(self.step, mask))?;
        }
        Ok(())
    }

    /// Cuts the power (or kills the process) of the run itself, recovers and continues.
    pub fn cut(&mut self, kind: Crash, mask: u64) -> Result<(), Violation> {
        let draw = mix(&[mask, self.step]);
        let kind = if W::common(&self.setup).lasting && draw.is_multiple_of(3) { Crash::Kill } else { kind };
        let (memory, keeps_acknowledged) = W::before_cut(self, kind, draw)?;
        let instant = self.session.freeze(kind);
        let drawn = instant.drawn(mask);
        self.say(|| format!("cut ({kind:?}, mask {mask}): {}", instant.describe(drawn)));
        let known = self.known_after(keeps_acknowledged);
        self.stats.faults += self.session.faults_hit();
        self.stats.cuts += 1;
        self.stats.crash_states += 1;
        self.stats.distinct += 1;
        self.session.exec().halt();
        let entrance = W::entrance(self, Moment::Cut, mask);
        let left = (instant.crash(drawn), memory);
        let (session, known) = W::recover(&self.setup, left, &known, entrance, &mut self.stats)?;
        self.begin_life(session, known);
        Ok(())
    }

    /// Returns the memory that a crash of this kind leaves, possibly during a write to it. A failed flush
    /// leaves none.
    pub fn memory_after(&self, kind: Crash, draw: u64) -> Option<VolatileMemory> {
        let memory = self.session.memory().filter(|_| kind == Crash::Kill)?;
        if self.session.disks()[0].flush_faults_hit() > 0 {
            return None;
        }
        if let Some(within) = W::memory_within_step(self, draw) {
            return Some(within);
        }
        let memory = memory.copy();
        if mix(&[draw, 2]).is_multiple_of(3) {
            tear(&memory);
        }
        Some(memory)
    }

    /// Returns what is known if everything in flight may or may not have happened.
    pub fn in_doubt(&mut self) -> W::Known {
        self.known.model_mut().spread();
        let mut known = self.known.clone();
        let flying = self.inflight.values().filter_map(|op| match &op.class {
            Class::Control(pending) => Some(pending.clone()),
            _ => None,
        });
        known.pending().extend(flying);
        known.pending().sort_by_key(|p| p.start);
        known
    }

    /// The same after a crash, which may lose nothing acknowledged.
    fn known_after(&mut self, keeps_acknowledged: bool) -> W::Known {
        let mut known = self.in_doubt();
        if keeps_acknowledged {
            W::keep_acknowledged(&self.session, &mut known);
        }
        known
    }
}
