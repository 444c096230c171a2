//! Limits and settings of the server.

use std::time::Duration;

/// Settings of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Most virtqueues per device, 1 to 64.
    pub max_queues: u16,
    /// Size in bytes of a logical block of the device, 512 or 4096.
    pub block_size: u32,
    /// Most bytes of data that the requests of one device hold in buffers at a time; one request is always served.
    pub max_buffered: usize,
    /// How long an idle queue is polled before the thread waits for a notification of the guest; 0: not at all. The
    /// actual time adapts to the guest below this limit.
    pub max_poll: Duration,
    /// How long a front end may take to send the rest of a message or to receive a reply.
    pub stall_timeout: Duration,
    /// How long requests in flight may take when the server stops.
    pub drain_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            max_queues: 16,
            block_size: 512,
            max_buffered: 32 << 20,
            max_poll: Duration::ZERO,
            stall_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

impl ServerOptions {
    /// Sets [`max_queues`](Self::max_queues).
    #[must_use]
    pub fn with_max_queues(self, max_queues: u16) -> ServerOptions {
        ServerOptions { max_queues: max_queues.clamp(1, 64), ..self }
    }

    /// Sets [`block_size`](Self::block_size).
    ///
    /// # Panics
    /// If it is neither 512 nor 4096.
    #[must_use]
    pub fn with_block_size(self, block_size: u32) -> ServerOptions {
        assert!(matches!(block_size, 512 | 4096), "a block of 512 or 4096 bytes");
        ServerOptions { block_size, ..self }
    }

    /// Sets [`max_poll`](Self::max_poll).
    #[must_use]
    pub fn with_max_poll(self, max_poll: Duration) -> ServerOptions {
        ServerOptions { max_poll, ..self }
    }

    /// Sets [`drain_timeout`](Self::drain_timeout).
    #[must_use]
    pub fn with_drain_timeout(self, drain_timeout: Duration) -> ServerOptions {
        ServerOptions { drain_timeout, ..self }
    }
}
