//! Descriptors that a service manager opened for this process (sd_listen_fds: `LISTEN_FDS`,
//! `LISTEN_PID`, `LISTEN_FDNAMES`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

/// The first passed descriptor.
const FIRST: RawFd = 3;
/// Most descriptors that are accepted; managers pass far fewer.
const MAX_FDS: i32 = 4096;

/// A passed descriptor.
#[derive(Debug)]
pub struct Inherited {
    /// Name given by the manager; `unknown` if it gives none.
    pub name: String,
    /// The descriptor, with close-on-exec set.
    pub fd: OwnedFd,
}

/// Returns the descriptors that were passed to this process, in order. Only the first call returns
/// them; later calls return none.
pub fn inherited() -> Vec<Inherited> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    let is_ours = number("LISTEN_PID").is_some_and(|pid| u32::try_from(pid) == Ok(std::process::id()));
    if !is_ours || TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0).clamp(0, MAX_FDS);
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').filter(|name| !name.is_empty()).map(str::to_string);
    let names = names.chain(std::iter::repeat("unknown".to_string()));
    let open = (FIRST..FIRST + count).filter(|&fd| is_open(fd));
    let fds: Vec<OwnedFd> = open.map(sys::own).collect();
    fds.into_iter()
        .zip(names)
        .filter_map(|(fd, name)| sys::close_at_exec(&fd).ok().map(|()| Inherited { name, fd }))
        .collect()
}

/// Replaces this process by a program, to which descriptors are passed as by a service manager, each with a name;
/// returns only on failure. A colon in a name is passed as `%3A`.
pub fn exec_with(command: &mut Command, passed: Vec<Inherited>) -> io::Error {
    let names: Vec<String> = passed.iter().map(|passed| passed.name.replace(':', "%3A")).collect();
    command.env("LISTEN_PID", std::process::id().to_string()).env("LISTEN_FDS", passed.len().to_string());
    command.env("LISTEN_FDNAMES", names.join(":"));
    let place = move || {
        // Above all places first, so that none is overwritten before it was moved.
        let end = FIRST + passed.len() as RawFd;
        let above = |passed: &Inherited| {
            // SAFETY: takes no pointers.
            sys::check(unsafe { libc::fcntl(passed.fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, end) }).map(sys::own)
        };
        let moved: Vec<OwnedFd> = passed.iter().map(above).collect::<Result<_, _>>()?;
        for (fd, at) in moved.iter().zip(FIRST..) {
            // SAFETY: takes no pointers.
            sys::check(unsafe { libc::dup2(fd.as_raw_fd(), at) })?;
        }
        Ok(())
    };
    // SAFETY: nothing is forked: the closure runs in this process and on this thread, directly before `execve`, so that
    // it may allocate. What had the numbers before is not used any more: a failure ends the process.
    unsafe { command.pre_exec(place) };
    command.exec()
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: only the flags of the descriptor are read during this call; if it is not open, the
    // call fails and nothing is accessed.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    sys::descriptor_flags(fd).is_ok()
}
