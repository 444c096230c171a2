//! Clients of the copier: each has its order in the queue, its throttle and its statistics.

use std::cell::{Cell, RefCell};

use crate::format::Throttle;

use super::throttle::Meter;
use super::{CopyClass, CopyStats};

/// A client of the copier, such as one volume.
pub struct Client {
    user: CopyClass,
    pub(super) meter: RefCell<Meter>,
    pub(super) stats: Cell<CopyStats>,
    /// Its first waiting job has been counted as delayed by a throttle.
    pub(super) held: Cell<bool>,
}

impl Client {
    /// Creates a client of a class, limited by `throttle`.
    pub fn new(user: CopyClass, throttle: Throttle) -> Client {
        let (meter, stats) = (RefCell::new(Meter::new(throttle)), Cell::default());
        Client { user, meter, stats, held: Cell::new(false) }
    }

    /// Returns its class.
    pub fn user(&self) -> CopyClass {
        self.user
    }

    /// Returns its throttle.
    pub fn throttle(&self) -> Throttle {
        self.meter.borrow().limit()
    }

    /// Sets its throttle. The copier applies it at the next
    /// [`throttle_changed`](super::Copier::throttle_changed).
    pub fn set_throttle(&self, throttle: Throttle) {
        if self.throttle() != throttle {
            self.meter.borrow_mut().set(throttle);
        }
    }

    /// Returns its statistics so far.
    pub fn stats(&self) -> CopyStats {
        self.stats.get()
    }
}
