//! Keeps a daemon able to serve when the machine runs out of memory: dirty memory may have to be
//! written to devices that the daemon itself serves.

use std::fs;

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{configure_io_flusher_behavior, geteuid};
use rustix::thread::{CapabilitySet, capabilities};

use crate::config::{Settings, key};

const SCORE: &str = "/proc/self/oom_score_adj";
/// Score of a process that the out-of-memory killer never chooses.
const NEVER: &str = "-1000";

/// Applies the reserves; called by a daemon before it starts a thread. Without root, or if the
/// machine does not allow it, nothing happens.
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

/// Drops the reserves; called by a process that a daemon has started, which inherits all but the locked memory.
pub fn let_go() {
    if fs::read_to_string(SCORE).is_ok_and(|score| score.trim() == NEVER) {
        // Raising the score needs no privilege.
        let _ = fs::write(SCORE, "0");
        let _ = configure_io_flusher_behavior(false);
    }
}
