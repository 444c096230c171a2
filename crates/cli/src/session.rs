//! Access to a pool: through the daemon that serves it, or by opening it for one command.
//!
//! A verb calls methods on a [`Caller`], which runs them in this process or in the daemon; verbs do
//! not see the difference.

use std::cell::RefCell;
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forkdisk::{ErrorKind, OpenOptions, Pool, PoolEvent, Recovery};
use forkdisk_control::{
    Call, Client, Failure, FailureKind, Method, NoHost, Observer, Session, attach_origins, delete_expired,
    detach_origins, params, perform, runtime_dir,
};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice};

use crate::config::key;
use crate::global::Global;
use crate::host;
use crate::owner::{self, InUse};
pub use crate::pool_lock::Access;
use crate::pool_lock::PoolLock;
use crate::progress::Progress;
use crate::volatile_file::VolatileFile;

/// How long a daemon may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Executor of verbs.
pub enum Caller {
    /// The pool is open in this process.
    Idle(Session),
    /// A daemon has the pool open.
    Served(RefCell<Client>),
}

impl Caller {
    /// Carries out `method`, with the file that belongs to it, if any.
    pub async fn call<M: Method>(&self, method: M, file: Option<OwnedFd>) -> Result<M::Reply, Failure> {
        let progress = Rc::new(Progress::new());
        match self {
            Caller::Served(client) => {
                let file = file.as_ref().map(AsFd::as_fd);
                client.borrow_mut().call(method, file, |step| progress.reached(step))
            }
            Caller::Idle(session) => {
                let call = Call { observer: progress, file: file.map(Rc::new), ..Call::default() };
                let reply = perform(session, method.into(), &call).await?;
                let mixed_up = || Failure::new(FailureKind::Protocol, "the answer is another method's");
                M::reply_of(reply).ok_or_else(mixed_up)
            }
        }
    }
}

/// Carries out one `method` on the pool at `path`.
pub fn call<M: Method>(global: &Global, path: &Path, access: Access, method: M) -> Result<M::Reply> {
    with_pool(global, path, access, async |caller| Ok(caller.call(method, None).await?))
}

/// Runs `work` with an executor of verbs for the pool at `path`. If an object is missing in the
/// default pool, the error names the pool's path and the source of that setting.
pub fn with_pool<T>(
    global: &Global,
    path: &Path,
    access: Access,
    work: impl AsyncFnOnce(&Caller) -> Result<T>,
) -> Result<T> {
    in_pool(global, path, access, work).map_err(|error| {
        let failure = error.downcast_ref::<Failure>();
        match global.about_default_pool(path) {
            Some(place) if failure.is_some_and(|f| f.kind == ErrorKind::NotFound) => error.context(place),
            _ => error,
        }
    })
}

fn in_pool<T>(global: &Global, path: &Path, access: Access, work: impl AsyncFnOnce(&Caller) -> Result<T>) -> Result<T> {
    if let Some(client) = daemon(global, path)? {
        return at_once(work(&Caller::Served(RefCell::new(client))));
    }
    forkdisk_uring::block_on(Config::default(), |runtime| async move {
        let mut turn = PoolTurn::new(global)?;
        let (device, _lock) = loop {
            let error = match open_device(&runtime, path, access) {
                Ok(opened) => break opened,
                Err(error) => error,
            };
            // A daemon may have started to serve the pool a moment ago.
            if let Some(client) = daemon(global, path)? {
                drop(turn);
                return work(&Caller::Served(RefCell::new(client))).await;
            }
            turn.wait(&runtime, error).await?;
        };
        drop(turn);
        let volatile_file = VolatileFile::of(path, false);
        let read_only = access == Access::Read;
        let options =
            host::open_options().with_shared_cache(0).with_read_only(read_only).with_volatile(volatile_file.log());
        let pool = open_pool(device, &runtime, path, options).await?;
        let session = Session::new(pool.clone(), runtime, Rc::new(NoHost));
        if !read_only && let Err(error) = delete_expired(&session).await {
            tracing::warn!("{}: what has expired could not be deleted: {error}", path.display());
        }
        let outcome = work(&Caller::Idle(session)).await;
        let closed = close_pool(&pool).await.with_context(|| format!("{}: closing the pool", path.display()));
        if closed.is_ok() && !read_only {
            volatile_file.remove();
        }
        let value = outcome?;
        match closed {
            // The journal contains what the verb did; the next open replays it.
            Err(error) if !read_only && is_full(&error) => tracing::warn!(
                "it is done, but the pool was not closed in order, which the next open recovers: give the file \
                 system under it room: {error:#}"
            ),
            closed => closed?,
        }
        Ok(value)
    })?
}

fn is_full(error: &anyhow::Error) -> bool {
    error.downcast_ref::<forkdisk::Error>().is_some_and(|e| e.kind() == ErrorKind::NoSpace)
}

/// Wait for a verb or daemon that has the pool open.
struct PoolTurn {
    since: Instant,
    /// How long to wait for another verb.
    patience: Duration,
    progress: Option<Progress>,
}

impl PoolTurn {
    /// Starts the wait, with the configured limit.
    fn new(global: &Global) -> Result<PoolTurn> {
        Ok(PoolTurn { since: Instant::now(), patience: global.settings.time(&key::WAIT)?, progress: None })
    }

