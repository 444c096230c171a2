//! Serialises `attach` and `detach` on a machine: each inspects the devices and then changes them.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

const LOCK: &str = "/run/forkdisk/attach.lock";
/// Longer than any of them takes.
const PATIENCE: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(20);

/// The lock of all `attach` and `detach` calls; released when dropped or when the process ends.
pub struct AttachLock(#[allow(dead_code, reason = "the lock is held by the open file")] File);

/// Takes the lock if it is free.
pub fn alone_at_once() -> Option<AttachLock> {
    let file = open().ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok().map(|()| AttachLock(file))
}

fn open() -> Result<File> {
    let path = Path::new(LOCK);
    path.parent().map_or(Ok(()), fs::create_dir_all).context(LOCK)?;
    File::options().write(true).create(true).truncate(false).open(path).context(LOCK)
}

/// Waits for the lock.
pub fn alone() -> Result<AttachLock> {
    let file = open()?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(AttachLock(file)),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(error) => return Err(error).context(LOCK),
        }
        if start.elapsed() > PATIENCE {
            bail!("another `forkdisk attach` or `detach` has not ended in {PATIENCE:?} (`fuser {LOCK}` shows it)");
        }
        std::thread::sleep(PAUSE);
    }
}
