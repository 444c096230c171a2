//! The server: accepts connections, limits their number, and stops them.
//!
//! All of it runs on the thread that owns the exports. Invariants: what clients can make it hold is
//! bounded by [`ServerOptions`]; a client that stops reading or writing delays other clients by at
//! most `stall_timeout`; a request that was started runs to its end.

mod budget;
mod connection;
mod contexts;
mod export;
mod fair;
mod inbox;
mod log;
mod negotiate;
mod options;
mod outbox;
mod pacing;
mod passed;
mod pool;
mod session;
mod statistics;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

pub use contexts::{ALLOCATION, CHANGED, DEPTH, DEPTH_HOLE, DEPTH_OWN, DEPTH_SHARED};
pub use export::{Export, Exports};
pub use negotiate::Security;
pub use options::ServerOptions;
pub use passed::{Agreed, PassedClient, Stage};
pub use pool::{PoolContext, PoolExport};
pub use statistics::ServerStatistics;

use budget::SharedMemory;
use connection::{Begin, Broken, Common, Control, Waits};
use fair::Fair;
use forkdisk_uring::{Accept, ByteStream, Event, PeerCred, Rt, Stream, WakeCell};
use log::LogLimit;
use pacing::Pacing;
use statistics::{Counters, count};

/// Pause after a failed accept, for example when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long to wait for a pending connection that cannot be served for want of descriptors.
const ACCEPT_TO_CLOSE: Duration = Duration::from_millis(10);
/// Interval of checks for stalled clients while a request waits for memory.
const STALL_CHECK: Duration = Duration::from_millis(250);
/// Interval at which clients that are being passed on are interrupted, when their sends are, too, and when those that
/// have not stopped are disconnected.
const LEAVING_CHECK: Duration = Duration::from_millis(1);
const LEAVING_SENDS: Duration = Duration::from_millis(100);
const LEAVING_LIMIT: Duration = Duration::from_secs(10);

/// An NBD server for a set of exports. Cheap to clone; all clones are the same server.
pub struct Server<X> {
    state: Rc<State<X>>,
}

struct State<X> {
    common: Common<X>,
    clients: Rc<Clients>,
    log: LogLimit,
    /// A reserved descriptor, used to accept and close a connection when there are no others.
    spare: RefCell<Option<File>>,
}

#[derive(Default)]
struct Clients {
    stop: Event,
    connected: RefCell<Vec<Rc<Control>>>,
    changed: WakeCell,
    /// New clients are passed on to another process, too.
    are_leaving: Cell<bool>,
    /// That process can continue encrypted clients.
    takes_encrypted: Cell<bool>,
    passed: RefCell<Vec<PassedClient>>,
}

/// Stops a server; usable anywhere on the server's thread.
#[derive(Clone)]
pub struct ServerHandle {
    clients: Rc<Clients>,
    memory: Rc<SharedMemory>,
    counters: Rc<Counters>,
    most_connections: usize,
}

impl ServerHandle {
    /// Stops accepting connections and reading requests; requests in flight end and
    /// are answered, within the server's `drain_timeout`. [`Server::serve`] returns after that.
    pub fn stop(&self) {
        self.clients.stop.raise();
    }

    /// As [`stop`](Self::stop), but disconnects all clients at once.
    pub fn hurry(&self) {
        self.clients.stop.raise();
        self.clients.connected.borrow().iter().for_each(|control| control.disconnect());
    }

    /// Returns the clients that have chosen an export.
    pub fn clients(&self) -> Vec<ClientInfo> {
        let connected = self.clients.connected.borrow();
        let info = |control: &Rc<Control>| {
            let names = control.export()?;
            Some(ClientInfo { export: names.export, shows: names.shows, peer: control.peer() })
        };
        connected.iter().filter_map(info).collect()
    }

    /// Stops reading requests of the clients of a disk, by its current name, and disconnects them
    /// when their requests in flight have ended and been answered, within the server's
    /// `drain_timeout`. Returns how many of them are left.
    pub fn disconnect(&self, disk: &str) -> usize {
        let connected = self.clients.connected.borrow();
        let theirs = connected.iter().filter(|control| control.export().is_some_and(|names| names.shows == disk));
        theirs.inspect(|control| control.stop()).count()
    }

    /// Returns how many clients more can connect.
    pub fn room(&self) -> usize {
        self.most_connections.saturating_sub(self.connections())
    }

    /// Returns the number of connected clients.
    pub fn connections(&self) -> usize {
        self.clients.connected.borrow().len()
    }

    /// Returns the counters of the server's connections.
    pub fn statistics(&self) -> ServerStatistics {
        let (size, used) = self.memory.usage();
        ServerStatistics {
            connections: self.connections() as u64,
            shared_memory: size as u64,
            shared_memory_used: used as u64,
            ..self.counters.read()
        }
    }
}

