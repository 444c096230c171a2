//! `serve`: serves every volume and snapshot of a pool as an NBD export until it is told to end.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forkdisk::{DiscardPolicy, WhenFull};
use forkdisk_control::ServerOptions as ControlOptions;
use forkdisk_fuse::OverIoUring;
use forkdisk_nbd::{ServerOptions, nbd_uri};
use forkdisk_uring::SocketAccess;
use forkdisk_vhost_user::ServerOptions as VhostOptions;
use serde::Serialize;

use crate::attach;
use crate::config::{Given, Settings as Configuration, key};
use crate::daemon::{self, Ready, Settings, VhostUser, detach, reserves};
use crate::global::Global;
use crate::group;
use crate::host;
use crate::network::Network;
use crate::output::{print_json_line, print_line};
use crate::patterns::Patterns;
use crate::served_mount::over_io_uring;
use crate::verbs::examples::examples;
use crate::volume_sockets::VolumeSockets;

/// Most exports announced by name as text; JSON lists all of them.
const ANNOUNCED_COUNT: usize = 100;

/// Serve every volume and snapshot as an NBD export
///
/// SIGTERM, SIGINT and `forkdisk stop` let requests in flight end, flush, and leave the pool clean.
/// All other verbs work meanwhile.
#[derive(Args)]
#[command(after_help = examples!["forkdisk serve /srv/pool.img --daemon"])]
pub struct ServeArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Serve in the background; returns when clients can connect. The log goes to --log-file, else to --syslog
    #[arg(long)]
    daemon: bool,

    /// End when the last device of the pool is detached
    #[arg(long, hide = true)]
    until_detached: bool,

    /// Write nothing, not even to recover the pool: all exports are read-only, and verbs that
    /// change the pool are refused. Also for a pool whose counts are damaged
    #[arg(long)]
    read_only: bool,

    #[command(flatten)]
    pub given: Given<true>,
}

/// Most queues of a disk.
const MAX_QUEUES: usize = 64;

/// Printed once, when clients can connect.
#[derive(Serialize)]
struct Announcement {
    socket: Option<String>,
    /// Folder with a socket for each volume.
    socket_dir: Option<String>,
    /// Folder with a vhost-user-blk socket for each volume.
    vhost_user: Option<String>,
    control: Option<String>,
    pid: u32,
    /// Prefixes of URIs over TCP; an export's name follows them.
    tcp: Vec<String>,
    metrics: Vec<String>,
    exports: Vec<Export>,
}

#[derive(Serialize)]
struct Export {
    name: String,
    /// `null` if the socket has no path.
    uri: Option<String>,
    size: u64,
    read_only: bool,
}

/// Serves until told to end, then closes the pool cleanly.
pub fn run(args: ServeArgs, global: &Global) -> Result<ExitCode> {
    let path = global.pool(args.pool.as_deref())?;
    if args.daemon {
        match detach::is_detached() {
            false => return detach::start(),
            true => detach::leave_terminal()?,
        }
    }
    reserves::hold(&global.settings)?;
    // Cleans up after a killed daemon. `attach` has done so already if it started this one.
    if rustix::process::geteuid().is_root()
        && let Some(_alone) = attach::alone_at_once()
    {
        attach::refresh();
    }
    let json = global.output.json();
    let mut settings = Settings { until_detached: args.until_detached, ..settings(&global.settings)? };
    settings.pool.read_only = args.read_only;
    daemon::run(&path, settings, global, |ready| announce(&ready, json))
}

