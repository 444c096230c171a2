//! The life of a daemon, from the first read of the pool to its last flush.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forkdisk::{OpenOptions, Pool};
use forkdisk_control::{
    Failure, FailureKind, Server as ControlServer, ServerHandle as ControlHandle, ServerOptions as ControlOptions,
    Session, Status, params, runtime_dir,
};
use forkdisk_monitor::PoolSource;
use forkdisk_nbd::{Security, Server, ServerHandle, ServerOptions};
use forkdisk_uring::{Config, JoinHandle, Rt, Signals, SocketAccess, UnixListener, UringDevice};
use forkdisk_vhost_user::{Server as VhostServer, ServerOptions as VhostOptions};
use rustix::process::Signal;

use super::activation::{self, Activated};
use super::descriptors;
use super::detach;
use super::devices::Devices;
use super::exports::{ExportLocks, Served};
use super::host::{Clients, Daemon, End};
use super::io_error_log::IoErrorLog;
use super::mounts::Mounts;
use super::notify::Notifier;
use super::pid_file::PidFile;
use super::socket_dir::{Contents, Listen, SocketDir};
use super::space;
use super::vhost_sockets::VhostSockets;
use crate::global::Global;
use crate::network::{Listeners, Network};
use crate::patterns::Patterns;
use crate::progress::Progress;
use crate::session::{Access, close_pool, daemon, open_device, open_device_in_turn, open_pool};
use crate::volatile_file::VolatileFile;
use crate::volume_sockets::VolumeSockets;

/// Interval at which freed space is returned to the pool and to the file system under it.
const GIVE_BACK: Duration = Duration::from_secs(5);
/// How long callers of `stop` may take to receive the answer.
const FAREWELL: Duration = Duration::from_secs(2);

/// Settings of a daemon.
pub struct Settings {
    /// Path of the data socket; `None`: in the pool's own folder.
    pub socket: Option<PathBuf>,
    /// Folder with a data socket for each volume.
    pub socket_dir: Option<PathBuf>,
    /// Disks for virtual machines; `None`: none.
    pub vhost_user: Option<VhostUser>,
    /// A disk with a socket of its own.
    pub disk: Option<params::VhostUser>,
    /// Mode and group of data sockets, except the one in the pool's own folder.
    pub access: SocketAccess,
    /// Mode and group of the sockets in `socket_dir` and of those for virtual machines.
    pub volume_sockets: VolumeSockets,
    /// Path of the control socket; `None`: in the pool's own folder.
    pub control: Option<PathBuf>,
    /// File for the process number.
    pub pid_file: Option<PathBuf>,
    /// Log file that replaces stderr.
    pub log_file: Option<PathBuf>,
    /// The socket of the system's log, for a daemon in the background without a log file.
    pub syslog: Option<PathBuf>,
    /// Where the pool is mounted, too.
    pub mount: Option<PathBuf>,
    /// Whether it was started for attached devices and ends with the last of them.
    pub until_detached: bool,
    /// Options for opening the pool.
    pub pool: OpenOptions,
    /// Network listeners besides the sockets.
    pub network: Network,
    /// Limits of the data server.
    pub data: ServerOptions,
    /// Limits of the control server.
    pub control_limits: ControlOptions,
}

/// Sockets of the vhost-user-blk server.
#[derive(Clone)]
pub struct VhostUser {
    /// Folder with a socket for each volume.
    pub dir: PathBuf,
    /// Volumes that have one.
    pub volumes: Patterns,
    pub options: VhostOptions,
}

/// Announced once, when clients can connect.
pub struct Ready<'a> {
    /// Path of the data socket.
    pub socket: Option<&'a Path>,
    /// Folder of the sockets of single volumes.
    pub socket_dir: Option<&'a Path>,
    /// Folder of the sockets for virtual machines.
    pub vhost_user: Option<&'a Path>,
    /// Path of the control socket.
    pub control: Option<&'a Path>,
    /// Listeners for TCP and metrics.
    pub listeners: &'a Listeners,
    /// The pool.
    pub pool: &'a Pool<UringDevice>,
    /// Whether all exports are read-only.
    pub read_only: bool,
}

