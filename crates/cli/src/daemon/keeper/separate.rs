//! The keeper as a process of its own, as the daemon sees it.
//!
//! It is started by a daemon with `keeper`, and found by the socket in the pool's run-time folder. It ends when it
//! holds nothing and no daemon is connected, or when no daemon has come for the time that `keeper_limit` sets: then
//! the mounts end, too.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forkdisk_control::{params, runtime_dir};
use serde::{Deserialize, Serialize};

use super::{Descriptors, Left};
use crate::daemon::channel::Channel;

/// File name of the socket in the pool's run-time folder.
const SOCKET: &str = "keeper.sock";
/// How long the keeper may take to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Descriptors of a mount: its connection to the kernel, and the two files of its record.
pub(super) const DESCRIPTORS_COUNT: usize = 3;
/// The same of a mount with a request log.
pub(super) const LOGGED_COUNT: usize = DESCRIPTORS_COUNT + 1;

/// From the daemon to the keeper. Each is answered.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Hold a mount with its descriptors, instead of what is held for its folder.
    Hold(params::Mount),
    /// The same for a mount with a request log. A keeper of an older version ends the connection.
    HoldLogged(params::Mount),
    /// Close the descriptors of the mount on this folder.
    Release(String),
    /// Send all.
    Send,
}

/// From the keeper to the daemon: the mounts that it holds, for `Send` with the descriptors of each.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Answer {
    pub held: Vec<params::Mount>,
    /// Which of them have a request log, and thus one descriptor more. Empty from an older version: none.
    #[serde(default)]
    pub logged: Vec<bool>,
}

/// The connection to the keeper of a pool.
pub struct SeparateProcess {
    channel: RefCell<Channel>,
    path: PathBuf,
}

impl SeparateProcess {
    /// Connects to the keeper of pool `uuid`, if there is one.
    pub fn running(uuid: &[u8; 16]) -> Option<SeparateProcess> {
        let path = path_of(uuid)?;
        let socket = UnixStream::connect(&path).ok()?;
        let channel = Channel::new(socket);
        channel.set_patience(Some(PATIENCE)).ok()?;
        Some(SeparateProcess { channel: RefCell::new(channel), path })
    }

    /// Connects to the keeper of pool `uuid`; starts it if there is none. It waits for `limit` for another daemon.
    pub fn start(uuid: &[u8; 16], limit: Duration) -> Result<SeparateProcess> {
        if let Some(keeper) = SeparateProcess::running(uuid) {
            return Ok(keeper);
        }
        let path = path_of(uuid).context("there is no run-time folder for the keeper's socket: set XDG_RUNTIME_DIR")?;
        let _ = std::fs::remove_file(&path);
        path.parent().map_or(Ok(()), runtime_dir::make_private).with_context(|| path.display().to_string())?;
        let listener = UnixListener::bind(&path).with_context(|| path.display().to_string())?;
        let started = Command::new("/proc/self/exe")
            .arg0("forkdisk")
            .args(["keeper", "--limit", &limit.as_secs().to_string()])
            .arg(&path)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        started.context("starting the keeper")?;
        SeparateProcess::running(uuid).with_context(|| format!("{}: the keeper cannot be reached", path.display()))
    }

    pub fn left(&self) -> Result<Vec<Left>> {
        let (answer, files) = self.call::<BorrowedFd<'_>>(&Order::Send, &[])?;
        let logs = answer.logged.iter().filter(|&&logged| logged).count();
        if files.len() != answer.held.len() * DESCRIPTORS_COUNT + logs {
            bail!("the keeper sent {} descriptors for {} mounts", files.len(), answer.held.len());
        }
        let mut files = files.into_iter();
        let mut left = Vec::with_capacity(answer.held.len());
        let mut logged = answer.logged.into_iter();
        for mount in answer.held {
            let (Some(connection), Some(a), Some(b)) = (files.next(), files.next(), files.next()) else { break };
            let log = if logged.next() == Some(true) { files.next() } else { None };
            left.push(Left { mount, connection, record: [a, b], log });
        }
        Ok(left)
    }

    pub fn hold(&self, mount: params::Mount, descriptors: Descriptors<'_>) -> Result<()> {
        let Descriptors { connection, record: [a, b], log } = descriptors;
        let held = match log {
            None => self.call(&Order::Hold(mount), &[connection, a, b]),
            Some(log) => {
                let held = self.call(&Order::HoldLogged(mount), &[connection, a, b, log]);
                held.context("if it is of an older version, the next start of the daemon replaces it")
            }
        };
        held.map(drop)
    }

    pub fn release(&self, dir: &Path) -> Result<()> {
        self.call::<BorrowedFd<'_>>(&Order::Release(dir.display().to_string()), &[]).map(drop)
    }

    fn call<F: AsFd>(&self, order: &Order, files: &[F]) -> Result<(Answer, Vec<OwnedFd>)> {
        let mut channel = self.channel.borrow_mut();
        let answered = channel.send(order, files).and_then(|()| channel.receive());
        let answered = answered.with_context(|| format!("the keeper at {}", self.path.display()))?;
        answered.with_context(|| format!("the keeper at {} has ended", self.path.display()))
    }
}

fn path_of(uuid: &[u8; 16]) -> Option<PathBuf> {
    Some(runtime_dir::own_control(uuid)?.with_file_name(SOCKET))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_of_an_older_keeper_has_no_request_logs() {
        let answer: Answer = serde_json::from_str(r#"{"held":[]}"#).unwrap();
        assert!(answer.held.is_empty() && answer.logged.is_empty());
    }
}
