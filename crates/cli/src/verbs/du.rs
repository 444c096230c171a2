//! `du`: how much space volumes hold, and how much of it they hold alone.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{DuRecord, params};

use crate::address::{names, same_pool};
use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json, print_line};
use crate::session::{Access, call};
use crate::size::human;

/// Show what volumes hold, what they hold alone, and what deleting them would free
#[derive(Args)]
pub struct DuArgs {
    /// A pool, or folders, volumes and snapshots in it
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// Counts exactly: a dry run of deleting.
pub fn run(args: DuArgs, global: &Global) -> Result<()> {
    let addresses = global.addresses(&args.addresses)?;
    let pool = same_pool(&addresses)?;
    let usage = call(global, &pool, Access::Read, params::Du { objects: names(addresses) })?;
    if global.output.json() {
        return print_json(&usage);
    }
    let cells =
        |row: &DuRecord| vec![row.name.clone(), args.table.size(row.referenced), args.table.size(row.exclusive)];
    let rows: Vec<Vec<String>> = usage.volumes.iter().map(cells).collect();
    args.table.print(&[Column::Left("NAME"), Column::Right("REFERENCED"), Column::Right("EXCLUSIVE")], &rows)?;
    if args.table.is_for_people() {
        let size = args.table.size(usage.frees);
        let exact = if size == human(usage.frees) { format!(" ({} bytes)", usage.frees) } else { String::new() };
        print_line(&format!("Deleting these frees {size}{exact}."))?;
    }
    Ok(())
}
