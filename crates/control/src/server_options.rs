//! Limits of a control server.

use std::time::Duration;

/// Limits of a control server. Peers can make it hold at most about
/// `max_connections × max_message`, plus the buffers of imports and exports.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Most connections at a time; more are refused with an error.
    pub max_connections: usize,
    /// Most bytes of one message of a peer.
    pub max_message: usize,
    /// A peer that takes longer than this to accept an answer is disconnected.
    pub send_timeout: Duration,
    /// Interval of progress notifications.
    pub progress_every: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            max_connections: 128,
            max_message: 1 << 20,
            send_timeout: Duration::from_secs(30),
            progress_every: Duration::from_secs(1),
        }
    }
}

forkdisk::setters! {
    ServerOptions {
        with_max_connections max_connections: usize,
        with_max_message max_message: usize,
        with_send_timeout send_timeout: Duration,
        with_progress_every progress_every: Duration,
    }
}
