//! Holding writes back until everything that is to be read has been: a disk that goes to and fro between the two takes
//! longer for both.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use super::job::Pump;

/// Whoever submits several jobs one after the other and wants all of them read before any is written. The gate opens
/// when this is dropped. Nobody is kept from anything by it: it does not hold while any job waits to be started.
pub struct WriteGate {
    hold: GateHold,
    engine: Weak<dyn Pump>,
}

/// For a [`Job`](super::Job): it is written when the gate is open.
#[derive(Clone)]
pub struct GateHold(Rc<Cell<bool>>);

impl WriteGate {
    pub(super) fn new(engine: Weak<dyn Pump>) -> WriteGate {
        WriteGate { hold: GateHold(Rc::new(Cell::new(true))), engine }
    }

    /// What holds a job.
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
