//! Starts a program that takes over as a child of the service manager.
//!
//! systemd waits at a stop for the end of a main process only if that is its child when it is named, and kills it at
//! once otherwise. So the program is started twice: the first process starts the second one and ends, by which the
//! service manager becomes the parent.

use std::env;
use std::process::Command;

use anyhow::{Context, Result};

use super::MARK;

/// Environment variable of the first of the two processes, besides [`MARK`].
pub(super) const LAUNCH: &str = "FORKDISK_LAUNCH";

/// Starts this program again if that is what it was started for. `None` otherwise.
pub fn launch() -> Option<Result<()>> {
    env::var_os(LAUNCH).and(env::var_os(MARK))?;
    let again = env::current_exe().and_then(|program| {
        // It inherits standard input, the socket to the process before.
        Command::new(program).args(env::args_os().skip(1)).env_remove(LAUNCH).spawn()
    });
    Some(again.map(drop).context("starting the program that takes over"))
}
