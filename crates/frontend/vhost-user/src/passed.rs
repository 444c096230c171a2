//! Sessions on their way to another process of the server: everything that the front end has set, with the files that
//! it passed. The rings themselves, and what the guest has read of them, lie in the guest's memory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};

/// A session. `F` stands for its files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedSession<F = OwnedFd> {
    /// Current name of the disk.
    pub disk: String,
    /// Path of the socket by which the front end came; absent if an earlier version passes it.
    #[serde(default)]
    pub place: String,
    /// The connection.
    pub socket: F,
    /// Size of a block in bytes, as the guest has read it.
    pub block_size: u32,
    /// Features that were chosen.
    pub features: u64,
    /// Features of the protocol that were chosen.
    pub protocol: u64,
    /// Whether the guest wants a write cache.
    pub is_writeback: bool,
    /// The driver's status.
    pub status: u64,
    /// The channel on which the front end takes requests.
    pub channel: Option<F>,
    /// Memory for requests in flight.
    pub inflight: Option<PassedInflight<F>>,
    /// The guest's memory.
    pub memory: Vec<PassedRegion<F>>,
    /// The queues.
    pub queues: Vec<PassedQueue<F>>,
}

/// Memory for requests in flight.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedInflight<F> {
    /// Its file.
    pub file: F,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Number of queues.
    pub queues: u16,
    /// Descriptors of a queue.
    pub queue_size: u16,
}

/// A region of the guest's memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedRegion<F> {
    /// Its file.
    pub file: F,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Address for the guest.
    pub guest: u64,
    /// Address in the front end.
    pub user: u64,
}

/// A virtqueue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedQueue<F> {
    /// Number of descriptors.
    pub size: u16,
    /// Addresses of the descriptors, of the ring of requests and of the ring of answers, in the front end.
    pub addresses: [u64; 3],
    /// Index of the next request.
    pub base: u16,
    /// Whether it is enabled.
    pub is_enabled: bool,
    /// Descriptor by which the guest notifies of requests; `None` if the queue is stopped.
    pub kick: Option<F>,
    /// Descriptor by which the guest is notified.
    pub call: Option<F>,
    /// Descriptor by which the front end is notified that the queue is broken.
    pub fault: Option<F>,
}

impl<F> PassedSession<F> {
    /// Converts all files.
    pub fn map<G>(self, convert: &mut impl FnMut(F) -> G) -> PassedSession<G> {
        PassedSession {
            disk: self.disk,
            place: self.place,
            socket: convert(self.socket),
            block_size: self.block_size,
            features: self.features,
            protocol: self.protocol,
            is_writeback: self.is_writeback,
            status: self.status,
            channel: self.channel.map(&mut *convert),
            inflight: self.inflight.map(|inflight| {
                let PassedInflight { file, offset, len, queues, queue_size } = inflight;
                PassedInflight { file: convert(file), offset, len, queues, queue_size }
            }),
            memory: self
                .memory
                .into_iter()
                .map(|PassedRegion { file, offset, len, guest, user }| {
                    let file = convert(file);
                    PassedRegion { file, offset, len, guest, user }
                })
                .collect(),
            queues: self.queues.into_iter().map(|queue| queue.map(convert)).collect(),
        }
    }
}

impl<F> PassedQueue<F> {
    fn map<G>(self, convert: &mut impl FnMut(F) -> G) -> PassedQueue<G> {
        PassedQueue {
            size: self.size,
            addresses: self.addresses,
            base: self.base,
            is_enabled: self.is_enabled,
            kick: self.kick.map(&mut *convert),
            call: self.call.map(&mut *convert),
            fault: self.fault.map(&mut *convert),
        }
    }
}

/// Duplicates a descriptor.
pub fn duplicate(fd: impl AsFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}
