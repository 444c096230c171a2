//! `vhost-user`: one volume or snapshot as a disk of a virtual machine, on a socket of its own.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use forkdisk_control::params;

use super::serve;
use crate::daemon::{self, Settings, detach, reserves};
use crate::global::Global;
use crate::group;
use crate::output::print_line;
use crate::session;
use crate::verbs::examples::examples;
use crate::volume_sockets;

/// Serve a volume or snapshot as a disk of a virtual machine (vhost-user-blk), on a socket of its own
///
/// If a daemon serves the pool, it makes the socket, and this returns at once; the disk is served until the socket is
/// removed or the daemon ends. Otherwise this serves the pool, as `serve` does, until it is told to end. QEMU and
/// others connect to the socket (docs/vhost-user.md). `serve --vhost-user DIR` makes sockets for all volumes.
#[derive(Args)]
#[command(after_help = examples!["forkdisk vhost-user /srv/pool.img/vm1 /run/vm1.sock"])]
pub struct VhostUserArgs {
    #[arg(value_name = "ADDRESS")]
    object: String,

    #[arg(value_name = "SOCKET")]
    socket: PathBuf,

    #[arg(long, value_name = "MODE", value_parser = checked_mode)]
    mode: Option<String>,

    #[arg(long, value_name = "GROUP", value_parser = group::number)]
    group: Option<u32>,

    #[arg(long, conflicts_with_all = ["mode", "group", "daemon"])]
    remove: bool,

    /// If no daemon serves the pool, serve it in the background; returns when the monitor can connect
    #[arg(long)]
    daemon: bool,
}

fn checked_mode(text: &str) -> Result<String> {
    volume_sockets::mode(text).map(|_| text.to_string())
}

/// Makes or removes the socket.
pub fn run(args: VhostUserArgs, global: &Global) -> Result<ExitCode> {
    let address = global.object(&args.object)?;
    let pool = global.pool(Some(&address.pool))?;
    let socket = std::path::absolute(&args.socket).with_context(|| args.socket.display().to_string())?;
    let disk = params::VhostUser {
        object: address.name.clone(),
        socket: socket.display().to_string(),
        mode: args.mode.clone(),
        group: args.group,
        remove: args.remove,
    };
    if !detach::is_detached() && ask_daemon(&disk, &pool, global)? {
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(!args.remove, "{}: no daemon serves this pool, so it has no socket", pool.display());
    if args.daemon {
        match detach::is_detached() {
            false => return detach::start(),
            true => detach::leave_terminal()?,
        }
    }
    reserves::hold(&global.settings)?;
    let settings = Settings { disk: Some(disk.clone()), ..serve::settings(&global.settings)? };
    let announce = || print_line(&format!("socket {}", socket.display()));
    let error = match daemon::run(&pool, settings, global, |_| announce()) {
        Ok(status) => return Ok(status),
        Err(error) => error,
    };
    // Of several such commands at once one serves the pool, and the others ask it.
    if !ask_daemon(&disk, &pool, global)? {
        return Err(error);
    }
    announce()?;
    Ok(ExitCode::SUCCESS)
}

/// Requests the socket of the pool's daemon; returns false if there is none.
fn ask_daemon(disk: &params::VhostUser, pool: &Path, global: &Global) -> Result<bool> {
    let Some(mut client) = session::daemon(global, pool)? else { return Ok(false) };
    client.call(disk.clone(), None, |_| {})?;
    Ok(true)
}
