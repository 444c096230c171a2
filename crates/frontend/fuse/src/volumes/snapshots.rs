//! Snapshots: `mkdir .snapshots/VOLUME/NAME` takes one, `rmdir` deletes it. With a folder in the place of the volume,
//! both concern every volume in the folder.
//!
//! A snapshot is a file, but the kernel allows only folders as results of `mkdir` and arguments of
//! `rmdir`. So for these two system calls only, the name is reported as a phantom folder, which the
//! kernel must not cache.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;

use forkdisk::{Device, SnapshotFlags, unescape_name};

use super::folders::full_name;
use super::nodes::{Node, join};
use super::{Failed, Outcome, Volumes, now};
use crate::codec::{Entry, Reply};
use crate::off_thread::off_thread;
use crate::syscall_helper::{MountCall, Refusal};

impl<D: Device> Volumes<D> {
    pub(super) async fn take_snapshot(&self, volume: &str, name: &str) -> Outcome<Entry> {
        if !self.is_volume(volume) {
            return self.take_snapshots_in(volume, name).await;
        }
        if self.pool.find(&full_name(volume, name)).is_ok() {
            return Err(Failed(libc::EEXIST));
        }
        self.write_back(MountCall::WriteBack(self.options.dir.join(OsString::from_vec(unescape_name(volume))))).await?;
        self.pool.snapshot(&[(volume, name)], now().seconds as u64).await?;
        self.entry(Node::Phantom, 0)
    }

    /// Takes a snapshot of every volume in a folder, which the entry shows.
    async fn take_snapshots_in(&self, folder: &str, name: &str) -> Outcome<Entry> {
        if self.pool.volumes_in(folder)?.is_empty() {
            return Err(Failed(libc::EPERM));
        }
        if self.pool.child(&join(folder, name)).is_ok() || self.pool.has_snapshot_in(folder, name) {
            return Err(Failed(libc::EEXIST));
        }
        self.write_back(MountCall::WriteBackAll(self.options.dir.clone())).await?;
        self.pool.snapshot_folder(folder, name, SnapshotFlags::NONE, now().seconds as u64).await?;
        self.entry(Node::Kept(folder.to_string(), name.to_string()), 0)
    }

    /// Makes the kernel write what it has cached, so that the snapshot contains it.
    async fn write_back(&self, call: MountCall) -> Outcome<()> {
        let syscall_helper = self.options.syscall_helper.clone();
        match off_thread(move || call.make(syscall_helper.as_ref())).await {
            // No access, or not mounted here: then nothing of this mount is cached.
            Err(Refusal { errno: libc::EACCES | libc::EPERM | libc::ENOENT, .. }) => Ok(()),
            outcome => outcome.map_err(|refusal| Failed(refusal.errno)),
        }
    }

    pub(super) fn remove_snapshot(&self, volume: &str, name: &str) -> Outcome {
        if !self.is_volume(volume) && self.pool.find(&full_name(volume, name)).is_err() {
            if self.pool.child(&join(volume, name)).is_ok() || !self.pool.has_snapshot_in(volume, name) {
                return Err(Failed(libc::EPERM));
            }
            self.pool.remove_snapshots_in(volume, name)?;
            return Ok(Reply::Done);
        }
        self.pool.remove_file(&full_name(volume, name))?;
        Ok(Reply::Done)
    }

    pub(super) async fn rename_snapshot(&self, from: (&str, &str), to: (&str, &str)) -> Outcome {
        let is_of_file = || self.is_volume(from.0) || self.pool.find(&full_name(from.0, from.1)).is_ok();
        if from.0 != to.0 || !is_of_file() {
            return Err(Failed(libc::EPERM));
        }
        self.pool.rename(&full_name(from.0, from.1), &full_name(to.0, to.1)).await?;
        Ok(Reply::Done)
    }
}

/// Returns whether thread `pid` is in a system call that removes a folder. `/proc/PID/syscall`
/// tells, to root for all processes and to other users for their own.
pub fn wants_a_folder(pid: u32) -> bool {
    pid != 0 && fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(|line| removes_a_folder(&line))
}

fn removes_a_folder(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let Some(number) = words.next().and_then(|n| n.parse::<i64>().ok()) else { return false };
    let mut flags = || words.nth(2).and_then(|w| i64::from_str_radix(w.trim_start_matches("0x"), 16).ok());
    #[cfg(target_arch = "x86_64")]
    if number == libc::SYS_rmdir {
        return true;
    }
    number == libc::SYS_unlinkat && flags().is_some_and(|f| f & i64::from(libc::AT_REMOVEDIR) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_remove_folders_count() {
        let call =
            |number: i64, flags: &str| format!("{number} 0xffffff9c 0x7ffd1 {flags} 0x0 0x0 0x0 0x7ffd2 0x7f3\n");
        assert!(removes_a_folder(&call(libc::SYS_unlinkat, "0x200")));
        assert!(!removes_a_folder(&call(libc::SYS_unlinkat, "0x0")));
        assert!(!removes_a_folder(&call(libc::SYS_newfstatat, "0x200")));
        #[cfg(target_arch = "x86_64")]
        assert!(removes_a_folder(&call(libc::SYS_rmdir, "0x0")));
        for odd in ["running\n", "", "-1 0x7ffd1 0x7f3\n"] {
            assert!(!removes_a_folder(odd), "{odd:?}");
        }
    }
}
