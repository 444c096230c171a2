//! On whose behalf copies are made: one queue's worth of order, one throttle, one set of figures.

use std::cell::{Cell, RefCell};

use crate::format::Throttle;

use super::throttle::Meter;
use super::{CopyClass, CopyStats};

/// Somebody who has things copied, such as one volume.
pub struct Client {
    user: CopyClass,
    pub(super) meter: RefCell<Meter>,
    pub(super) stats: Cell<CopyStats>,
    /// Its first waiting job has been counted as held up.
    pub(super) held: Cell<bool>,
}

impl Client {
    /// A client of a kind, held to `throttle`.
    pub fn new(user: CopyClass, throttle: Throttle) -> Client {
        let (meter, stats) = (RefCell::new(Meter::new(throttle)), Cell::default());
        Client { user, meter, stats, held: Cell::new(false) }
    }

    /// Its kind.
    pub fn user(&self) -> CopyClass {
        self.user
    }

    /// What it is held to.
    pub fn throttle(&self) -> Throttle {
        self.meter.borrow().limit()
    }

    /// What it is held to from now on. The copier learns of it at the next
    /// [`throttle_changed`](super::Copier::throttle_changed).
    pub fn set_throttle(&self, throttle: Throttle) {
        if self.throttle() != throttle {
            self.meter.borrow_mut().set(throttle);
        }
    }

    /// Its figures so far.
    pub fn stats(&self) -> CopyStats {
        self.stats.get()
    }
}
