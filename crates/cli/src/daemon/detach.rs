//! Going to the background: a second process serves, the first one returns when clients can connect.
//!
//! Until then the second one has the caller's stderr, so that whatever keeps it from serving is said there.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::output::print;
use crate::syslog;

/// How long it may take until clients can connect: recovery reads at most the journal and what it maps.
const PATIENCE: Timespec = Timespec { tv_sec: 300, tv_nsec: 0 };

/// Set in the environment of the process that serves.
const MARK: &str = "FORKDISK_DETACHED";

/// Whether this is the process that serves in the background.
pub fn is_detached() -> bool {
    env::var_os(MARK).is_some()
}

/// Starts the process that serves, with the same arguments, and waits until it says that clients can
/// connect; what it says goes to stdout. Its own exit status when it ends before.
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

/// To be called first in the process that serves: it is on its own from here.
pub fn leave_terminal() -> Result<()> {
    rustix::process::setsid().context("leaving the terminal")?;
    Ok(())
}

/// To be called when clients can connect: lets go of the caller's stdout, stderr and folder. What is logged goes to
/// `log_file`, else to the system's log behind the socket `syslog` if it is there, else nowhere.
pub fn let_go(log_file: Option<&Path>, syslog: Option<&Path>) -> Result<()> {
    let nowhere = File::options().write(true).open("/dev/null").context("/dev/null")?;
    if log_file.is_none() {
        if let Some(error) = syslog.and_then(|path| syslog::begin(path).err()) {
            tracing::debug!(%error, "there is no system log");
        }
        rustix::stdio::dup2_stderr(&nowhere)?;
    }
    env::set_current_dir("/").context("leaving the folder")?;
    // Last: this is what the first process waits for.
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(())
}

/// Has stderr go to the end of `path` from now on, which is made if it does not exist.
pub fn log_to(path: &Path) -> Result<()> {
    let file = File::options().append(true).create(true).open(path);
    let file = file.with_context(|| format!("{}: the log cannot be written", path.display()))?;
    rustix::stdio::dup2_stderr(&file)?;
    Ok(())
}
