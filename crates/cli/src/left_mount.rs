//! Mounts that a killed process has left: how they are recognised, without waiting for them, and removed.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, Result, bail};
use forkdisk_fuse::{mounted_at, probe, unmount};
use forkdisk_uring::abandon_loop;
use rustix::io::Errno;

use crate::served_mount::syscall_helper;

/// Time in which the process behind a mount answers.
const PATIENCE: Duration = Duration::from_secs(2);

/// Errors of a mount after the end of its process. The kernel aborts the connection some moments after that: requests
/// under way get the second one.
const IS_GONE: [i32; 2] = [Errno::NOTCONN.raw_os_error(), Errno::CONNABORTED.raw_os_error()];

/// State of a mounted pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A process serves it.
    Served,
    /// Its process is gone: each access fails.
    Dead,
    /// No process answers: each access waits. So it is with a mount that a keeper holds for the next daemon.
    Silent,
}

/// Returns the state of the mount at `dir`, as a helper process finds it: a request that the stopped server of a mount
/// has received cannot be interrupted, and a process with a thread in it cannot end.
pub fn state_of(dir: &Path) -> State {
    let (sender, receiver) = mpsc::channel();
    let dir = dir.to_path_buf();
    // The helper ends with the mount or when the mount answers.
    thread::spawn(move || sender.send(probe(&dir, &syscall_helper()).err().and_then(|error| error.raw_os_error())));
    match receiver.recv_timeout(PATIENCE) {
        Ok(Some(errno)) if IS_GONE.contains(&errno) => State::Dead,
        Ok(_) => State::Served,
        Err(_) => State::Silent,
    }
}

/// Returns whether the process behind the mount at `dir` is gone.
pub fn is_dead(dir: &Path) -> bool {
    state_of(dir) == State::Dead
}

/// Removes the mount of a killed daemon, with the devices on it: below a new mount they could not be found any more.
pub fn remove_dead(dir: &Path) -> Result<()> {
    while mounted_at(dir).is_some_and(|mount| mount.is_pool()) && is_dead(dir) {
        tracing::warn!(dir = %dir.display(), "the process that had mounted it was killed: unmounting");
        for device in devices_in(dir)? {
            let gone = abandon_loop(&device).with_context(|| device.display().to_string());
            gone.context("its daemon was killed: unmount what is on it first")?;
        }
        unmount(dir, true)?;
    }
    Ok(())
}

/// Prepares a mount of `pool` on `dir`: removes the dead mounts of this pool there.
///
/// Fails if another pool's mount there is dead, or if a mount there does not answer.
pub fn make_way(dir: &Path, pool: &Path) -> Result<()> {
    let dir = place(dir).with_context(|| dir.display().to_string())?;
    let Some(mount) = mounted_at(&dir).filter(|mount| mount.is_pool()) else { return Ok(()) };
    let (source, shown) = (PathBuf::from(&mount.source), dir.display());
    match state_of(&dir) {
        State::Served => Ok(()),
        State::Dead if is_same(&source, pool) => remove_dead(&dir),
        State::Dead => bail!(
            "{shown}: the process that had {} mounted there was killed: `forkdisk umount {shown}` removes that mount",
            source.display()
        ),
        State::Silent => bail!(silent(&dir, &source)),
    }
}

/// Describes a mount that does not answer.
pub fn silent(dir: &Path, pool: &Path) -> String {
    format!(
        "{dir}: {pool} is mounted there and does not answer: if its daemon was killed, `forkdisk serve {pool}` \
         continues the mount; `forkdisk umount --lazy {dir}` gives it up",
        dir = dir.display(),
        pool = pool.display()
    )
}

/// Returns a folder without links. It is not accessed if a pool may be mounted on it.
pub fn place(dir: &Path) -> std::io::Result<PathBuf> {
    let absolute = std::path::absolute(dir)?;
    if let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) {
        let place = parent.canonicalize()?.join(name);
        if mounted_at(&place).is_some_and(|mount| mount.is_pool()) {
            return Ok(place);
        }
    }
    dir.canonicalize()
}

fn is_same(one: &Path, other: &Path) -> bool {
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// Returns the loop devices on files of a mount.
fn devices_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let names = fs::read_dir("/sys/block").context("/sys/block")?.map(|entry| Ok(entry?.file_name()));
    let names: Vec<_> = names.collect::<std::io::Result<_>>().context("/sys/block")?;
    let backing = |name: &std::ffi::OsString| {
        fs::read_to_string(Path::new("/sys/block").join(name).join("loop/backing_file")).unwrap_or_default()
    };
    let inside = names.iter().filter(|name| Path::new(&backing(name)).starts_with(dir));
    Ok(inside.map(|name| Path::new("/dev").join(name)).collect())
}
