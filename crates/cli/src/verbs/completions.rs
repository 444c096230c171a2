//! `completions`: prints a shell's completion script for the command line.

use anyhow::Result;
use clap::Args;
use clap_complete::Shell;

use crate::command::without_hidden_verbs;
use crate::output::print;

/// Write a completion script for a shell to standard output
#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Writes the script.
pub fn run(args: CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut without_hidden_verbs(), "forkdisk", &mut script);
    print(&script)
}
