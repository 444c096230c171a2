//! Serves an open pool, from the first socket to the last.

use std::cell::OnceCell;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use forkdisk::Pool;
use forkdisk_control::{
    Failure, FailureKind, Server as ControlServer, ServerHandle as ControlHandle, Session, Status, runtime_dir,
    watch_lifetimes,
};
use forkdisk_monitor::PoolSource;
use forkdisk_nbd::{Security, Server, ServerHandle};
use forkdisk_uring::{JoinHandle, Rt, Signals, UringDevice};
use forkdisk_vhost_user::{Server as VhostServer, ServerOptions as VhostOptions};
use rustix::process::Signal;

use super::activation;
use super::detach;
use super::devices::Devices;
use super::doors::Doors;
use super::earlier::Earlier;
use super::exports::Served;
use super::hand_over::State;
use super::host::{Clients, Daemon, End};
use super::mounts::Mounts;
use super::notify::Notifier;
use super::outlets::Door;
use super::pid_file::PidFile;
use super::process::{Continued, Ending, Kept, Process};
use super::run::{Ready, Settings};
use super::socket_dir::{self, Contents, Listen, SocketDir};
use super::sockets::Sockets;
use super::space;
use super::vhost_sockets::{VhostSockets, name_of};
use crate::network::Listeners;
use crate::patterns::Patterns;
use crate::progress::Progress;
use crate::session::close_pool;

/// How long callers of `stop` may take to receive the answer.
const FAREWELL: Duration = Duration::from_secs(2);

/// Resources that the end releases.
pub struct Serving {
    control: ControlHandle,
    signals: Rc<Signals>,
    notifier: Rc<Notifier>,
    _places: Places,
}

/// How long clients of the process before have to open their volumes, before what has expired is deleted.
const CONTINUING: Duration = Duration::from_secs(5);

/// Files that are removed when the daemon ends.
struct Places {
    _pid_file: Option<PidFile>,
    _private: Option<runtime_dir::PrivateDir>,
}

/// Returns the status of the daemon without its clients and mounts, which change.
fn identity(path: &Path, pool: &Pool<UringDevice>, sockets: &Sockets, settings: &Settings) -> Result<Status> {
    Ok(Status {
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        pool: path.display().to_string(),
        uuid: forkdisk::uuid_text(&pool.info().uuid),
        file: runtime_dir::file_identity(path)?,
        socket: sockets.data_path.as_ref().map(|path| path.display().to_string()),
        clients: Vec::new(),
        mounts: Vec::new(),
        until_detached: settings.until_detached,
    })
}

/// Tells the log and the service manager that clients can connect.
fn report_serving(path: &Path, (data, control): (Option<PathBuf>, Option<PathBuf>), notifier: &Notifier) {
    let shown = |path: Option<PathBuf>| path.map_or("-".to_string(), |path| path.display().to_string());
    let (data_path, control_path) = (shown(data), shown(control));
    tracing::info!(pool = %path.display(), socket = %data_path, control = %control_path, "serving");
    notifier.ready(&format!("serving {}", path.display()));
}