/// Serves the pool at `path` until the end is requested, then closes it. Calls `announce` when
/// clients can connect.
pub fn run(
    path: &Path,
    mut settings: Settings,
    global: &Global,
    announce: impl Fn(Ready<'_>) -> Result<()>,
) -> Result<()> {
    let room = descriptors::check(descriptors::raise(), &settings.data, &settings.control_limits)?;
    // A daemon leaves the folder in which it was started.
    let absolute = |path: &Path| std::path::absolute(path).with_context(|| path.display().to_string());
    let path = absolute(path)?;
    let Settings { pid_file, log_file, syslog, mount, socket_dir, vhost_user, .. } = &mut settings;
    let paths = [pid_file, log_file, syslog, mount, socket_dir];
    if let Some(vhost_user) = vhost_user {
        vhost_user.dir = absolute(&vhost_user.dir)?;
    }
    for path in paths.into_iter().flatten() {
        *path = absolute(path)?;
    }
    // Checked before clients are told that they can connect.
    for file in [&settings.pid_file, &settings.log_file].into_iter().flatten() {
        let folder = file.parent().filter(|folder| !folder.is_dir());
        if let Some(folder) = folder {
            bail!("{}: the folder {} does not exist", file.display(), folder.display());
        }
    }
    forkdisk_uring::block_on(Config::default(), |runtime| async move {
        // Before any thread is started.
        let signals = runtime.signals(&[Signal::TERM.as_raw(), Signal::INT.as_raw(), Signal::HUP.as_raw()])?;
        let read_only = settings.pool.read_only;
        let access = if read_only { Access::Read } else { Access::Write };
        // Several readers can share a pool, but not its sockets.
        if read_only && let Some(refusal) = served_already(global, &path) {
            return Err(refusal);
        }
        let opened = open_device_in_turn(global, &runtime, || open_device(&runtime, &path, access)).await;
        let (device, _lock) = opened.map_err(|error| served_already(global, &path).unwrap_or(error))?;
        let volatile_file = VolatileFile::of(&path, !read_only);
        let options = settings.pool.clone().with_volatile(volatile_file.log());
        let pool = open_pool(device, &runtime, &path, options).await?;
        let end = Rc::new(End::default());
        let outcome = serve(&path, &runtime, &pool, (&settings, room), signals, &end, announce).await;
        let outcome = match outcome {
            Ok(served) => served.close(&runtime, &pool, &path, &end).await,
            Err(error) => {
                // The error to report is why it could not be served.
                let _ = close_pool(&pool).await;
                Err(error)
            }
        };
        if outcome.is_ok() {
            if !read_only {
                volatile_file.remove();
            }
            tracing::info!("stopped");
        }
        outcome
    })?
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

/// Resources that the end releases.
struct Serving {
    control: ControlHandle,
    signals: Rc<Signals>,
    notifier: Rc<Notifier>,
    _places: Places,
}

/// Files that are removed when the daemon ends.
struct Places {
    _pid_file: Option<PidFile>,
    _private: Option<runtime_dir::PrivateDir>,
}

/// What the daemon says of itself; clients and mounts are filled in when it is asked.
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
fn report_serving(path: &Path, sockets: &Sockets, notifier: &Notifier) {
    let shown = |path: &Option<PathBuf>| path.as_ref().map_or("-".to_string(), |path| path.display().to_string());
    let (data_path, control_path) = (shown(&sockets.data_path), shown(&sockets.control_path));
    tracing::info!(pool = %path.display(), socket = %data_path, control = %control_path, "serving");
    notifier.ready(&format!("serving {}", path.display()));
}

async fn serve(
    path: &Path,
    runtime: &Rt,
    pool: &Pool<UringDevice>,
    (settings, room): (&Settings, usize),
    signals: Signals,
    end: &Rc<End>,
    announce: impl Fn(Ready<'_>) -> Result<()>,
) -> Result<Serving> {
    let activated = activation::take()?;
    let sockets = Sockets::open(runtime, pool, settings, activated)?;
    let listeners = settings.network.open(runtime)?;
    let export_locks = ExportLocks::default();
    let mounts = Mounts::new(runtime, pool);
    let io_errors = IoErrorLog::default();
    let (uuid, locks) = (pool.info().uuid, export_locks.clone());
    let exports = Served { pool: pool.clone(), uuid, export_locks: locks, mounts: mounts.clone(), io_errors };
    let devices = Devices::new(runtime, path, exports.clone());
    devices.adopt().await;
    let data = Server::new(runtime, exports.clone(), settings.data.clone());
    let disks = VhostServer::new(runtime, exports, settings.vhost_options());
    let clients = Clients { data: data.handle(), disks: disks.handle() };
    let (used, attached) = (clients.clone(), devices.clone());
    mounts.guard(Some(Box::new(move |name| used.has(name) || attached.has(name))));
    let socket_dirs = open_dirs(runtime, pool, contents_of(settings, &data, &disks), room).await?;
    let vhost_sockets = VhostSockets::new(runtime, pool, &disks);
    if let Some(disk) = &settings.disk {
        vhost_sockets.apply(disk.clone()).await?;
    }
    let identity = identity(path, pool, &sockets, settings)?;
    let host = Daemon {
        runtime: runtime.clone(),
        clients: clients.clone(),
        export_locks,
        mounts: mounts.clone(),
        devices: devices.clone(),
        vhost_sockets: vhost_sockets.clone(),
        end: end.clone(),
        socket_dirs: socket_dirs.clone(),
        identity,
    };
    let session = Session::new(pool.clone(), runtime.clone(), Rc::new(host));
    let control = ControlServer::new(session, settings.control_limits.clone());
    let notifier = Rc::new(Notifier::from_environment());
    let pid_file = settings.pid_file.as_deref().map(PidFile::write).transpose()?;
    if let Some(dir) = &settings.mount {
        mounts.mount_at(dir, path).await?;
    }

    let (socket, control_socket) = (sockets.data_path.as_deref(), sockets.control_path.as_deref());
    let (socket_dir, read_only) = (settings.socket_dir.as_deref(), settings.pool.read_only);
    let vhost_user = settings.vhost_user.as_ref().map(|vhost_user| vhost_user.dir.as_path());
    let control_path = control_socket;
    announce(Ready { socket, socket_dir, vhost_user, control: control_path, listeners: &listeners, pool, read_only })?;
    if let Some(log_file) = &settings.log_file {
        detach::log_to(log_file)?;
    }
    if detach::is_detached() {
        detach::let_go(settings.log_file.as_deref(), settings.syslog.as_deref())?;
    }
    report_serving(path, &sockets, &notifier);

    let signals = Rc::new(signals);
    let asked =
        Asked { signals: signals.clone(), end: end.clone(), data: data.handle(), log: settings.log_file.clone() };
    let mut background = vec![
        runtime.spawn(give_back(runtime.clone(), pool.clone(), read_only)),
        runtime.spawn(space::watch(runtime.clone(), pool.clone())),
        runtime.spawn(watchdog(runtime.clone(), notifier.clone())),
        runtime.spawn(asked.run()),
    ];
    let watch = |sockets: &SocketDir| runtime.spawn(sockets.clone().watch(mounts.clone()));
    let following = socket_dirs.iter().map(watch).collect();
    let handle = control.handle();
    let (server, listener) = (control.clone(), sockets.control);
    let controlling = runtime.spawn(async move { server.serve(listener).await });
    let source = PoolSource { pool: pool.clone(), server: Some(data.handle()) };
    let (by_tcp, measuring) = listeners.serve(runtime, &data, source);
    background.extend(measuring);
    let serving = sockets
        .data
        .into_iter()
        .map(|listener| {
            let data = data.clone();
            runtime.spawn(async move { data.serve(listener).await })
        })
        .chain(by_tcp)
        .collect();

    end.wanted.wait().await;
    tracing::info!("letting clients finish");
    notifier.stopping("letting clients finish");
    let control = handle.clone();
    let doors =
        Doors { devices, socket_dirs, vhost_sockets, following, clients, control, mounts, serving, controlling };
    doors.close().await;
    for task in background {
        task.cancel().await;
    }
    let _places = Places { _pid_file: pid_file, _private: sockets.private };
    Ok(Serving { control: handle, signals, notifier, _places })
}

/// Everything by which the pool is used.
struct Doors {
    devices: Devices,
    socket_dirs: Vec<SocketDir>,
    vhost_sockets: VhostSockets,
    /// Tasks that keep the sockets in step with the volumes.
    following: Vec<JoinHandle<()>>,
    clients: Clients,
    control: ControlHandle,
    mounts: Mounts,
    /// Tasks of the data server.
    serving: Vec<JoinHandle<()>>,
    /// The task of the control server.
    controlling: JoinHandle<()>,
}

impl Doors {
    /// Accepts nothing new and lets requests in flight end.
    async fn close(self) {
        self.devices.stop().await;
        for following in self.following {
            following.cancel().await;
        }
        for sockets in self.socket_dirs {
            sockets.close().await;
        }
        self.clients.data.stop();
        self.vhost_sockets.close().await;
        self.clients.disks.stop().await;
        self.control.stop();
        for server in self.serving {
            server.await;
        }
        self.controlling.await;
        self.control.idle().await;
        self.mounts.stop().await;
        self.mounts.guard(None);
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
fn contents_of(settings: &Settings, data: &Server<Served>, disks: &VhostServer<Served>) -> Vec<Contents> {
    let access = settings.volume_sockets.clone();
    let by_nbd = settings.socket_dir.as_ref().map(|dir| {
        let data = data.clone();
        let listen: Listen = Box::new(move |listener, name| {
            let (data, only) = (data.clone(), Security::Only(name.into()));
            Box::pin(async move { data.listen(listener, only).await })
        });
        Contents { dir: dir.clone(), access: access.clone(), volumes: Patterns::all(), listen }
    });
    let by_vhost_user = settings.vhost_user.as_ref().map(|vhost_user| {
        let disks = disks.clone();
        let listen: Listen = Box::new(move |listener, name| {
            let (disks, name) = (disks.clone(), name.to_string());
            Box::pin(async move { disks.listen(listener, &name).await })
        });
        Contents { dir: vhost_user.dir.clone(), access: access.clone(), volumes: vhost_user.volumes.clone(), listen }
    });
    by_nbd.into_iter().chain(by_vhost_user).collect()
}

impl Serving {
    /// Closes the pool and answers the callers of `stop`.
    async fn close(self, runtime: &Rt, pool: &Pool<UringDevice>, path: &Path, end: &End) -> Result<()> {
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

/// Sockets that clients connect to.
struct Sockets {
    data: Vec<UnixListener>,
    data_path: Option<PathBuf>,
    control: UnixListener,
    control_path: Option<PathBuf>,
    private: Option<runtime_dir::PrivateDir>,
}

impl Sockets {
    fn open(runtime: &Rt, pool: &Pool<UringDevice>, settings: &Settings, activated: Activated) -> Result<Sockets> {
        let needs_private = settings.socket.is_none() && activated.data.is_empty()
            || settings.control.is_none() && activated.control.is_none();
        let private = match needs_private {
            true => Some(runtime_dir::PrivateDir::make(&pool.info().uuid)?),
            false => None,
        };
        let place_of = |chosen: &Option<PathBuf>, usual: fn(&runtime_dir::PrivateDir) -> PathBuf| -> Result<PathBuf> {
            let path = chosen.clone().or_else(|| private.as_ref().map(usual)).context("no place for the socket")?;
            std::path::absolute(&path).with_context(|| format!("{}: no such place", path.display()))
        };
        let (mut data, data_path) = match activated.data.is_empty() {
            true => {
                let path = place_of(&settings.socket, runtime_dir::PrivateDir::data)?;
                let access = if settings.socket.is_some() { settings.access } else { SocketAccess::OWNER };
                (vec![UnixListener::bind_for(runtime, &path, access)?], Some(path))
            }
            false => (Vec::new(), activated.data.first().and_then(activation::path_of)),
        };
        data.extend(activated.data.into_iter().map(|fd| UnixListener::from_fd(runtime, fd)));
        let (control, control_path) = match activated.control {
            Some(fd) => {
                let path = activation::path_of(&fd);
                (UnixListener::from_fd(runtime, fd), path)
            }
            None => {
                let path = place_of(&settings.control, runtime_dir::PrivateDir::control)?;
                (UnixListener::bind(runtime, &path)?, Some(path))
            }
        };
        Ok(Sockets { data, data_path, control, control_path, private })
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
            if signal == Signal::HUP.as_raw()
                && let Some(log) = &self.log
            {
                if let Err(error) = detach::log_to(log) {
                    tracing::error!("{error:#}");
                }
                continue;
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

/// Runs checkpoints: only they make trimmed or deleted space free, and a hole in the pool's file.
/// The engine starts one when much has changed; this starts one for little, too.
async fn give_back(runtime: Rt, pool: Pool<UringDevice>, read_only: bool) {
    if read_only {
        return;
    }
    loop {
        runtime.sleep_for(GIVE_BACK).await;
        if pool.info().freeing > 0
            && let Err(error) = pool.checkpoint().await
        {
            return tracing::error!(%error, "space cannot be given back");
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
