//! Descriptors that a service manager opened for this process (sd_listen_fds: `LISTEN_FDS`,
//! `LISTEN_PID`, `LISTEN_FDNAMES`).

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

/// The first descriptor that is handed over.
const FIRST: RawFd = 3;
/// No manager hands over more; a larger number is nonsense.
const MAX_FDS: i32 = 4096;

/// A descriptor that was handed over.
#[derive(Debug)]
pub struct Inherited {
    /// What the manager calls it; `unknown` when it does not say.
    pub name: String,
    /// The descriptor, closed at exec from now on.
    pub fd: OwnedFd,
}

/// The descriptors that were handed over to this process, in order. They are given out once: the second
/// call returns none.
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

fn is_open(fd: RawFd) -> bool {
    // SAFETY: the descriptor is only asked for its flags during this call; if it is not open, the call says so
    // and nothing is touched.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    sys::descriptor_flags(fd).is_ok()
}
