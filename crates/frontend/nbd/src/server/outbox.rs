//! Replies to a client: all that are ready when the socket is writable go out in one send.
//!
//! A reply holds its request's permit until it was sent, so the queue is bounded
//! by what a connection may have in flight.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, Piece, WakeCell, is_interrupted};

use super::budget::Permit;
use crate::codec::{ErrorCode, ReplyEncoder, ReplyTo, StatusExtent};

/// Bytes of data after which a send takes no further reply, so that memory is freed while a slow
/// client fetches many large reads.
const BATCH_BYTES: usize = 1 << 20;

/// The reply to one request.
pub(super) struct Reply {
    pub(super) to: ReplyTo,
    pub(super) outcome: Outcome,
    /// Released when the reply was sent.
    pub(super) permit: Permit,
}

/// Outcome of a request.
pub(super) enum Outcome {
    Done,
    /// All of the data.
    Data(Buf),
    /// The data except some holes: pairs of start in the buffer and length, in
    /// rising order, at least one.
    Sparse(Buf, Vec<(usize, usize)>),
    /// Extents of each context, by its number; at least one.
    Status(Vec<(u32, Vec<StatusExtent>)>),
    Failed(Box<Failure>),
}

/// Why a request failed.
pub(super) struct Failure {
    pub(super) code: ErrorCode,
    /// Text for people.
    pub(super) text: String,
    /// Offset of the failure, if known.
    pub(super) at: Option<u64>,
}

#[derive(Default)]
pub(super) struct Outbox {
    ready: RefCell<VecDeque<Reply>>,
    changed: WakeCell,
    closed: Cell<bool>,
    /// Numbers of replies pushed and replies sent or dropped.
    pushed: Cell<u64>,
    sent: Cell<u64>,
    /// A time, and how many replies had been pushed by then.
    mark: Cell<Option<(Instant, u64)>>,
    /// Bytes that the client did not fetch before its connection was passed on, or before this process got it.
    unsent: RefCell<Option<Vec<u8>>>,
}

impl Outbox {
    pub(super) fn push(&self, reply: Reply) {
        self.ready.borrow_mut().push_back(reply);
        self.pushed.set(self.pushed.get() + 1);
        self.changed.wake();
    }

    /// Closes the outbox: no more replies will be pushed.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.changed.wake();
    }

    /// Returns whether replies that were ready at an earlier call, at least `time` ago, have not
    /// all been sent yet. Called periodically; the first call only starts the measurement.
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

    /// Sets the bytes that [`run`](Self::run) sends first. Without any it sends what the stream itself has kept.
    pub(super) fn begin_with(&self, unsent: Vec<u8>) {
        *self.unsent.borrow_mut() = Some(unsent);
    }

    /// Takes the bytes that were not sent because the send was interrupted.
    pub(super) fn take_unsent(&self) -> Vec<u8> {
        self.unsent.take().unwrap_or_default()
    }

    /// Sends replies until the outbox is closed. After an interruption it keeps them instead. If a send fails, shuts
    /// the connection down and drops further replies.
    pub(super) async fn run(&self, stream: impl ByteStream, encoder: ReplyEncoder) {
        let mut batch = Batch::default();
        let mut broken = false;
        let unsent = self.unsent.take();
        batch.pieces.extend(unsent.map(Piece::from));
        while !batch.pieces.is_empty() || self.next(&mut batch, encoder).await {
            if let Some(unsent) = &mut *self.unsent.borrow_mut() {
                batch.pieces.iter().for_each(|piece| unsent.extend_from_slice(piece.bytes()));
            } else if !broken {
                let (result, pieces) = stream.send_vectored(std::mem::take(&mut batch.pieces)).await;
                batch.pieces = pieces;
                match result {
                    Ok(()) => {}
                    Err(error) if is_interrupted(&error) => {
                        *self.unsent.borrow_mut() = Some(batch.pieces.iter().flat_map(Piece::bytes).copied().collect());
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a client disconnected with unsent replies");
                        // Tasks that wait for requests of this client see the end of the stream.
                        let _ = stream.shutdown(Shutdown::Both);
                        broken = true;
                    }
                }
            }
            self.sent.set(self.sent.get() + batch.permits.len() as u64);
            batch.clear();
        }
    }

    /// Fills `batch` with the replies that are ready; returns `false` when the outbox is closed.
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

/// Replies that are sent together.
#[derive(Default)]
struct Batch {
    pieces: Vec<Piece>,
    permits: Vec<Permit>,
    /// Encoded bytes that are not yet in a piece.
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

    /// Frees buffers and then releases permits.
    fn clear(&mut self) {
        self.pieces.clear();
        self.permits.clear();
        self.bytes = 0;
    }
}
