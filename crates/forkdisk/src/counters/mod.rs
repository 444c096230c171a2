//! Counters since the pool was opened. They are never stored.
//!
//! Counting is an addition to a cell: no allocation, no lock, no search. A volume's block of counters is
//! behind an `Rc` in its handles and is created when the volume is first opened, so that a pool of ten
//! thousand snapshots does not pay for unused ones. The engine has no clock: the front end that answers a
//! request reports its duration.

mod histogram;
mod pool;
mod volume;

use std::cell::Cell;

use crate::device::Segment;

pub use histogram::{HISTOGRAM_BUCKETS, Histogram};
pub(crate) use pool::PoolCounters;
pub use pool::{PoolStatistics, Requests, Traffic};
pub(crate) use volume::VolumeCounters;
pub use volume::{Faults, Operation, OperationStatistics, VolumeStatistics};

/// A counter that only increases.
#[derive(Default)]
pub(crate) struct Counter(Cell<u64>);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.set(self.0.get().wrapping_add(n));
    }

    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Requests of one direction, with their bytes.
#[derive(Default)]
pub(crate) struct RequestCounters {
    count: Counter,
    bytes: Counter,
}

impl RequestCounters {
    /// Adds one request per segment.
    pub fn add(&self, segments: &[Segment]) {
        self.count.add(segments.len() as u64);
        self.bytes.add(segments.iter().map(|s| s.len as u64).sum());
    }

    /// Adds one request of `bytes` bytes.
    pub fn add_one(&self, bytes: u64) {
        self.count.add(1);
        self.bytes.add(bytes);
    }

    pub fn read(&self) -> Requests {
        Requests { count: self.count.get(), bytes: self.bytes.get() }
    }
}
