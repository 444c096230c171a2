//! The daemon as verbs see it: its state, and the actions that they request of it.

use std::cell::{Cell, OnceCell, RefCell};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::{ErrorKind, LocalFuture, Mode, Pool};
use forkdisk_control::{
    ClientRecord, Exchange, Failure, Guard, Host, Place, ServerHandle as ControlHandle, Status, Switched, params,
};
use forkdisk_monitor::ServerRecord;
use forkdisk_nbd::{Server, ServerHandle, nbd_uri};
use forkdisk_uring::{Event, PeerCred, Rt, UringDevice};
use forkdisk_vhost_user::ServerHandle as VhostHandle;

use super::descriptors;
use super::devices::Devices;
use super::exchange::LiveExchange;
use super::exports::Served;
use super::hand_over::Successor;
use super::mounts::Mounts;
use super::outlets::Door;
use super::process::stays;
use super::socket_dir::SocketDir;
use super::switch::Switch;
use super::vhost_sockets::VhostSockets;

/// Interval at which clients that are being disconnected are counted.
const LOOK: Duration = Duration::from_millis(5);

/// How long `stop` waits for clients that are disconnecting before it is refused.
const LEAVING: Duration = Duration::from_millis(300);
/// How long an upgrade waits for other verbs before it is refused.
const VERBS: Duration = Duration::from_secs(10);
/// Most clients that a refusal names.
const SHOWN_COUNT: usize = 5;

/// The clients of all servers.
#[derive(Clone)]
pub struct Clients {
    /// By NBD.
    pub data: ServerHandle,
    /// By vhost-user.
    pub disks: VhostHandle,
}

/// A client: what it uses, and its description.
struct Client {
    export: String,
    shown: String,
}

impl Clients {
    fn all(&self) -> Vec<Client> {
        let by_nbd = self.data.clients().into_iter();
        let by_nbd = by_nbd.map(|client| Client { shown: shown("an NBD client", client.peer), export: client.shows });
        let by_vhost = self.disks.clients().into_iter();
        let by_vhost =
            by_vhost.map(|client| Client { shown: shown("a virtual machine", client.peer), export: client.disk });
        by_nbd.chain(by_vhost).collect()
    }

    /// Whether `name` has clients.
    pub fn has(&self, name: &str) -> bool {
        self.all().iter().any(|client| client.export == name)
    }

    /// Disconnects the clients of `name` after their requests in flight; returns how many are left.
    fn disconnect(&self, name: &str) -> usize {
        self.data.disconnect(name) + self.disks.disconnect(name)
    }
}

/// A running daemon.
pub struct Daemon {
    pub runtime: Rt,
    pub pool: Pool<UringDevice>,
    pub clients: Clients,
    /// The data server.
    pub data: Server<Served>,
    pub exports: Served,
    pub mounts: Mounts,
    pub devices: Devices,
    pub vhost_sockets: VhostSockets,
    pub end: Rc<End>,
    /// The control server; set once it exists.
    pub control: Rc<OnceCell<ControlHandle>>,
    pub socket_dirs: Vec<SocketDir>,
    /// The status without its clients, which change.
    pub identity: Status,
}

/// The end of a daemon: requested, and reached.
#[derive(Default)]
pub struct End {
    /// Raised when the end is requested, or a new program can take over.
    pub wanted: Event,
    /// The new program.
    pub successor: RefCell<Option<Successor>>,
    is_upgrading: Cell<bool>,
    is_passing_on: Cell<bool>,
    outcome: RefCell<Option<Result<(), Failure>>>,
    reached: Event,
}

impl End {
    /// Whether the daemon ends because a new program takes over.
    pub fn is_passing_on(&self) -> bool {
        self.is_passing_on.get()
    }

    /// Records that the pool is closed, or why it could not be.
    pub fn reach(&self, outcome: Result<(), Failure>) {
        *self.outcome.borrow_mut() = Some(outcome);
        self.reached.raise();
    }
}

impl Host for Daemon {
    fn users(&self, name: &str) -> Vec<String> {
        let clients = self.clients.all().into_iter().filter(|client| client.export == name);
        clients.map(|client| client.shown).chain(self.mounts.users(name)).collect()
    }

    fn devices(&self, name: &str) -> Vec<String> {
        self.devices.of(name, &self.mounts.dirs())
    }

    fn place(&self, name: &str) -> Place {
        // An export that was switched is no way to the volume of its name.
        let is_switched = self.exports.outlets.switched(&Door::Export(name.to_string())).is_some();
        let socket = self.identity.socket.as_ref().filter(|_| !is_switched);
        let uri = socket.map(|socket| nbd_uri(Path::new(socket), name));
        let file = |dir: String| if dir.ends_with('/') { format!("{dir}{name}") } else { format!("{dir}/{name}") };
        Place { uri, paths: self.mounts.dirs().into_iter().map(file).collect() }
    }

