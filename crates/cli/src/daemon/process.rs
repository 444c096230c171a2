//! The process of a daemon: opens the pool, serves it and closes it; takes over from another process, and passes on
//! to a new one.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use forkdisk::{ErrorKind, Pool};
use forkdisk_control::{Failure, params, runtime_dir};
use forkdisk_uring::{Inherited, Rt, Signals, UringDevice, inherited};

use super::detach;
use super::devices::Devices;
use super::doors::Passed;
use super::hand_over::{self, Predecessor, State, Successor};
use super::host::End;
use super::keeper::{self, Keeper, Left};
use super::mounts::Mounts;
use super::notify::Notifier;
use super::run::{Ready, Settings};
use super::service::Serving;
use crate::global::Global;
use crate::pool_lock::PoolLock;
use crate::session::{Access, close_pool, daemon, device_options, open_device, open_device_in_turn, open_pool};
use crate::volatile_file::VolatileFile;

/// How a daemon ended.
pub enum Ended {
    Stopped,
    /// Another process serves the pool. `stays`: this one waits for its end.
    Replaced {
        stays: bool,
    },
}

/// The process that serves a pool.
pub struct Process<'a> {
    pub path: &'a Path,
    pub settings: &'a Settings,
    /// Descriptors for sockets of single volumes.
    pub room: usize,
    pub global: &'a Global,
    pub runtime: Rt,
    pub signals: Rc<Signals>,
}

