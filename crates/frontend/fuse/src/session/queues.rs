//! Requests through queues of io_uring (Linux 6.14) instead of `/dev/fuse`: one command answers a request and waits for
//! the next one, and the data lies in memory of this process already. Notifications, and requests without a reply,
//! still go through `/dev/fuse`.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::device::BUF_ALIGN_BYTES;
use forkdisk::{Error, ErrorKind, Result};
use forkdisk_uring::{FusePlace, FuseQueues, FuseRequest, FuseSizes, Rt};
use serde::{Deserialize, Serialize};

use super::{Handler, LEAVING_LOOK, Notifier, Session, State};
use crate::codec::{MAX_WRITE, Reply, Request};
use crate::off_thread::off_thread;
use crate::processors::{may_run_everywhere, online_processors};
use crate::syscall_helper::MountCall;

/// Most entries of all queues. Each can hold a request of [`MAX_WRITE`] bytes, for which memory is mapped when it is
/// touched: as many bytes as requests by `/dev/fuse` may have in flight.
const ENTRIES_COUNT: usize = 256;
/// Most and fewest entries of a queue. All requests of programs on one processor go to one queue: with few entries a
/// device would be idle.
const MOST_DEPTH_COUNT: usize = 32;
const LEAST_DEPTH_COUNT: usize = 8;

/// Error of a mount that needs the queues.
pub(super) const NOT_OFFERED: &str = "this kernel does not offer FUSE over io_uring: it needs Linux 6.14 and, as root, \
    `echo 1 > /sys/module/fuse/parameters/enable_uring` before the mount; without fuse_uring=yes it can be mounted";

/// Whether requests come through queues of io_uring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverIoUring {
    /// If the kernel offers it.
    Auto,
    /// A mount fails without.
    Yes,
    /// They come through `/dev/fuse`.
    #[default]
    No,
}

/// How long entries without a request are waited for when a mount goes to another process.
const OCCUPYING_LIMIT: Duration = Duration::from_secs(5);

/// State of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Entry {
    /// It waits for a request.
    Idle,
    /// It has one, which was not begun.
    Received,
    /// It has one that is carried out.
    Busy,
    /// It has the reply to the request of this id.
    Replied(u64),
}

/// The queues of a mount on its way to another process, and `F`, their memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedQueues<F> {
    memory: F,
    address: u64,
    queues: u16,
    depth: u16,
    /// Distance between two payloads; programs that pass none leave nothing between them.
    #[serde(default = "adjoining")]
    stride: usize,
    entries: Vec<Entry>,
}

fn adjoining() -> usize {
    MAX_WRITE
}

impl<F> PassedQueues<F> {
    /// Converts the descriptor.
    pub fn map<G>(self, convert: impl FnOnce(F) -> G) -> PassedQueues<G> {
        let PassedQueues { memory, address, queues, depth, stride, entries } = self;
        PassedQueues { memory: convert(memory), address, queues, depth, stride, entries }
    }
}

/// The queues of a session.
pub(super) struct Queues {
    queues: FuseQueues,
    entries: RefCell<Vec<Entry>>,
    notifier: Notifier,
}

impl Queues {
    /// Allocates the queues; `None` if there should be none, or cannot be.
    pub(super) fn choose(
        rt: &Rt,
        over_io_uring: OverIoUring,
        connection: &impl AsFd,
        notifier: &Notifier,
    ) -> Result<Option<Rc<Queues>>> {
        if over_io_uring == OverIoUring::No {
            return Ok(None);
        }
        let made = sizes(rt).and_then(|sizes| {
            let connection = connection.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
            FuseQueues::new(rt, connection, sizes).map_err(|e| format!("no memory for it: {e}"))
        });
        match made {
            Ok(queues) => {
                let entries = RefCell::new(vec![Entry::Idle; queues.places().count()]);
                Ok(Some(Rc::new(Queues { queues, entries, notifier: notifier.clone() })))
            }
            Err(why) if over_io_uring == OverIoUring::Yes => {
                Err(Error::new(ErrorKind::Unsupported, format!("no FUSE over io_uring (fuse_uring=yes): {why}")))
            }
            Err(why) => {
                tracing::debug!("no FUSE over io_uring: {why}");
                Ok(None)
            }
        }
    }

