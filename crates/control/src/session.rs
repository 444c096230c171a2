//! A pool that is open in this process, as verbs see it: the engine, the runtime under it, and who
//! else uses its volumes here.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkdisk::{LocalFuture, Pool};
use forkdisk_monitor::ServerRecord;
use forkdisk_uring::{Rt, UringDevice};

use crate::failure::{Failure, FailureKind};
use crate::method::params;
use crate::reply::Status;

/// What serves the pool's volumes beside the verbs: a daemon, or nobody.
pub trait Host {
    /// Who uses the volume or snapshot `name` at the moment, in words, such as
    /// `an NBD client (pid 123)`; without its [`devices`](Self::devices).
    fn users(&self, name: &str) -> Vec<String>;

    /// The block devices of the kernel that the volume or snapshot `name` is attached as.
    fn devices(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    /// Keeps new users away from the volume or snapshot `name`, lets requests in flight end, and
    /// disconnects all who use it. Users may come again when the guard is dropped.
    fn evict<'a>(&'a self, name: &'a str) -> LocalFuture<Box<dyn Guard>>;

    /// What is being served.
    fn status(&self) -> Result<Status, Failure>;

    /// What the server did with its connections; `None` if there is none.
    fn server(&self) -> Option<ServerRecord> {
        None
    }

    /// Shows the pool as files through `connection`, which the caller has mounted; resolves when they can be used.
    fn mount(&self, _mount: params::Mount, _connection: OwnedFd) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Makes a volume or snapshot a block device of the kernel; its path.
    fn attach(&self, _attach: params::Attach) -> LocalFuture<Result<String, Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// Takes a block device away that [`attach`](Self::attach) has made.
    fn detach(&self, _device: String) -> LocalFuture<Result<(), Failure>> {
        Box::pin(async { Err(NoHost::refusal()) })
    }

    /// A verb gave the volume `name` other contents or another length. Resolves when nobody sees the old ones.
    fn changed<'a>(&'a self, _name: &'a str) -> LocalFuture<()> {
        Box::pin(async {})
    }

    /// A verb has ended. Resolves when what is offered by name follows the pool's names.
    fn follow(&self) -> LocalFuture<()> {
        Box::pin(async {})
    }

    /// Begins to end the daemon; resolves when the pool is closed. Refused while clients are connected, but with
    /// `force`.
    fn stop(&self, force: bool) -> LocalFuture<Result<(), Failure>>;
}

/// Keeps users away while it lives.
pub trait Guard {}

/// The host of a pool that is open for one verb only.
pub struct NoHost;

impl NoHost {
    fn refusal() -> Failure {
        Failure::new(FailureKind::Invalid, "the pool is not being served: `forkdisk serve` does that")
    }
}

impl Guard for NoHost {}

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
    /// The engine on its device.
    pub pool: Pool<UringDevice>,
    /// Where tasks run.
    pub runtime: Rt,
    host: Rc<dyn Host>,
    own: Rc<Own>,
}

/// What verbs of this session are doing.
#[derive(Default)]
struct Own {
    /// Volumes that verbs read or write, by number, with what they do.
    uses: RefCell<BTreeMap<u64, Vec<&'static str>>>,
    /// Imports and exports under way.
    copies: Cell<usize>,
}

/// Imports and exports at a time: each holds up to about 16 MiB and a thread.
const MAX_COPIES_COUNT: usize = 16;

impl Session {
    /// A session on `pool`, whose volumes `host` serves.
    pub fn new(pool: Pool<UringDevice>, runtime: Rt, host: Rc<dyn Host>) -> Session {
        Session { pool, runtime, host, own: Rc::default() }
    }

    pub(crate) fn host(&self) -> &dyn Host {
        &*self.host
    }

    /// Notes that an import or export begins; refused when there are many already.
    pub(crate) fn begin_copy(&self) -> Result<Copying, Failure> {
        let going_on = self.own.copies.get();
        if going_on >= MAX_COPIES_COUNT {
            let text = format!("{going_on} imports and exports go on already: try again when one has ended");
            return Err(Failure::new(FailureKind::Busy, text));
        }
        self.own.copies.set(going_on + 1);
        Ok(Copying { own: self.own.clone() })
    }

    /// Notes that a verb does `what` with volume number `id` until the guard is dropped.
    pub(crate) fn using(&self, id: u64, what: &'static str) -> Using {
        self.own.uses.borrow_mut().entry(id).or_default().push(what);
        Using { own: self.own.clone(), id, what }
    }

    /// Who uses a volume or snapshot, in words; empty if nobody does.
    pub(crate) fn users(&self, id: u64, name: &str) -> Vec<String> {
        let own = self.own.uses.borrow();
        let verbs = own.get(&id).into_iter().flatten().map(|what| what.to_string());
        verbs.chain(self.host.users(name)).collect()
    }

    /// Seconds since 1970.
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

/// A note that a verb uses a volume.
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
