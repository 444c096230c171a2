//! One connection from its first byte to its last.
//!
//! One task reads requests and starts a task for each; another sends what is ready. A request runs
//! to its end whatever becomes of the client, and replies leave in the order in which requests end.

use std::cell::Cell;
use std::io;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::{Buf, Operation};
use forkdisk_uring::{ByteStream, Rt};

use super::budget::{Permit, Quota, SharedMemory};
use super::export::{Export, Exports};
use super::inbox::Inbox;
use super::negotiate::{Chosen, Ended, Entered, Security, enter};
use super::options::ServerOptions;
use super::outbox::{Done, Outbox, Reply};
use super::statistics::{Counters, count};
use crate::codec::{Action, ErrorCode, ExportInfo, MAX_DRAIN, REQUEST_HEADER, ReplyEncoder, Request, RequestError};

/// What the server knows of a connection, to stop it or to take its memory away.
pub(super) struct Control {
    /// Ends directions of the stream, whatever its type.
    shutdown: Box<dyn Fn(Shutdown)>,
    phase: Cell<Phase>,
    outbox: Rc<Outbox>,
    /// When the payload that is being received began.
    payload_since: Cell<Option<Instant>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Handshake,
    Transmission,
    /// No further request is read.
    Draining,
}

impl Control {
    pub(super) fn new(stream: &impl ByteStream) -> Rc<Control> {
        let stream = stream.clone();
        // It fails when the client was faster.
        let shutdown = Box::new(move |how| drop(stream.shutdown(how)));
        Rc::new(Control {
            shutdown,
            phase: Cell::new(Phase::Handshake),
            outbox: Rc::default(),
            payload_since: Cell::new(None),
        })
    }

    /// Reads no further request; those in flight end. A handshake ends at once.
    pub(super) fn stop(&self) {
        match self.phase.replace(Phase::Draining) {
            Phase::Handshake => self.disconnect(),
            _ => (self.shutdown)(Shutdown::Read),
        }
    }

    /// Ends the connection without waiting for anything.
    pub(super) fn disconnect(&self) {
        self.phase.set(Phase::Draining);
        (self.shutdown)(Shutdown::Both);
    }

    /// Whether the client has been taking longer than `time` for a transfer; see
    /// [`Outbox::has_stalled`].
    pub(super) fn has_stalled(&self, time: Duration) -> bool {
        let payload = self.payload_since.get().is_some_and(|since| since.elapsed() >= time);
        self.outbox.has_stalled(time) || payload
    }

    fn is_draining(&self) -> bool {
        self.phase.get() == Phase::Draining
    }
}

/// Why a connection ended, when it was not the client's wish.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("no export was chosen within {0:?}")]
    HandshakeTimeout(Duration),
    #[error(transparent)]
    Negotiation(Ended),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("a write of {0} bytes is more than the server takes in to refuse it")]
    Oversized(u64),
    #[error("the client left in the middle of a write's data")]
    MidPayload,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What the connections of a server share.
pub(super) struct Shared<'a, X> {
    pub(super) rt: &'a Rt,
    pub(super) exports: &'a X,
    pub(super) options: &'a ServerOptions,
    pub(super) memory: &'a Rc<SharedMemory>,
    pub(super) counters: &'a Counters,
}

/// Serves one client until it has gone.
pub(super) async fn serve<X: Exports, S: ByteStream>(
    shared: &Shared<'_, X>,
    stream: S,
    security: &Security,
    control: &Rc<Control>,
) -> Result<(), Broken> {
    let limit = shared.options.handshake_timeout;
    match shared.rt.timeout(limit, enter(shared.exports, stream, security)).await {
        Err(_) => Err(Broken::HandshakeTimeout(limit)),
        Ok(Err(Ended::Left)) => Ok(()),
        Ok(Err(ended)) => Err(Broken::Negotiation(ended)),
        Ok(Ok(Entered::Clear(inbox, chosen))) => transmit(shared, inbox, chosen, control).await,
        Ok(Ok(Entered::Encrypted(inbox, chosen))) => {
            count(&shared.counters.encrypted);
            transmit(shared, inbox, chosen, control).await
        }
    }
}

/// The transmission phase.
async fn transmit<X: Exports, S: ByteStream>(
    shared: &Shared<'_, X>,
    inbox: Inbox<S>,
    chosen: Chosen<X::Export>,
    control: &Rc<Control>,
) -> Result<(), Broken> {
    if control.is_draining() {
        return Ok(());
    }
    let Shared { rt, exports, options, memory, counters } = shared;
    control.phase.set(Phase::Transmission);
    let (outbox, stream) = (control.outbox.clone(), inbox.stream().clone());
    let sender = {
        let (outbox, stream) = (outbox.clone(), stream.clone());
        rt.spawn(async move { outbox.run(stream, ReplyEncoder).await })
    };
    let quota = Quota::new(options, (*memory).clone());
    let Chosen { export, info } = chosen;
    let session = Rc::new(Session { export, outbox: outbox.clone() });
    let reader = Reader { rt, exports: *exports, control, info, session, quota: quota.clone(), counters };
    let result = reader.run(inbox).await;
    control.phase.set(Phase::Draining);
    drain(rt, control, &quota, options.drain_timeout).await;
    outbox.close();
    sender.await;
    // The client has what it asked for; whether it hears the goodbye is its business.
    let _ = rt.timeout(options.drain_timeout, stream.finish()).await;
    result
}

