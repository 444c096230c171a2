//! `serve`: every volume and snapshot of a pool as an NBD export, until somebody says that it is enough.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use forkdisk::{OpenOptions, WhenFull};
use forkdisk_control::ServerOptions as ControlOptions;
use forkdisk_nbd::{ServerOptions, nbd_uri};
use serde::Serialize;

use crate::cli::Global;
use crate::daemon::{self, Ready, Settings, detach};
use crate::network::NetworkArgs;
use crate::output::{print_json_line, print_line};

/// How long a write waits for space in a full pool.
const WAIT_FOR_SPACE: Duration = Duration::from_secs(60);
/// Exports that are announced to people by name; programs are told all of them.
const ANNOUNCED: usize = 100;

/// Serve every volume and snapshot as an NBD export
///
/// SIGTERM, SIGINT and `forkdisk stop` let requests in flight end, flush, and leave the pool clean. Every other verb
/// works meanwhile.
#[derive(Args)]
pub struct ServeArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Serve in the background; returns when clients can connect
    #[arg(long)]
    daemon: bool,

    /// Where the socket goes [default: /run/forkdisk/UUID/nbd.sock for root, else
    /// $XDG_RUNTIME_DIR/forkdisk/UUID/nbd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Where the process's number is written
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,

    /// Where the log goes instead of stderr; SIGHUP opens it again
    #[arg(long, value_name = "PATH")]
    log_file: Option<PathBuf>,

    #[command(flatten)]
    network: NetworkArgs,
}

/// Said once, when clients may connect.
#[derive(Serialize)]
struct Announcement {
    socket: Option<String>,
    control: Option<String>,
    pid: u32,
    /// Beginnings of URIs over TCP; an export's name follows.
    tcp: Vec<String>,
    metrics: Vec<String>,
    exports: Vec<Export>,
}

#[derive(Serialize)]
struct Export {
    name: String,
    /// `null` when the socket has no path.
    uri: Option<String>,
    size: u64,
    read_only: bool,
}

/// Serves until it is told to end, then closes the pool cleanly.
pub fn run(args: ServeArgs, global: &Global) -> Result<ExitCode> {
    let path = global.pool(args.pool.as_deref())?;
    if args.daemon {
        match detach::is_detached() {
            false => return detach::start(),
            true => detach::leave_terminal()?,
        }
    }
    let json = global.output.json();
    let security = args.network.security()?;
    let settings = Settings {
        socket: args.socket,
        control: global.control(),
        pid_file: args.pid_file,
        log_file: args.log_file,
        network: args.network,
        security,
        pool: OpenOptions { when_full: WhenFull::Wait(WAIT_FOR_SPACE), ..OpenOptions::default() },
        data: ServerOptions::default(),
        control_limits: ControlOptions::default(),
    };
    daemon::run(&path, settings, global, |ready| announce(&ready, json))?;
    Ok(ExitCode::SUCCESS)
}

fn announce(ready: &Ready<'_>, json: bool) -> Result<()> {
    let export = |info: &forkdisk::VolumeInfo| Export {
        name: info.name.clone(),
        uri: ready.socket.map(|socket| nbd_uri(socket, &info.name)),
        size: info.size,
        read_only: info.snapshot,
    };
    let exports: Vec<Export> = ready.pool.list().iter().map(export).collect();
    let shown = |path: Option<&Path>| path.map(|path| path.display().to_string());
    if json {
        let (socket, control, pid) = (shown(ready.socket), shown(ready.control), std::process::id());
        let (tcp, metrics) = (ready.doors.uris(), ready.doors.metrics_places.clone());
        return print_json_line(&Announcement { socket, control, pid, tcp, metrics, exports });
    }
    print_line(&format!("socket {}", shown(ready.socket).unwrap_or_else(|| "-".to_string())))?;
    ready.doors.uris().iter().try_for_each(|uri| print_line(&format!("tcp {uri}")))?;
    ready.doors.metrics_places.iter().try_for_each(|place| print_line(&format!("metrics {place}")))?;
    for uri in exports.iter().take(ANNOUNCED).filter_map(|export| export.uri.as_deref()) {
        print_line(uri)?;
    }
    match exports.len().saturating_sub(ANNOUNCED) {
        0 => Ok(()),
        more => print_line(&format!("and {more} more")),
    }
}
