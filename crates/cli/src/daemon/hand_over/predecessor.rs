//! The old process, as the new program sees it.

use std::env;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, getpid, getppid};

use super::state::State;
use super::{FORMAT_VERSION, MARK, Message, NO_FILES};
use crate::daemon::channel::Channel;

/// Whether the channel was taken from standard input.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// A daemon that waits for this program to take over.
pub struct Predecessor {
    channel: Channel,
    pid: Option<Pid>,
}

impl Predecessor {
    /// Returns the daemon that started this program to take over, if one did.
    pub fn take() -> Result<Option<Predecessor>> {
        if env::var_os(MARK).is_none() || IS_TAKEN.swap(true, Ordering::Relaxed) {
            return Ok(None);
        }
        let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).context("the socket of an upgrade")?;
        let nowhere = File::open("/dev/null").context("/dev/null")?;
        rustix::stdio::dup2_stdin(&nowhere).context("standard input")?;
        Ok(Some(Predecessor { channel: Channel::new(UnixStream::from(socket)), pid: getppid() }))
    }

    /// Returns its process id.
    pub fn pid(&self) -> Option<Pid> {
        self.pid
    }

    /// Says that this program can take over; returns the state of the daemon, which has closed the pool.
    pub fn receive(&mut self) -> Result<State<OwnedFd>> {
        let pid = Some(getpid().as_raw_nonzero().get());
        let ready = Message::Ready { format: FORMAT_VERSION, fuse_uring: true, fuse_stride: true, tls: true, pid };
        self.channel.send(&ready, NO_FILES)?;
        match self.channel.receive()? {
            Some((Message::State(state), files)) => state.join(files).context("a descriptor is missing"),
            Some((other, _)) => bail!("the daemon sent {other:?}"),
            None => bail!("the daemon has given up the upgrade, or has ended"),
        }
    }

    /// Says that the pool is open, and waits until the daemon leaves its clients to this process. Returns whether it
    /// waits for the end of this process. If it ends without an answer, this process is the only one that can continue.
    pub fn take_over(mut self) -> Result<bool> {
        if self.channel.send(&Message::Taken, NO_FILES).is_err() {
            return Ok(false);
        }
        match self.channel.receive()? {
            Some((Message::Continue { stays }, _)) => Ok(stays),
            Some((other, _)) => bail!("the daemon sent {other:?}"),
            None => Ok(false),
        }
    }

    /// Says why this program cannot take over.
    pub fn fail(mut self, error: &anyhow::Error) {
        // The daemon may have given up before.
        let _ = self.channel.send(&Message::Failed { why: format!("{error:#}") }, NO_FILES);
    }
}

/// Tells the daemon for which this program was started why it ends, unless it has begun to take over.
pub fn tell_failure(why: &str) {
    let stdin = rustix::stdio::stdin();
    let is_socket = rustix::net::sockopt::socket_type(stdin).is_ok();
    if env::var_os(MARK).is_none() || IS_TAKEN.swap(true, Ordering::Relaxed) || !is_socket {
        return;
    }
    if let Ok(socket) = stdin.as_fd().try_clone_to_owned() {
        // The daemon may have given up before.
        let _ = Channel::new(UnixStream::from(socket)).send(&Message::Failed { why: why.to_string() }, NO_FILES);
    }
}
