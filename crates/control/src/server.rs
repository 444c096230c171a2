//! The control server: accepts connections, refuses other users and connections over the limit, stops them all.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk_uring::{Rt, Stream, UnixListener};
use serde_json::Value;

use crate::connection::{self, Peer};
use crate::event::Event;
use crate::message::{self, ErrorCode, RpcError};
use crate::session::Session;

/// Pause after a failed accept, for example when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Descriptors reserved for verbs, in case the process reaches its limit.
const RESERVE_FDS: usize = 16;
/// Least time between two log messages about failed accepts.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// Limits of a control server. Peers can make it hold at most about
/// `max_connections × max_message`, plus the buffers of imports and exports.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Most connections at a time; more are refused with an error.
    pub max_connections: usize,
    /// Most bytes of one message of a peer.
    pub max_message: usize,
    /// A peer that takes longer than this to accept an answer is disconnected.
    pub send_timeout: Duration,
    /// Interval of progress notifications.
    pub progress_every: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            max_connections: 128,
            max_message: 1 << 20,
            send_timeout: Duration::from_secs(30),
            progress_every: Duration::from_secs(1),
        }
    }
}

forkdisk::setters! {
    ServerOptions {
        with_max_connections max_connections: usize,
        with_max_message max_message: usize,
        with_send_timeout send_timeout: Duration,
        with_progress_every progress_every: Duration,
    }
}

/// A JSON-RPC server for one session. Cheap to clone; all clones are the same server.
#[derive(Clone)]
pub struct Server {
    state: Rc<State>,
}

pub(crate) struct State {
    pub session: Session,
    pub options: ServerOptions,
    /// Raised by `stop`: no further request is read, and verbs that can be undone end.
    pub stop: Event,
    peers: RefCell<Vec<Rc<Peer>>>,
    changed: Cell<Option<std::task::Waker>>,
    /// Reserved descriptors, closed to make room when an accept fails.
    reserve: RefCell<Vec<File>>,
    /// When a failed accept was logged last.
    told: Cell<Option<Instant>>,
}

/// Stops a server; usable anywhere on the server's thread.
#[derive(Clone)]
pub struct ServerHandle {
    state: Rc<State>,
}

impl ServerHandle {
    /// Stops reading requests. Imports and exports under way are cancelled; other requests are completed.
    pub fn stop(&self) {
        self.state.stop.raise();
        self.state.peers.borrow().iter().for_each(|peer| peer.cancel());
    }

    /// Waits until every request under way has ended, except `stop` requests.
    pub async fn idle(&self) {
        self.until(|peer| !peer.is_busy() || peer.waits_for_end()).await;
    }

    /// Waits until every connection has ended.
    pub async fn gone(&self) {
        self.until(|_| false).await;
    }

    async fn until(&self, is_fine: impl Fn(&Peer) -> bool) {
        std::future::poll_fn(|cx| {
            if self.state.peers.borrow().iter().all(|peer| is_fine(peer)) {
                return std::task::Poll::Ready(());
            }
            self.state.changed.set(Some(cx.waker().clone()));
            std::task::Poll::Pending
        })
        .await
    }
}

impl State {
    /// Wakes the waiting task; called whenever the state of a peer has changed.
    pub fn changed(&self) {
        if let Some(waker) = self.changed.take() {
            waker.wake();
        }
    }

    /// Refills the reserve of descriptors as far as the process limit allows.
    fn refill(&self) {
        let mut reserve = self.reserve.borrow_mut();
        while reserve.len() < RESERVE_FDS
            && let Ok(file) = File::open("/dev/null")
        {
            reserve.push(file);
        }
    }

    /// Closes the reserved descriptors; returns whether there were any.
    fn draw_on_reserve(&self) -> bool {
        !self.reserve.take().is_empty()
    }

    fn rt(&self) -> &Rt {
        &self.session.runtime
    }
}

impl Server {
    /// Creates a server for verbs on `session`.
    pub fn new(session: Session, options: ServerOptions) -> Server {
        let (stop, peers, changed, reserve, told) = Default::default();
        let state = State { session, options, stop, peers, changed, reserve, told };
        state.refill();
        Server { state: Rc::new(state) }
    }

    /// Returns a handle that stops the server.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle { state: self.state.clone() }
    }

    /// Serves all connections to `listener` until [`ServerHandle::stop`]. Requests under way may
    /// continue after this returns.
    pub async fn serve(&self, listener: UnixListener) {
        let State { stop, .. } = &*self.state;
        while !stop.has_happened() {
            match stop.unless(listener.accept()).await {
                None => break,
                Some(Ok(stream)) => self.welcome(stream),
                Some(Err(_)) if self.state.draw_on_reserve() => {}
                Some(Err(error)) => {
                    let (told, now) = (&self.state.told, Instant::now());
                    if told.get().is_none_or(|last| now.duration_since(last) >= TELL_AGAIN) {
                        told.set(Some(now));
                        tracing::warn!(%error, "cannot accept a control connection");
                    }
                    stop.unless(self.state.rt().sleep_for(ACCEPT_PAUSE)).await;
                }
            }
        }
    }

    fn welcome(&self, stream: Stream) {
        if let Err(error) = self.admit(&stream) {
            tracing::warn!("refused a control connection: {}", error.message);
            let refusal = message::line(&message::answer(&Value::Null, Err::<(), _>(error)));
            let (rt, limit) = (self.state.rt().clone(), self.state.options.send_timeout);
            let sent = stream.send_vectored(vec![refusal.into()]);
            // A failed send does not matter: the peer did not read it.
            drop(self.state.rt().spawn(async move { drop(rt.timeout(limit, sent).await) }));
            return;
        }
        let peer = Peer::new(stream);
        self.state.peers.borrow_mut().push(peer.clone());
        let place = Place { state: self.state.clone(), peer };
        drop(self.state.rt().spawn(async move {
            if let Err(error) = connection::serve(&place.state, &place.peer).await {
                tracing::warn!("closed a control connection: {error}");
            }
        }));
    }

    fn admit(&self, stream: &Stream) -> Result<(), RpcError> {
        let most = self.state.options.max_connections;
        if self.state.peers.borrow().len() >= most {
            let text = format!("there are {most} control connections already (control_connections)");
            return Err(RpcError::new(ErrorCode::TOO_MANY, text));
        }
        let own = rustix::process::geteuid().as_raw();
        match stream.peer_cred() {
            Ok(peer) if peer.uid == own || peer.uid == 0 => Ok(()),
            Ok(peer) => {
                let text = format!("user {} may not control this pool: its own user {own} and root may", peer.uid);
                Err(RpcError::new(ErrorCode::NOT_PERMITTED, text))
            }
            Err(e) => Err(RpcError::new(ErrorCode::NOT_PERMITTED, format!("the peer's user is not known: {e}"))),
        }
    }
}

/// Keeps a peer in the server's list of peers while it lives.
struct Place {
    state: Rc<State>,
    peer: Rc<Peer>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.state.peers.borrow_mut().retain(|peer| !Rc::ptr_eq(peer, &self.peer));
        self.state.changed();
        self.state.refill();
    }
}
