//! One owner per pool (I11): a lock that lives exactly as long as writes can still reach the device.
//!
//! The lock belongs to the open file description, not to the process. Every
//! request in flight holds that description too, so the kernel releases the lock only when the last
//! request has ended, even if the process was killed long before.
//! So writes of the previous owner cannot overtake those of the next one.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use forkdisk::{Error, ErrorKind};

/// Pause between two attempts to take a lock whose owner is ending.
pub(super) const RETRY: Duration = Duration::from_millis(10);
/// How long to wait for an image whose lock belongs to no living process.
const ENDING: Duration = Duration::from_secs(1);

/// Locks the whole file, exclusively or shared. Waits up to `patience` while the lock is held
/// but no living process is found to hold it.
pub(super) fn acquire(file: &File, path: &Path, exclusive: bool, patience: Duration) -> forkdisk::Result<()> {
    let start = Instant::now();
    loop {
        let locked = crate::sys::lock_file(file.as_fd(), exclusive);
        if locked.map_err(|e| Error::io(format!("cannot lock {}", path.display()), e))? {
            return Ok(());
        }
        if let Some(holder) = holder(file, None) {
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

/// Offset of the bytes that QEMU locks in an image, shared, one for each permission in use.
const USED: u64 = 100;
/// Offset of the bytes for permissions that other processes may not use.
const NOT_SHARED: u64 = 200;
/// Permissions: consistent read, write, resize.
const READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;

/// Refuses an image that another process writes, as far as a lock shows it: QEMU and forkdisk set one.
/// While `file` is open, QEMU does not start writing it; other readers neither block nor are blocked. A
/// file system without locks never refuses. Blocks the thread for up to a second if the lock belongs to a
/// process that has ended: the kernel keeps it until the last request of that process is complete.
///
/// # Errors
/// `Busy` if another process writes the image; `Io` if the locks cannot be examined.
pub fn lock_image(file: &File, path: &Path) -> forkdisk::Result<()> {
    let start = Instant::now();
    while let Some(byte) = foreign_lock(file) {
        match holder(file, byte) {
            Some(holder) => return Err(busy(path, &holder)),
            None if start.elapsed() >= ENDING => return Err(busy(path, UNSEEN)),
            None => std::thread::sleep(RETRY),
        }
    }
    Ok(())
}

/// Locks the image as a reader. Returns the conflicting lock of a writer, if there is one: on a
/// byte, or on the whole file.
fn foreign_lock(file: &File) -> Option<Option<u64>> {
    let fd = file.as_fd();
    // Lock first, then test: of two processes that start together, at least one sees the other's lock.
    for byte in [USED + READ, NOT_SHARED + WRITE, NOT_SHARED + RESIZE] {
        if matches!(crate::sys::share_byte(fd, byte), Ok(false)) {
            return Some(Some(byte));
        }
    }
    for byte in [USED + WRITE, USED + RESIZE, NOT_SHARED + READ] {
        if matches!(crate::sys::is_locked(fd, true, byte, 1), Ok(true)) {
            return Some(Some(byte));
        }
    }
    matches!(crate::sys::is_locked(fd, false, 0, 0), Ok(true)).then_some(None)
}

/// Returns whether a line of fdinfo shows a lock of an open file description, on this byte.
fn tells_of_lock(line: &str, byte: Option<u64>) -> bool {
    if !line.starts_with("lock:") || !line.contains("OFDLCK") {
        return false;
    }
    let Some(byte) = byte else { return true };
    let mut from_end = line.split_whitespace().rev();
    let end = from_end.next().map(|end| end.parse().unwrap_or(u64::MAX));
    let start = from_end.next().and_then(|start| start.parse().ok());
    start.zip(end).is_some_and(|(start, end): (u64, u64)| (start..=end).contains(&byte))
}

/// Returns the process that holds a lock on this file, or on this byte of it, as `name (pid 123)`.
fn holder(file: &File, byte: Option<u64>) -> Option<String> {
    let identity = identity(&file.metadata().ok()?);
    let me = std::process::id();
    for pid in processes() {
        for fd in open_on(pid, identity) {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
            if info.lines().any(|line| tells_of_lock(line, byte)) {
                return Some(describe(pid, me));
            }
        }
    }
    None
}

/// Describes the user of a block device that the kernel refuses to open exclusively, as far as
/// /proc and /sys show it.
pub fn block_device_user(path: &Path) -> String {
    let Ok(meta) = fs::metadata(path) else { return UNSEEN.to_string() };
    let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
    if let Some(place) = mount_point(&meta) {
        return format!("a file system mounted on {place} (umount it first)");
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut swaps = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    if swaps.any(|name| fs::metadata(name).is_ok_and(|found| found.rdev() == meta.rdev() && found.rdev() != 0)) {
        return "the kernel as swap (swapoff it first)".to_string();
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

/// Returns the mount point of a device. File systems with their own device numbers (btrfs) are
/// matched by their source.
fn mount_point(device: &fs::Metadata) -> Option<String> {
    let number = format!("{}:{}", libc::major(device.rdev()), libc::minor(device.rdev()));
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let is_source = |name: &str| {
        let found = fs::metadata(name).ok().filter(|found| name.starts_with("/dev/") && found.rdev() != 0);
        found.is_some_and(|found| found.rdev() == device.rdev())
    };
    table.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (shown, place) = (words.nth(2)?, words.nth(1)?);
        // After a dash: the type and the source.
        let source = words.skip_while(|word| *word != "-").nth(2)?;
        (shown == number || is_source(source)).then(|| place.to_string())
    })
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the descriptors of a process that are open on a file.
fn open_on(pid: u32, wanted: (u64, u64, u64)) -> impl Iterator<Item = String> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    // Does not query servers of file systems, which may be waiting for this process.
    fds.filter(move |fd| crate::sys::identity(&fd.path()).is_some_and(|found| found == wanted))
        .filter_map(|fd| fd.file_name().into_string().ok())
}

/// Returns device and inode; for a block device its number, since it may have several nodes.
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Returns a file, and a second open file description of it.
    fn twice() -> (tempfile::NamedTempFile, File) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let again = File::options().read(true).write(true).open(file.path()).unwrap();
        (file, again)
    }

    #[test]
    fn an_image_that_is_written_is_refused_and_one_that_is_read_is_not() {
        // Bytes that QEMU's readers and writers lock.
        for (bytes, is_written) in
            [(&[100_u64, 201, 203] as &[u64], false), (&[100, 101, 103, 201], true), (&[200], true)]
        {
            let (ours, theirs) = twice();
            bytes.iter().for_each(|&byte| assert!(crate::sys::share_byte(theirs.as_fd(), byte).unwrap()));
            assert_eq!(lock_image(ours.as_file(), ours.path()).is_err(), is_written, "{bytes:?}");
        }
    }

    #[test]
    fn a_writer_that_comes_later_sees_the_reader() {
        let (ours, theirs) = twice();
        lock_image(ours.as_file(), ours.path()).unwrap();
        // QEMU checks whether another process forbids writing.
        assert!(crate::sys::is_locked(theirs.as_fd(), true, NOT_SHARED + WRITE, 1).unwrap());
        assert!(!crate::sys::is_locked(theirs.as_fd(), true, USED + WRITE, 1).unwrap());
    }

    #[test]
    fn what_is_locked_as_a_whole_is_refused_by_name() {
        let (ours, theirs) = twice();
        assert!(crate::sys::lock_file(theirs.as_fd(), true).unwrap());
        let error = lock_image(ours.as_file(), ours.path()).unwrap_err();
        assert!(error.to_string().contains("in use by this process already"), "{error}");
        assert!(!tells_of_lock("lock:\t1: OFDLCK  ADVISORY  READ  -1 00:31:5 100 101", Some(102)));
        assert!(tells_of_lock("lock:\t1: OFDLCK  ADVISORY  READ  -1 00:31:5 100 101", Some(101)));
        assert!(tells_of_lock("lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:31:5 0 EOF", Some(7)));
    }
}
