//! What was copied, for the pool or for one volume.

use std::time::Duration;

use forkdisk::{CopyStats, Throttle};
use serde::{Deserialize, Serialize};

/// Figures of copies; see [`CopyStats`]. Times are nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyFigures {
    /// Jobs that have not started yet, now.
    pub queued: u64,
    /// Sub-jobs in flight, now.
    pub in_flight: u64,
    /// Jobs that ended, however.
    pub jobs: u64,
    /// Of them, those that could not read or write.
    pub failed: u64,
    /// Of them, those that were given up.
    pub cancelled: u64,
    /// Jobs that shared a request with the one before.
    pub merged: u64,
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Bytes that the host's file system copied by itself.
    pub offloaded: u64,
    /// Bytes of clients' writes that copies took along.
    pub given: u64,
    /// How often a job waited for a buffer.
    pub buffer_waits: u64,
    /// How long, altogether.
    pub buffer_wait: u64,
    /// How often a throttle held a job up.
    pub throttle_waits: u64,
    /// How long jobs waited for their first sub-job, altogether.
    pub wait: u64,
    /// How long jobs took, altogether.
    pub latency: u64,
    /// The longest that one took.
    pub longest: u64,
    /// Percent of the time in which anything may be in flight; 100 for no limit.
    pub throttle_percent: u8,
    /// Bytes that may be copied in a second; 0 for no limit.
    pub throttle_rate: u64,
}

/// A pool's copier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopierFigures {
    /// Everything that was copied.
    #[serde(flatten)]
    pub all: CopyFigures,
    /// Bytes of buffers.
    pub buffers: u64,
    /// Of them, those in use.
    pub buffers_used: u64,
}

impl CopyFigures {
    /// Figures of what is held to `throttle`.
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