/// A client that has chosen an export.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientInfo {
    /// The export's current name.
    pub export: String,
    /// Current name of the disk that it shows.
    pub shows: String,
    /// The peer's credentials; `None` if the socket does not provide them.
    pub peer: Option<PeerCred>,
}

impl<X> Clone for Server<X> {
    fn clone(&self) -> Server<X> {
        Server { state: self.state.clone() }
    }
}

impl<X: Exports> Server<X> {
    /// Creates a server of `exports` that runs on `rt`.
    pub fn new(rt: &Rt, exports: X, options: ServerOptions) -> Server<X> {
        let options = options.effective();
        let memory = SharedMemory::new(options.shared_memory);
        let fair = Fair::new(&options);
        let (clients, log, counters) = Default::default();
        let (rt, exports, pacing) = (rt.clone(), Rc::new(exports), Pacing::new());
        let common = Common { rt, exports, options, memory, fair, pacing, counters };
        Server { state: Rc::new(State { common, clients, log, spare: RefCell::new(spare()) }) }
    }

    /// Returns a handle that stops the server.
    pub fn handle(&self) -> ServerHandle {
        let State { clients, common, .. } = &*self.state;
        let (memory, counters) = (common.memory.clone(), common.counters.clone());
        let most_connections = common.options.max_connections;
        ServerHandle { clients: clients.clone(), memory, counters, most_connections }
    }

    /// Serves all connections to `listener`, unencrypted; see [`serve_as`](Self::serve_as).
    pub async fn serve(&self, listener: impl Accept) {
        self.serve_as(listener, Security::Clear).await;
    }

    /// Serves all connections to `listener`, protected by `security`, until [`ServerHandle::stop`];
    /// then waits for the clients to end, and disconnects those that have not within
    /// `drain_timeout`. It does not wait longer than that for a request that hangs in its export.
    pub async fn serve_as(&self, listener: impl Accept, security: Security) {
        let state = &self.state;
        let watch = state.common.rt.spawn(watch_memory(state.clone()));
        self.listen(listener, security).await;
        state.end_connections().await;
        watch.cancel().await;
    }

    /// Serves one more listener, next to [`serve_as`](Self::serve_as), which handles memory and shutdown:
    /// until [`ServerHandle::stop`], without waiting for clients to end, or until it is cancelled.
    pub async fn listen(&self, listener: impl Accept, security: Security) {
        let state = &self.state;
        let stop = &state.clients.stop;
        while !stop.has_happened() {
            match stop.unless(listener.accept()).await {
                None => break,
                Some(Ok(stream)) => self.welcome_as(stream, security.clone()),
                Some(Err(error)) => {
                    state.log.warn(format_args!("cannot accept a connection: {error}"));
                    if !(is_short_of_descriptors(&error) && state.turn_away(&listener).await) {
                        stop.unless(state.common.rt.sleep_for(ACCEPT_PAUSE)).await;
                    }
                }
            }
        }
    }

    /// Stops all clients between two requests and returns them for another process, which continues them with
    /// [`resume`](Self::resume). Requests in flight end first. Clients that connect later are returned by a second
    /// call, after their listeners have ended. `encrypted`: the other process continues encrypted clients, and gets
    /// their keys. Otherwise they are disconnected after their requests in flight.
    pub async fn pass_on(&self, encrypted: bool) -> Vec<PassedClient> {
        let Common { rt, .. } = &self.state.common;
        let clients = &self.state.clients;
        clients.are_leaving.set(true);
        clients.takes_encrypted.set(encrypted);
        let start = Instant::now();
        loop {
            let all = clients.connected.borrow().clone();
            if all.is_empty() {
                break;
            }
            if start.elapsed() > LEAVING_LIMIT {
                self.state.log.warn(format_args!("disconnected {} clients: their requests do not end", all.len()));
                all.iter().for_each(|control| control.disconnect());
                break;
            }
            all.iter().for_each(|control| control.leave(Waits::Receive, encrypted));
            if start.elapsed() > LEAVING_SENDS {
                all.iter().for_each(|control| control.leave(Waits::Send, encrypted));
            }
            rt.sleep_for(LEAVING_CHECK).await;
        }
        clients.passed.take()
    }

    /// Continues a client of another process, protected by `security` if it has not chosen an export yet.
    pub fn resume(&self, passed: PassedClient, security: Security) {
        let PassedClient { socket, received, unsent, tls, stage } = passed;
        let security = match &stage {
            Stage::Negotiation { only: Some(only), .. } => Security::Only(only.as_str().into()),
            Stage::Negotiation { with_tls: true, .. } => security,
            _ => Security::Clear,
        };
        let stream = Stream::from_fd(&self.state.common.rt, socket);
        let earlier = Some(PassedClient { socket: (), received, unsent, tls, stage });
        self.begin(Begin { stream, security, earlier });
    }

    /// Serves a connection that the caller accepted, unless there are too many.
    pub fn welcome(&self, stream: impl ByteStream) {
        self.welcome_as(stream, Security::Clear);
    }