    fn room(&self) -> Result<usize, Failure> {
        Ok(self.clients.data.room())
    }

    fn connect(&self, name: &str, socket: OwnedFd) {
        self.data.welcome_to(name, socket);
    }

    fn evict<'a>(&'a self, name: &'a str) -> LocalFuture<Box<dyn Guard>> {
        let lock = self.exports.export_locks.close(name);
        let (clients, runtime, name) = (self.clients.clone(), self.runtime.clone(), name.to_string());
        Box::pin(async move {
            while clients.disconnect(&name) > 0 {
                runtime.sleep_for(LOOK).await;
            }
            Box::new(lock) as Box<dyn Guard>
        })
    }

    fn exchange<'a>(&'a self, name: &'a str) -> LocalFuture<Result<Box<dyn Exchange>, Failure>> {
        let (pool, mounts, devices) = (self.pool.clone(), self.mounts.clone(), self.devices(name));
        let name = name.to_string();
        Box::pin(async move {
            let id = pool.find(&name)?.id;
            let begun = LiveExchange::begin((&name, id), devices, &mounts).await?;
            Ok(Box::new(begun) as Box<dyn Exchange>)
        })
    }

    fn status(&self) -> Result<Status, Failure> {
        let record = |client: Client| ClientRecord { peer: client.shown, export: client.export };
        let clients = self.clients.all().into_iter().map(record).collect();
        Ok(Status { clients, mounts: self.mounts.dirs(), ..self.identity.clone() })
    }

    fn mount(&self, mount: params::Mount, connection: OwnedFd) -> LocalFuture<Result<(), Failure>> {
        let mounts = self.mounts.clone();
        Box::pin(async move { mounts.begin(mount, connection).await })
    }

    fn attach(&self, attach: params::Attach) -> LocalFuture<Result<String, Failure>> {
        let devices = self.devices.clone();
        Box::pin(async move { devices.attach(attach).await })
    }

    fn detach(&self, device: String) -> LocalFuture<Result<(), Failure>> {
        let devices = self.devices.clone();
        Box::pin(async move { devices.detach(device).await })
    }

    fn vhost_user(&self, disk: params::VhostUser) -> LocalFuture<Result<(), Failure>> {
        let sockets = self.vhost_sockets.clone();
        Box::pin(async move { sockets.apply(disk).await })
    }

    fn switch(&self, switch: params::Switch) -> LocalFuture<Result<Switched, Failure>> {
        let (runtime, exports, devices) = (self.runtime.clone(), self.exports.clone(), self.devices.clone());
        let (disks, socket_dirs) = (self.clients.disks.clone(), self.socket_dirs.clone());
        let vhost_sockets = self.vhost_sockets.clone();
        Box::pin(Switch { runtime, exports, devices, disks, socket_dirs, vhost_sockets }.perform(switch))
    }

    fn changed<'a>(&'a self, name: &'a str) -> LocalFuture<()> {
        let (mounts, name) = (self.mounts.clone(), name.to_string());
        self.clients.disks.announce_change(&name);
        Box::pin(async move { mounts.changed_name(&name).await })
    }

    fn server(&self) -> Option<ServerRecord> {
        Some((&self.clients.data.statistics()).into())
    }

    fn is_daemon(&self) -> bool {
        true
    }

    fn follow(&self) -> LocalFuture<()> {
        let socket_dirs = self.socket_dirs.clone();
        Box::pin(async move {
            for sockets in socket_dirs {
                sockets.follow().await;
            }
        })
    }

    fn upgrade(&self, program: String) -> LocalFuture<Result<(), Failure>> {
        let (end, runtime, control) = (self.end.clone(), self.runtime.clone(), self.control.clone());
        let (has_devices, pool, mounts) = (self.devices.count() > 0, self.pool.clone(), self.mounts.clone());
        Box::pin(async move {
            if end.wanted.has_happened() || end.is_upgrading.replace(true) {
                return Err(Failure::new(ErrorKind::Busy, "the daemon is ending, or is being upgraded already"));
            }
            let ready = prepare(&runtime, &program, (has_devices, &pool), (&control, &end)).await;
            let ready = ready.and_then(|successor| match mounts.has_queues() && !successor.takes_fuse_uring() {
                true => Err(Failure::new(ErrorKind::Unsupported, QUEUES_NOT_TAKEN)),
                false => Ok(successor),
            });
            match ready {
                Ok(successor) => {
                    *end.successor.borrow_mut() = Some(successor);
                    end.is_passing_on.set(true);
                    end.wanted.raise();
                    Ok(())
                }
                Err(failure) => {
                    end.is_upgrading.set(false);
                    Err(failure)
                }
            }
        })
    }

    fn stop(&self, force: bool) -> LocalFuture<Result<(), Failure>> {
        let (end, clients, runtime) = (self.end.clone(), self.clients.clone(), self.runtime.clone());
        let pool = self.identity.pool.clone();
        Box::pin(async move {
            let mut waited = Duration::ZERO;
            while !force && !end.wanted.has_happened() && !clients.all().is_empty() {
                if waited >= LEAVING {
                    return Err(Failure::new(ErrorKind::Busy, in_use(&pool, &clients.all())));
                }
                runtime.sleep_for(LOOK).await;
                waited += LOOK;
            }
            end.wanted.raise();
            end.reached.wait().await;
            end.outcome.borrow().clone().unwrap_or(Ok(()))
        })
    }
}

