//! `stop`: ends the daemon that serves a pool.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forkdisk::ErrorKind;
use forkdisk_control::{Client, FailureKind, params, runtime_dir};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::attach;
use crate::global::Global;
use crate::progress::Progress;
use crate::session;
use crate::verbs::examples::examples;

/// How long a daemon may take to end once its pool is closed.
const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// End the daemon that serves a pool, and wait until the pool is closed
///
/// Requests in flight end, everything is flushed, and the pool is left clean. Refused while NBD
/// clients are connected, since they would lose their disks.
#[derive(Args)]
#[command(after_help = examples!["forkdisk stop /srv/pool.img"])]
pub struct StopArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Wait until no client is connected any more
    #[arg(long, conflicts_with = "force")]
    wait_for_clients: bool,

    #[arg(long)]
    force: bool,
}

/// Handling of connected clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Fail and leave the daemon running.
    Refuse,
    /// Wait until they disconnect.
    Wait,
    /// Disconnect them.
    Disconnect,
}

/// Interval of attempts while clients are connected.
const AGAIN: Duration = Duration::from_millis(200);

/// Ends the daemon; returns when its process has ended.
pub fn run(args: StopArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let absolute = path.canonicalize().with_context(|| path.display().to_string())?;
    if let Some(attached) = attach::list().into_iter().find(|a| a.pool == absolute && !attach::is_left_behind(a)) {
        let (device, name) = (attached.device.display(), attached.object);
        bail!("{} is in use: {name} is attached as {device}; `forkdisk detach {device}` first", path.display());
    }
    let Some(client) = session::daemon(global, &path)? else {
        bail!("{}: no daemon serves this pool", path.display());
    };
    let clients = match (args.wait_for_clients, args.force) {
        (true, _) => Clients::Wait,
        (_, true) => Clients::Disconnect,
        _ => Clients::Refuse,
    };
    if end(client, clients)? == Cause::Another {
        let is_clean = runtime_dir::recorded(&path).is_some_and(|recorded| recorded.clean);
        ensure!(is_clean, "{}: the daemon ended without closing the pool; the next open recovers it", path.display());
    }
    Ok(())
}

/// What ended the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// This call.
    This,
    /// Another stop, a signal or a crash, while this call waited for clients.
    Another,
}

/// Ends the daemon and waits until its process has ended.
pub fn end(mut client: Client, clients: Clients) -> Result<Cause> {
    let _progress = Progress::spinner("waiting for the daemon to end");
    let status = client.call(params::Status {}, None, |_| {})?;
    // Opened before the process number can be reused.
    let process = i32::try_from(status.pid).ok().and_then(Pid::from_raw);
    let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let force = clients == Clients::Disconnect;
    let cause = loop {
        match client.call(params::Stop { force }, None, |_| {}) {
            Ok(_) => break Cause::This,
            Err(refused) if clients == Clients::Wait && refused.kind == ErrorKind::Busy => thread::sleep(AGAIN),
            Err(failure) if clients == Clients::Wait && failure.kind == FailureKind::Ending => break Cause::Another,
            Err(failure) => return Err(failure.into()),
        }
    };
    match process {
        // The pool's lock is released with the process.
        Some(process) => {
            let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&PATIENCE))?;
            ensure!(ended > 0, "the daemon (pid {}) has not ended in a minute", status.pid);
        }
        None => client.wait_for_end(),
    }
    Ok(cause)
}
