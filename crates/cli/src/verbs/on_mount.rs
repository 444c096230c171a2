//! `on-mount`: makes a system call on a mount, or notifications about it, for the process that serves it.

use std::ffi::OsString;

use anyhow::{Context, Result};
use clap::Args;
use forkdisk_fuse::{NOTIFY, carry_out};

use crate::daemon::reserves;
use crate::output::print_line;

/// Make a system call on a mount for the process that serves it
#[derive(Args)]
pub struct OnMountArgs {
    /// The call and its path
    #[arg(required = true)]
    words: Vec<OsString>,
}

/// Makes the call and prints its outcome.
pub fn run(args: OnMountArgs) -> Result<()> {
    // A write to a device on the mount may wait for a notification: what makes these keeps its reserves.
    if args.words.first().is_none_or(|word| word != NOTIFY) {
        reserves::let_go();
    }
    let said = carry_out(&args.words).with_context(|| format!("there is no call {:?}", args.words))?;
    print_line(&said)
}
