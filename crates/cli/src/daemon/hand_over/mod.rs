//! Upgrades: a new program takes over from a running daemon, with its sockets, sessions, mounts and devices.
//!
//! The old process starts the new program and serves on until that says that it is ready. Then it stops every client
//! between two requests, closes the pool, and passes all descriptors and what was agreed upon. The new process opens
//! the pool and says so; with the answer of the old one it continues all clients. Until that answer the old process
//! can continue them itself, which it does if the new program fails.

mod foreground;
mod launch;
mod predecessor;
mod state;
mod successor;

use std::env;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::process::{Pid, getpid};
use serde::{Deserialize, Serialize};

pub use foreground::{follow_first, wait_for_children};
pub use launch::launch;
pub use predecessor::{Predecessor, tell_failure};
pub use state::{PassedListener, PassedMount, State};
pub use successor::Successor;

/// Environment variable of a program that takes over: process id of the first process of the daemon.
const MARK: &str = "FORKDISK_HAND_OVER";
/// Version of the state that is passed. Fields can be added without a new one.
const FORMAT_VERSION: u32 = 1;

/// For messages without descriptors.
const NO_FILES: &[OwnedFd] = &[];

/// What the two processes tell each other.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// From the new process: it can take over.
    Ready {
        format: u32,
        /// It can take over mounts with queues of io_uring.
        #[serde(default)]
        fuse_uring: bool,
        /// Those with payloads that begin huge pages, too.
        #[serde(default)]
        fuse_stride: bool,
        /// It can continue encrypted clients.
        #[serde(default)]
        tls: bool,
        /// Its process id.
        #[serde(default)]
        pid: Option<i32>,
    },
    /// From the new process: it cannot.
    Failed { why: String },
    /// From the old process, with all descriptors.
    State(Box<State<usize>>),
    /// From the new process: the pool is open.
    Taken,
    /// From the old process: continue. `stays`: it waits for the end of the new one.
    Continue { stays: bool },
}

/// Returns whether this process took over from another one, or is about to.
pub fn has_predecessor() -> bool {
    env::var_os(MARK).is_some()
}

/// Returns the process id of the first process of this daemon: this one if it did not take over from another.
fn first_process() -> Pid {
    let passed = env::var(MARK).ok().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
    passed.unwrap_or_else(getpid)
}

/// Returns the folder in which the daemon was started, to which its arguments relate.
pub fn starting_folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| env::current_dir().unwrap_or_else(|_| PathBuf::from("/")))
}
