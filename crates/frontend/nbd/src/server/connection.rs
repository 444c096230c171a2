//! One connection from its first byte to its last.
//!
//! One task reads requests and starts a task for each; another sends what is ready.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::{Buf, Error, ErrorKind, WriteFlags};
use forkdisk_uring::{ByteStream, PeerCred, Rt, Turnstile, is_interrupted};

use super::budget::{Quota, SharedMemory};
use super::export::{Export, Exports};
use super::fair::{Fair, Share};
use super::inbox::Inbox;
use super::negotiate::{Chosen, Ended, Entered, Security, Terms, enter, enter_encrypted};
use super::options::ServerOptions;
use super::outbox::{Failure, Outbox, Outcome, Reply};
use super::pacing::Pacing;
use super::passed::{Agreed, PassedClient, Stage};
use super::session::{Job, Session};
use super::statistics::{Counters, count};
use crate::codec::{Action, CMD_READ, ErrorCode, MAX_DRAIN, ReplyEncoder, ReplyTo, Request, RequestError};
use crate::tls::{Leaving, TlsStream};

/// How often, and after which time, a connection is passed on again that could not be for want of descriptors.
const PASS_ATTEMPTS_COUNT: usize = 200;
const PASS_AGAIN: Duration = Duration::from_millis(5);

/// Handle of a connection, by which the server stops it or detects that it has stalled.
pub(super) struct Control {
    /// Shuts down directions of the stream, independent of its type.
    shutdown: Box<dyn Fn(Shutdown)>,
    /// Ends a receive or a send in flight.
    interrupt: Box<dyn Fn(Waits)>,
    /// The connection goes to another process at the next boundary of requests.
    is_leaving: Cell<bool>,
    /// The other process can continue it if it is encrypted.
    takes_encrypted: Cell<bool>,
    peer: Option<PeerCred>,
    phase: Cell<Phase>,
    outbox: Rc<Outbox>,
    /// Time at which the payload being received began.
    payload_since: Cell<Option<Instant>>,
    /// Returns the current names of the chosen export.
    export: RefCell<Option<Box<dyn Fn() -> Names>>>,
    /// The export that the client is about to open.
    entering: RefCell<Option<String>>,
}

/// Names of a chosen export.
pub(super) struct Names {
    pub(super) export: String,
    /// That of the disk that it shows.
    pub(super) shows: String,
}

/// What a task waits for on a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waits {
    Receive,
    Send,
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
        let (stream, peer) = (stream.clone(), stream.peer());
        // Fails if the client has closed the connection already.
        let ended = stream.clone();
        let shutdown = Box::new(move |how| drop(ended.shutdown(how)));
        let interrupt = Box::new(move |waits| match waits {
            Waits::Receive => stream.interrupt(),
            Waits::Send => stream.interrupt_send(),
        });
        Rc::new(Control {
            shutdown,
            interrupt,
            is_leaving: Cell::new(false),
            takes_encrypted: Cell::new(false),
            peer,
            phase: Cell::new(Phase::Handshake),
            outbox: Rc::default(),
            payload_since: Cell::new(None),
            export: RefCell::new(None),
            entering: RefCell::new(None),
        })
    }

    /// Returns the current names of the client's export; `None` before it has chosen one.
    pub(super) fn export(&self) -> Option<Names> {
        self.export.borrow().as_ref().map(|name| name())
    }

    /// Records that the client is about to open `export`; it counts as a client of it from now on.
    pub(super) fn enter(&self, export: &str) {
        *self.entering.borrow_mut() = Some(export.to_owned());
    }

    /// Returns whether the client uses `export` or is about to open it.
    pub(super) fn is_on(&self, export: &str) -> bool {
        match self.export() {
            Some(names) => names.export == export,
            None => self.entering.borrow().as_deref() == Some(export),
        }
    }

    /// Returns the peer's credentials, as far as the socket provides them.
    pub(super) fn peer(&self) -> Option<PeerCred> {
        self.peer
    }

    /// Stops reading requests; those in flight end. A handshake is aborted.
    pub(super) fn stop(&self) {
        match self.phase.replace(Phase::Draining) {
            Phase::Handshake => self.disconnect(),
            _ => (self.shutdown)(Shutdown::Read),
        }
    }

    /// Stops the connection at the next boundary of requests, to be passed on. What is interrupted besides receives may
    /// be called again until it has stopped. `encrypted`: the other process can continue encrypted connections.
    pub(super) fn leave(&self, waits: Waits, encrypted: bool) {
        self.is_leaving.set(true);
        self.takes_encrypted.set(encrypted);
        (self.interrupt)(waits);
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.get()
    }

    /// Closes the connection at once.
    pub(super) fn disconnect(&self) {
        self.phase.set(Phase::Draining);
        (self.shutdown)(Shutdown::Both);
    }

    /// Returns whether a transfer to or from the client has taken longer than `time`; see
    /// [`Outbox::has_stalled`].
    pub(super) fn has_stalled(&self, time: Duration) -> bool {
        let payload = self.payload_since.get().is_some_and(|since| since.elapsed() >= time);
        self.outbox.has_stalled(time) || payload
    }

    fn is_draining(&self) -> bool {
        self.phase.get() == Phase::Draining
    }
}

