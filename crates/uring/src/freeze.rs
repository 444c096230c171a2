//! Freezing file systems: what is cached is written, and what would be written later waits.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::c_ulong;

use crate::sys;

/// `_IOWR('X', 119, int)` and the next, on processors whose requests are built in the usual way.
const FIFREEZE: c_ulong = 0xc004_5877;
const FITHAW: c_ulong = 0xc004_5878;

/// Writes what the file system of `file` has cached and has its writers wait until [`thaw`]. Needs root. One that is
/// frozen already is [`ResourceBusy`](io::ErrorKind::ResourceBusy), one that cannot be frozen `EOPNOTSUPP`.
pub fn freeze(file: impl AsFd) -> io::Result<()> {
    ask(file, FIFREEZE)
}

/// Lets writers of the file system of `file` go on.
pub fn thaw(file: impl AsFd) -> io::Result<()> {
    ask(file, FITHAW)
}

fn ask(file: impl AsFd, request: c_ulong) -> io::Result<()> {
    // SAFETY: both requests ignore their argument.
    sys::check(unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request as _, 0) }).map(drop)
}