pub(super) fn settings(config: &Configuration) -> Result<Settings> {
    let when_full = match config.word(&key::WHEN_FULL) {
        Some("error") => WhenFull::Error,
        _ => WhenFull::Wait(config.time(&key::WAIT_FOR_SPACE)?),
    };
    let access = access(config)?;
    Ok(Settings {
        access,
        volume_sockets: volume_sockets(config, access)?,
        socket_dir: config.path(&key::SOCKET_DIR),
        vhost_user: vhost_user(config)?,
        disk: None,
        network: Network::from_settings(config)?,
        socket: config.path(&key::SOCKET),
        control: config.path(&key::CONTROL),
        mount: config.path(&key::MOUNT),
        fuse_uring: fuse_uring(config)?,
        keeper_limit: match config.switch(&key::KEEPER)? {
            true => Some(config.time(&key::KEEPER_LIMIT)?),
            false => None,
        },
        until_detached: false,
        pid_file: config.path(&key::PID_FILE),
        log_file: config.path(&key::LOG_FILE),
        syslog: config.path(&key::SYSLOG),
        pool: host::open_options()
            .with_cache(config.size(&key::CACHE)?)
            .with_shared_cache(config.size(&key::SHARED_CACHE)? as u64)
            .with_dirty(config.size(&key::DIRTY)?)
            .with_discard(discard_policy(config)?)
            .with_commit_interval(config.time(&key::COMMIT_INTERVAL)?)
            .with_low_water(config.share(&key::LOW_WATER)?)
            .with_when_full(when_full),
        data: ServerOptions::default()
            .with_max_connections(config.count(&key::MAX_CONNECTIONS)?)
            .with_max_export_connections(config.count(&key::MAX_EXPORT_CONNECTIONS)?)
            .with_max_requests(config.count(&key::MAX_REQUESTS)?)
            .with_max_request_bytes(config.size(&key::MAX_REQUEST_BYTES)?)
            .with_connection_reserve(config.size(&key::CONNECTION_RESERVE)?)
            .with_shared_memory(config.size(&key::SHARED_MEMORY)?)
            .with_started_requests(config.count(&key::STARTED_REQUESTS)?)
            .with_started_bytes(config.size(&key::STARTED_BYTES)?)
            .with_handshake_timeout(config.time(&key::HANDSHAKE_TIMEOUT)?)
            .with_stall_timeout(config.time(&key::STALL_TIMEOUT)?)
            .with_drain_timeout(config.time(&key::DRAIN_TIMEOUT)?),
        control_limits: ControlOptions::default()
            .with_max_connections(config.count(&key::CONTROL_CONNECTIONS)?)
            .with_max_message(config.size(&key::CONTROL_MESSAGE)?),
    })
}

/// Returns whether requests of mounts come by io_uring. A kept mount has to survive the memory that the queues lend.
fn fuse_uring(config: &Configuration) -> Result<OverIoUring> {
    let chosen = over_io_uring(config.word(&key::FUSE_URING).unwrap_or_default())?;
    match config.switch(&key::KEEPER)? {
        true if chosen == OverIoUring::Yes => {
            bail!(
                "fuse_uring=yes and keeper exclude each other: the kernel loses requests of a killed process's queues"
            )
        }
        true => Ok(OverIoUring::No),
        false => Ok(chosen),
    }
}

/// Returns when freed space is discarded.
fn discard_policy(config: &Configuration) -> Result<DiscardPolicy> {
    if config.word(&key::DISCARD) != Some("lazy") {
        return Ok(config.switch(&key::DISCARD)?.into());
    }
    let bytes = config.size(&key::DISCARD_ABOVE)? as u64;
    Ok(DiscardPolicy::Later { bytes, time: config.time(&key::DISCARD_AFTER)? })
}

/// Returns the settings of the vhost-user-blk server.
fn vhost_user(config: &Configuration) -> Result<Option<VhostUser>> {
    let Some(dir) = config.path(&key::VHOST_USER) else { return Ok(None) };
    let is_shared = config
        .path(&key::SOCKET_DIR)
        .is_some_and(|other| std::path::absolute(&other).ok() == std::path::absolute(&dir).ok());
    ensure!(!is_shared, "socket_dir and vhost_user are the same folder, {}: each needs its own", dir.display());
    let volumes = Patterns::parse(config.word(&key::VHOST_USER_VOLUMES).unwrap_or_default())?;
    let queues = config.count(&key::VHOST_USER_QUEUES)?;
    ensure!(queues <= MAX_QUEUES, "vhost_user_queues is at most {MAX_QUEUES}");
    let block_size = if config.word(&key::VHOST_USER_BLOCK_SIZE) == Some("4096") { 4096 } else { 512 };
    let options = VhostOptions::default()
        .with_max_queues(queues as u16)
        .with_block_size(block_size)
        .with_max_poll(config.time(&key::VHOST_USER_POLL)?)
        .with_drain_timeout(config.time(&key::DRAIN_TIMEOUT)?);
    Ok(Some(VhostUser { dir, volumes, options }))
}

