//! Figures of the devices of origins.

use crate::counters::{Counter, RequestCounters, Requests, Traffic};
use crate::device::Device;

use super::Origins;

/// Requests to an origin's own device since the pool was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OriginStatistics {
    /// The origin.
    pub name: String,
    /// Reads, including those of copies, and writes.
    pub device: Traffic,
    /// Flushes.
    pub flushes: u64,
}

/// Counters of an origin without those of the copier.
#[derive(Default)]
pub struct Counters {
    pub reads: RequestCounters,
    pub writes: RequestCounters,
    pub flushes: Counter,
}

impl<D: Device> Origins<D> {
    /// Figures of the devices of open origins, sorted by name.
    pub fn statistics(&self) -> Vec<OriginStatistics> {
        let (meta, origins) = (self.store.meta.borrow(), self.open.borrow());
        let statistics = origins.values().filter_map(|origin| {
            let name = meta.directory.get(origin.id)?.record.name.to_string();
            // Copies read from the origin's device.
            let copied = self
                .store
                .live
                .borrow()
                .activity(origin.id)
                .map(|activity| activity.copies.stats())
                .unwrap_or_default();
            let mut read = origin.counters.reads.read();
            read.merge(&Requests { count: copied.reads, bytes: copied.bytes_read });
            let device = Traffic { read, write: origin.counters.writes.read() };
            Some(OriginStatistics { name, device, flushes: origin.counters.flushes.get() })
        });
        let mut all: Vec<OriginStatistics> = statistics.collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}
