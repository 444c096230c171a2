//! One owner per pool on this machine, by whatever path: a lock by the pool's UUID in its run-time folder.
//!
//! The lock of the device (`forkdisk-uring`) covers one file or one device. A loop device over the pool's
//! file, and a copy of the pool, are different devices with the same UUID. Writers lock exclusively, readers
//! share. The kernel releases the lock when the process ends. Without a writable folder there is no lock.
//!
//! The file is removed only under the exclusive lock, and a lock counts only on the file that lies
//! in the folder: so no two processes hold locks on different files.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forkdisk_control::runtime_dir;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::owner::InUse;
use crate::storage;

/// The file's name in the pool's run-time folder.
const NAME: &str = "owner.lock";
/// How long to wait for a lock that names no living process: its holder is starting or ending.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for a holder that has released the device already.
const ENDING: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);

/// Access that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read-only: nothing on the device changes, and other readers may have the pool open at the same time.
    Read,
    /// Writes to the pool.
    Write,
}

/// The lock; released when dropped. Holds nothing if there is nothing to lock.
#[must_use]
pub struct PoolLock {
    held: Option<(File, PathBuf)>,
}

impl PoolLock {
    /// As [`take`](Self::take), for a change that gives the pool a new identity: a process that has a
    /// pool with the same UUID open is no obstacle if the two are certainly stored in different places.
    pub fn take_copy(path: &Path) -> Result<PoolLock> {
        PoolLock::take(path, Access::Write).or_else(|error| {
            let other = error.downcast_ref().and_then(InUse::other);
            match other.is_some_and(|other| !storage::may_be_one(path, other)) {
                true => Ok(PoolLock { held: None }),
                false => Err(error),
            }
        })
    }

    /// Continues to hold a lock that another process has [passed on](Self::pass_on).
    pub fn inherit(fd: OwnedFd, path: &Path, access: Access) -> Result<PoolLock> {
        let file = File::from(fd);
        let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).context("the lock of the pool")?;
        note(&file, path, access);
        Ok(PoolLock { held: Some((file, name)) })
    }

    /// Returns the lock for another process; this one does not release it any more.
    pub fn pass_on(mut self) -> Option<OwnedFd> {
        self.held.take().map(|(file, _)| file.into())
    }

    /// Locks the pool at `path`. The error names the holding process and its path. A file that is
    /// not a pool is not locked.
    pub fn take(path: &Path, access: Access) -> Result<PoolLock> {
        let folder =
            runtime_dir::pool_identity(path).and_then(|uuid| runtime_dir::folders_in_memory(&uuid).into_iter().next());
        folder.map_or(Ok(PoolLock { held: None }), |folder| lock(&folder, path, access))
    }
}

