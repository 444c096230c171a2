//! Figures of copies, for the pool or for one volume.

use std::time::Duration;

use forkdisk::{CopyStats, Throttle};
use serde::{Deserialize, Serialize};

/// Figures of copies; see [`CopyStats`]. Times are nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CopyFigures {
    /// Jobs that have not started yet, now.
    pub queued: u64,
    /// Sub-jobs in flight, now.
    pub in_flight: u64,
    /// Jobs that ended, with any result.
    pub jobs: u64,
    /// Of them, those that failed to read or write.
    pub failed: u64,
    /// Of them, those that were cancelled.
    pub cancelled: u64,
    /// Jobs merged into a request of the job before.
    pub merged: u64,
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Bytes that the host's file system cloned or zeroed instead of reads and writes.
    pub offloaded: u64,
    /// Bytes of clients' writes that were written together with a copy.
    pub given: u64,
    /// How often a job waited for a buffer.
    pub buffer_waits: u64,
    /// Total time of these waits.
    pub buffer_wait: u64,
    /// How often a throttle delayed a job.
    pub throttle_waits: u64,
    /// Total time that jobs waited for their first sub-job.
    pub wait: u64,
    /// Total time that jobs took.
    pub latency: u64,
    /// Longest time that one job took.
    pub longest: u64,
    /// Percent of the time in which copies may be in flight; 100 for no limit.
    pub throttle_percent: u8,
    /// Bytes that may be copied in a second; 0 for no limit.
    pub throttle_rate: u64,
}

/// A pool's copier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CopierFigures {
    /// All copies together.
    #[serde(flatten)]
    pub all: CopyFigures,
    /// Bytes of buffers.
    pub buffers: u64,
    /// Of them, bytes in use.
    pub buffers_used: u64,
}

impl CopyFigures {
    /// Returns the figures of copies under `throttle`.
    pub fn of(s: &CopyStats, throttle: Throttle) -> CopyFigures {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        CopyFigures {
            queued: s.queued,
            in_flight: s.in_flight,
            jobs: s.jobs,
            failed: s.failed,
            cancelled: s.cancelled,
            merged: s.merged,
            read: s.bytes_read,
            written: s.bytes_written,
            offloaded: s.bytes_offloaded,
            given: s.bytes_given,
            buffer_waits: s.buffer_waits,
            buffer_wait: nanos(s.buffer_wait),
            throttle_waits: s.throttle_waits,
            wait: nanos(s.wait),
            latency: nanos(s.latency),
            longest: nanos(s.longest),
            throttle_percent: throttle.percent,
            throttle_rate: throttle.bytes_per_second,
        }
    }
}
