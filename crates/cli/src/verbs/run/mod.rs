//! `run`: runs a program for which FICLONE works on mounts of pools.
//!
//! The kernel does not pass `ioctl(FICLONE)` to a FUSE server. The program, and all that it starts, send these calls to
//! this process instead (seccomp's user notification), which makes the clone by `copy_file_range`.

mod clone;

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_uring::{CloneCalls, pass_clone_calls};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};

use crate::daemon::channel::Channel;
use crate::verbs::examples::examples;

/// Run a program for which FICLONE works on mounts
///
/// `ioctl(FICLONE)`, `ioctl(FICLONERANGE)` and `cp --reflink=always` make clones on mounts of pools, for the program
/// and all that it starts, statically linked ones too. Elsewhere they work as without this verb. The program cannot
/// gain privileges by set-user-id files. The verb ends when all of them have ended, with the exit status of the
/// program.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk run -- cp --reflink=always /mnt/pool/base /mnt/pool/vm1",
    "forkdisk run -- ./build-images.sh",
])]
pub struct RunArgs {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    words: Vec<OsString>,
}

/// Run a program, with its clone calls passed to another process
#[derive(Args)]
pub struct OnRunArgs {
    /// The socket of the process that makes the clones
    socket: String,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Runs the program and makes its clones; ends with its status.
pub fn run(args: RunArgs) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let name = format!("forkdisk-run-{}-{}", std::process::id(), now.as_nanos());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?).context("a socket")?;
    let program = std::env::current_exe().context("this program")?;
    let mut child = Command::new(program).arg("on-run").arg(&name).args(&args.words).spawn().context("starting it")?;
    let Some((mut channel, calls)) = receive(&listener, &mut child)? else {
        // It has said why.
        return end(child.wait().context("waiting for it")?);
    };
    channel.send::<_, OwnedFd>(&"begin", &[]).context("starting the program")?;
    drop((channel, listener));
    end(serve(&CloneCalls::from(calls), &mut child)?)
}

/// Receives where the calls of the program come; `None` if it does not start.
fn receive(listener: &UnixListener, child: &mut Child) -> Result<Option<(Channel, OwnedFd)>> {
    let ended = ended(child)?;
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
        wait(&mut fds)?;
        if fds[0].revents().is_empty() {
            return Ok(None);
        }
        let (socket, _) = listener.accept().context("a socket")?;
        let peer = rustix::net::sockopt::socket_peercred(&socket).context("a socket")?;
        if peer.pid.as_raw_nonzero().get().cast_unsigned() != child.id() {
            continue;
        }
        let mut channel = Channel::new(socket);
        return match channel.receive::<String>()? {
            Some((_, mut files)) if files.len() == 1 => Ok(files.pop().map(|calls| (channel, calls))),
            _ => Ok(None),
        };
    }
}

/// Carries out calls until the program and all that it has started have ended.
fn serve(calls: &CloneCalls, child: &mut Child) -> Result<ExitStatus> {
    let ended = ended(child)?;
    let mut status = None;
    loop {
        let mut fds = vec![PollFd::new(calls, PollFlags::IN)];
        if status.is_none() {
            fds.push(PollFd::new(&ended, PollFlags::IN));
        }
        wait(&mut fds)?;
        let (events, has_ended) = (fds[0].revents(), fds.get(1).is_some_and(|fd| !fd.revents().is_empty()));
        if events.contains(PollFlags::IN)
            && let Some(call) = calls.receive().context("receiving a call")?
        {
            let answer = clone::carry_out(calls, &call);
            calls.answer(&call, answer).context("answering a call")?;
        }
        if has_ended {
            // Its filter lives as long as it is not waited for.
            status = Some(child.wait().context("waiting for the program")?);
        }
        match status {
            Some(status) if events.contains(PollFlags::HUP) => return Ok(status),
            _ => {}
        }
    }
}

fn ended(child: &Child) -> Result<OwnedFd> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("the program")?;
    pidfd_open(pid, PidfdFlags::empty()).context("watching the program")
}

fn wait(fds: &mut [PollFd<'_>]) -> Result<()> {
    match poll(fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("waiting for the program"),
    }
}

/// Ends this process as the program has ended.
fn end(status: ExitStatus) -> Result<()> {
    std::process::exit(status.code().unwrap_or(128 + status.signal().unwrap_or(0)))
}

/// Passes the calls on and replaces this process by the program; returns only on failure.
pub fn run_on(args: OnRunArgs) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("binding it to the process that started it")?;
    let socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&args.socket)?).context("a socket")?;
    let (program, words) = args.words.split_first().context("no program")?;
    let mut channel = Channel::new(socket);
    let calls = pass_clone_calls().context(
        "the kernel does not let this process pass FICLONE on: a container may forbid seccomp(2), or the program runs \
         under `forkdisk run` or another supervisor already",
    )?;
    channel.send(&"calls", &[calls.as_fd()])?;
    drop(calls);
    if channel.receive::<String>()?.is_none() {
        bail!("the process that makes the clones has ended");
    }
    drop(channel);
    Err(Command::new(program).args(words).exec()).with_context(|| program.display().to_string())
}
