//! The life of a daemon: its settings, and its start.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forkdisk::{OpenOptions, Pool};
use forkdisk_control::{ServerOptions as ControlOptions, params};
use forkdisk_fuse::OverIoUring;
use forkdisk_nbd::ServerOptions;
use forkdisk_uring::{Config, SocketAccess, UringDevice};
use forkdisk_vhost_user::ServerOptions as VhostOptions;
use rustix::process::Signal;

use super::descriptors;
use super::hand_over::{self, Predecessor};
use super::process::{Ended, Process};
use crate::global::Global;
use crate::network::{Listeners, Network};
use crate::patterns::Patterns;
use crate::volume_sockets::VolumeSockets;

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
    /// Whether requests of mounts come by io_uring.
    pub fuse_uring: OverIoUring,
    /// How long mounts go on without a daemon; `None`: they end with it.
    pub keeper_limit: Option<Duration>,
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
) -> Result<ExitCode> {
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
    hand_over::starting_folder();
    let ended = forkdisk_uring::block_on(Config::default(), |runtime| async move {
        // Before any thread is started: a thread that does not block SIGCHLD would take it from `wait_for_children`.
        let wanted = [Signal::TERM, Signal::INT, Signal::HUP, Signal::CHILD].map(Signal::as_raw);
        let signals = Rc::new(runtime.signals(&wanted)?);
        let predecessor = Predecessor::take()?;
        let daemon = Process { path: &path, settings: &settings, room, global, runtime, signals };
        daemon.run(predecessor, announce).await
    })??;
    match ended {
        Ended::Stopped => tracing::info!("stopped"),
        Ended::Replaced { stays: false } => tracing::info!("another process serves the pool now"),
        Ended::Replaced { stays: true } => return hand_over::wait_for_children(),
    }
    Ok(ExitCode::SUCCESS)
}
