//! `du`: shows the space that volumes reference and the part they hold exclusively.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{DuRecord, params};

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::output::{Column, TableArgs, percent_of, print_json, print_line};
use crate::session::{Access, call};
use crate::size::human;
use crate::verbs::examples::examples;

/// Show the bytes that volumes reference and hold exclusively, and what deleting them would free
#[derive(Args)]
#[command(after_help = examples!["forkdisk du /srv/pool.img"])]
pub struct DuArgs {
    #[arg(value_name = "ADDRESS")]
    objects: Vec<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// Counts exactly, as a dry run of deleting does.
pub fn run(args: DuArgs, global: &Global) -> Result<()> {
    let addresses = global.addresses(&args.objects)?;
    let pool = same_pool(&addresses)?;
    let usage = call(global, &pool, Access::Read, params::Du { objects: names(addresses) })?;
    if global.output.json() {
        return print_json(&usage);
    }
    let cells = |row: &DuRecord| {
        let (referenced, exclusive) = (args.table.size(row.referenced), args.table.size(row.exclusive));
        vec![row.name.clone(), referenced, exclusive, percent_of(row.scattered, row.referenced)]
    };
    let rows: Vec<Vec<String>> = usage.volumes.iter().map(cells).collect();
    let right = ["REFERENCED", "EXCLUSIVE", "FRAGMENTED"].map(Column::Right);
    let header: Vec<Column> = [Column::Left("NAME")].into_iter().chain(right).collect();
    args.table.print(&header, &rows)?;
    if args.table.is_for_people() {
        let size = args.table.size(usage.frees);
        let exact = if size == human(usage.frees) { format!(" ({} bytes)", usage.frees) } else { String::new() };
        print_line(&format!("Deleting these frees {size}{exact}."))?;
    }
    Ok(())
}
