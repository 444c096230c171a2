//! One control connection: requests are read, carried out and answered one after the other.
//!
//! A request that was started runs to its end even if the peer half-closes the connection; a closed
//! connection is noticed when a progress notification cannot be sent.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forkdisk_uring::{Event, Stream};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::Call;
use crate::message::{self, ErrorCode, Incoming, Item, RpcError};
use crate::method::{Reply, Request};
use crate::observer::{Observer, Step};
use crate::perform::perform;
use crate::server_options::ServerOptions;
use crate::session::Session;

/// Most descriptors received with one piece of a message.
const MAX_FILES_PER_PIECE: usize = 4;
/// Most received descriptors that wait for the request they belong to.
const MAX_FILES: usize = 8;
/// Bytes received at a time.
const PIECE_BYTES: usize = 64 << 10;

/// After which time a message with descriptors is sent again to a peer that has no room for it.
const SEND_AGAIN: std::time::Duration = std::time::Duration::from_millis(5);

/// Most bytes received and dropped after a message that is too long.
const MAX_FORGOTTEN_BYTES: usize = 64 << 20;

/// How often, and after which time, a connection is passed on again that could not be for want of descriptors.
const PASS_ATTEMPTS_COUNT: usize = 200;
const PASS_AGAIN: std::time::Duration = std::time::Duration::from_millis(5);

/// State of the server that its connections use.
pub struct Shared {
    pub session: Session,
    pub options: ServerOptions,
    /// Raised by `stop`: no further request is read, and verbs that can be undone end.
    pub stop: Event,
    /// Connections are passed on to another process instead of being closed.
    pub is_leaving: Cell<bool>,
    pub passed: RefCell<Vec<PassedPeer>>,
    /// The task that waits until the state of a peer has changed.
    pub changed: Cell<Option<std::task::Waker>>,
}

impl Shared {
    /// Wakes the waiting task; called whenever the state of a peer has changed.
    pub fn wake(&self) {
        if let Some(waker) = self.changed.take() {
            waker.wake();
        }
    }
}

/// A connection on its way to another process of the server. `F` stands for its files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedPeer<F = OwnedFd> {
    /// The socket.
    pub socket: F,
    /// Received bytes that belong to no request that was carried out.
    pub received: Vec<u8>,
    /// Descriptors that came with them.
    pub files: Vec<F>,
    /// Id of the request to upgrade, which the other process answers.
    pub upgrade: Option<Value>,
    /// Its number, for leases; absent if an earlier version passes it.
    #[serde(default)]
    pub number: Option<u64>,
}

impl<F> PassedPeer<F> {
    /// Converts all files.
    pub fn map<G>(self, convert: &mut impl FnMut(F) -> G) -> PassedPeer<G> {
        let PassedPeer { socket, received, files, upgrade, number } = self;
        let socket = convert(socket);
        PassedPeer { socket, received, files: files.into_iter().map(convert).collect(), upgrade, number }
    }
}

/// State of one connection, as the server sees it.
pub struct Peer {
    stream: Stream,
    /// Its number, which no other connection has or had.
    number: u64,
    /// The user at the other end.
    user: Option<u32>,
    busy: Cell<bool>,
    /// The request under way is `stop`: the peer waits until the daemon has ended.
    stopping: Cell<bool>,
    /// The request under way is `upgrade`.
    upgrading: Cell<bool>,
    cancelled: RefCell<Arc<AtomicBool>>,
}

impl Peer {
    pub fn new(stream: Stream, number: u64) -> Rc<Peer> {
        let (busy, stopping, upgrading, cancelled) = Default::default();
        let user = stream.peer_cred().ok().map(|peer| peer.uid);
        Rc::new(Peer { stream, number, user, busy, stopping, upgrading, cancelled })
    }

    /// Returns its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether the request under way is to upgrade.
    pub fn upgrades(&self) -> bool {
        self.upgrading.get()
    }

    /// Whether a request is under way.
    pub fn is_busy(&self) -> bool {
        self.busy.get()
    }

    pub fn waits_for_end(&self) -> bool {
        self.stopping.get()
    }

    /// Cancels the request under way, if its verb can be undone.
    pub fn cancel(&self) {
        self.cancelled.borrow().store(true, Ordering::Relaxed);
    }
}

