//! What has been copied, for whom, and what it waited for.

use std::time::Duration;

/// What has been done for one job, in bytes; what goes to several destinations counts for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Read.
    pub read: u64,
    /// Written.
    pub written: u64,
    /// Cloned or made zero by the device.
    pub offloaded: u64,
}

/// Figures of one client, or of a whole copier. Counted since the pool was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Jobs that have not started yet, now.
    pub queued: u64,
    /// Sub-jobs in flight, now.
    pub in_flight: u64,
    /// Jobs that ended, however.
    pub jobs: u64,
    /// Of them, those that could not read or write.
    pub failed: u64,
    /// Of them, those that were cancelled.
    pub cancelled: u64,
    /// Jobs that shared a request with the one before.
    pub merged: u64,
    /// Requests that read.
    pub reads: u64,
    /// Requests that wrote.
    pub writes: u64,
    /// Bytes read from devices.
    pub bytes_read: u64,
    /// Bytes written to devices.
    pub bytes_written: u64,
    /// Bytes that devices cloned or made zero, neither read nor written.
    pub bytes_offloaded: u64,
    /// Bytes of clients' writes that copies took along.
    pub bytes_given: u64,
    /// How often a job had to wait for a buffer, and how long altogether.
    pub buffer_waits: u64,
    /// See `buffer_waits`.
    pub buffer_wait: Duration,
    /// How often a throttle held a job up.
    pub throttle_waits: u64,
    /// How long jobs waited for their first sub-job, altogether.
    pub wait: Duration,
    /// How long jobs took from their submission to their end, altogether.
    pub latency: Duration,
    /// The longest that one took.
    pub longest: Duration,
}