impl Drop for PoolLock {
    fn drop(&mut self) {
        let Some((file, path)) = &self.held else { return };
        // Only the last reader gets the exclusive lock and removes the file.
        if flock(file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(file, path) {
            let _ = fs::remove_file(path);
            // Fails if other files are in it.
            let _ = path.parent().map(fs::remove_dir);
        }
    }
}

fn lock(folder: &Path, path: &Path, access: Access) -> Result<PoolLock> {
    let name = folder.join(NAME);
    let wanted = match access {
        Access::Read => FlockOperation::NonBlockingLockShared,
        Access::Write => FlockOperation::NonBlockingLockExclusive,
    };
    let none = |error: &dyn std::fmt::Display| {
        tracing::debug!(file = %name.display(), %error, "no lock by the pool's UUID");
        Ok(PoolLock { held: None })
    };
    let start = Instant::now();
    loop {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = match runtime_dir::make_private(folder).and_then(|()| options.open(&name)) {
            Ok(file) => file,
            // The previous owner has just removed the folder.
            Err(error) if error.kind() == ErrorKind::NotFound && start.elapsed() < PATIENCE => continue,
            Err(error) => return none(&error),
        };
        match flock(&file, wanted) {
            Ok(()) if is_at(&file, &name) => {
                note(&file, path, access);
                return Ok(PoolLock { held: Some((file, name)) });
            }
            // The previous owner has just removed it.
            Ok(()) => continue,
            Err(Errno::AGAIN) => {}
            Err(error) => return none(&error),
        }
        if let Some(holder) = holders(&file).pop() {
            let in_use = in_use(path, &holder);
            // A process that held this device and released its lock is ending.
            let ends = !in_use.by_another_way() && holder.pid != std::process::id();
            if !ends || start.elapsed() >= ENDING {
                return Err(in_use.into());
            }
        }
        if start.elapsed() >= PATIENCE {
            bail!(
                "{} is in use by a process that cannot be seen from here, as this path or as a copy of it: \
                 it has locked {}",
                path.display(),
                name.display()
            );
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns whether `file` is the file at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
    let ours = file.metadata().map(identity).ok();
    ours.is_some() && ours == fs::symlink_metadata(path).map(identity).ok()
}

/// A line of the file: process, file or device, and the path by which it was opened.
#[derive(Debug, PartialEq)]
struct Holder {
    pid: u32,
    device: String,
    path: String,
}

impl Holder {
    fn of(line: &str) -> Option<Holder> {
        let mut words = line.splitn(3, ' ');
        let (pid, device, path) = (words.next()?.parse().ok()?, words.next()?.to_string(), words.next()?.to_string());
        Some(Holder { pid, device, path })
    }

    fn line(&self) -> String {
        format!("{} {} {}\n", self.pid, self.device, self.path)
    }

    /// Returns whether that process still has the file open.
    fn lives(&self) -> bool {
        let fds = fs::read_dir(format!("/proc/{}/fd", self.pid)).into_iter().flatten().flatten();
        fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|to| to.ends_with(NAME))
    }
}

/// Returns the living processes that hold the lock.
fn holders(mut file: &File) -> Vec<Holder> {
    let mut text = Vec::new();
    let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut text));
    let text = read.map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default();
    text.lines().filter_map(Holder::of).filter(Holder::lives).collect()
}

/// Adds this process to the file, next to other readers. Used in messages only.
fn note(mut file: &File, path: &Path, access: Access) {
    let others = if access == Access::Read { holders(file) } else { Vec::new() };
    let path_text = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).display().to_string();
    let device = runtime_dir::file_identity(path).unwrap_or_else(|_| "-".to_string());
    let this = Holder { pid: std::process::id(), device, path: path_text.replace('\n', "?") };
    let text: String = others.iter().chain([&this]).map(Holder::line).collect();
    let written =
        file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).and_then(|_| file.write_all(text.as_bytes()));
    if let Err(error) = written {
        tracing::debug!(%error, "the lock's owner cannot be recorded");
    }
}

fn in_use(path: &Path, holder: &Holder) -> InUse {
    let same = runtime_dir::file_identity(path).is_ok_and(|device| device == holder.device);
    InUse::by(path, holder.pid, (!same).then(|| PathBuf::from(&holder.path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_lock_alone_and_readers_together() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, pool) = (dir.path().join("run"), dir.path().join("a pool"));
        let take = |access| lock(&folder, &pool, access);
        let writer = take(Access::Write).unwrap();
        let told = take(Access::Read).err().expect("a writer has it").to_string();
        assert!(told.contains("is the pool itself"), "{told}");
        drop(writer);
        assert!(!folder.exists(), "the last one removes file and folder");
        let readers = [take(Access::Read).unwrap(), take(Access::Read).unwrap()];
        assert!(take(Access::Write).is_err());
        let [one, other] = readers;
        drop(one);
        assert!(take(Access::Write).is_err(), "one reader is left");
        drop(other);
        drop(take(Access::Write).unwrap());
        assert!(!folder.exists());
    }

    #[test]
    fn no_folder_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(lock(&file.join("run"), Path::new("p"), Access::Write).unwrap().held.is_none());
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let holder = Holder { pid: 7, device: "block:3".to_string(), path: "/a b/c".to_string() };
        assert_eq!(Holder::of(holder.line().trim_end()), Some(holder));
        assert_eq!(Holder::of("x"), None);
    }
}
