//! A pool that is open in this process, as verbs see it: the engine, its runtime, and the users of
//! its volumes in this process.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkdisk::{ErrorKind, LocalFuture, Pool};
use forkdisk_monitor::ServerRecord;
use forkdisk_uring::{Rt, UringDevice};

use crate::connections::Connections;
use crate::failure::Failure;
use crate::method::params;
use crate::reply::{Place, Status, Switched};

/// The daemon that serves the pool's volumes, as verbs see it. [`NoHost`] if there is none.
pub trait Host {
    /// Describes the current users of the volume or snapshot `name`, such as `an NBD client (pid
    /// 123)`; without its [`devices`](Self::devices).
    fn users(&self, name: &str) -> Vec<String>;

    /// Returns where clients find the volume or snapshot `name`.
    fn place(&self, _name: &str) -> Place {
        Place::default()
    }

    /// Returns the block devices as which the volume or snapshot `name` is attached.
    fn devices(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    /// Refuses new users of the volume or snapshot `name`, completes requests in flight, and
    /// disconnects its users. New users are accepted again when the guard is dropped.
    fn evict<'a>(&'a self, name: &'a str) -> LocalFuture<Box<dyn Guard>>;

    /// The volume `name` is about to get other contents while it is in use: writes back what the kernel has cached of
    /// it, and claims its devices.
    ///
    /// # Errors
    /// `Busy` if a device of it is mounted, or another exchange is going on.
    fn exchange<'a>(&'a self, _name: &'a str) -> LocalFuture<Result<Box<dyn Exchange>, Failure>> {
        Box::pin(async { Ok(Box::new(NoHost) as Box<dyn Exchange>) })
    }

    /// Returns how many clients more can connect.
    ///
    /// # Errors
    /// `Invalid` if the pool is not being served.
    fn room(&self) -> Result<usize, Failure> {
        Err(NoHost::refusal())
    }

    /// Serves the volume or snapshot `name` to a client at the other end of `socket`.
    fn connect(&self, _name: &str, _socket: OwnedFd) {}

    /// Returns the state of the daemon.
    ///
    /// # Errors
    /// `Invalid` if the pool is not being served.
    fn status(&self) -> Result<Status, Failure>;

    /// Returns the server's counters; `None` if there is no server.
    fn server(&self) -> Option<ServerRecord> {
        None
    }

    /// Serves the pool as files on `connection`, which the caller has mounted; resolves when the files can be used.
    fn mount(&self, _mount: params::Mount, _connection: OwnedFd) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Attaches a volume or snapshot as a block device; returns its path.
    fn attach(&self, _attach: params::Attach) -> LocalFuture<Result<String, Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Removes a block device that [`attach`](Self::attach) created.
    fn detach(&self, _device: String) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Serves a volume or snapshot as a vhost-user-blk disk on a socket of its own, or removes that socket.
    fn vhost_user(&self, _disk: params::VhostUser) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Points a door at another volume or snapshot, under its clients.
    fn switch(&self, _switch: params::Switch) -> LocalFuture<Result<Switched, Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Reports that a verb changed the contents or length of the volume `name`. Resolves when no
    /// user sees the old ones.
    fn changed<'a>(&'a self, _name: &'a str) -> LocalFuture<()> {
        Box::pin(async {})
    }

    /// Whether the pool stays open after the verb.
    fn is_daemon(&self) -> bool {
        false
    }

    /// Reports that a verb has ended. Resolves when the exports match the pool's names.
    fn follow(&self) -> LocalFuture<()> {
        Box::pin(async {})
    }

    /// Starts `program` to take over from the daemon; resolves when it is ready to. The daemon then passes on all
    /// connections ([`ServerHandle::pass_on`](crate::ServerHandle::pass_on)).
    fn upgrade(&self, _program: String) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Starts to end the daemon; resolves when the pool is closed. Refused while clients are
    /// connected, unless `force`.
    fn stop(&self, force: bool) -> LocalFuture<Result<(), Failure>>;
}

/// Refuses new users of a volume while it lives.
pub trait Guard {}

/// A volume that is getting other contents while it is in use; dropped when it has them or keeps the old ones.
pub trait Exchange {
    /// The volume has its new contents. Resolves when no cache has old ones.
    fn taken_place(&self) -> LocalFuture<Result<(), Failure>>;
}

/// Host of a pool that is open for one verb only.
pub struct NoHost;

impl NoHost {
    fn refusal() -> Failure {
        Failure::new(ErrorKind::Invalid, "the pool is not being served: `forkdisk serve` does that")
    }
}

