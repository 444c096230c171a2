//! The process of the keeper.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forkdisk_control::params;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::is_mounted;
use super::separate::{Answer, DESCRIPTORS_COUNT, LOGGED_COUNT, Order, PATIENCE};
use crate::daemon::channel::Channel;

/// How long it waits for a daemon while it holds nothing: the one that started it is about to connect.
const IDLE: Duration = Duration::from_secs(3);

/// A mount that it holds.
struct Held {
    mount: params::Mount,
    files: Vec<OwnedFd>,
}

impl Held {
    /// Returns the connection to the kernel.
    fn connection(&self) -> Option<&OwnedFd> {
        self.files.first()
    }
}

/// Holds mounts for the daemons that connect to `listener`, the socket at `path`; waits for `limit` for the next one.
pub fn run(listener: &UnixListener, path: &Path, limit: Duration) -> Result<()> {
    // Not a part of what started it: neither a signal of its terminal nor the end of its session ends this process.
    let _ = rustix::process::setsid();
    std::env::set_current_dir("/").context("/")?;
    let mut daemons: Vec<Channel> = Vec::new();
    let mut held: Vec<Held> = Vec::new();
    let mut alone_since = Instant::now();
    loop {
        let patience = if held.is_empty() { IDLE } else { limit };
        if daemons.is_empty() && alone_since.elapsed() >= patience {
            // A daemon that connects from now on is refused and starts another one.
            let _ = std::fs::remove_file(path);
            let _ = path.parent().map(std::fs::remove_dir);
            return Ok(());
        }
        let wait = daemons.is_empty().then(|| patience.saturating_sub(alone_since.elapsed()));
        let ready = wait_for(listener, &daemons, &held, wait)?;
        if ready[0]
            && let Ok((socket, _)) = listener.accept()
        {
            let channel = Channel::new(socket);
            channel.set_patience(Some(PATIENCE))?;
            daemons.push(channel);
        }
        let mut answers = ready[1..].iter();
        let count = daemons.len();
        daemons.retain_mut(|daemon| !answers.next().copied().unwrap_or(false) || answer(daemon, &mut held).is_ok());
        if daemons.is_empty() {
            // Those that were unmounted meanwhile.
            held.retain(|held| held.connection().is_some_and(is_mounted));
            if count > 0 {
                alone_since = Instant::now();
            }
        }
    }
}

/// Waits until a daemon connects, sends an order or ends, for `wait` at most. Returns whether there is one to accept,
/// then for each daemon whether there is something to receive. Without a daemon also until a mount ends.
fn wait_for(listener: &UnixListener, daemons: &[Channel], held: &[Held], wait: Option<Duration>) -> Result<Vec<bool>> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(daemons.iter().map(|daemon| PollFd::new(daemon, PollFlags::IN)));
    if daemons.is_empty() {
        // With a daemon each request of the mounts would wake this process.
        let connections = held.iter().filter_map(Held::connection);
        fds.extend(connections.map(|connection| PollFd::new(connection, PollFlags::empty())));
    }
    let wait = wait.map(|wait| Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() });
    match poll(&mut fds, wait.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(vec![false; daemons.len() + 1]),
        Err(error) => return Err(error).context("waiting for a daemon"),
    }
    Ok(fds.iter().take(daemons.len() + 1).map(|fd| !fd.revents().is_empty()).collect())
}

/// Carries out one order. Fails if the daemon has ended.
fn answer(daemon: &mut Channel, held: &mut Vec<Held>) -> Result<()> {
    let (order, files) = daemon.receive::<Order>()?.context("the daemon has ended")?;
    match order {
        Order::Hold(ref mount) if files.len() == DESCRIPTORS_COUNT => hold(held, mount, files),
        Order::HoldLogged(ref mount) if files.len() == LOGGED_COUNT => hold(held, mount, files),
        Order::Hold(_) | Order::HoldLogged(_) | Order::Send => {}
        Order::Release(ref dir) => held.retain(|held| held.mount.dir != *dir),
    }
    match order {
        Order::Send => {
            let files: Vec<BorrowedFd<'_>> = held.iter().flat_map(|held| &held.files).map(AsFd::as_fd).collect();
            let all = held.iter().map(|held| held.mount.clone()).collect();
            let logged = held.iter().map(|held| held.files.len() == LOGGED_COUNT).collect();
            daemon.send(&Answer { held: all, logged }, &files)
        }
        _ => daemon.send::<_, BorrowedFd<'_>>(&Answer::default(), &[]),
    }
}

/// Holds a mount instead of what is held for its folder.
fn hold(held: &mut Vec<Held>, mount: &params::Mount, files: Vec<OwnedFd>) {
    held.retain(|held| held.mount.dir != mount.dir);
    held.push(Held { mount: mount.clone(), files });
}