/// Why a connection was closed by the server.
#[derive(Debug, thiserror::Error)]
pub enum Closed {
    #[error("a message has more than {0} bytes")]
    TooLong(usize),
    #[error("more than {MAX_FILES} descriptors came without a request for them")]
    TooManyFiles,
    #[error("the peer does not read its answers")]
    NotReading,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What another process has received of a peer.
#[derive(Default)]
pub struct Received {
    pub bytes: Vec<u8>,
    pub files: Vec<OwnedFd>,
}

/// Serves one peer until it has gone or the server stops.
pub async fn serve(shared: &Shared, peer: &Peer, earlier: Received) -> Result<(), Closed> {
    let Received { bytes, files } = earlier;
    let mut inbox = Inbox { stream: peer.stream.clone(), bytes, seen: 0, files: files.into() };
    let upgrade = converse(shared, peer, &mut inbox).await?;
    if shared.is_leaving.get() {
        let mut socket = peer.stream.pass_on();
        // Descriptors of other connections are closed meanwhile.
        for _ in 0..PASS_ATTEMPTS_COUNT {
            if socket.is_ok() {
                break;
            }
            shared.session.runtime.sleep_for(PASS_AGAIN).await;
            socket = peer.stream.pass_on();
        }
        let (socket, received, files) = (socket?, inbox.bytes, inbox.files.into());
        shared.passed.borrow_mut().push(PassedPeer { socket, received, files, upgrade, number: Some(peer.number) });
    }
    Ok(())
}

/// Carries out the requests of a peer until it has gone or the server stops. Returns the id of a request to upgrade,
/// which another process answers.
async fn converse(shared: &Shared, peer: &Peer, inbox: &mut Inbox) -> Result<Option<Value>, Closed> {
    loop {
        let line = match shared.stop.unless(inbox.line(shared.options.max_message)).await {
            None | Some(Ok(None)) => return Ok(None),
            Some(Ok(Some(line))) => line,
            Some(Err(Closed::TooLong(most))) => {
                let error = RpcError::new(ErrorCode::TOO_LONG, format!("a message has at most {most} bytes"));
                send(shared, peer, &message::answer(&Value::Null, Err::<(), _>(error))).await?;
                inbox.forget_the_rest(shared).await;
                return Err(Closed::TooLong(most));
            }
            Some(Err(closed)) => return Err(closed),
        };
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match message::parse(&line) {
            Incoming::One(item) => {
                let (id, given) = (item.id.clone(), Given::default());
                let upgrades = matches!(item.request, Ok(Request::Upgrade(_)));
                let answer = handle(shared, peer, inbox, &given, *item).await;
                if upgrades && answer.as_ref().is_some_and(|answer| answer.get("result").is_some()) {
                    shared.stop.wait().await;
                    return Ok(id);
                }
                if let Some(answer) = answer {
                    send_with(shared, peer, &answer, given.take()).await?;
                }
            }
            Incoming::Batch(items) => {
                let (mut answers, given) = (Vec::new(), Given::default());
                for mut item in items {
                    if matches!(item.request, Ok(Request::Upgrade(_))) {
                        let text = "upgrade cannot be a part of a batch: another process answers it";
                        item.request = Err(RpcError::new(ErrorCode::REQUEST, text));
                    }
                    answers.extend(handle(shared, peer, inbox, &given, item).await);
                }
                if !answers.is_empty() {
                    send_with(shared, peer, &Value::Array(answers), given.take()).await?;
                }
            }
        }
    }
}

pub async fn send(shared: &Shared, peer: &Peer, message: &Value) -> Result<(), Closed> {
    let sent = peer.stream.send_vectored(vec![message::line(message).into()]);
    match shared.session.runtime.timeout(shared.options.send_timeout, sent).await {
        Ok((result, _)) => Ok(result?),
        Err(_) => Err(Closed::NotReading),
    }
}

/// Sends a message with the descriptors that go with it.
async fn send_with(shared: &Shared, peer: &Peer, message: &Value, given: Vec<OwnedFd>) -> Result<(), Closed> {
    if given.is_empty() {
        return send(shared, peer, message).await;
    }
    let (runtime, limit) = (&shared.session.runtime, shared.options.send_timeout);
    let (mut line, files) = (message::line(message), given.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    let begin = async {
        loop {
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files.len()))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&files));
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(peer.stream.as_fd(), &[io::IoSlice::new(&line)], &mut control, flags) {
                Ok(sent) => return Ok(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => runtime.sleep_for(SEND_AGAIN).await,
                Err(error) => return Err(io::Error::from(error)),
            }
        }
    };
    let sent = runtime.timeout(limit, begin).await.map_err(|_| Closed::NotReading)??;
    let rest = line.split_off(sent);
    match runtime.timeout(limit, peer.stream.send_vectored(vec![rest.into()])).await {
        Ok((result, _)) => Ok(result?),
        Err(_) => Err(Closed::NotReading),
    }
}

/// Descriptors that go with an answer.
type Given = Rc<RefCell<Vec<OwnedFd>>>;

