//! One connection from its first byte to its last.
//!
//! One task reads requests and starts a task for each; another sends what is ready. A request runs
//! to its end whatever becomes of the client, and replies leave in the order in which requests end.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::Buf;
use forkdisk_uring::{PeerCred, Rt, Stream};

use super::budget::{Permit, Quota, SharedMemory};
use super::export::{Export, Exports};
use super::inbox::Inbox;
use super::negotiate::{Chosen, Ended, negotiate};
use super::options::ServerOptions;
use super::outbox::{Done, Outbox, Reply};
use crate::codec::{Action, ErrorCode, ExportInfo, MAX_DRAIN, REQUEST_HEADER, ReplyEncoder, Request, RequestError};

/// What the server knows of a connection, to stop it or to take its memory away.
pub(super) struct Control {
    stream: Stream,
    phase: Cell<Phase>,
    outbox: Rc<Outbox>,
    /// When the payload that is being received began.
    payload_since: Cell<Option<Instant>>,
    /// What the export that was chosen is called at the moment.
    export: RefCell<Option<Box<dyn Fn() -> String>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Handshake,
    Transmission,
    /// No further request is read.
    Draining,
}

impl Control {
    pub(super) fn new(stream: Stream) -> Rc<Control> {
        Rc::new(Control {
            stream,
            phase: Cell::new(Phase::Handshake),
            outbox: Rc::default(),
            payload_since: Cell::new(None),
            export: RefCell::new(None),
        })
    }

    /// The present name of the export that the client uses; `None` before it has chosen one.
    pub(super) fn export(&self) -> Option<String> {
        self.export.borrow().as_ref().map(|name| name())
    }

    /// Who connected, as far as the socket tells.
    pub(super) fn peer(&self) -> Option<PeerCred> {
        self.stream.peer_cred().ok()
    }

    /// Reads no further request; those in flight end. A handshake ends at once.
    pub(super) fn stop(&self) {
        match self.phase.replace(Phase::Draining) {
            Phase::Handshake => self.disconnect(),
            _ => drop(self.stream.shutdown(Shutdown::Read)),
        }
    }

    /// Ends the connection without waiting for anything.
    pub(super) fn disconnect(&self) {
        self.phase.set(Phase::Draining);
        // It fails when the client was faster.
        let _ = self.stream.shutdown(Shutdown::Both);
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

/// Serves one client until it has gone.
pub(super) async fn serve<X: Exports>(
    rt: &Rt,
    exports: &Rc<X>,
    options: &ServerOptions,
    memory: &Rc<SharedMemory>,
    control: &Rc<Control>,
) -> Result<(), Broken> {
    let mut inbox = Inbox::new(control.stream.clone());
    let limit = options.handshake_timeout;
    let chosen = match rt.timeout(limit, negotiate(&**exports, &control.stream, &mut inbox)).await {
        Err(_) => return Err(Broken::HandshakeTimeout(limit)),
        Ok(Err(Ended::Left)) => return Ok(()),
        Ok(Err(ended)) => return Err(Broken::Negotiation(ended)),
        Ok(Ok(chosen)) => chosen,
    };
    if control.is_draining() {
        return Ok(());
    }
    control.phase.set(Phase::Transmission);
    let outbox = control.outbox.clone();
    let sender = {
        let (outbox, stream) = (outbox.clone(), control.stream.clone());
        rt.spawn(async move { outbox.run(stream, ReplyEncoder).await })
    };
    let quota = Quota::new(options, memory.clone());
    let Chosen { export, info } = chosen;
    let session = Rc::new(Session { export, outbox: outbox.clone() });
    let named = session.clone();
    *control.export.borrow_mut() = Some(Box::new(move || named.export.info().name));
    let reader = Reader { rt, exports: &**exports, control, info, session, quota: quota.clone() };
    let result = reader.run(inbox).await;
    control.phase.set(Phase::Draining);
    drain(rt, control, &quota, options.drain_timeout).await;
    outbox.close();
    sender.await;
    // The export is let go of with the last request.
    control.export.take();
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
}

impl<X: Exports> Reader<'_, X> {
    async fn run(self, mut inbox: Inbox) -> Result<(), Broken> {
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

    async fn refuse(&self, inbox: &mut Inbox, request: &Request, code: ErrorCode) -> Result<(), Broken> {
        let payload = request.payload();
        if payload > MAX_DRAIN {
            return Err(Broken::Oversized(payload));
        }
        let permit = self.quota.admit(0).await;
        if payload > 0 && !inbox.skip(payload).await? {
            return Err(Broken::MidPayload);
        }
        self.session.outbox.push(Reply { cookie: request.cookie, outcome: Err(code), permit });
        Ok(())
    }

    async fn start(&self, inbox: &mut Inbox, cookie: u64, action: Action) -> Result<(), Broken> {
        let len = match action {
            Action::Read { len, .. } | Action::Write { len, .. } => len as usize,
            _ => 0,
        };
        let permit = self.quota.admit(len).await;
        let session = self.session.clone();
        match action {
            Action::Read { offset, .. } => {
                let buf = self.exports.buffer(len);
                self.rt.spawn(session.read(cookie, permit, offset, buf));
            }
            Action::Write { offset, fua, .. } => {
                let buf = self.payload(inbox, self.exports.buffer(len)).await?;
                self.rt.spawn(session.write(cookie, permit, offset, buf, fua));
            }
            action => drop(self.rt.spawn(session.other(cookie, permit, action))),
        }
        Ok(())
    }

    async fn payload(&self, inbox: &mut Inbox, buf: Buf) -> Result<Buf, Broken> {
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
        self.outbox.push(Reply { cookie, outcome, permit });
    }

    async fn write(self: Rc<Self>, cookie: u64, permit: Permit, offset: u64, buf: Buf, fua: bool) {
        let (result, buf) = match buf.is_empty() {
            true => (Ok(()), buf),
            false => self.export.write(offset, buf, fua).await,
        };
        drop(buf);
        let outcome = outcome(result).map(|()| Done::Plain);
        self.outbox.push(Reply { cookie, outcome, permit });
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
        let outcome = outcome(result).map(|()| Done::Plain);
        self.outbox.push(Reply { cookie, outcome, permit });
    }
}

fn outcome(result: forkdisk::Result<()>) -> Result<(), ErrorCode> {
    result.map_err(|error| {
        tracing::debug!(%error, "a request failed");
        ErrorCode::from_errno(error.errno())
    })
}
