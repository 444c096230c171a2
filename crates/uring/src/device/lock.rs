//! One owner per pool (I11): a lock that lives exactly as long as anybody can still write.
//!
//! The lock belongs to the open file description, not to the process. Every
//! request in flight holds that description too, so the kernel releases the lock only when the last
//! request has ended, even when the process was killed long before.
//! A successor that gets the lock therefore cannot be overtaken by its predecessor's writes.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use forkdisk::{Error, ErrorKind};

/// Pause between two attempts on a lock whose owner is ending.
pub(super) const RETRY: Duration = Duration::from_millis(10);

/// Locks the whole file, exclusively or shared. Waits up to `patience` while the lock is held
/// but no living process can be seen to hold it.
pub(super) fn acquire(file: &File, path: &Path, exclusive: bool, patience: Duration) -> forkdisk::Result<()> {
    let start = Instant::now();
    loop {
        let locked = crate::sys::lock_file(file.as_fd(), exclusive);
        if locked.map_err(|e| Error::io(format!("cannot lock {}", path.display()), e))? {
            return Ok(());
        }
        if let Some(holder) = holder(file) {
            return Err(busy(path, &holder));
        }
        if start.elapsed() >= patience {
            return Err(busy(path, UNSEEN));
        }
        std::thread::sleep(RETRY);
    }
}

pub(super) const UNSEEN: &str =
    "a process that cannot be seen from here (another user's, another container's or an ending one)";

pub(super) fn busy(path: &Path, holder: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{} is in use by {holder}", path.display()))
}

/// The process that holds a lock on this file, as `name (pid 123)`.
fn holder(file: &File) -> Option<String> {
    let identity = identity(&file.metadata().ok()?);
    let me = std::process::id();
    for pid in processes() {
        for fd in open_on(pid, identity) {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
            if info.lines().any(|line| line.starts_with("lock:") && line.contains("OFDLCK")) {
                return Some(describe(pid, me));
            }
        }
    }
    None
}

/// Who has a block device that the kernel refuses to open exclusively, as far as can be found.
pub(super) fn block_device_user(path: &Path) -> String {
    let Ok(meta) = fs::metadata(path) else { return UNSEEN.to_string() };
    let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
    if let Some(place) = mount_point(major, minor) {
        return format!("a file system mounted on {place}");
    }
    let holders = fs::read_dir(format!("/sys/dev/block/{major}:{minor}/holders"));
    if let Some(holder) = holders.into_iter().flatten().flatten().next() {
        return format!("the device {}", holder.file_name().to_string_lossy());
    }
    let identity = identity(&meta);
    let me = std::process::id();
    let user = processes().find(|&pid| open_on(pid, identity).next().is_some());
    user.map_or_else(|| UNSEEN.to_string(), |pid| describe(pid, me))
}

fn mount_point(major: u32, minor: u32) -> Option<String> {
    let wanted = format!("{major}:{minor}");
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let line = table.lines().find(|line| line.split(' ').nth(2) == Some(&wanted))?;
    line.split(' ').nth(4).map(str::to_string)
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The descriptors of a process that are open on a file.
fn open_on(pid: u32, wanted: (u64, u64, u64)) -> impl Iterator<Item = String> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    // Never asks a file system's server, which may be waiting for us.
    fds.filter(move |fd| crate::sys::identity(&fd.path()).is_some_and(|found| found == wanted))
        .filter_map(|fd| fd.file_name().into_string().ok())
}

/// Device, inode and, for a block device, which one: its node may exist several times.
fn identity(meta: &fs::Metadata) -> (u64, u64, u64) {
    if meta.file_type().is_block_device() { (0, 0, meta.rdev()) } else { (meta.dev(), meta.ino(), 0) }
}

fn describe(pid: u32, me: u32) -> String {
    if pid == me {
        return format!("this process already (pid {pid})");
    }
    let name: io::Result<String> = fs::read_to_string(format!("/proc/{pid}/comm"));
    format!("{} (pid {pid})", name.as_deref().map_or("a process", str::trim))
}