    /// Continues those of another process.
    pub(super) fn resume(
        rt: &Rt,
        connection: &impl AsFd,
        notifier: &Notifier,
        passed: PassedQueues<OwnedFd>,
    ) -> io::Result<Rc<Queues>> {
        let PassedQueues { memory, address, queues, depth, stride, entries } = passed;
        if stride < MAX_WRITE || !stride.is_multiple_of(BUF_ALIGN_BYTES) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut sizes = FuseSizes::new(queues, depth, MAX_WRITE);
        sizes.stride = stride;
        let connection = connection.as_fd().try_clone_to_owned()?;
        let queues = FuseQueues::resume(rt, connection, (memory, address), sizes)?;
        if entries.len() != queues.places().count() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Rc::new(Queues { queues, entries: RefCell::new(entries), notifier: notifier.clone() }))
    }

    /// Returns the queues for another process.
    pub(super) fn pass_on(&self) -> io::Result<PassedQueues<OwnedFd>> {
        let ((memory, address), sizes) = (self.queues.memory()?, self.queues.sizes());
        let FuseSizes { queues, depth, stride, .. } = sizes;
        Ok(PassedQueues { memory, address, queues, depth, stride, entries: self.entries.borrow().clone() })
    }

    fn set(&self, place: FusePlace, entry: Entry) {
        self.entries.borrow_mut()[place.index] = entry;
    }

    /// Returns whether an entry waits for a request of a program on one of `processors`.
    fn has_idle(&self, processors: &[usize]) -> bool {
        let entries = self.entries.borrow();
        let is_idle = |place: &FusePlace| entries[place.index] == Entry::Idle;
        self.queues.places().filter(is_idle).any(|place| processors.contains(&usize::from(place.queue)))
    }

    /// Waits until every entry has a request, of programs or of a helper that makes some: what an entry has received
    /// goes to another process, and one that waits for a request cannot.
    pub(super) async fn occupy(&self, state: &State) {
        let processors = online_processors();
        if !self.has_idle(&processors) {
            return;
        }
        let call = MountCall::Occupy(state.dir.clone(), self.queues.sizes().depth);
        let syscall_helper = state.syscall_helper.clone();
        // Its requests are answered by the other process.
        state.rt.spawn(off_thread(move || drop(call.make(syscall_helper.as_ref()))));
        let start = Instant::now();
        while self.has_idle(&processors) {
            if start.elapsed() > OCCUPYING_LIMIT {
                tracing::warn!("entries of FUSE over io_uring are still without a request, and are made anew");
                return;
            }
            state.rt.sleep_for(LEAVING_LOOK).await;
        }
    }

    /// Waits while the mount is about to leave this process; returns false when it has.
    async fn is_here(&self, state: &State) -> bool {
        while state.leaving.get() && !self.notifier.is_busy() {
            if state.left.get() {
                return false;
            }
            state.rt.sleep_for(LEAVING_LOOK).await;
        }
        !state.left.get()
    }
}

/// Returns the sizes of the queues on this machine, or why it has none.
fn sizes(rt: &Rt) -> std::result::Result<FuseSizes, String> {
    let queues = FuseQueues::count(rt).ok_or("it needs Linux 6.14")?;
    if !may_run_everywhere() {
        return Err("this process may not run on every processor".to_string());
    }
    depth_of(queues)
        .map(|depth| FuseSizes::new(queues, depth, MAX_WRITE))
        .ok_or_else(|| format!("this machine has more than {} processors", ENTRIES_COUNT / LEAST_DEPTH_COUNT))
}

fn depth_of(queues: u16) -> Option<u16> {
    let depth = (ENTRIES_COUNT / usize::from(queues)).min(MOST_DEPTH_COUNT);
    (depth >= LEAST_DEPTH_COUNT).then_some(depth as u16)
}

impl<H: Handler> Session<H> {
    /// Serves all entries. The kernel holds requests back until it has them.
    pub(super) fn serve_queues(&self, queues: &Rc<Queues>) {
        let state = &self.state;
        *state.queues.borrow_mut() = Some(queues.clone());
        for place in queues.queues.places() {
            let (state, handler, queues) = (state.clone(), self.handler.clone(), queues.clone());
            self.state.rt.spawn(async move {
                if let Err(error) = serve_entry(&state, &handler, &queues, place).await
                    && error.raw_os_error() != Some(libc::ENOTCONN)
                {
                    tracing::debug!(%error, ?place, "an entry of FUSE over io_uring has ended");
                }
            });
        }
    }
}

/// Serves the requests of one entry, until the mount ends or leaves.
async fn serve_entry<H: Handler>(state: &State, handler: &Rc<H>, all: &Queues, place: FusePlace) -> io::Result<()> {
    let mut entry = all.entries.borrow()[place.index];
    loop {
        match entry {
            Entry::Idle => all.queues.fetch(place).await?,
            Entry::Replied(id) => {
                all.set(place, Entry::Idle);
                all.queues.answer(place, id).await?;
            }
            Entry::Received | Entry::Busy => {}
        }
        all.set(place, Entry::Received);
        if !all.is_here(state).await {
            return Ok(());
        }
        all.set(place, Entry::Busy);
        let FuseRequest { id, head, payload, payload_len } = all.queues.received(place)?;
        state.requests.set(state.requests.get() + 1);
        state.by_queues.set(state.by_queues.get() + 1);
        let reply = match Request::decode_parts(&head, payload, payload_len) {
            Some(Request { header, operation }) => handler.clone().handle(header, operation).await,
            None => Reply::Error(libc::EIO),
        };
        let head = reply.head(id);
        let data = match reply {
            Reply::Data(data) => Some(data),
            // Before the answer, since its buffer may be that of the request.
            other => {
                drop(other);
                None
            }
        };
        all.queues.put(place, id, &head, data).await;
        entry = Entry::Replied(id);
        all.set(place, entry);
        state.requests.set(state.requests.get() - 1);
        state.memory.give_back(0);
        if !all.is_here(state).await {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_divided_among_the_processors_and_bounded() {
        let all = [(1, 32), (2, 32), (8, 32), (16, 16), (32, 8)];
        assert!(all.iter().all(|&(queues, depth)| depth_of(queues) == Some(depth)));
        assert_eq!(depth_of(33), None);
    }
}