/// Waits for the requests in flight, and disconnects a client that does not fetch their replies.
async fn drain(rt: &Rt, control: &Control, quota: &Quota, limit: Duration) {
    control.outbox.has_stalled(limit);
    while rt.timeout(limit, quota.idle()).await.is_err() {
        if control.outbox.has_stalled(limit) {
            control.disconnect();
        }
    }
}

/// What the tasks of a connection's requests share.
struct Session<E> {
    export: E,
    outbox: Rc<Outbox>,
}

/// Reads requests and starts them.
struct Reader<'a, X: Exports> {
    rt: &'a Rt,
    exports: &'a X,
    control: &'a Control,
    info: ExportInfo,
    session: Rc<Session<X::Export>>,
    quota: Rc<Quota>,
    counters: &'a Counters,
}

impl<X: Exports> Reader<'_, X> {
    async fn run<S: ByteStream>(self, mut inbox: Inbox<S>) -> Result<(), Broken> {
        while !self.control.is_draining() {
            let Some(request) = Request::decode(inbox.bytes())? else {
                if !inbox.fill().await? {
                    return Ok(());
                }
                continue;
            };
            inbox.consume(REQUEST_HEADER);
            match request.check(self.info.size, self.info.read_only) {
                Ok(Action::Disconnect) => return Ok(()),
                Ok(action) => self.start(&mut inbox, request.cookie, action).await?,
                Err(code) => self.refuse(&mut inbox, &request, code).await?,
            }
        }
        Ok(())
    }

    async fn refuse(
        &self,
        inbox: &mut Inbox<impl ByteStream>,
        request: &Request,
        code: ErrorCode,
    ) -> Result<(), Broken> {
        let payload = request.payload();
        if payload > MAX_DRAIN {
            return Err(Broken::Oversized(payload));
        }
        count(&self.counters.refused_requests);
        let permit = self.quota.admit(0).await;
        if payload > 0 && !inbox.skip(payload).await? {
            return Err(Broken::MidPayload);
        }
        self.session.outbox.push(Reply { cookie: request.cookie, outcome: Err(code), permit });
        Ok(())
    }

    async fn start(&self, inbox: &mut Inbox<impl ByteStream>, cookie: u64, action: Action) -> Result<(), Broken> {
        let len = match action {
            Action::Read { len, .. } | Action::Write { len, .. } => len as usize,
            _ => 0,
        };
        let mut permit = self.quota.admit(len).await;
        let session = self.session.clone();
        match action {
            Action::Read { offset, .. } => {
                let buf = self.exports.buffer(len);
                self.rt.spawn(session.read(cookie, permit, offset, buf));
            }
            Action::Write { offset, fua, .. } => {
                let buf = self.payload(inbox, self.exports.buffer(len)).await?;
                permit.restart();
                self.rt.spawn(session.write(cookie, permit, offset, buf, fua));
            }
            action => drop(self.rt.spawn(session.other(cookie, permit, action))),
        }
        Ok(())
    }

    async fn payload(&self, inbox: &mut Inbox<impl ByteStream>, buf: Buf) -> Result<Buf, Broken> {
        if inbox.bytes().len() < buf.len() {
            self.control.payload_since.set(Some(Instant::now()));
        }
        let read = inbox.read(buf).await;
        self.control.payload_since.set(None);
        read?.ok_or(Broken::MidPayload)
    }
}

impl<E: Export> Session<E> {
    async fn read(self: Rc<Self>, cookie: u64, permit: Permit, offset: u64, buf: Buf) {
        let (result, buf) = match buf.is_empty() {
            true => (Ok(()), buf),
            false => self.export.read(offset, buf).await,
        };
        let outcome = outcome(result).map(|()| Done::Data { offset, buf });
        self.answer(Operation::Read, Reply { cookie, outcome, permit });
    }

    async fn write(self: Rc<Self>, cookie: u64, permit: Permit, offset: u64, buf: Buf, fua: bool) {
        let (result, buf) = match buf.is_empty() {
            true => (Ok(()), buf),
            false => self.export.write(offset, buf, fua).await,
        };
        drop(buf);
        let outcome = outcome(result).map(|()| Done::Plain);
        self.answer(Operation::Write, Reply { cookie, outcome, permit });
    }

    async fn other(self: Rc<Self>, cookie: u64, permit: Permit, action: Action) {
        let result = match action {
            Action::Flush => self.export.flush().await,
            Action::Trim { len: 0, .. } | Action::WriteZeroes { len: 0, .. } => Ok(()),
            Action::Trim { offset, len, fua } => self.export.trim(offset, len, fua).await,
            Action::WriteZeroes { offset, len, fua, no_hole } => {
                self.export.write_zeroes(offset, len, fua, no_hole).await
            }
            Action::Read { .. } | Action::Write { .. } | Action::Disconnect => Ok(()),
        };
        let operation = match action {
            Action::Trim { .. } => Operation::Discard,
            Action::WriteZeroes { .. } => Operation::Zero,
            _ => Operation::Flush,
        };
        let outcome = outcome(result).map(|()| Done::Plain);
        self.answer(operation, Reply { cookie, outcome, permit });
    }

    fn answer(&self, operation: Operation, reply: Reply) {
        self.export.took(operation, reply.permit.age());
        self.outbox.push(reply);
    }
}

fn outcome(result: forkdisk::Result<()>) -> Result<(), ErrorCode> {
    result.map_err(|error| {
        tracing::debug!(%error, "a request failed");
        ErrorCode::from_errno(error.errno())
    })
}
