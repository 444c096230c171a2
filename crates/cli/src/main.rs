//! The `forkdisk` program: one verb per run, results on stdout, everything else on stderr.
//!
//! Exit status: 0 done, 1 failed with nothing changed, 2 wrong usage; `check` has its own.

mod address;
mod attach;
mod cli;
mod config;
mod daemon;
mod lasting;
mod logging;
mod network;
mod output;
mod owner;
mod progress;
mod qemu;
mod session;
mod syslog;
mod top;
mod verbs;

use std::io;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use forkdisk_control::size;
use forkdisk_control::{Failure, FailureKind};

use crate::cli::Cli;
use crate::logging::Logging;

const USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    let configured = cli.configure().and_then(|()| cli.logging());
    match configured.map(Logging::begin).and_then(|()| cli.run()) {
        Ok(status) => status,
        Err(error) if reader_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forkdisk: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage(error: clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Help that nobody reads to its end is no failure.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    eprint!("forkdisk: {}", text.strip_prefix("error: ").unwrap_or(&text));
    ExitCode::from(USAGE)
}

/// Whether stdout was closed by whoever read it (`forkdisk list | head`).
fn reader_is_gone(error: &anyhow::Error) -> bool {
    let broken = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(broken)
            || cause.downcast_ref::<Failure>().is_some_and(|failure| failure.kind == FailureKind::BrokenPipe)
            || cause
                .downcast_ref::<serde_json::Error>()
                .is_some_and(|e| e.io_error_kind() == Some(io::ErrorKind::BrokenPipe))
    })
}
