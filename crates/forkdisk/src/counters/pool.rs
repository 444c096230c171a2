//! Counters of the pool's device requests and metadata.

use super::{Counter, RequestCounters, VolumeStatistics};
use super::{Histogram, HistogramCounter};
use crate::device::SharedCacheStatistics;

/// Requests and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Number of requests.
    pub count: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl Requests {
    /// Adds other requests.
    pub fn merge(&mut self, other: &Requests) {
        self.count += other.count;
        self.bytes += other.bytes;
    }
}

/// Device requests of one kind, in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Reads.
    pub read: Requests,
    /// Writes.
    pub write: Requests,
}

/// Counters since the pool was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStatistics {
    /// All volumes together, including those deleted since.
    pub volumes: VolumeStatistics,
    /// Device requests for the data of volumes.
    pub data: Traffic,
    /// Device reads of map tables, counts and directory pages, and writes of them by checkpoints,
    /// superblocks included.
    pub metadata: Traffic,
    /// Device writes of journal groups.
    pub journal: Requests,
    /// Device discards of freed space.
    pub discards: Requests,
    /// Flushes of the device.
    pub flushes: u64,
    /// Journal records appended, merged ones included.
    pub records: u64,
    /// For every commit, how many flushes waited for it.
    pub commit_group: Histogram,
    /// Checkpoints that succeeded.
    pub checkpoints: u64,
    /// Lookups that found their table in memory.
    pub cache_hits: u64,
    /// Tables and count pages that had to be read.
    pub cache_misses: u64,
    /// Bytes of tables in memory, clean and changed.
    pub cache_bytes: u64,
    /// The shared cache of data.
    pub shared_cache: SharedCacheStatistics,
    /// Deleted volumes whose maps were released completely.
    pub reaped: u64,
    /// Droppable snapshots of origins that were deleted because the pool was full.
    pub dropped: u64,
    /// Bytes that checkpoints freed.
    pub freed_bytes: u64,
    /// Bytes that were gathered.
    pub gathered_bytes: u64,
    /// Free bytes that are not discarded yet.
    pub retained_bytes: u64,
    /// Whether a deleted volume is being released now.
    pub reaping: bool,
}

/// The counters of a pool, without those of its volumes.
#[derive(Default)]
pub(crate) struct PoolCounters {
    pub data_reads: RequestCounters,
    pub data_writes: RequestCounters,
    pub metadata_reads: RequestCounters,
    pub metadata_writes: RequestCounters,
    pub journal_writes: RequestCounters,
    pub discards: RequestCounters,
    pub flushes: Counter,
    pub commit_group: HistogramCounter,
    pub checkpoints: Counter,
    pub cache_misses: Counter,
    pub reaped: Counter,
    pub dropped: Counter,
    pub freed_bytes: Counter,
    pub gathered: Counter,
}

impl PoolCounters {
    /// Returns the values of these counters; the caller adds the rest.
    pub fn read(&self) -> PoolStatistics {
        PoolStatistics {
            data: Traffic { read: self.data_reads.read(), write: self.data_writes.read() },
            metadata: Traffic { read: self.metadata_reads.read(), write: self.metadata_writes.read() },
            journal: self.journal_writes.read(),
            discards: self.discards.read(),
            flushes: self.flushes.get(),
            commit_group: self.commit_group.read(),
            checkpoints: self.checkpoints.get(),
            cache_misses: self.cache_misses.get(),
            reaped: self.reaped.get(),
            dropped: self.dropped.get(),
            freed_bytes: self.freed_bytes.get(),
            gathered_bytes: self.gathered.get(),
            ..PoolStatistics::default()
        }
    }
}
