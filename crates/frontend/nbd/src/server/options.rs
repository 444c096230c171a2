//! Limits that keep one client from harming the others.

use std::time::Duration;

use crate::codec::MAX_PAYLOAD;

/// As many connections clients open at once that are told they may have several: nbdcopy, and the kernel's client.
const SEVERAL_CONNECTIONS: usize = 4;

/// Limits of a server. The memory that clients can make it use is bounded by
/// `shared_memory + max_connections × (connection_reserve + 128 KiB)` plus some bookkeeping per
/// request.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Connections at a time; more are closed as soon as they are accepted.
    pub max_connections: usize,
    /// Of them, those that use one export; further clients of it are refused when they choose it.
    pub max_export_connections: usize,
    /// Until a client has chosen an export: between two of its options, and for each part of an answer.
    pub handshake_timeout: Duration,
    /// Requests of one connection that have not been answered entirely.
    pub max_requests: usize,
    /// Bytes of data of such requests, of one connection. At least [`MAX_PAYLOAD`].
    pub max_request_bytes: usize,
    /// Bytes of data that a connection may have in flight without asking the others.
    pub connection_reserve: usize,
    /// Bytes of data beyond the reserves, for all connections together. At least [`MAX_PAYLOAD`].
    pub shared_memory: usize,
    /// Requests that all connections together have under way in their exports, about; every
    /// active connection has an equal share of them. What keeps the disks busy and no more.
    pub started_requests: usize,
    /// Bytes of data of such requests, shared likewise.
    pub started_bytes: usize,
    /// A client that takes longer than this to accept replies, or to deliver the data of a write,
    /// is disconnected when another connection waits for the memory it holds.
    pub stall_timeout: Duration,
    /// How long requests in flight are waited for when the server stops, and how long a client that
    /// has said goodbye may take to fetch its replies.
    pub drain_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            max_connections: 128,
            max_export_connections: 96,
            handshake_timeout: Duration::from_secs(10),
            max_requests: 128,
            max_request_bytes: 64 << 20,
            connection_reserve: 1 << 20,
            shared_memory: 256 << 20,
            started_requests: 128,
            started_bytes: 64 << 20,
            stall_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

impl ServerOptions {
    /// Whether clients are told that they may open several connections to an export.
    pub(super) fn multi_conn(&self) -> bool {
        self.max_connections.min(self.max_export_connections) >= SEVERAL_CONNECTIONS
    }

    /// Raises limits below which some request could never be admitted.
    pub(super) fn effective(mut self) -> ServerOptions {
        let one = MAX_PAYLOAD as usize;
        self.max_connections = self.max_connections.max(1);
        self.max_export_connections = self.max_export_connections.max(1);
        self.max_requests = self.max_requests.max(1);
        self.max_request_bytes = self.max_request_bytes.max(one);
        self.shared_memory = self.shared_memory.max(one);
        self
    }
}
