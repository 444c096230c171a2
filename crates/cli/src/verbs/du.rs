//! `du`: how much space volumes hold, and how much of it they hold alone.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::address::{Address, same_pool};
use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json, print_line};
use crate::progress::Progress;
use crate::session::{Access, Session, with_pool};
use crate::size::human;
use crate::verbs::list::select;

/// Show what volumes hold, what they hold alone, and what deleting them would free
#[derive(Args)]
pub struct DuArgs {
    /// A pool, or folders, volumes and snapshots in it
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<String>,

    #[command(flatten)]
    table: TableArgs,
}

#[derive(Serialize)]
struct Report {
    volumes: Vec<Row>,
    /// Bytes that deleting all of them together would free.
    frees: u64,
}

#[derive(Serialize)]
struct Row {
    name: String,
    referenced: u64,
    exclusive: u64,
}

/// Counts exactly: a dry run of deleting.
pub fn run(args: DuArgs, global: &Global) -> Result<()> {
    let addresses = global.addresses(&args.addresses)?;
    let pool = same_pool(&addresses)?;
    let report = with_pool(&pool, Access::Read, |session| count(session, addresses))?;
    if global.output.json() {
        return print_json(&report);
    }
    let cells = |row: &Row| vec![row.name.clone(), args.table.size(row.referenced), args.table.size(row.exclusive)];
    let rows: Vec<Vec<String>> = report.volumes.iter().map(cells).collect();
    args.table.print(&[Column::Left("NAME"), Column::Right("REFERENCED"), Column::Right("EXCLUSIVE")], &rows)?;
    if args.table.is_for_people() {
        let size = args.table.size(report.frees);
        let exact = if size == human(report.frees) { format!(" ({} bytes)", report.frees) } else { String::new() };
        print_line(&format!("Deleting these frees {size}{exact}."))?;
    }
    Ok(())
}

async fn count(session: Session, addresses: Vec<Address>) -> Result<Report> {
    let found = select(&session, &addresses)?;
    let _progress = Progress::spinner("counting");
    let mut volumes = Vec::new();
    for info in &found {
        let usage = session.pool.usage(&info.name).await?;
        volumes.push(Row { name: info.name.clone(), referenced: usage.referenced, exclusive: usage.exclusive });
    }
    let names: Vec<&str> = found.iter().map(|info| info.name.as_str()).collect();
    let frees = session.pool.freed_by(&names).await?;
    Ok(Report { volumes, frees })
}
