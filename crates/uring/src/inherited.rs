//! Descriptors that a service manager opened for this process (sd_listen_fds: `LISTEN_FDS`,
//! `LISTEN_PID`, `LISTEN_FDNAMES`).

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
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

fn is_open(fd: RawFd) -> bool {
    // SAFETY: only the flags of the descriptor are read during this call; if it is not open, the
    // call fails and nothing is accessed.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    sys::descriptor_flags(fd).is_ok()
}