/// Why a connection ended, unless the client closed it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the client was idle for {0:?} without choosing an export (handshake_timeout)")]
    HandshakeTimeout(Duration),
    #[error(transparent)]
    Negotiation(Ended),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("a write of {0} bytes is more than the server takes in to refuse it")]
    Oversized(u64),
    #[error("the client disconnected in the middle of a write's data")]
    MidPayload,
    #[error("it cannot be continued after an upgrade: {0}")]
    Resume(Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// State shared by all connections of a server.
pub(super) struct Common<X> {
    pub(super) rt: Rt,
    pub(super) exports: Rc<X>,
    pub(super) options: ServerOptions,
    pub(super) memory: Rc<SharedMemory>,
    pub(super) fair: Rc<Fair>,
    pub(super) pacing: Pacing,
    pub(super) counters: Rc<Counters>,
}

/// A connection from its beginning, or from where another process left it.
pub(super) struct Begin<S> {
    pub(super) stream: S,
    pub(super) security: Security,
    pub(super) earlier: Option<PassedClient<()>>,
}

/// Serves one client until it disconnects, or leaves: then returns what another process needs to continue. `admits`
/// returns whether it may open an export.
pub(super) async fn serve<X: Exports, S: ByteStream>(
    common: &Common<X>,
    begin: Begin<S>,
    control: &Rc<Control>,
    admits: &dyn Fn(&str) -> bool,
) -> Result<Option<PassedClient>, Broken> {
    let (patience, multi_conn) = (common.options.handshake_timeout, common.options.multi_conn());
    let (pacing, fair) = (&common.pacing, &*common.fair);
    let is_leaving = &|| control.is_leaving();
    let terms = Terms { rt: &common.rt, patience, multi_conn, admits, is_leaving, pacing, fair };
    let Begin { stream, security, earlier } = begin;
    let exports = &*common.exports;
    let Some(PassedClient { received, mut unsent, tls, stage, .. }) = earlier else {
        let entered = enter(exports, Inbox::after(stream.clone(), &[]), &security, None, terms).await;
        return proceed(common, entered, (&stream, &security), control).await;
    };
    let tls = tls.map(|tls| TlsStream::resume(stream.clone(), tls, &mut unsent)).transpose();
    let tls = tls.map_err(|error| Broken::Resume(Error::io("its TLS session", error)))?;
    let agreed = match stage {
        Stage::Negotiation { agreed, .. } => agreed,
        Stage::Transmission { .. } => {
            let chosen = resume(exports, stage).map_err(Broken::Resume)?;
            control.outbox.begin_with(unsent);
            return match tls {
                None => transmit(common, Inbox::after(stream, &received), chosen, control, &clear).await,
                Some(tls) => transmit_encrypted(common, Inbox::after(tls, &received), chosen, control).await,
            };
        }
    };
    let entered = match tls {
        None => enter(exports, Inbox::after(stream.clone(), &received), &security, Some(agreed), terms).await,
        Some(stream) => {
            let missing = || Broken::Resume(Error::new(ErrorKind::Invalid, "TLS is not configured any more"));
            let tls = security.tls().ok_or_else(missing)?;
            enter_encrypted(exports, Inbox::after(stream, &received), tls, agreed, terms).await
        }
    };
    proceed(common, entered, (&stream, &security), control).await
}

/// Serves a client that has ended its negotiation.
async fn proceed<X: Exports, S: ByteStream>(
    common: &Common<X>,
    entered: Result<Entered<S, X::Export>, Ended>,
    (stream, security): (&S, &Security),
    control: &Rc<Control>,
) -> Result<Option<PassedClient>, Broken> {
    let client = |received: Vec<u8>, with_tls: bool, agreed: Agreed| {
        let stage = Stage::Negotiation { only: security.only(), with_tls, agreed };
        PassedClient { socket: (), received, unsent: Vec::new(), tls: None, stage }
    };
    match entered {
        Err(Ended::Io(e)) if e.kind() == io::ErrorKind::TimedOut => {
            Err(Broken::HandshakeTimeout(common.options.handshake_timeout))
        }
        Err(ended) if ended.is_a_farewell() => Ok(None),
        Err(ended) => Err(Broken::Negotiation(ended)),
        Ok(Entered::Leaving(received, agreed)) => {
            let client = client(received, security.tls().is_some(), agreed);
            Ok(pass_on(&common.rt, stream, &clear, client).await?)
        }
        Ok(Entered::LeavingEncrypted(stream, received, agreed)) => {
            let client = client(received, true, agreed);
            Ok(pass_on(&common.rt, &stream, &|| encrypted(&stream, control), client).await?)
        }
        Ok(Entered::Clear(inbox, chosen)) => transmit(common, inbox, chosen, control, &clear).await,
        Ok(Entered::Encrypted(inbox, chosen)) => {
            count(&common.counters.encrypted);
            transmit_encrypted(common, inbox, chosen, control).await
        }
    }
}

/// What a stream adds to a connection that is passed on.
enum Adds {
    Nothing,
    Session(Box<Leaving>),
    /// The other process cannot continue it.
    Stays,
}

/// How a stream leaves.
type Leaves<'a> = &'a dyn Fn() -> io::Result<Adds>;

/// An unencrypted stream has no state.
fn clear() -> io::Result<Adds> {
    Ok(Adds::Nothing)
}

fn encrypted(stream: &TlsStream<impl ByteStream>, control: &Control) -> io::Result<Adds> {
    match control.takes_encrypted.get() {
        true => stream.leave().map(|leaving| Adds::Session(Box::new(leaving))),
        false => Ok(Adds::Stays),
    }
}

/// Returns a connection for another process; `None` if its state lies in this one. For want of descriptors, waits until
/// those of others are closed.
async fn pass_on(
    rt: &Rt,
    stream: &impl ByteStream,
    leaves: Leaves<'_>,
    client: PassedClient<()>,
) -> io::Result<Option<PassedClient>> {
    let adds = leaves()?;
    if matches!(adds, Adds::Stays) {
        return Ok(None);
    }
    let mut socket = stream.pass_on();
    for _ in 0..PASS_ATTEMPTS_COUNT {
        let Err(error) = &socket else { break };
        tracing::debug!(%error, "a connection is not passed on yet");
        rt.sleep_for(PASS_AGAIN).await;
        socket = stream.pass_on();
    }
    let Ok(Some(socket)) = socket else { return Ok(None) };
    let mut client = client.map(|()| socket);
    if let Adds::Session(leaving) = adds {
        let Leaving { session, received, unsent } = *leaving;
        client.received.extend(received);
        client.unsent.splice(0..0, unsent);
        client.tls = Some(session);
    }
    Ok(Some(client))
}

/// Opens the export and the contexts that a client had chosen in another process.
fn resume<X: Exports>(exports: &X, stage: Stage) -> forkdisk::Result<Chosen<X::Export>> {
    let missing = |what: &str| Error::new(ErrorKind::NotFound, format!("{what} of a client is not there any more"));
    let Stage::Transmission { export: name, read_only, style, contexts: names } = stage else {
        return Err(missing("the export"));
    };
    let export = exports.open(&name)?;
    let mut info = export.info();
    info.read_only |= read_only;
    let open = |name: &String| export.context(name).ok_or_else(|| missing("a context"));
    let contexts = names.iter().map(open).collect::<forkdisk::Result<_>>()?;
    Ok(Chosen { export, info, style, contexts, context_names: names })
}

/// Runs the transmission phase under TLS.
async fn transmit_encrypted<X: Exports, S: ByteStream>(
    common: &Common<X>,
    inbox: Inbox<TlsStream<S>>,
    chosen: Chosen<X::Export>,
    control: &Rc<Control>,
) -> Result<Option<PassedClient>, Broken> {
    let stream = inbox.stream().clone();
    transmit(common, inbox, chosen, control, &|| encrypted(&stream, control)).await
}

/// Runs the transmission phase.
async fn transmit<X: Exports, S: ByteStream>(
    common: &Common<X>,
    inbox: Inbox<S>,
    chosen: Chosen<X::Export>,
    control: &Rc<Control>,
    leaves: Leaves<'_>,
) -> Result<Option<PassedClient>, Broken> {
    if control.is_draining() {
        return Ok(None);
    }
    let Common { rt, exports, options, counters, .. } = common;
    control.phase.set(Phase::Transmission);
    let (outbox, stream) = (control.outbox.clone(), inbox.stream().clone());
    let Chosen { export, info, style, contexts, context_names } = chosen;
    let sender = {
        let (outbox, stream) = (outbox.clone(), stream.clone());
        rt.spawn(async move { outbox.run(stream, ReplyEncoder::new(style)).await })
    };
    let quota = Quota::new(options, common.memory.clone());
    let session = Rc::new(Session { rt: rt.clone(), export, outbox: outbox.clone(), style, contexts });
    let named = session.clone();
    *control.export.borrow_mut() = Some(Box::new(move || {
        let export = &named.export;
        Names { export: export.info().name, shows: export.shows() }
    }));
    let share = Share::new(&common.fair);
    let read_only = info.read_only;
    let reader = Reader { exports: &**exports, control, read_only, session, quota: quota.clone(), share, counters };
    let result = reader.run(inbox).await;
    control.phase.set(Phase::Draining);
    drain(rt, control, &quota, options.drain_timeout).await;
    outbox.close();
    sender.await;
    // The export is released when its last request ends.
    let export = control.export.take().map(|names| names().export).unwrap_or_default();
    control.entering.take();
    let result = match result {
        Ok(Some(received)) => {
            let stage = Stage::Transmission { export, read_only, style, contexts: context_names };
            let unsent = outbox.take_unsent();
            let client = PassedClient { socket: (), received, unsent, tls: None, stage };
            match pass_on(rt, &stream, leaves, client).await {
                Ok(Some(client)) => return Ok(Some(client)),
                Ok(None) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        result => result.map(drop),
    };
    // All replies were sent; whether the client sees the end of the connection does not matter.
    let _ = rt.timeout(options.drain_timeout, stream.finish()).await;
    result.map(|()| None)
}

/// Waits for the requests in flight; disconnects a client that does not fetch their replies.
async fn drain(rt: &Rt, control: &Control, quota: &Quota, limit: Duration) {
    control.outbox.has_stalled(limit);
    while rt.timeout(limit, quota.idle()).await.is_err() {
        if control.outbox.has_stalled(limit) {
            control.disconnect();
        }
    }
}

/// Reads requests and starts them.
struct Reader<'a, X: Exports> {
    exports: &'a X,
    control: &'a Control,
    read_only: bool,
    session: Rc<Session<X::Export>>,
    quota: Rc<Quota>,
    share: Rc<Share>,
    counters: &'a Counters,
}

impl<X: Exports> Reader<'_, X> {
    /// Returns the received bytes that belong to no started request if the connection leaves.
    async fn run<S: ByteStream>(self, mut inbox: Inbox<S>) -> Result<Option<Vec<u8>>, Broken> {
        while !self.control.is_draining() {
            if self.control.is_leaving() {
                return Ok(Some(inbox.take_rest()));
            }
            let Some((request, header)) = Request::decode(inbox.bytes(), self.session.style)? else {
                match inbox.fill().await {
                    Ok(true) => {}
                    Ok(false) => return Ok(None),
                    Err(error) if is_interrupted(&error) => {}
                    Err(error) => return Err(error.into()),
                }
                continue;
            };
            inbox.consume(header);
            // The size may have changed since the last request.
            let begun = match request.check(self.session.export.size(), self.read_only) {
                Ok(Action::Disconnect) => return Ok(None),
                Ok(Action::BlockStatus { .. }) if self.session.contexts.is_empty() => {
                    self.refuse(&mut inbox, &request, ErrorCode::Invalid).await
                }
                Ok(action) => self.start(&mut inbox, &request, action).await,
                Err(code) => self.refuse(&mut inbox, &request, code).await,
            };
            match begun {
                // A part of its data has arrived: the other process receives all of it from its beginning.
                Err(Broken::Io(error)) if is_interrupted(&error) => {
                    let rest = inbox.take_rest();
                    return Ok(Some([request.encode(), rest].concat()));
                }
                begun => begun?,
            }
        }
        Ok(None)
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
        let at = match request.command {
            CMD_READ if code == ErrorCode::Invalid => request.past_end(self.session.export.size()),
            _ => None,
        };
        let outcome = Outcome::Failed(Box::new(Failure { code, text: refusal_text(code).to_owned(), at }));
        self.session.outbox.push(Reply { to: address(request), outcome, permit });
        Ok(())
    }

    async fn start(&self, inbox: &mut Inbox<impl ByteStream>, request: &Request, action: Action) -> Result<(), Broken> {
        let session = &self.session;
        let len = match action {
            Action::Read { len, .. } | Action::Write { len, .. } => len as usize,
            Action::BlockStatus { one, .. } => session.status_bytes(one),
            _ => 0,
        };
        let mut permit = self.quota.admit(len).await;
        let exchanges = || session.export.turnstile().map_or(0, |turnstile| turnstile.exchanges());
        let before = exchanges();
        let mut payload = match action {
            Action::Write { .. } => {
                let intent = session.export.announce_write(request.offset, len as u64);
                Some((self.payload(inbox, self.exports.buffer(len)).await?, intent))
            }
            _ => None,
        };
        // The time for receiving the data depends on the client: it is not counted.
        permit.restart();
        let started = self.share.begin(len).await;
        // Last, so that no request that has passed waits for one that has not.
        let pass = Turnstile::pass_any(session.export.turnstile()).await;
        if exchanges() != before {
            // What was announced to the disk before is void, and this one may have another size.
            payload = payload.map(|(buf, _)| (buf, None));
            if let Err(code) = request.check(session.export.size(), self.read_only) {
                let outcome =
                    Outcome::Failed(Box::new(Failure { code, text: refusal_text(code).to_owned(), at: None }));
                session.outbox.push(Reply { to: address(request), outcome, permit });
                return Ok(());
            }
        }
        let job = Job { to: address(request), permit, started, pass };
        let (rt, session) = (&session.rt, session.clone());
        match (action, payload) {
            (Action::Read { whole, .. }, _) => drop(rt.spawn(session.read(job, self.exports.buffer(len), whole))),
            (Action::Write { fua, .. }, Some((buf, intent))) => {
                // With requests in flight or bytes received, the client pipelines: more writes follow.
                let more = self.quota.requests() > 1 || !inbox.bytes().is_empty();
                let flags = WriteFlags::from(fua).with_more(more).with_intent(intent);
                drop(rt.spawn(session.write(job, buf, flags)))
            }
            (action, _) => drop(rt.spawn(session.other(job, action))),
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

fn address(request: &Request) -> ReplyTo {
    ReplyTo { cookie: request.cookie, offset: request.offset }
}

fn refusal_text(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::NotPermitted => "the export is read-only",
        ErrorCode::NoSpace => "the range reaches past the end of the export",
        _ => "the request has a range, a length or flags that it cannot have here",
    }
}
