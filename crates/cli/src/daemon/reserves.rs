//! What keeps a daemon able to serve when the machine runs out of memory. Its memory may be freed only by writing to
//! devices that it serves itself.

use std::fs;

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{configure_io_flusher_behavior, geteuid};
use rustix::thread::{CapabilitySet, capabilities};

use crate::config::{Settings, key};

const SCORE: &str = "/proc/self/oom_score_adj";
/// Never chosen by the out-of-memory killer.
const NEVER: &str = "-1000";

/// To be called by a daemon before it starts a thread. Without root, or where the machine does not allow it, nothing
/// happens.
pub fn hold(settings: &Settings) -> anyhow::Result<()> {
    if !settings.switch(&key::MEMORY_RESERVES)? || !geteuid().is_root() {
        return Ok(());
    }
    if let Err(error) = fs::write(SCORE, NEVER) {
        tracing::debug!(%error, "the out-of-memory killer may choose this process");
    }
    if let Err(error) = configure_io_flusher_behavior(true) {
        tracing::debug!(%error, "allocations of this process may wait for its own devices");
    }
    // Without the capability a later allocation could fail at the limit of locked memory.
    let may_lock = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let pages = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if may_lock && let Err(error) = mlockall(pages) {
        tracing::debug!(%error, "the memory of this process may be swapped out");
    }
    Ok(())
}

/// To be called by a process that a daemon has started: it inherits all but the locked memory.
pub fn let_go() {
    if fs::read_to_string(SCORE).is_ok_and(|score| score.trim() == NEVER) {
        // To raise it needs no privilege.
        let _ = fs::write(SCORE, "0");
        let _ = configure_io_flusher_behavior(false);
    }
}
