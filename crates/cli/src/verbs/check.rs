//! `check`: recounts all references of a pool and compares them with the stored counts.
//!
//! Exit status: 0 clean, 1 could not complete, 2 corrupt, 3 leaks only.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forkdisk::ErrorKind;
use forkdisk_control::{Check, params};

use crate::global::Global;
use crate::output::{print_json, print_line};
use crate::session::{Access, call};
use crate::size::human;
use crate::verbs::examples::examples;

const CORRUPT_STATUS: u8 = 2;
const LEAKS_STATUS: u8 = 3;

/// Verify a pool: exit status 0 clean, 1 could not complete, 2 corrupt, 3 leaks only
#[derive(Args)]
#[command(after_help = examples!["forkdisk check /srv/pool.img"])]
pub struct CheckArgs {
    /// The pool
    pool: Option<PathBuf>,
}

/// Checks and reports; changes nothing.
pub fn run(args: CheckArgs, global: &Global) -> Result<ExitCode> {
    let path = global.pool(args.pool.as_deref())?;
    let report = examine(global, &path)?;
    if global.output.json() {
        print_json(&report)?;
    } else {
        print_text(&report)?;
    }
    Ok(exit_code(&report))
}

/// Checks the pool at `path`.
pub fn examine(global: &Global, path: &Path) -> Result<Check> {
    match call(global, path, Access::Read, params::Check {}) {
        // The pool is too damaged to be opened.
        Err(error) if is_corrupt(&error) => Ok(Check::of_damage(format!("{error:#}"))),
        outcome => outcome,
    }
}

/// Returns the exit status for a report.
pub fn exit_code(report: &Check) -> ExitCode {
    match report.status.as_str() {
        "clean" => ExitCode::SUCCESS,
        "leaks" => ExitCode::from(LEAKS_STATUS),
        _ => ExitCode::from(CORRUPT_STATUS),
    }
}

/// Prints one line per damaged place.
pub fn print_damage(report: &Check) {
    for damage in &report.damage {
        eprintln!("forkdisk: {damage}");
    }
}

fn is_corrupt(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| Some(cause.downcast_ref::<forkdisk::Error>()?.kind());
    error.chain().any(|cause| kind(cause) == Some(ErrorKind::Corrupt))
}

fn print_text(report: &Check) -> Result<()> {
    print_damage(report);
    let counted = format!("{} volumes and snapshots, {} pages", report.volumes, report.pages);
    match report.status.as_str() {
        "clean" => print_line(&format!("clean: {counted}")),
        "leaks" => print_line(&format!("leaks: {} are used by nothing; {counted}", human(report.leaked))),
        _ => print_line(&format!("corrupt: {} places are damaged; {counted}", report.damage.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_found_while_opening_is_corruption() {
        let error = anyhow::Error::from(forkdisk::Error::new(ErrorKind::Corrupt, "both superblocks")).context("p.img");
        assert!(is_corrupt(&error));
        assert!(!is_corrupt(&anyhow::anyhow!("something else")));
    }
}