    /// Waits a little if `error` says that the pool is in use temporarily: by another verb, or by a
    /// daemon that is starting or ending. Otherwise, and after the limit, fails with `error`.
    async fn wait(&mut self, runtime: &Rt, error: anyhow::Error) -> Result<()> {
        let Some(in_use) = error.downcast_ref::<InUse>() else { return Err(error) };
        if in_use.by_a_daemon() && in_use.by_another_way() {
            return Err(error);
        }
        if in_use.by_a_daemon() && self.since.elapsed() > PATIENCE {
            // The daemon answers on another socket.
            let (socket, time) = ("on the sockets known here", PATIENCE.as_secs());
            return Err(anyhow::anyhow!("{error}; it did not answer {socket} for {time} s (--control names others)"));
        }
        if !in_use.by_a_daemon() && !in_use.by_a_verb() {
            return Err(error);
        }
        if in_use.by_a_verb() && self.since.elapsed() >= self.patience {
            let (who, time) = (in_use.who(), self.patience.as_secs_f64());
            return Err(match self.patience.is_zero() {
                true => anyhow::anyhow!("{who}: try again when that has ended, or wait for it with --wait TIME"),
                false => anyhow::anyhow!(
                    "{who}; this waited for {time} s: try again when that has ended, or wait longer with --wait TIME"
                ),
            });
        }
        let waiting = || Progress::spinner(&format!("waiting: {}", in_use.who()));
        self.progress.get_or_insert_with(waiting);
        // Each attempt scans the descriptors of all processes: the pause grows with the time waited.
        runtime.sleep_for((self.since.elapsed() / 8).clamp(PAUSE, LONGEST_PAUSE)).await;
        Ok(())
    }
}

/// Opens the device under the pool at `path`; the error names the process that has it open. The
/// lock must be kept as long as the device.
pub fn open_device(runtime: &Rt, path: &Path, access: Access) -> Result<(UringDevice, PoolLock)> {
    Ok((device_of(runtime, path, access)?, PoolLock::take(path, access)?))
}

/// As [`open_device`] for writing, also while another process has a pool with the same UUID elsewhere.
pub fn open_device_of_copy(runtime: &Rt, path: &Path) -> Result<(UringDevice, PoolLock)> {
    Ok((device_of(runtime, path, Access::Write)?, PoolLock::take_copy(path)?))
}

/// Returns the options for the device under a pool.
pub fn device_options(access: Access) -> DeviceOptions {
    DeviceOptions::default().with_read_only(access == Access::Read)
}

fn device_of(runtime: &Rt, path: &Path, access: Access) -> Result<UringDevice> {
    UringDevice::open(runtime, path, &device_options(access)).map_err(|e| owner::explain(path, e))
}

/// As [`open_device`], but waits for verbs that have the pool open; `open` makes one attempt.
pub async fn open_device_in_turn(
    global: &Global,
    runtime: &Rt,
    open: impl Fn() -> Result<(UringDevice, PoolLock)>,
) -> Result<(UringDevice, PoolLock)> {
    let mut turn = PoolTurn::new(global)?;
    loop {
        match open() {
            Err(error) if owner::is_a_verb(&error) => turn.wait(runtime, error).await?,
            outcome => return outcome,
        }
    }
}

/// Opens the pool on `device`, and the devices of its origins as far as possible.
pub async fn open_pool(
    device: UringDevice,
    runtime: &Rt,
    path: &Path,
    options: OpenOptions,
) -> Result<Pool<UringDevice>> {
    let read_only = options.read_only;
    let pool = Pool::open(device, Rc::new(runtime.clone()), options).await.context(path.display().to_string())?;
    tell_recovery(&pool, path);
    pool.observe(tell_dropped);
    for (name, error) in attach_origins(&pool, runtime, read_only).await {
        tracing::warn!("the origin {name:?} is not open, nor are its snapshots and their clones: {error}");
    }
    Ok(pool)
}

/// Logs which snapshot was dropped. A verb that finds no space fails with a message of its own; in
/// a daemon [`space`](crate::daemon::space) logs it.
pub fn tell_dropped(event: &PoolEvent) {
    if let PoolEvent::Dropped { snapshot } = event {
        tracing::warn!(
            "dropped {snapshot}: the pool is full, and it was the oldest snapshot that may be dropped \
             (when-full=drop-oldest); grow the pool or delete something to keep the others"
        );
    }
}

/// Logs what was recovered from a pool that was not closed cleanly.
fn tell_recovery(pool: &Pool<UringDevice>, path: &Path) {
    let Recovery { clean, journal, volatile, .. } = pool.recovery();
    if clean {
        return;
    }
    let path = path.display();
    tracing::warn!(
        "{path} was not closed in order: replayed {journal} records of the journal and {volatile} of the volatile log \
         of a process that ended"
    );
}

/// Closes the pool and the devices of its origins.
pub async fn close_pool(pool: &Pool<UringDevice>) -> forkdisk::Result<()> {
    let detached = detach_origins(pool).await;
    detached.and(pool.close().await)
}

/// Connects to the daemon that serves the pool at `path`; `None` if none answers.
pub fn daemon(global: &Global, path: &Path) -> Result<Option<Client>> {
    let Some(uuid) = runtime_dir::pool_identity(path) else { return Ok(None) };
    let file = runtime_dir::file_identity(path)?;
    for place in global.control().into_iter().chain(runtime_dir::control_candidates(&uuid)) {
        let mut client = match Client::connect(&place) {
            Ok(client) => client,
            Err(error) => {
                tracing::debug!(socket = %place.display(), %error, "no daemon answers");
                continue;
            }
        };
        match client.call(params::Status {}, None, |_| {}) {
            // A copy of a pool has the same identity but is another pool.
            Ok(status) if status.file == file => return Ok(Some(client)),
            Ok(status) => tracing::debug!(socket = %place.display(), other = status.pool, "serves another pool"),
            // The daemon is ending: opening the pool shows whether it is free.
            Err(failure) if failure.kind == FailureKind::Ending => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(None)
}

/// Returns the outcome of a future that blocks instead of waiting.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut TaskContext::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("a caller of a daemon blocks, it never waits"),
    }
}
