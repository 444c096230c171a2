//! Holding writes back until all reads are done: a disk that alternates between reading and writing takes
//! longer for both.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use super::job::Pump;

/// A gate for a caller that submits several jobs and wants all of them read before any is written. The gate
/// opens when this is dropped. It never blocks progress: it does not hold while any job waits to be started.
pub struct WriteGate {
    hold: GateHold,
    engine: Weak<dyn Pump>,
}

/// For a [`Job`](super::Job): it is written only when the gate is open.
#[derive(Clone)]
pub struct GateHold(Rc<Cell<bool>>);

impl WriteGate {
    pub(super) fn new(engine: Weak<dyn Pump>) -> WriteGate {
        WriteGate { hold: GateHold(Rc::new(Cell::new(true))), engine }
    }

    /// Returns the hold for a job.
    pub fn hold(&self) -> GateHold {
        self.hold.clone()
    }
}

impl GateHold {
    pub(super) fn is_closed(&self) -> bool {
        self.0.get()
    }
}

impl Drop for WriteGate {
    fn drop(&mut self) {
        self.hold.0.set(false);
        if let Some(engine) = self.engine.upgrade() {
            engine.recheck_order();
        }
    }
}
