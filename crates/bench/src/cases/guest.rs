//! The client of vhost-user sockets: the driver of a guest without a guest, the same for every server.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use forkdisk_vhost_user::testing::{Guest, Request};

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
/// Descriptors of a queue: the usual number of a virtual machine.
const QUEUE_SIZE: u16 = 128;
const SLOT_BYTES: u64 = 1 << 20;
/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A front end with the memory of a guest.
pub struct Client(Guest);

/// Requests of one queue.
pub struct Requests<'a> {
    pub write: bool,
    pub len: usize,
    /// In the order of the requests.
    pub offsets: &'a [u64],
    /// Whether a flush follows each of them.
    pub flush: bool,
}

impl Client {
    /// Connects to a server.
    pub fn connect(socket: &Path, queues: u16) -> Result<Client> {
        Client::with_size(socket, queues, QUEUE_SIZE)
    }

    /// As [`connect`](Self::connect), with queues of `size` descriptors: three for each request under way.
    pub fn with_size(socket: &Path, queues: u16, size: u16) -> Result<Client> {
        Guest::connect(socket, queues, size, SLOT_BYTES).map(Client).map_err(Error::from_boxed)
    }

    /// Carries out the requests of each queue, all queues at a time; returns the time that it takes.
    pub fn run(&mut self, depth: usize, work: &[Requests<'_>]) -> Result<Duration> {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let mut queues = self.0.queues.iter_mut().zip(work);
            let first = queues.next();
            let others: Vec<_> =
                queues.map(|(queue, of)| scope.spawn(move || queue.run(depth as u16, all(of), PATIENCE))).collect();
            let mine = first.map(|(queue, of)| queue.run(depth as u16, all(of), PATIENCE));
            let ended = others.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a panic".into())));
            ended.chain(mine).try_for_each(|result| result.map(drop).map_err(Error::from_boxed))
        })?;
        Ok(start.elapsed())
    }
}

fn all<'a>(work: &'a Requests<'_>) -> impl Iterator<Item = Request> + 'a {
    let kind = if work.write { WRITE } else { READ };
    work.offsets.iter().flat_map(move |&offset| {
        let request = Request { kind, offset, len: work.len as u32 };
        let flush = Request { kind: FLUSH, offset: 0, len: 0 };
        [request].into_iter().chain(work.flush.then_some(flush))
    })
}
