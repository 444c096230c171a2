//! The `forkdisk` program: one verb per run, results on stdout, everything else on stderr; with
//! `--json` failures are JSON, too.
//!
//! Exit status: 0 done, 1 failed with nothing changed, 2 wrong usage; `check` defines its own.

mod address;
mod attach;
mod braces;
mod cli;
mod command;
mod config;
mod daemon;
mod dates;
mod declared;
mod freeze;
mod global;
mod group;
mod host;
mod left_mount;
mod listen_address;
mod logging;
mod mount_helper;
mod network;
mod new_file;
mod output;
mod owner;
mod patterns;
mod pool_lock;
mod progress;
mod qemu;
mod refusal;
mod served_mount;
mod session;
mod storage;
mod syslog;
mod top;
mod verbs;
mod volatile_file;
mod volume_sockets;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use forkdisk_control::size;

use crate::cli::Cli;
use crate::logging::Logging;

const USAGE_STATUS: u8 = 2;

fn main() -> ExitCode {
    match mount_helper::begin().or_else(daemon::launch) {
        Some(Ok(())) => return ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("forkdisk: {error:#}");
            return ExitCode::FAILURE;
        }
        None => {}
    }
    let parsed = Cli::definition().try_get_matches().and_then(|matches| Cli::read(&matches));
    let mut cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    let json = cli.json();
    let configured = cli.configure().and_then(|()| cli.logging());
    match configured.map(Logging::begin).and_then(|()| cli.run()) {
        Ok(status) => status,
        // A listing that is read only in part is no failure (`forkdisk list | head`).
        Err(error) if error.is::<output::ReaderGone>() => ExitCode::SUCCESS,
        Err(error) => {
            daemon::hand_over::tell_failure(&format!("{error:#}"));
            match json {
                true => eprintln!("{}", refusal::as_json(&error)),
                false => eprintln!("forkdisk: {error:#}"),
            }
            ExitCode::FAILURE
        }
    }
}

fn usage(error: clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Help that is read only in part is no failure.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let told = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(word)) => command::elsewhere(word),
        _ => None,
    };
    let text = told.unwrap_or_else(|| error.to_string());
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    daemon::hand_over::tell_failure(text);
    match refusal::wants_json(std::env::args()) {
        true => eprintln!("{}", refusal::usage_as_json(text)),
        false => eprint!("forkdisk: {text}"),
    }
    ExitCode::from(USAGE_STATUS)
}
