//! `completions`: prints a shell's completion script for the command line.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::output::print;
use crate::verbs::examples::examples;

/// Write a completion script for a shell to standard output
#[derive(Args)]
#[command(after_help = examples!["forkdisk completions bash > /usr/share/bash-completion/completions/forkdisk"])]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Writes the script for `command`.
pub fn run(args: CompletionsArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "forkdisk", &mut script);
    print(&script)
}