    /// As [`welcome`](Self::welcome), protected by `security`.
    pub fn welcome_as(&self, stream: impl ByteStream, security: Security) {
        let state = &self.state;
        let counters = &state.common.counters;
        count(&counters.accepted);
        let most = state.common.options.max_connections;
        if state.clients.connected.borrow().len() >= most {
            count(&counters.refused);
            state.log.warn(format_args!("refused a connection: there are {most} already (max_connections)"));
            return;
        }
        self.begin(Begin { stream, security, earlier: None });
    }

    /// As [`welcome`](Self::welcome), for the other end of a pair of sockets; the client may open this export only.
    pub fn welcome_to(&self, export: &str, socket: OwnedFd) {
        self.welcome_as(Stream::from_fd(&self.state.common.rt, socket), Security::Only(export.into()));
    }

    fn begin(&self, begin: Begin<impl ByteStream>) {
        let state = self.state.clone();
        let control = Control::new(&begin.stream);
        if state.clients.are_leaving.get() {
            control.leave(Waits::Receive, state.clients.takes_encrypted.get());
        }
        state.clients.connected.borrow_mut().push(control.clone());
        let place = Place { clients: state.clients.clone(), control };
        let rt = state.common.rt.clone();
        rt.spawn(async move {
            let admits = |export: &str| state.admits(&place.control, export);
            match connection::serve(&state.common, begin, &place.control, &admits).await {
                Ok(passed) => state.clients.passed.borrow_mut().extend(passed),
                Err(e) => {
                    let counters = &state.common.counters;
                    let is_handshake = matches!(e, Broken::HandshakeTimeout(_) | Broken::Negotiation(_));
                    count(if is_handshake { &counters.failed_handshakes } else { &counters.broken });
                    state.log.warn(format_args!("closed a connection: {e}"));
                }
            }
        });
    }
}

impl<X> State<X> {
    /// Admits a client to an export, unless the export has its maximum of clients.
    fn admits(&self, control: &Control, export: &str) -> bool {
        let (connected, most) = (self.clients.connected.borrow(), self.common.options.max_export_connections);
        if connected.iter().filter(|control| control.is_on(export)).count() >= most {
            count(&self.common.counters.crowded);
            self.log.warn(format_args!(
                "refused a client of the export {export:?}: it has {most} connections already (max_export_connections)"
            ));
            return false;
        }
        control.enter(export);
        true
    }

    /// Closes the first pending connection, so that its client does not wait in vain; returns false if that failed.
    async fn turn_away(&self, listener: &impl Accept) -> bool {
        if self.spare.take().is_none() {
            *self.spare.borrow_mut() = spare();
            return false;
        }
        let accepted = self.common.rt.timeout(ACCEPT_TO_CLOSE, listener.accept()).await;
        let is_closed = matches!(accepted, Ok(Ok(_)));
        drop(accepted);
        if is_closed {
            count(&self.common.counters.refused);
        }
        *self.spare.borrow_mut() = spare();
        is_closed
    }

    async fn end_connections(&self) {
        let all = || self.clients.connected.borrow().clone();
        all().iter().for_each(|control| control.stop());
        let limit = self.common.options.drain_timeout;
        if self.common.rt.timeout(limit, self.clients.gone()).await.is_err() {
            let rest = all();
            self.log.warn(format_args!("{} clients did not end within {limit:?}", rest.len()));
            rest.iter().for_each(|control| control.disconnect());
        }
    }
}

/// Opens a descriptor to be held in reserve; `None` if there is none left.
fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

fn is_short_of_descriptors(error: &io::Error) -> bool {
    const ENFILE_ERRNO: i32 = 23;
    const EMFILE_ERRNO: i32 = 24;
    matches!(error.raw_os_error(), Some(EMFILE_ERRNO | ENFILE_ERRNO))
}

impl Clients {
    async fn gone(&self) {
        self.changed.until(|| self.connected.borrow().is_empty().then_some(())).await
    }
}

/// Keeps a connection in the list of clients while it lives.
struct Place {
    clients: Rc<Clients>,
    control: Rc<Control>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clients.connected.borrow_mut().retain(|c| !Rc::ptr_eq(c, &self.control));
        self.clients.changed.wake();
    }
}

/// Disconnects clients that hold memory without progress while requests wait for memory.
async fn watch_memory<X: Exports>(state: Rc<State<X>>) {
    let limit = state.common.options.stall_timeout;
    loop {
        state.common.memory.short().await;
        let all = state.clients.connected.borrow().clone();
        for control in all.iter().filter(|control| control.has_stalled(limit)) {
            state.log.warn(format_args!(
                "disconnected a client that held memory that others wait for, without progress for {limit:?}"
            ));
            count(&state.common.counters.stalled);
            control.disconnect();
        }
        state.common.rt.sleep_for(STALL_CHECK.min(limit)).await;
    }
}
