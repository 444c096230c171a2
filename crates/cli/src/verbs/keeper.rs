//! `keeper`: holds the connections of mounts for the daemon of a pool.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::daemon::keeper;

/// Hold the connections of mounts while no daemon serves the pool
#[derive(Args)]
pub struct KeeperArgs {
    /// Seconds to wait for a daemon
    #[arg(long)]
    limit: u64,

    /// Path of the socket that standard input is
    socket: PathBuf,
}

pub fn run(args: &KeeperArgs) -> Result<()> {
    let listener = rustix::stdio::stdin().as_fd().try_clone_to_owned().context("the socket")?;
    keeper::run(&UnixListener::from(listener), &args.socket, Duration::from_secs(args.limit))
}