/// Carries out one request; returns the answer, or `None` for a notification.
async fn handle(shared: &Shared, peer: &Peer, inbox: &mut Inbox, given: &Given, item: Item) -> Option<Value> {
    let outcome = match item.request {
        Err(error) => Err(error),
        Ok(request) => {
            peer.busy.set(true);
            peer.stopping.set(matches!(request, Request::Stop(_)));
            peer.upgrading.set(matches!(request, Request::Upgrade(_)));
            let outcome = carry_out(shared, peer, (inbox, given), request, item.id.as_ref()).await;
            peer.busy.set(false);
            peer.stopping.set(false);
            peer.upgrading.set(false);
            shared.wake();
            outcome
        }
    };
    Some(message::answer(&item.id?, outcome))
}

/// Keeps the last step reported by a verb.
#[derive(Default)]
struct Reached(RefCell<Option<Step>>);

impl Observer for Reached {
    fn reached(&self, step: Step) {
        *self.0.borrow_mut() = Some(step);
    }
}

async fn carry_out(
    shared: &Shared,
    peer: &Peer,
    (inbox, given): (&mut Inbox, &Given),
    request: Request,
    id: Option<&Value>,
) -> Result<Reply, RpcError> {
    let reached = Rc::new(Reached::default());
    let cancelled = Arc::new(AtomicBool::new(false));
    *peer.cancelled.borrow_mut() = cancelled.clone();
    let wants_file = matches!(request, Request::Import(_) | Request::Export(_) | Request::Mount(_));
    let file = if wants_file { inbox.files.pop_front().map(Rc::new) } else { None };
    let created_by = peer.user.map(|user| format!("control:uid={user}"));
    let connection = Some(peer.number);
    let (observer, given) = (reached.clone(), given.clone());
    let call = Call { observer, file, given, cancelled: cancelled.clone(), connection, created_by };
    tracing::debug!(method = request.method(), "a request");
    let session = shared.session.clone();
    let runtime = session.runtime.clone();
    let mut running = runtime.spawn(async move {
        let outcome = perform(&session, request, &call).await;
        session.connections().ring();
        session.host().follow().await;
        outcome
    });
    loop {
        match runtime.timeout(shared.options.progress_every, &mut running).await {
            Ok(outcome) => return outcome.map_err(RpcError::from),
            Err(_) => {
                let step = reached.0.borrow().clone();
                if let (Some(id), Some(step)) = (id, step)
                    && send(shared, peer, &message::progress(id, &step)).await.is_err()
                {
                    cancelled.store(true, Ordering::Relaxed);
                    return running.await.map_err(RpcError::from);
                }
            }
        }
    }
}

/// Received bytes and descriptors that no request has taken yet.
struct Inbox {
    stream: Stream,
    bytes: Vec<u8>,
    /// Number of leading bytes of `bytes` that are known to hold no line end.
    seen: usize,
    files: VecDeque<OwnedFd>,
}

impl Inbox {
    /// Returns the next line without its line end; `None` when the peer has closed its side.
    async fn line(&mut self, most: usize) -> Result<Option<Vec<u8>>, Closed> {
        loop {
            if let Some(end) = self.bytes[self.seen..].iter().position(|&byte| byte == b'\n') {
                let rest = self.bytes.split_off(self.seen + end + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.pop();
                self.seen = 0;
                return Ok(Some(line));
            }
            self.seen = self.bytes.len();
            if self.seen > most {
                return Err(Closed::TooLong(most));
            }
            if !self.receive().await? {
                self.seen = 0;
                let rest = std::mem::take(&mut self.bytes);
                return Ok(Some(rest).filter(|rest| !rest.is_empty()));
            }
        }
    }

    /// Receives and drops what the peer still sends, within limits of bytes and time. Closing the
    /// connection in the middle of a message would give the peer an error before it reads the answer.
    async fn forget_the_rest(&mut self, shared: &Shared) {
        // Fails if the peer is gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        let forget = async {
            let mut forgotten = 0;
            while forgotten < MAX_FORGOTTEN_BYTES && matches!(self.receive().await, Ok(true)) {
                forgotten += self.bytes.len();
                self.bytes.clear();
                self.files.clear();
            }
        };
        let limit = shared.options.send_timeout;
        let _ = shared.stop.unless(shared.session.runtime.timeout(limit, forget)).await;
    }

    /// Receives some bytes and the descriptors that come with them; returns false when the peer has closed its side.
    async fn receive(&mut self) -> Result<bool, Closed> {
        loop {
            self.stream.readable().await?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES_PER_PIECE))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut piece = [0; PIECE_BYTES];
            let into = &mut [io::IoSliceMut::new(&mut piece)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let received = match recvmsg(self.stream.as_fd(), into, &mut control, flags) {
                Ok(received) => received.bytes,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(e) => return Err(io::Error::from(e).into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    self.files.extend(files);
                }
            }
            if self.files.len() > MAX_FILES {
                return Err(Closed::TooManyFiles);
            }
            self.bytes.extend_from_slice(&piece[..received]);
            return Ok(received > 0);
        }
    }
}
