//! Freezing file systems: cached data is written, and later writers wait.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::c_ulong;

use crate::sys;

/// `_IOWR('X', 119, int)` and the next, on architectures with the generic encoding of ioctls.
const FIFREEZE: c_ulong = 0xc004_5877;
const FITHAW: c_ulong = 0xc004_5878;

/// Writes the cached data of `file`'s file system and blocks its writers until [`thaw`]. Needs root. Fails with
/// [`ResourceBusy`](io::ErrorKind::ResourceBusy) if it is frozen already, and `EOPNOTSUPP` if it cannot be frozen.
///
/// # Errors
/// `ResourceBusy` if it is frozen already, `EOPNOTSUPP` if it cannot be frozen, `PermissionDenied` without
/// root.
pub fn freeze(file: impl AsFd) -> io::Result<()> {
    ask(file, FIFREEZE)
}

/// Lets writers of the file system of `file` continue.
///
/// # Errors
/// `InvalidInput` if it is not frozen, `PermissionDenied` without root.
pub fn thaw(file: impl AsFd) -> io::Result<()> {
    ask(file, FITHAW)
}

fn ask(file: impl AsFd, request: c_ulong) -> io::Result<()> {
    // SAFETY: both requests ignore their argument.
    sys::check(unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request as _, 0) }).map(drop)
}
