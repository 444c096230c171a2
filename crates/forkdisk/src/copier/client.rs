//! Clients of the copier: each has its order in the queue, its throttle and its statistics.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use crate::format::Throttle;

use super::CopyClass;
use super::throttle::Meter;

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

    /// Whether its copies are limited.
    pub fn is_throttled(&self) -> bool {
        !self.meter.borrow().limit().is_none()
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

/// What has been done for one job, in bytes; writes to several destinations count for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Read.
    pub read: u64,
    /// Written.
    pub written: u64,
    /// Cloned or zeroed by the device.
    pub offloaded: u64,
}

/// Statistics of one client, of a class, or of a whole copier, since the pool was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyStats {
    /// Jobs that have not started yet, now.
    pub queued: u64,
    /// Sub-jobs in flight, now.
    pub in_flight: u64,
    /// Jobs that have ended, with any outcome.
    pub jobs: u64,
    /// Of them, those that could not read or write.
    pub failed: u64,
    /// Of them, those that were cancelled.
    pub cancelled: u64,
    /// Jobs that share a write with the one before.
    pub merged: u64,
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes read from devices.
    pub bytes_read: u64,
    /// Bytes written to devices.
    pub bytes_written: u64,
    /// Bytes that devices cloned or zeroed, neither read nor written.
    pub bytes_offloaded: u64,
    /// Bytes of clients' writes that were merged into copies.
    pub bytes_given: u64,
    /// How often a job had to wait for a buffer, and how long in total.
    pub buffer_waits: u64,
    /// See `buffer_waits`.
    pub buffer_wait: Duration,
    /// How often a throttle delayed a job.
    pub throttle_waits: u64,
    /// How long jobs waited for their first sub-job, in total.
    pub wait: Duration,
    /// How long jobs took from their submission to their end, in total.
    pub latency: Duration,
    /// The longest that one took.
    pub longest: Duration,
}
