//! Replies to a client: whatever is ready when the socket takes more goes out in one send.
//!
//! A reply holds its request's permit until it has been sent, so what can pile up here is bounded
//! by what a connection may have in flight.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, Piece};

use super::budget::Permit;
use super::sync::WakeCell;
use crate::codec::{ErrorCode, ReplyEncoder, ReplyTo, StatusExtent};

/// Data after which a send takes no further reply: so memory comes back while a slow client
/// fetches many large reads.
const BATCH_BYTES: usize = 1 << 20;

/// The answer to one request.
pub(super) struct Reply {
    pub(super) to: ReplyTo,
    pub(super) outcome: Outcome,
    /// Given back when the reply has been sent.
    pub(super) permit: Permit,
}

/// What a request led to.
pub(super) enum Outcome {
    Done,
    /// All of the data.
    Data(Buf),
    /// The data but for some holes: where they begin in the buffer and how long they are, in
    /// rising order, at least one.
    Sparse(Buf, Vec<(usize, usize)>),
    /// What each context says, by its number; at least one.
    Status(Vec<(u32, Vec<StatusExtent>)>),
    Failed(Box<Failure>),
}

/// Why a request failed.
pub(super) struct Failure {
    pub(super) code: ErrorCode,
    /// For people.
    pub(super) text: String,
    /// Where, if that is known.
    pub(super) at: Option<u64>,
}

#[derive(Default)]
pub(super) struct Outbox {
    ready: RefCell<VecDeque<Reply>>,
    changed: WakeCell,
    closed: Cell<bool>,
    /// Replies that were put in here, and those that are done with.
    pushed: Cell<u64>,
    sent: Cell<u64>,
    /// A moment and how many replies had been pushed then.
    mark: Cell<Option<(Instant, u64)>>,
}

impl Outbox {
    pub(super) fn push(&self, reply: Reply) {
        self.ready.borrow_mut().push_back(reply);
        self.pushed.set(self.pushed.get() + 1);
        self.changed.wake();
    }

    /// No reply will be waited for any more.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.changed.wake();
    }

    /// Whether replies that were ready at an earlier call, at least `time` ago, have still not all
    /// been fetched. To be asked now and then; the first call only looks.
    pub(super) fn has_stalled(&self, time: Duration) -> bool {
        let sent = self.sent.get();
        match self.mark.get() {
            Some((since, pushed)) if sent < pushed => since.elapsed() >= time,
            _ => {
                let pushed = self.pushed.get();
                self.mark.set((sent < pushed).then(|| (Instant::now(), pushed)));
                false
            }
        }
    }

    /// Sends replies until the outbox is closed. When a send fails the connection is shut down and
    /// further replies are thrown away.
    pub(super) async fn run(&self, stream: impl ByteStream, encoder: ReplyEncoder) {
        let mut batch = Batch::default();
        let mut broken = false;
        while self.next(&mut batch, encoder).await {
            if !broken {
                let (result, pieces) = stream.send_vectored(std::mem::take(&mut batch.pieces)).await;
                batch.pieces = pieces;
                if let Err(error) = result {
                    tracing::debug!(%error, "a client has gone with replies on their way");
                    // Whoever waits for requests of this client sees its end.
                    let _ = stream.shutdown(Shutdown::Both);
                    broken = true;
                }
            }
            self.sent.set(self.sent.get() + batch.permits.len() as u64);
            batch.clear();
        }
    }

    /// Fills `batch` with what is ready; `false` when the outbox is closed.
    async fn next(&self, batch: &mut Batch, encoder: ReplyEncoder) -> bool {
        let look = || match (self.ready.borrow().is_empty(), self.closed.get()) {
            (false, _) => Some(true),
            (true, closed) => closed.then_some(false),
        };
        if !self.changed.until(look).await {
            return false;
        }
        let mut ready = self.ready.borrow_mut();
        while batch.bytes < BATCH_BYTES {
            let Some(reply) = ready.pop_front() else {
                break;
            };
            batch.add(reply, encoder);
        }
        batch.end_bytes();
        true
    }
}

/// Replies on their way out together.
#[derive(Default)]
struct Batch {
    pieces: Vec<Piece>,
    permits: Vec<Permit>,
    /// Encoded and not yet one of the pieces.
    encoded: Vec<u8>,
    bytes: usize,
}

impl Batch {
    fn add(&mut self, reply: Reply, encoder: ReplyEncoder) {
        let Reply { to, outcome, permit } = reply;
        self.permits.push(permit);
        match outcome {
            Outcome::Done => encoder.done(to, &mut self.encoded),
            Outcome::Failed(failure) => {
                encoder.error(to, failure.code, &failure.text, failure.at, &mut self.encoded);
            }
            Outcome::Data(buf) => {
                self.bytes += buf.len();
                encoder.data(to, to.offset, buf.len() as u32, true, &mut self.encoded);
                self.end_bytes();
                self.pieces.push(buf.into());
            }
            Outcome::Sparse(buf, holes) => self.add_sparse(to, buf, &holes, encoder),
            Outcome::Status(contexts) => {
                let count = contexts.len();
                for (i, (id, extents)) in contexts.iter().enumerate() {
                    encoder.status(to, *id, extents, i + 1 == count, &mut self.encoded);
                }
            }
        }
    }

    fn add_sparse(&mut self, to: ReplyTo, buf: Buf, holes: &[(usize, usize)], encoder: ReplyEncoder) {
        let (buf, mut at) = (Rc::new(buf), 0);
        let end = buf.len();
        for &(hole, len) in holes.iter().chain([&(end, 0)]) {
            if at < hole {
                self.bytes += hole - at;
                encoder.data(to, to.offset + at as u64, (hole - at) as u32, hole == end, &mut self.encoded);
                self.end_bytes();
                self.pieces.push(Piece::Part(buf.clone(), at..hole));
            }
            at = hole + len;
            if len > 0 {
                encoder.hole(to, to.offset + hole as u64, len as u32, at == end, &mut self.encoded);
            }
        }
    }

    fn end_bytes(&mut self) {
        if !self.encoded.is_empty() {
            self.pieces.push(std::mem::take(&mut self.encoded).into());
        }
    }

    /// Frees buffers and gives permits back, in this order.
    fn clear(&mut self) {
        self.pieces.clear();
        self.permits.clear();
        self.bytes = 0;
    }
}
