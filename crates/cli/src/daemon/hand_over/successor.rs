//! The new program, as the old process sees it.

use std::env;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use forkdisk_uring::{Rt, Watched};
use rustix::process::{Pid, Signal, kill_process};

use super::foreground::keep_descendants;
use super::launch::LAUNCH;
use super::state::State;
use super::{FORMAT_VERSION, MARK, Message, NO_FILES, first_process, starting_folder};
use crate::daemon::channel::Channel;
use crate::daemon::detach;

/// How long the program may take until it is ready, and to open the pool. The second is less than a service manager
/// waits for a sign of life (`WatchdogSec=30s`); the third is that for the rest of a message that has begun to
/// arrive.
const READY_LIMIT: Duration = Duration::from_secs(30);
const TAKE_LIMIT: Duration = Duration::from_secs(20);
const REST_LIMIT: Duration = Duration::from_secs(1);

/// The process of a program.
enum Running {
    Child(Child),
    /// A child of the service manager.
    Launched(Pid),
}

/// A program that was started to take over, and has not yet. Killed when dropped.
pub struct Successor {
    program: PathBuf,
    running: Option<Running>,
    channel: Channel,
    /// It can take over mounts with queues of io_uring.
    takes_fuse_uring: bool,
    /// It can continue encrypted clients.
    takes_tls: bool,
}

impl Successor {
    /// Starts `program` with the arguments of this process; returns when it is ready.
    pub async fn start(runtime: &Rt, program: &Path) -> Result<Successor> {
        let (ours, theirs) = UnixStream::pair().context("a pair of sockets")?;
        let mut command = Command::new(program);
        command
            .args(env::args_os().skip(1))
            .env(MARK, first_process().to_string())
            .stdin(Stdio::from(OwnedFd::from(theirs)));
        for passed_before in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"] {
            command.env_remove(passed_before);
        }
        if starting_folder().is_dir() {
            command.current_dir(starting_folder());
        }
        if !detach::is_detached() {
            // Signals of a terminal reach the process that was started there, which passes them on.
            command.process_group(0);
        }
        if env::var_os("NOTIFY_SOCKET").is_some() {
            command.env(LAUNCH, "1");
        }
        let child = command.spawn().with_context(|| format!("{}: cannot be started", program.display()))?;
        drop(command);
        let watched = Watched::new(runtime, ours.try_clone().context("a socket")?.into());
        let (program, channel) = (program.to_path_buf(), Channel::new(ours));
        let running = Some(Running::Child(child));
        let successor = Successor { program, running, channel, takes_fuse_uring: false, takes_tls: false };
        let ready = runtime.timeout(READY_LIMIT, watched.readable()).await;
        ensure!(ready.is_ok(), "{} was not ready within {READY_LIMIT:?}", successor.program.display());
        successor.expect_ready()
    }

    fn expect_ready(mut self) -> Result<Successor> {
        self.channel.set_patience(Some(REST_LIMIT))?;
        match self.receive()? {
            Message::Ready { format: FORMAT_VERSION, fuse_uring, fuse_stride, tls, pid } => {
                (self.takes_fuse_uring, self.takes_tls) = (fuse_uring && fuse_stride, tls);
                self.follow(pid.and_then(Pid::from_raw))?;
                Ok(self)
            }
            Message::Ready { format, .. } => {
                bail!(
                    "{} passes on connections by format {format}, and this daemon by {FORMAT_VERSION}",
                    self.program.display()
                )
            }
            Message::Failed { why } => bail!("{}: {why}", self.program.display()),
            other => bail!("{} sent {other:?}", self.program.display()),
        }
    }

    /// Waits for the process that has started the program, if that is another one.
    fn follow(&mut self, pid: Option<Pid>) -> Result<()> {
        let (Some(Running::Child(child)), Some(pid)) = (&mut self.running, pid) else { return Ok(()) };
        if child.id() != pid.as_raw_nonzero().get().unsigned_abs() {
            child.wait().context("waiting for the process that started the program")?;
            self.running = Some(Running::Launched(pid));
        }
        Ok(())
    }

    /// Receives a message; fails if the program has ended.
    fn receive(&mut self) -> Result<Message> {
        let program = self.program.display();
        let received = self.channel.receive().map_err(|error| match error.downcast_ref::<io::Error>() {
            Some(late) if late.kind() == io::ErrorKind::WouldBlock => anyhow!("{program} did not answer in time"),
            _ => error.context(format!("{program}: waiting for it")),
        });
        match received? {
            Some((message, _)) => Ok(message),
            None => {
                let Some(Running::Child(child)) = &mut self.running else {
                    bail!("{program} has ended; its log says why")
                };
                // It may have closed the socket only.
                let _ = child.kill();
                match child.wait() {
                    Ok(status) => bail!("{program} ended without taking over: {status}; its log says why"),
                    Err(_) => bail!("{program} ended without taking over"),
                }
            }
        }
    }

    /// Passes on the state; returns when the program has opened the pool and will continue the clients.
    pub fn pass(&mut self, state: State<usize>, files: &[OwnedFd]) -> Result<()> {
        self.channel.set_patience(Some(TAKE_LIMIT))?;
        self.channel.send(&Message::State(Box::new(state)), files)?;
        match self.receive()? {
            Message::Taken => Ok(()),
            Message::Failed { why } => bail!("{}: {why}", self.program.display()),
            other => bail!("{} sent {other:?}", self.program.display()),
        }
    }

    /// Lets the program continue the clients. From now on this process must not. `stays`: it waits for the program's
    /// end. Fails if the program has ended: then this process continues.
    pub fn release(&mut self, stays: bool) -> Result<()> {
        // Before the program can end by a later upgrade.
        keep_descendants(stays)?;
        let told = self.channel.send(&Message::Continue { stays }, NO_FILES);
        told.with_context(|| format!("{} has ended", self.program.display()))?;
        self.running = None;
        Ok(())
    }

    /// Returns whether the program can take over mounts with queues of io_uring.
    pub fn takes_fuse_uring(&self) -> bool {
        self.takes_fuse_uring
    }

    /// Returns whether the program can continue encrypted clients.
    pub fn takes_tls(&self) -> bool {
        self.takes_tls
    }

    /// Returns the process id of the program.
    pub fn pid(&self) -> u32 {
        match &self.running {
            Some(Running::Child(child)) => child.id(),
            Some(Running::Launched(pid)) => pid.as_raw_nonzero().get().unsigned_abs(),
            None => 0,
        }
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        match &mut self.running {
            // Both fail if it has ended already.
            Some(Running::Child(child)) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Some(Running::Launched(pid)) => {
                let _ = kill_process(*pid, Signal::KILL);
            }
            None => {}
        }
    }
}
