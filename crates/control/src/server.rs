//! The control server: accepts connections, refuses other users and connections over the limit, stops them all.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forkdisk_uring::{Rt, Stream, UnixListener};
use serde_json::Value;

use crate::connection::{self, PassedPeer, Peer, Received, Shared};
use crate::failure::Failure;
use crate::message::{self, ErrorCode, RpcError};
use crate::reply::Upgraded;
use crate::server_options::ServerOptions;
use crate::session::Session;

/// Pause after a failed accept, for example when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Descriptors reserved for verbs, in case the process reaches its limit.
const RESERVE_FDS: usize = 16;
/// Least time between two log messages about failed accepts.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// A JSON-RPC server for one session. Cheap to clone; all clones are the same server.
#[derive(Clone)]
pub struct Server {
    state: Rc<State>,
}

struct State {
    shared: Shared,
    peers: RefCell<Vec<Rc<Peer>>>,
    /// Reserved descriptors, closed to make room when an accept fails.
    reserve: RefCell<Vec<File>>,
    /// When a failed accept was logged last.
    told: Cell<Option<Instant>>,
    /// The number of the next connection.
    next_number: Cell<u64>,
}

/// Stops a server; usable anywhere on the server's thread.
#[derive(Clone)]
pub struct ServerHandle {
    state: Rc<State>,
}

impl ServerHandle {
    /// Stops reading requests. Imports and exports under way are cancelled; other requests are completed.
    pub fn stop(&self) {
        self.state.shared.stop.raise();
        self.state.peers.borrow().iter().for_each(|peer| peer.cancel());
    }

    /// Returns whether a request other than those to upgrade and to stop is under way.
    pub fn is_busy(&self) -> bool {
        self.state.peers.borrow().iter().any(|peer| peer.is_busy() && !peer.upgrades() && !peer.waits_for_end())
    }

    /// Stops reading requests and returns all connections for another process, which continues them with
    /// [`Server::resume`]. Called when no request but that to upgrade is under way.
    pub async fn pass_on(&self) -> Vec<PassedPeer> {
        let shared = &self.state.shared;
        shared.is_leaving.set(true);
        shared.stop.raise();
        self.gone().await;
        shared.passed.take()
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
            self.state.shared.changed.set(Some(cx.waker().clone()));
            std::task::Poll::Pending
        })
        .await
    }
}

impl State {
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

    fn new_number(&self) -> u64 {
        self.next_number.replace(self.next_number.get() + 1)
    }

    fn rt(&self) -> &Rt {
        &self.shared.session.runtime
    }
}

impl Server {
    /// Creates a server for verbs on `session`.
    pub fn new(session: Session, options: ServerOptions) -> Server {
        let (stop, changed, peers, reserve, told) = Default::default();
        let (is_leaving, passed) = Default::default();
        let shared = Shared { session, options, stop, is_leaving, passed, changed };
        // Volumes may have leases of connections to earlier servers.
        let next_number = Cell::new(SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64));
        let state = State { shared, peers, reserve, told, next_number };
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
        let Shared { stop, .. } = &self.state.shared;
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
            let (rt, limit) = (self.state.rt().clone(), self.state.shared.options.send_timeout);
            let sent = stream.send_vectored(vec![refusal.into()]);
            // A failed send does not matter: the peer did not read it.
            drop(self.state.rt().spawn(async move { drop(rt.timeout(limit, sent).await) }));
            return;
        }
        self.begin(stream, self.state.new_number(), Received::default(), None);
    }

    /// Continues a connection of another process, and answers the request to upgrade if that was the peer's.
    pub fn resume(&self, passed: PassedPeer, upgraded: Result<Upgraded, Failure>) {
        let stream = Stream::from_fd(self.state.rt(), passed.socket);
        let answer = |id| message::answer(&id, upgraded.map_err(RpcError::from));
        let (first, earlier) = (passed.upgrade.map(answer), Received { bytes: passed.received, files: passed.files });
        let number = passed.number.unwrap_or_else(|| self.state.new_number());
        self.begin(stream, number, earlier, first);
    }

    fn begin(&self, stream: Stream, number: u64, earlier: Received, first: Option<Value>) {
        let peer = Peer::new(stream, number);
        self.state.shared.session.connections().begin(number);
        self.state.peers.borrow_mut().push(peer.clone());
        let place = Place { state: self.state.clone(), peer };
        drop(self.state.rt().spawn(async move {
            let shared = &place.state.shared;
            let answered = match &first {
                Some(answer) => connection::send(shared, &place.peer, answer).await,
                None => Ok(()),
            };
            let ended = match answered {
                Ok(()) => connection::serve(shared, &place.peer, earlier).await,
                Err(closed) => Err(closed),
            };
            if let Err(error) = ended {
                tracing::warn!("closed a control connection: {error}");
            }
        }));
    }

    fn admit(&self, stream: &Stream) -> Result<(), RpcError> {
        let most = self.state.shared.options.max_connections;
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
        let shared = &self.state.shared;
        if !shared.is_leaving.get() {
            shared.session.connections().end(self.peer.number());
        }
        self.state.shared.wake();
        self.state.refill();
    }
}