/// Why a program without FUSE over io_uring cannot take over.
const QUEUES_NOT_TAKEN: &str = "requests of a mount come by io_uring, which that program cannot continue: unmount it \
    first, or serve with --fuse-uring no";

/// Starts the program that is to take over, and waits until it is ready and no verb is under way.
async fn prepare(
    runtime: &Rt,
    program: &str,
    (has_devices, pool): (bool, &Pool<UringDevice>),
    (control, end): (&OnceCell<ControlHandle>, &End),
) -> Result<Successor, Failure> {
    let invalid = |error: anyhow::Error| Failure::new(ErrorKind::Invalid, format!("{error:#}"));
    if has_devices && stays() && !releases_devices() {
        let text = "this kernel (before Linux 6.7) releases devices of the ublk driver only when their process ends, \
                    and a daemon in the foreground does not: serve with --daemon, or as a service";
        return Err(Failure::new(ErrorKind::Unsupported, text));
    }
    if pool.mode() == Mode::OutOfDataSpace {
        let text = "the pool is full, or the file system under it, and requests may wait for space: free some first \
             (`forkdisk du`), or grow it";
        return Err(Failure::new(ErrorKind::Busy, text));
    }
    check_closable(runtime, pool).await?;
    descriptors::check_room(runtime.listeners())
        .map_err(|error| Failure::new(ErrorKind::Busy, format!("{error:#}")))?;
    let successor = Successor::start(runtime, Path::new(program)).await.map_err(invalid)?;
    let start = Instant::now();
    while control.get().is_some_and(ControlHandle::is_busy) {
        if start.elapsed() > VERBS {
            let text = format!("another verb has been under way for {VERBS:?}: upgrade when it has ended");
            return Err(Failure::new(ErrorKind::Busy, text));
        }
        if end.wanted.has_happened() {
            break;
        }
        runtime.sleep_for(LOOK).await;
    }
    if end.wanted.has_happened() {
        return Err(Failure::new(ErrorKind::Busy, "the daemon is ending"));
    }
    Ok(successor)
}

/// Checks that the pool could be closed now, by a checkpoint, which makes closing it short: a pool that cannot be
/// closed takes its clients along.
async fn check_closable(runtime: &Rt, pool: &Pool<UringDevice>) -> Result<(), Failure> {
    if pool.mode() == Mode::ReadOnly {
        return Ok(());
    }
    let checked = pool.clone();
    let checkpoint = runtime.spawn(async move { checked.checkpoint().await });
    match runtime.timeout(VERBS, checkpoint).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Failure::new(error.kind(), format!("the pool could not be closed for it: {error}"))),
        Err(_) => {
            let text = format!(
                "the pool could not be closed for it: a checkpoint has not ended within {VERBS:?}; give the file \
                 system under the pool room"
            );
            Err(Failure::new(ErrorKind::Busy, text))
        }
    }
}

/// Whether the kernel releases the devices of a ring that ends before its process.
fn releases_devices() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 7)
}

/// Returns why a daemon with clients does not end.
fn in_use(pool: &str, clients: &[Client]) -> String {
    let shown: Vec<String> =
        clients.iter().take(SHOWN_COUNT).map(|client| format!("{} on {}", client.shown, client.export)).collect();
    let count = match clients.len() {
        1 => "1 client is connected".to_string(),
        count => format!("{count} clients are connected"),
    };
    let more = match clients.len().saturating_sub(SHOWN_COUNT) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "{pool} is in use: {count}: {}{more}; --wait-for-clients waits until they have gone, --force takes their disks \
         away",
        shown.join(", ")
    )
}

/// Describes a client: `an NBD client, qemu-io (pid 123)`.
fn shown(kind: &str, peer: Option<PeerCred>) -> String {
    match peer {
        Some(peer) => match fs::read_to_string(format!("/proc/{}/comm", peer.pid)) {
            Ok(name) => format!("{kind}, {} (pid {})", name.trim(), peer.pid),
            Err(_) => format!("{kind} (pid {})", peer.pid),
        },
        None => kind.to_string(),
    }
}
