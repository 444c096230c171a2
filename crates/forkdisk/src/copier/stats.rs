//! Statistics of copies: bytes, requests and waiting times, by client and class.

use std::time::Duration;

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
    /// Jobs that shared a request with the one before.
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
