//! `on-mount`: a call on a mount, made for the process that serves it.

use std::ffi::OsString;

use anyhow::{Context, Result};
use clap::Args;
use forkdisk_fuse::{SyscallHelper, carry_out};

use crate::daemon::reserves;
use crate::output::print_line;

/// Make a call on a mount for the process that serves it
#[derive(Args)]
pub struct OnMountArgs {
    /// The call, and the path that it is about
    #[arg(required = true)]
    words: Vec<OsString>,
}

/// How the process that serves starts this: from its own file, also when another version lies in its place by now.
pub fn syscall_helper() -> SyscallHelper {
    SyscallHelper { program: "/proc/self/exe".into(), args: ["on-mount", "--"].map(OsString::from).to_vec() }
}

/// Makes the call, and says how it ended.
pub fn run(args: OnMountArgs) -> Result<()> {
    reserves::let_go();
    let said = carry_out(&args.words).with_context(|| format!("there is no call {:?}", args.words))?;
    print_line(&said)
}
