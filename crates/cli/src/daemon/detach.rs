//! Start in the background: a second process serves, the first one returns when clients can connect.
//!
//! Until then the second process keeps the caller's stderr, so that errors of the start appear there.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::output::print;
use crate::syslog;

/// How long the start may take: recovery reads at most the journal and the data it maps.
const PATIENCE: Timespec = Timespec { tv_sec: 300, tv_nsec: 0 };

/// Environment variable that marks the process that serves.
const MARK: &str = "FORKDISK_DETACHED";

/// Returns whether this is the process that serves in the background.
pub fn is_detached() -> bool {
    env::var_os(MARK).is_some()
}

/// Starts the process that serves, with the same arguments, and waits until it announces that clients
/// can connect; the announcement goes to stdout. Returns its exit status if it ends before that.
pub fn start() -> Result<ExitCode> {
    let program = env::current_exe().context("this program's own file is not found")?;
    let (mut said, writer) = io::pipe().context("making a pipe")?;
    let mut child = Command::new(program)
        .args(env::args_os().skip(1))
        .env(MARK, "1")
        .stdin(Stdio::null())
        .stdout(writer)
        .spawn()
        .context("starting the process that serves")?;
    let mut announcement = Vec::new();
    loop {
        let some = poll(&mut [PollFd::new(&said, PollFlags::IN)], Some(&PATIENCE)).context("waiting for the daemon")?;
        if some == 0 {
            let _ = child.kill();
            bail!(
                "the process that serves (pid {}) did not say in {} s that clients can connect: it waited for the \
                 pool's \
                 device, for recovery or for its sockets",
                child.id(),
                PATIENCE.tv_sec
            );
        }
        let mut part = [0; 4096];
        match said.read(&mut part).context("waiting for the process that serves")? {
            0 => break,
            n => announcement.extend_from_slice(&part[..n]),
        }
    }
    if announcement.is_empty() {
        let status = child.wait().context("waiting for the process that serves")?;
        let code = status.code().and_then(|code| u8::try_from(code).ok()).filter(|&code| code != 0);
        return Ok(ExitCode::from(code.unwrap_or(1)));
    }
    print(&announcement)?;
    Ok(ExitCode::SUCCESS)
}

/// Starts a new session; called first in the process that serves.
pub fn leave_terminal() -> Result<()> {
    rustix::process::setsid().context("leaving the terminal")?;
    Ok(())
}

/// Detaches from the caller's stdout, stderr and folder; called when clients can connect. Log lines then
/// go to `log_file`, else to the system's log behind the socket `syslog` if it exists, else nowhere.
pub fn let_go(log_file: Option<&Path>, syslog: Option<&Path>) -> Result<()> {
    let nowhere = File::options().write(true).open("/dev/null").context("/dev/null")?;
    if log_file.is_none() {
        if let Some(error) = syslog.and_then(|path| syslog::begin(path).err()) {
            tracing::debug!(%error, "there is no system log");
        }
        rustix::stdio::dup2_stderr(&nowhere)?;
    }
    env::set_current_dir("/").context("leaving the folder")?;
    // Last, since this ends the wait of the first process.
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(())
}

/// Redirects stderr to append to `path`; creates the file if it is missing.
pub fn log_to(path: &Path) -> Result<()> {
    let file = File::options().append(true).create(true).open(path);
    let file = file.with_context(|| format!("{}: the log cannot be written", path.display()))?;
    rustix::stdio::dup2_stderr(&file)?;
    Ok(())
}
