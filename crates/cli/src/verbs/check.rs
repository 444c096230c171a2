//! `check`: counts every reference of a pool again and compares.
//!
//! Exit status: 0 clean, 1 could not complete, 2 corrupt, 3 leaks only.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forkdisk::{CheckReport, ErrorKind, PAGE_SIZE};
use serde::Serialize;

use crate::cli::Global;
use crate::output::{print_json, print_line};
use crate::progress::Progress;
use crate::session::{Access, with_pool};
use crate::size::human;

const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;

/// Verify a pool: exit status 0 clean, 1 could not complete, 2 corrupt, 3 leaks only
#[derive(Args)]
pub struct CheckArgs {
    /// The pool
    pool: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    status: &'static str,
    /// What is damaged and where.
    damage: Vec<String>,
    /// Bytes that are counted as used and used by nothing.
    leaked: u64,
    pages: u64,
    volumes: u64,
}

impl From<CheckReport> for Report {
    fn from(found: CheckReport) -> Report {
        let status = match (found.damage.is_empty(), found.leaked) {
            (false, _) => "corrupt",
            (true, 0) => "clean",
            (true, _) => "leaks",
        };
        let leaked = found.leaked * PAGE_SIZE as u64;
        Report { status, damage: found.damage, leaked, pages: found.pages, volumes: found.volumes }
    }
}

/// Checks and reports; changes nothing.
pub fn run(args: CheckArgs, global: &Global) -> Result<ExitCode> {
    let path = global.pool(args.pool.as_deref())?;
    let found = with_pool(&path, Access::Read, |session| async move {
        let _progress = Progress::spinner("checking");
        Ok(session.pool.check().await?)
    });
    let report = match found {
        Ok(found) => Report::from(found),
        Err(error) if is_corrupt(&error) => {
            Report::from(CheckReport { damage: vec![format!("{error:#}")], ..CheckReport::default() })
        }
        Err(error) => return Err(error),
    };
    if global.output.json() {
        print_json(&report)?;
    } else {
        print_text(&report)?;
    }
    Ok(match report.status {
        "clean" => ExitCode::SUCCESS,
        "leaks" => ExitCode::from(LEAKS),
        _ => ExitCode::from(CORRUPT),
    })
}

fn is_corrupt(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| Some(cause.downcast_ref::<forkdisk::Error>()?.kind());
    error.chain().any(|cause| kind(cause) == Some(ErrorKind::Corrupt))
}

fn print_text(report: &Report) -> Result<()> {
    for damage in &report.damage {
        eprintln!("forkdisk: {damage}");
    }
    let counted = format!("{} volumes and snapshots, {} pages", report.volumes, report.pages);
    match report.status {
        "clean" => print_line(&format!("clean: {counted}")),
        "leaks" => print_line(&format!("leaks: {} are used by nothing; {counted}", human(report.leaked))),
        _ => print_line(&format!("corrupt: {} places are damaged; {counted}", report.damage.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_outranks_leaks() {
        let found = |damage: &[&str], leaked| {
            let damage = damage.iter().map(|text| text.to_string()).collect();
            Report::from(CheckReport { damage, leaked, ..CheckReport::default() }).status
        };
        assert_eq!(found(&[], 0), "clean");
        assert_eq!(found(&[], 1), "leaks");
        assert_eq!(found(&["page 5"], 1), "corrupt");
    }

    #[test]
    fn damage_found_while_opening_is_corruption() {
        let error = anyhow::Error::from(forkdisk::Error::new(ErrorKind::Corrupt, "both superblocks")).context("p.img");
        assert!(is_corrupt(&error));
        assert!(!is_corrupt(&anyhow::anyhow!("something else")));
    }
}