/// Returns mode and group of the data sockets.
fn access(config: &Configuration) -> Result<SocketAccess> {
    let group = config.word(&key::SOCKET_GROUP).map(group::number).transpose()?;
    let mode = config.mode(&key::SOCKET_MODE)?;
    let places = [&key::SOCKET, &key::SOCKET_DIR, &key::VHOST_USER];
    let is_reached = places.iter().any(|key| config.path(key).is_some());
    if (group.is_some() || mode.is_some()) && !is_reached {
        bail!(
            "socket_mode and socket_group need socket, socket_dir or vhost_user: the pool's own folder in /run lets \
             its own user in only, and a socket of systemd has SocketMode and SocketGroup"
        );
    }
    let usual = if group.is_some() { 0o660 } else { SocketAccess::OWNER.mode };
    Ok(SocketAccess { mode: mode.unwrap_or(usual), group })
}

/// Returns mode and group of the sockets of single volumes.
fn volume_sockets(config: &Configuration, usual: SocketAccess) -> Result<VolumeSockets> {
    let exceptions = config.word(&key::VOLUME_SOCKETS).unwrap_or_default();
    if !exceptions.is_empty() && config.path(&key::SOCKET_DIR).or(config.path(&key::VHOST_USER)).is_none() {
        bail!("volume_sockets needs socket_dir or vhost_user: only there does a volume have a socket of its own");
    }
    VolumeSockets::new(usual, exceptions).context("volume_sockets")
}

fn announce(ready: &Ready<'_>, json: bool) -> Result<()> {
    let export = |info: &forkdisk::VolumeInfo| Export {
        name: info.name.clone(),
        uri: ready.socket.map(|socket| nbd_uri(socket, &info.name)),
        size: info.size,
        read_only: info.is_snapshot() || ready.read_only,
    };
    let exports: Vec<Export> = ready.pool.list().iter().map(export).collect();
    let shown = |path: Option<&Path>| path.map(|path| path.display().to_string());
    if json {
        let (socket, control, pid) = (shown(ready.socket), shown(ready.control), std::process::id());
        let (tcp, metrics) = (ready.listeners.uris(), ready.listeners.metrics_places.clone());
        let (socket_dir, vhost_user) = (shown(ready.socket_dir), shown(ready.vhost_user));
        return print_json_line(&Announcement { socket, socket_dir, vhost_user, control, pid, tcp, metrics, exports });
    }
    print_line(&format!("socket {}", shown(ready.socket).unwrap_or_else(|| "-".to_string())))?;
    shown(ready.socket_dir).map_or(Ok(()), |dir| print_line(&format!("socket-dir {dir}")))?;
    shown(ready.vhost_user).map_or(Ok(()), |dir| print_line(&format!("vhost-user {dir}")))?;
    ready.listeners.uris().iter().try_for_each(|uri| print_line(&format!("tcp {uri}")))?;
    ready.listeners.metrics_places.iter().try_for_each(|place| print_line(&format!("metrics {place}")))?;
    for uri in exports.iter().take(ANNOUNCED_COUNT).filter_map(|export| export.uri.as_deref()) {
        print_line(uri)?;
    }
    match exports.len().saturating_sub(ANNOUNCED_COUNT) {
        0 => Ok(()),
        more => print_line(&format!("and {more} more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volatile_file::COMMIT_INTERVAL;

    #[test]
    fn the_defaults_are_those_of_the_servers_and_of_the_engine() {
        let settings = settings(&Configuration::default()).unwrap();
        let shown = |options: &ServerOptions| format!("{options:?}");
        assert_eq!(shown(&settings.data), shown(&ServerOptions::default()));
        assert_eq!(format!("{:?}", settings.control_limits), format!("{:?}", ControlOptions::default()));
        let (when_full, commit_interval) = (settings.pool.when_full, settings.pool.commit_interval);
        // Each open has its own random number.
        let host = settings.pool.host.clone();
        let pool = host::open_options().with_when_full(when_full).with_commit_interval(commit_interval).with_host(host);
        assert_eq!(commit_interval, COMMIT_INTERVAL, "as a mount by itself");
        assert_eq!(format!("{:?}", settings.pool), format!("{pool:?}"));
    }
}
