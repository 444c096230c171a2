//! `man`: the manual pages, made from the same definitions as the parser.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};

use crate::cli::Cli;

/// Write the manual pages into a directory
#[derive(Args)]
pub struct ManArgs {
    /// The directory; it is made if it does not exist
    dir: PathBuf,
}

/// Writes `forkdisk.1` and one page for each verb.
pub fn run(args: ManArgs) -> Result<()> {
    let shown = args.dir.display();
    fs::create_dir_all(&args.dir).with_context(|| format!("{shown}: cannot be made"))?;
    clap_mangen::generate_to(Cli::command(), &args.dir).with_context(|| format!("{shown}: cannot be written"))
}
