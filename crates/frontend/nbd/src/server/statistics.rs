//! Counters of the server's connections. Operations are counted by the exports.

use std::cell::Cell;

/// Connections of a server, now and since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStatistics {
    /// Clients that are connected.
    pub connections: u64,
    /// Connections accepted, including those refused.
    pub accepted: u64,
    /// Connections that were closed at once because there were too many.
    pub refused: u64,
    /// Clients refused by an export because it had too many.
    pub crowded: u64,
    /// Connections that ended without an export, except normal disconnects.
    pub failed_handshakes: u64,
    /// Connections that entered an export under TLS.
    pub encrypted: u64,
    /// Connections that ended with a protocol violation or in the middle of a message.
    pub broken: u64,
    /// Clients disconnected because they held memory for which requests waited.
    pub stalled: u64,
    /// Requests refused before they reached an export.
    pub refused_requests: u64,
    /// Memory for requests in flight that connections share, in bytes: its size and what is in use.
    pub shared_memory: u64,
    /// See `shared_memory`.
    pub shared_memory_used: u64,
}

/// Monotonic counters.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) accepted: Cell<u64>,
    pub(super) refused: Cell<u64>,
    pub(super) crowded: Cell<u64>,
    pub(super) failed_handshakes: Cell<u64>,
    pub(super) encrypted: Cell<u64>,
    pub(super) broken: Cell<u64>,
    pub(super) stalled: Cell<u64>,
    pub(super) refused_requests: Cell<u64>,
}

/// Adds one.
pub(super) fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

impl Counters {
    /// Returns the values of the counters; the caller adds the rest.
    pub(super) fn read(&self) -> ServerStatistics {
        ServerStatistics {
            accepted: self.accepted.get(),
            refused: self.refused.get(),
            crowded: self.crowded.get(),
            failed_handshakes: self.failed_handshakes.get(),
            encrypted: self.encrypted.get(),
            broken: self.broken.get(),
            stalled: self.stalled.get(),
            refused_requests: self.refused_requests.get(),
            ..ServerStatistics::default()
        }
    }
}
