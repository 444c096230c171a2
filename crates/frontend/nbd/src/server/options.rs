//! Limits that protect clients from each other.

use std::time::Duration;

use crate::codec::MAX_PAYLOAD;

/// Connections that clients open if several are allowed: nbdcopy, and the kernel's client.
const SEVERAL_CONNECTIONS: usize = 4;

/// Limits of a server. The memory that clients can make it use is bounded by
/// `shared_memory + max_connections × (connection_reserve + 128 KiB)` plus some bookkeeping per
/// request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Most connections at a time; more are closed as soon as they are accepted.
    pub max_connections: usize,
    /// Most connections to one export; further clients of it are refused when they choose it.
    pub max_export_connections: usize,
    /// Longest time between two options of a client, and for each part of an answer, until it has chosen an export.
    pub handshake_timeout: Duration,
    /// Most requests of one connection that have not been answered completely.
    pub max_requests: usize,
    /// Most bytes of data of such requests, of one connection. At least [`MAX_PAYLOAD`].
    pub max_request_bytes: usize,
    /// Bytes of data that each connection may have in flight before it uses shared memory.
    pub connection_reserve: usize,
    /// Most bytes of data beyond the reserves, for all connections together. At least [`MAX_PAYLOAD`].
    pub shared_memory: usize,
    /// Approximate number of requests that all connections together have under way in their
    /// exports; all active connections have equal shares. Just enough to keep the disks busy.
    pub started_requests: usize,
    /// Most bytes of data of such requests, shared in the same manner.
    pub started_bytes: usize,
    /// A client that takes longer than this to accept replies, or to deliver the data of a write,
    /// is disconnected when another connection waits for the memory it holds.
    pub stall_timeout: Duration,
    /// How long the server waits for requests in flight when it stops, and how long a client that
    /// has sent DISC may take to fetch its replies.
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
    /// Returns whether clients are told that they may open several connections to an export.
    pub(super) fn multi_conn(&self) -> bool {
        self.max_connections.min(self.max_export_connections) >= SEVERAL_CONNECTIONS
    }

    /// Raises limits below which some requests could never be admitted.
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

forkdisk::setters! {
    ServerOptions {
        with_max_connections max_connections: usize,
        with_max_export_connections max_export_connections: usize,
        with_handshake_timeout handshake_timeout: Duration,
        with_max_requests max_requests: usize,
        with_max_request_bytes max_request_bytes: usize,
        with_connection_reserve connection_reserve: usize,
        with_shared_memory shared_memory: usize,
        with_started_requests started_requests: usize,
        with_started_bytes started_bytes: usize,
        with_stall_timeout stall_timeout: Duration,
        with_drain_timeout drain_timeout: Duration,
    }
}
