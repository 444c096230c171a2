//! `upgrade`: lets another version of this program take over from the daemon of a pool.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::{Upgraded, params};

use crate::global::Global;
use crate::output::{print_json_line, print_line};
use crate::progress::Progress;
use crate::session;
use crate::verbs::examples::examples;

/// Replace the program of a running daemon, without an error at any client
///
/// The new program takes over the daemon's sockets and their connections, mounts, and devices, with the arguments
/// of the daemon and the configuration as it is now. Clients see a pause. If the new program fails before it has
/// taken over, the old one serves on. Without --program, this program takes over.
#[derive(Args)]
#[command(after_help = examples!["forkdisk upgrade /srv/pool.img"])]
pub struct UpgradeArgs {
    /// The pool
    pool: Option<PathBuf>,

    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

pub fn run(args: UpgradeArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let program = match args.program {
        Some(program) => program.canonicalize().with_context(|| program.display().to_string())?,
        None => std::env::current_exe().context("this program's own file is not found")?,
    };
    let Some(mut client) = session::daemon(global, &path)? else {
        bail!("{}: no daemon serves this pool", path.display());
    };
    let progress = Progress::spinner("upgrading the daemon");
    let upgraded = client.call(params::Upgrade { program: program.display().to_string() }, None, |_| {})?;
    drop(progress);
    if global.output.json() {
        return print_json_line(&upgraded);
    }
    let Upgraded { pid, version, pause_ms, connections, disconnected, mounts, devices } = upgraded;
    print_line(&format!(
        "forkdisk {version} (pid {pid}) took over after a pause of {pause_ms} ms: {connections} connections, {mounts} \
         mounts, {devices} devices"
    ))?;
    match disconnected {
        0 => Ok(()),
        count => print_line(&format!(
            "{count} clients were disconnected: their requests did not end, or they use TLS, which one of the two \
             programs cannot pass on"
        )),
    }
}