impl Guard for NoHost {}

impl Exchange for NoHost {
    fn taken_place(&self) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }
}

impl Host for NoHost {
    fn users(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    fn evict<'a>(&'a self, _name: &'a str) -> LocalFuture<Box<dyn Guard>> {
        Box::pin(async { Box::new(NoHost) as Box<dyn Guard> })
    }

    fn status(&self) -> Result<Status, Failure> {
        Err(NoHost::refusal())
    }

    fn stop(&self, _force: bool) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }
}

/// An open pool and the runtime under it. Cheap to clone; all clones are the same session.
#[derive(Clone)]
pub struct Session {
    /// The pool.
    pub pool: Pool<UringDevice>,
    /// Runtime that runs the tasks.
    pub runtime: Rt,
    host: Rc<dyn Host>,
    own: Rc<Own>,
}

/// Uses of the pool by verbs of this session.
#[derive(Default)]
struct Own {
    /// For each volume number, descriptions of the verbs that read or write it.
    uses: RefCell<BTreeMap<u64, Vec<&'static str>>>,
    /// Imports and exports under way.
    copies: Cell<usize>,
    /// A task is about to free the space of deletions.
    settles: Cell<bool>,
    connections: Rc<Connections>,
}

/// Time from a deletion until its space is freed. All deletions in between share the checkpoints.
const SETTLE_AFTER: Duration = Duration::from_secs(1);

/// Most imports and exports at a time: each uses up to about 16 MiB and a thread.
const MAX_COPIES_COUNT: usize = 16;

impl Session {
    /// Creates a session on `pool`, whose volumes `host` serves.
    pub fn new(pool: Pool<UringDevice>, runtime: Rt, host: Rc<dyn Host>) -> Session {
        Session { pool, runtime, host, own: Rc::default() }
    }

    pub(crate) fn host(&self) -> &dyn Host {
        &*self.host
    }

    /// The control connections of the pool.
    pub(crate) fn connections(&self) -> &Rc<Connections> {
        &self.own.connections
    }

    /// Registers an import or export; refused if too many are under way.
    pub(crate) fn begin_copy(&self) -> Result<Copying, Failure> {
        let going_on = self.own.copies.get();
        if going_on >= MAX_COPIES_COUNT {
            let text = format!("{going_on} imports and exports go on already: try again when one has ended");
            return Err(Failure::new(ErrorKind::Busy, text));
        }
        self.own.copies.set(going_on + 1);
        Ok(Copying { own: self.own.clone() })
    }

    /// Frees the space of deletions in the background, so that it can be used again and be discarded.
    pub(crate) fn settle_soon(&self) {
        if self.own.settles.replace(true) {
            return;
        }
        let session = self.clone();
        drop(self.runtime.spawn(async move {
            session.runtime.sleep_for(SETTLE_AFTER).await;
            session.own.settles.set(false);
            // A pool that has failed reports that itself; a full host is tried again by the pool.
            if let Err(error) = session.pool.wait_freed().await {
                tracing::debug!(%error, "the space of deletions is not free yet");
            }
        }));
    }

    /// Registers that a verb does `what` with volume number `id` until the guard is dropped.
    pub(crate) fn using(&self, id: u64, what: &'static str) -> Using {
        self.own.uses.borrow_mut().entry(id).or_default().push(what);
        Using { own: self.own.clone(), id, what }
    }

    /// Describes the users of a volume or snapshot; empty if there are none.
    pub(crate) fn users(&self, id: u64, name: &str) -> Vec<String> {
        let own = self.own.uses.borrow();
        let verbs = own.get(&id).into_iter().flatten().map(|what| what.to_string());
        verbs.chain(self.host.users(name)).collect()
    }

    /// Returns the time in seconds since 1970.
    pub(crate) fn now(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
    }
}

/// An import or export under way.
pub(crate) struct Copying {
    own: Rc<Own>,
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.own.copies.set(self.own.copies.get() - 1);
    }
}

/// Registration of a verb's use of a volume.
pub(crate) struct Using {
    own: Rc<Own>,
    id: u64,
    what: &'static str,
}

impl Drop for Using {
    fn drop(&mut self) {
        let mut uses = self.own.uses.borrow_mut();
        let Some(list) = uses.get_mut(&self.id) else { return };
        if let Some(at) = list.iter().position(|what| *what == self.what) {
            list.remove(at);
        }
        if list.is_empty() {
            uses.remove(&self.id);
        }
    }
}
