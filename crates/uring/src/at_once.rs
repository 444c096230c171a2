//! System calls on files that the ring's thread makes itself, since they wait for nothing.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::sys::check;

/// Returns whether a file is one in memory: on tmpfs or ramfs.
pub(crate) fn is_in_memory(file: BorrowedFd<'_>) -> io::Result<bool> {
    const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;
    let mut found = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the pointer is to a local structure, which is valid with any contents.
    let found = unsafe {
        check(libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()))?;
        found.assume_init()
    };
    Ok(matches!(found.f_type, libc::TMPFS_MAGIC | RAMFS_MAGIC))
}

/// Reads a part of a file into `buf`; returns how many bytes.
pub(crate) fn read_at(file: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    // SAFETY: the memory is that of `buf`.
    let read = unsafe { libc::pread64(file.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), offset as libc::off64_t) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Writes `buf` to a part of a file; returns how many bytes.
pub(crate) fn write_at(file: BorrowedFd<'_>, buf: &[u8], offset: u64) -> io::Result<usize> {
    // SAFETY: the memory is that of `buf`.
    let written = unsafe { libc::pwrite64(file.as_raw_fd(), buf.as_ptr().cast(), buf.len(), offset as libc::off64_t) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Flushes a file.
pub(crate) fn sync(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fsync(file.as_raw_fd()) }).map(drop)
}