impl Process<'_> {
    /// Serves an open pool until the end is requested or a new program is ready to take over. Everything that serves
    /// has ended then; the pool is still open.
    pub async fn serve(
        &self,
        pool: &Pool<UringDevice>,
        (state, continued, Kept { keeper, left, handed }): (Option<State<OwnedFd>>, &mut Continued, Kept),
        end: &Rc<End>,
        announce: &impl Fn(Ready<'_>) -> Result<()>,
    ) -> Result<Ending> {
        let (path, runtime, settings) = (self.path, &self.runtime, self.settings);
        let state = state.map(|state| Earlier::begin(runtime, state));
        let sockets = Sockets::open(runtime, pool, settings, activation::take(runtime, handed)?)?;
        let listeners = settings.network.open(runtime)?;
        let mounts = Mounts::new(runtime, pool, (keeper, settings.keeper_limit), settings.fuse_uring);
        let exports = Served::new(path, pool, &mounts);
        let devices = self.devices(&exports, continued).await;
        let data = Server::new(runtime, exports.clone(), settings.data.clone());
        let disks = VhostServer::new(runtime, exports.clone(), settings.vhost_options());
        let clients = Clients { data: data.handle(), disks: disks.handle() };
        let (used, attached) = (clients.clone(), devices.clone());
        mounts.guard(Some(Box::new(move |name| used.has(name) || attached.has(name))));
        let socket_dirs = open_dirs(runtime, pool, contents_of(settings, &exports, (&data, &disks)), self.room).await?;
        let vhost_sockets = VhostSockets::new(runtime, &exports, &disks);
        let wanted = state.as_ref().map_or(settings.disk.as_slice(), |earlier| earlier.disks());
        for disk in wanted {
            vhost_sockets.apply(disk.clone()).await?;
        }
        let controlled = Rc::new(OnceCell::new());
        let host = Daemon {
            runtime: runtime.clone(),
            pool: pool.clone(),
            clients: clients.clone(),
            data: data.clone(),
            exports: exports.clone(),
            mounts: mounts.clone(),
            devices: devices.clone(),
            vhost_sockets: vhost_sockets.clone(),
            end: end.clone(),
            control: controlled.clone(),
            socket_dirs: socket_dirs.clone(),
            identity: identity(path, pool, &sockets, settings)?,
        };
        let session = Session::new(pool.clone(), runtime.clone(), Rc::new(host));
        let server = ControlServer::new(session.clone(), settings.control_limits.clone());
        // Set once.
        let _ = controlled.set(server.handle());
        let notifier = Rc::new(Notifier::from_environment());
        let pid_file = settings.pid_file.as_deref().map(PidFile::write).transpose()?;
        left.into_iter().for_each(|left| mounts.take_over(left));
        self.begin((&sockets, &listeners, &mounts), pool, continued, announce).await?;
        let shown = (sockets.data_path.clone(), sockets.control_path.clone());

        let control = server.handle();
        let following = socket_dirs.iter().map(|dir| runtime.spawn(dir.clone().watch(mounts.clone()))).collect();
        let (controller, listener) = (server.clone(), sockets.control);
        let controlling = runtime.spawn(async move { controller.serve(listener).await });
        let source = PoolSource { pool: pool.clone(), server: Some(data.handle()) };
        let security = listeners.security.clone();
        let (by_tcp, measuring) = listeners.serve(runtime, &data, source);
        let by_unix = sockets.data.into_iter().map(|listener| {
            let data = data.clone();
            runtime.spawn(async move { data.serve(listener).await })
        });
        let serving = by_unix.chain(by_tcp).collect();
        let doors = Doors {
            devices: devices.clone(),
            socket_dirs,
            vhost_sockets,
            following,
            clients,
            control: control.clone(),
            mounts: mounts.clone(),
            data,
            disks,
            serving,
            controlling,
        };
        let lifetimes = (session, state.is_some());
        let mut background = self.background(pool, &notifier, end, (doors.clients.data.clone(), lifetimes));
        background.extend(measuring);
        if let Some(earlier) = state {
            earlier.resume(self, continued, (&doors, &server), exports, security)?;
        }
        report_serving(path, shown, &notifier);

        end.wanted.wait().await;
        if let Some(successor) = end.successor.take() {
            tracing::info!("passing everything on to another process");
            runtime.begin_to_pass_listeners().context("passing on the sockets")?;
            for task in background {
                task.cancel().await;
            }
            let passed = Box::new(doors.pass_on(runtime, successor.takes_tls()).await?);
            // The next process replaces it.
            pid_file.into_iter().for_each(PidFile::keep);
            return Ok(Ending::Leaving { passed, successor, devices, mounts, notifier });
        }
        tracing::info!("letting clients finish");
        notifier.stopping("letting clients finish");
        doors.close().await;
        for task in background {
            task.cancel().await;
        }
        let _places = Places { _pid_file: pid_file, _private: sockets.private };
        Ok(Ending::Stopped(Serving { control, signals: self.signals.clone(), notifier, _places }))
    }

    /// Returns the block devices: those of this process, or after a start those of a killed one.
    async fn devices(&self, exports: &Served, continued: &Continued) -> Devices {
        if let Continued::Itself(devices, _) = continued {
            return devices.clone();
        }
        let devices = Devices::new(&self.runtime, self.path, exports.clone());
        if let Continued::Nothing = continued {
            devices.adopt().await;
        }
        devices
    }

    /// Announces that clients can connect, or takes over from the process before.
    async fn begin(
        &self,
        (sockets, listeners, mounts): (&Sockets, &Listeners, &Mounts),
        pool: &Pool<UringDevice>,
        continued: &Continued,
        announce: &impl Fn(Ready<'_>) -> Result<()>,
    ) -> Result<()> {
        let settings = self.settings;
        if let Continued::Nothing = continued {
            if let Some(dir) = settings.mount.as_ref().filter(|dir| !mounts.has(dir)) {
                mounts.mount_at(dir, self.path).await?;
            }
            let (socket, control) = (sockets.data_path.as_deref(), sockets.control_path.as_deref());
            let (socket_dir, read_only) = (settings.socket_dir.as_deref(), settings.pool.read_only);
            let vhost_user = settings.vhost_user.as_ref().map(|vhost_user| vhost_user.dir.as_path());
            announce(Ready { socket, socket_dir, vhost_user, control, listeners, pool, read_only })?;
        }
        if let Some(log_file) = &settings.log_file {
            detach::log_to(log_file)?;
        }
        if detach::is_detached() {
            detach::let_go(settings.log_file.as_deref(), settings.syslog.as_deref())?;
        }
        Ok(())
    }

    /// Starts the tasks that run beside the doors.
    fn background(
        &self,
        pool: &Pool<UringDevice>,
        notifier: &Rc<Notifier>,
        end: &Rc<End>,
        (data, (session, continues)): (ServerHandle, (Session, bool)),
    ) -> Vec<JoinHandle<()>> {
        let (runtime, log, signals) = (&self.runtime, self.settings.log_file.clone(), self.signals.clone());
        // Clients of the process before open their volumes again first.
        let pause = if continues { CONTINUING } else { Duration::ZERO };
        let lifetimes = (!self.settings.pool.read_only).then(|| runtime.spawn(watch_lifetimes(session, pause)));
        let others = vec![
            runtime.spawn(space::give_back(runtime.clone(), pool.clone(), self.settings.pool.read_only)),
            runtime.spawn(space::watch(runtime.clone(), pool.clone())),
            runtime.spawn(watchdog(runtime.clone(), notifier.clone())),
            runtime.spawn(Asked { signals, end: end.clone(), data, log }.run()),
        ];
        others.into_iter().chain(lifetimes).collect()
    }
}

async fn open_dirs(runtime: &Rt, pool: &Pool<UringDevice>, all: Vec<Contents>, most: usize) -> Result<Vec<SocketDir>> {
    let mut opened = Vec::new();
    for contents in all {
        opened.push(SocketDir::open(runtime, pool, contents, most).await?);
    }
    Ok(opened)
}

impl Settings {
    fn vhost_options(&self) -> VhostOptions {
        self.vhost_user.as_ref().map(|vhost_user| vhost_user.options.clone()).unwrap_or_default()
    }
}

/// Returns the folders of sockets that the settings want.
fn contents_of(
    settings: &Settings,
    Served { pool, outlets, .. }: &Served,
    (data, disks): (&Server<Served>, &VhostServer<Served>),
) -> Vec<Contents> {
    let access = settings.volume_sockets.clone();
    let by_nbd = settings.socket_dir.as_ref().map(|dir| {
        let data = data.clone();
        let listen: Listen = Box::new(move |listener, name| {
            let (data, only) = (data.clone(), Security::Only(name.into()));
            Box::pin(async move { data.listen(listener, only).await })
        });
        Contents { dir: dir.clone(), access: access.clone(), volumes: Patterns::all(), offers_exports: true, listen }
    });
    let by_vhost_user = settings.vhost_user.as_ref().map(|vhost_user| {
        let (disks, outlets, pool, dir) = (disks.clone(), outlets.clone(), pool.clone(), vhost_user.dir.clone());
        let listen: Listen = Box::new(move |listener, name| {
            let (disks, outlets, pool, name) = (disks.clone(), outlets.clone(), pool.clone(), name.to_string());
            let place = dir.join(socket_dir::file_name(&name)).display().to_string();
            let door = Door::Socket(place.clone());
            let shown = move || match outlets.switched(&door) {
                Some(id) => name_of(&pool, id).unwrap_or_default(),
                None => name.clone(),
            };
            Box::pin(async move { disks.listen_at(listener, &place, shown).await })
        });
        let (dir, volumes) = (vhost_user.dir.clone(), vhost_user.volumes.clone());
        Contents { dir, access: access.clone(), volumes, offers_exports: false, listen }
    });
    by_nbd.into_iter().chain(by_vhost_user).collect()
}

impl Serving {
    /// Closes the pool and answers the callers of `stop`.
    pub async fn close(self, runtime: &Rt, pool: &Pool<UringDevice>, path: &Path, end: &End) -> Result<()> {
        // Further signals neither interrupt closing the pool nor change the exit status.
        let Serving { control, signals, notifier, _places } = self;
        signals.ignore_from_now_on();
        notifier.stopping("closing the pool");
        let _progress = Progress::spinner("closing the pool");
        let flushed = pool.flush().await;
        let closed = flushed.and(close_pool(pool).await);
        let told =
            closed.clone().map_err(|e| Failure::new(FailureKind::from(e.kind()), format!("closing the pool: {e}")));
        end.reach(told);
        // Callers that do not read the answer are not waited for longer.
        let _ = runtime.timeout(FAREWELL, control.gone()).await;
        closed.with_context(|| format!("{}: closing the pool", path.display()))
    }
}

/// Task that handles signals.
struct Asked {
    signals: Rc<Signals>,
    end: Rc<End>,
    data: ServerHandle,
    log: Option<PathBuf>,
}

impl Asked {
    async fn run(self) {
        loop {
            let signal = match self.signals.recv().await {
                Ok(signal) => signal,
                Err(error) => {
                    tracing::error!(%error, "signals cannot be received");
                    return self.end.wanted.raise();
                }
            };
            if signal == Signal::CHILD.as_raw() {
                // Children are waited for where they are started.
                continue;
            }
            if signal == Signal::HUP.as_raw()
                && let Some(log) = &self.log
            {
                if let Err(error) = detach::log_to(log) {
                    tracing::error!("{error:#}");
                }
                continue;
            }
            if self.end.is_passing_on() {
                // For the next process, or for this one if that fails.
                self.signals.give_back(signal);
                return;
            }
            if self.end.wanted.has_happened() {
                tracing::warn!("a second signal: disconnecting clients");
                self.data.hurry();
            } else {
                tracing::info!(signal, "a signal requests the end");
                self.end.wanted.raise();
            }
        }
    }
}

async fn watchdog(runtime: Rt, notifier: Rc<Notifier>) {
    let Some(interval) = notifier.watchdog_interval() else { return };
    loop {
        notifier.alive();
        runtime.sleep_for(interval).await;
    }
}
