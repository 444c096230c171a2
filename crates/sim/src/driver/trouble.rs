//! Faults of requests, and what has failed because of them.

use super::world::{Life, World};
use super::{Run, Violation};
use crate::disk::{Crash, SimDisk};

/// Most steps for which faults stay armed.
const MAX_FAULT_STEPS: u64 = 20_000;

/// Faults in this life of the engine.
#[derive(Default)]
pub struct Trouble {
    /// Operations until the faults are disarmed.
    pub armed: Option<u32>,
    /// The step from which on they are disarmed in any case: operations that wait for space on the host wait
    /// until then.
    pub armed_until: u64,
    /// Operations until the pool is opened again.
    pub patience: Option<u32>,
}

impl<W: World> Run<W> {
    /// Disarms faults and reopens what has failed when due.
    pub(super) fn watch_trouble(&mut self) -> Result<(), Violation> {
        if let Some(left) = &mut self.trouble.armed {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.disarm();
            }
        }
        match self.trouble.patience {
            None if W::has_failed(self) => self.trouble.patience = Some(W::PATIENCE_COUNT),
            Some(0) => {
                let kind = if self.rng.one_in(4) { Crash::Kill } else { Crash::Power };
                let mask = self.rng.next();
                return self.cut(kind, mask);
            }
            Some(left) => self.trouble.patience = Some(left - 1),
            None => {}
        }
        Ok(())
    }

    /// Notes that faults were armed at this step: for so many operations.
    pub fn armed(&mut self, now: u64, operations: u32) {
        self.trouble.armed = Some(operations);
        self.trouble.armed_until = now + MAX_FAULT_STEPS;
    }

    pub fn disarm(&mut self) {
        self.trouble.armed = None;
        self.session.disks().iter().for_each(SimDisk::disarm);
        self.say(|| "faults disarmed".into());
    }

    /// Disarms faults after enough steps.
    pub fn end_of_faults(&mut self, now: u64) {
        if self.trouble.armed.is_some() && now > self.trouble.armed_until {
            self.disarm();
        }
    }
}
