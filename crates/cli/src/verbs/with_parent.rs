//! `with-parent`: runs another program that ends with the process that started this.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::daemon::reserves;

/// Run another program that ends with the process that started this
#[derive(Args)]
pub struct WithParentArgs {
    /// The process number of the parent
    parent: u32,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Replaces this process by the program; returns only on failure.
pub fn run(args: WithParentArgs) -> Result<()> {
    reserves::let_go();
    set_parent_process_death_signal(Some(Signal::KILL)).context("binding it to the process that started it")?;
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent != i32::try_from(args.parent).ok() {
        bail!("the process that started it has ended");
    }
    let (program, words) = args.words.split_first().context("no program")?;
    Err(Command::new(program).args(words).exec()).with_context(|| program.display().to_string())
}