impl Process<'_> {
    /// Serves the pool, from its beginning or from where another process left it, until the end is requested or a new
    /// program has taken over. Serves on if that fails.
    pub async fn run(
        &self,
        predecessor: Option<Predecessor>,
        announce: impl Fn(Ready<'_>) -> Result<()>,
    ) -> Result<Ended> {
        let mut from = match predecessor {
            None => From::Nothing,
            Some(mut predecessor) => match predecessor.receive() {
                Ok(state) => From::Another(predecessor, state),
                Err(error) => {
                    predecessor.fail(&error);
                    return Err(error);
                }
            },
        };
        loop {
            let Some(Leaving { mut successor, state, devices, notifier }) = self.serve_once(from, &announce).await?
            else {
                return Ok(Ended::Stopped);
            };
            let (state, files) = state.split();
            notifier.alive();
            let (pid, stays) = (successor.pid(), stays());
            match successor.pass(state.clone(), &files).and_then(|()| successor.release(stays)) {
                Ok(()) => {
                    notifier.passed_to(pid);
                    self.signals.pass_on(pid);
                    return Ok(Ended::Replaced { stays });
                }
                Err(error) => {
                    tracing::error!("the upgrade has failed, this program serves on: {error:#}");
                    drop(successor);
                    let state = state.join(files).context("a descriptor is missing")?;
                    let failure = Failure::new(ErrorKind::Failed, format!("this program serves on: {error:#}"));
                    from = From::Itself(state, devices, failure);
                }
            }
        }
    }

    /// Opens the pool, serves it and closes it. Returns what a new program needs if it was not the end.
    async fn serve_once(&self, from: From, announce: &impl Fn(Ready<'_>) -> Result<()>) -> Result<Option<Leaving>> {
        let (state, mut continued) = match from {
            From::Nothing => (None, Continued::Nothing),
            From::Another(predecessor, state) => (Some(state), Continued::Another(predecessor)),
            From::Itself(state, devices, failure) => (Some(state), Continued::Itself(devices, failure)),
        };
        let uuid = runtime_dir::pool_identity(self.path);
        let (stored, handed) = inherited().into_iter().partition(|passed| keeper::is_of_store(&passed.name));
        let (keeper, left) = match (Keeper::with_left(uuid.as_ref(), stored), &state) {
            (Ok((keeper, left)), None) => (keeper, left),
            // Their mounts come from the process before.
            (Ok((keeper, _)), Some(_)) => (keeper, Vec::new()),
            (Err(error), None) => return Err(error),
            (Err(error), Some(_)) => {
                tracing::error!("a kill of this process ends the mounts: {error:#}");
                (None, Vec::new())
            }
        };
        let Open { pool, lock, volatile_file, state } = match self.open(state, !left.is_empty()).await {
            Ok(open) => open,
            Err(error) => {
                if let Continued::Another(predecessor) = continued {
                    predecessor.fail(&error);
                }
                return Err(error);
            }
        };
        let keeper = match (keeper, self.settings.keeper_limit) {
            (None, Some(limit)) => Keeper::start(&pool.info().uuid, limit)
                .inspect_err(|error| tracing::error!("a kill of this process ends the mounts: {error:#}"))
                .ok(),
            (running, _) => running,
        };
        let kept = Kept { keeper: keeper.map(Rc::new), left, handed };
        let end = Rc::new(End::default());
        let outcome = match self.serve(&pool, (state, &mut continued, kept), &end, announce).await {
            Ok(Ending::Stopped(serving)) => serving.close(&self.runtime, &pool, self.path, &end).await.map(|()| None),
            Ok(Ending::Leaving { passed, successor, devices, mounts, notifier }) => {
                let leaving = self.close_to_leave(&pool, *passed, lock).await;
                drop(mounts);
                leaving.map(|state| Some(Leaving { successor, state, devices, notifier }))
            }
            Err(error) => {
                if let Continued::Another(predecessor) = continued {
                    predecessor.fail(&error);
                }
                // The error to report is why it could not be served.
                let _ = close_pool(&pool).await;
                Err(error)
            }
        };
        if outcome.is_ok() && !self.settings.pool.read_only {
            volatile_file.remove();
        }
        outcome
    }

    /// Opens the pool. `left`: a killed process has left mounts, on which removed files may be open.
    async fn open(&self, state: Option<State<OwnedFd>>, left: bool) -> Result<Open> {
        let (path, runtime) = (self.path, &self.runtime);
        let read_only = self.settings.pool.read_only;
        let access = if read_only { Access::Read } else { Access::Write };
        let (device, lock, state) = match state {
            Some(mut state) => {
                let (device, lock) = (state.device.try_clone().context("the pool")?, state.lock.take());
                let device = UringDevice::inherit(runtime, path, device, &device_options(access))?;
                let lock = lock.map(|lock| PoolLock::inherit(lock, path, access)).transpose()?;
                (device, lock, Some(state))
            }
            None => {
                // Several readers can share a pool, but not its sockets.
                if read_only && let Some(refusal) = served_already(self.global, path) {
                    return Err(refusal);
                }
                let open = || open_device(runtime, path, access);
                let opened = open_device_in_turn(self.global, runtime, open).await;
                let (device, lock) = opened.map_err(|error| served_already(self.global, path).unwrap_or(error))?;
                (device, Some(lock), None)
            }
        };
        let volatile_file = VolatileFile::of(path, !read_only);
        let options = self.settings.pool.clone().with_keep_removed(state.is_some() || left);
        let pool = open_pool(device, runtime, path, options.with_volatile(volatile_file.log())).await?;
        Ok(Open { pool, lock, volatile_file, state })
    }

    /// Closes the pool for another process, which gets its device with its locks.
    async fn close_to_leave(
        &self,
        pool: &Pool<UringDevice>,
        passed: Passed,
        lock: Option<PoolLock>,
    ) -> Result<State<OwnedFd>> {
        let closed = pool.flush().await.and(close_pool(pool).await);
        closed.with_context(|| format!("{}: closing the pool", self.path.display()))?;
        let device = pool.device().pass_on().context("passing on the pool")?;
        let Passed { began_ns, listeners, clients, disconnected, sessions, disks, mounts, peers, devices } = passed;
        let lock = lock.and_then(PoolLock::pass_on);
        let large = Vec::new();
        let mut state = State {
            began_ns,
            device,
            lock,
            listeners,
            clients,
            large,
            disconnected,
            sessions,
            disks,
            mounts,
            peers,
            devices,
        };
        state.move_out_bytes().context("memory for replies that were not fetched")?;
        Ok(state)
    }
}

/// Whether this process waits for the end of the one that takes over: the number of a daemon in the foreground stays.
pub fn stays() -> bool {
    !detach::is_detached() && std::env::var_os("NOTIFY_SOCKET").is_none() && !hand_over::has_predecessor()
}

/// Where the service of a pool begins.
enum From {
    Nothing,
    /// Another process left it.
    Another(Predecessor, State<OwnedFd>),
    /// A new program failed to take over.
    Itself(State<OwnedFd>, Devices, Failure),
}

/// An open pool, and what is to be continued.
struct Open {
    pool: Pool<UringDevice>,
    lock: Option<PoolLock>,
    volatile_file: VolatileFile,
    state: Option<State<OwnedFd>>,
}

/// The keeper of mounts, and what it holds from a process that was killed.
pub struct Kept {
    pub keeper: Option<Rc<Keeper>>,
    pub left: Vec<Left>,
    /// Sockets that the service manager handed over.
    pub handed: Vec<Inherited>,
}

/// Where the clients come from.
pub enum Continued {
    Nothing,
    /// Another process, which waits for an answer.
    Another(Predecessor),
    /// This one, and why a new program did not take over.
    Itself(Devices, Failure),
}

/// A closed pool that a new program is to take over.
struct Leaving {
    successor: Successor,
    state: State<OwnedFd>,
    devices: Devices,
    notifier: Rc<Notifier>,
}

/// How the service of an open pool ended.
pub enum Ending {
    Stopped(Serving),
    Leaving {
        passed: Box<Passed>,
        successor: Successor,
        devices: Devices,
        /// Keeps removed files that are open until the pool is closed.
        mounts: Mounts,
        notifier: Rc<Notifier>,
    },
}

/// Returns the error for a pool that another daemon serves already.
fn served_already(global: &Global, path: &Path) -> Option<anyhow::Error> {
    let status = daemon(global, path).ok()??.call(params::Status {}, None, |_| {}).ok()?;
    let socket = status.socket.map_or(String::new(), |socket| format!(" on {socket}"));
    let (path, pid) = (path.display(), status.pid);
    Some(anyhow::anyhow!(
        "{path} is in use by forkdisk serve (pid {pid}), which serves it{socket}: `forkdisk stop {path}` ends that"
    ))
}
