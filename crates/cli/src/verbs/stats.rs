//! `stats`: what a pool holds and what state it is in.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use forkdisk_control::{PoolRecord, params};
use rustix::fs::access;

use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::session::{Access, call};

/// Show the state of a pool and where its space is
#[derive(Args)]
pub struct StatsArgs {
    /// The pool
    pool: Option<PathBuf>,

    #[command(flatten)]
    table: TableArgs,
}

/// Shows the pool.
pub fn run(args: StatsArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let mut record = call(global, &path, Access::Read, params::Stats {})?;
    if record.mode == "ro" && access(&path, rustix::fs::Access::WRITE_OK).is_ok() {
        // Only this look at it was read-only.
        record.mode = "rw".to_string();
    }
    if global.output.json() {
        return print_json(&record);
    }
    let rows = rows(&record, &args.table);
    args.table.print(&[Column::Left("PROPERTY"), Column::Left("VALUE")], &rows)
}

fn rows(pool: &PoolRecord, table: &TableArgs) -> Vec<Vec<String>> {
    let rows = [
        ("uuid", pool.uuid.clone()),
        ("created", table.time(pool.created)),
        ("mode", pool.mode.to_string()),
        ("clean", if pool.clean { "yes" } else { "no" }.to_string()),
        ("size", table.size(pool.size)),
        ("used", table.size(pool.used)),
        ("free", table.size(pool.free)),
        ("freeing", table.size(pool.freeing)),
        ("metadata", table.size(pool.metadata)),
        ("volumes", pool.volumes.to_string()),
        ("snapshots", pool.snapshots.to_string()),
        ("dirty", table.size(pool.dirty)),
        ("journal_size", table.size(pool.journal_size)),
        ("journal_used", table.size(pool.journal_used)),
        ("generation", pool.generation.to_string()),
    ];
    rows.into_iter().map(|(name, value)| vec![name.to_string(), value]).collect()
}
