//! `stats`: what a pool holds and what state it is in.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use forkdisk::{Mode, PoolInfo};
use rustix::fs::access;
use serde::Serialize;

use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::record::uuid_text;
use crate::session::{Access, with_pool};

/// Show the state of a pool and where its space is
#[derive(Args)]
pub struct StatsArgs {
    /// The pool
    pool: Option<PathBuf>,

    #[command(flatten)]
    table: TableArgs,
}

/// A pool as a JSON object.
#[derive(Serialize)]
pub struct PoolRecord {
    uuid: String,
    created: u64,
    mode: &'static str,
    size: u64,
    used: u64,
    free: u64,
    freeing: u64,
    metadata: u64,
    volumes: u64,
    snapshots: u64,
    dirty: u64,
    journal_size: u64,
    journal_used: u64,
    generation: u64,
    clean: bool,
}

impl From<&PoolInfo> for PoolRecord {
    fn from(info: &PoolInfo) -> PoolRecord {
        PoolRecord {
            uuid: uuid_text(&info.uuid),
            created: info.created,
            mode: mode_name(info.mode),
            size: info.size,
            used: info.used,
            free: info.free,
            freeing: info.freeing,
            metadata: info.metadata,
            volumes: info.volumes,
            snapshots: info.snapshots,
            dirty: info.dirty,
            journal_size: info.journal_size,
            journal_used: info.journal_used,
            generation: info.generation,
            clean: info.clean,
        }
    }
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::ReadWrite => "rw",
        Mode::ReadOnly => "ro",
        Mode::OutOfDataSpace => "out-of-data-space",
        Mode::Failed => "failed",
    }
}

/// Shows the pool.
pub fn run(args: StatsArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let mut info = with_pool(&path, Access::Read, |session| async move { Ok(session.pool.info()) })?;
    if info.mode == Mode::ReadOnly && access(&path, rustix::fs::Access::WRITE_OK).is_ok() {
        // Only this look at it was read-only.
        info.mode = Mode::ReadWrite;
    }
    let record = PoolRecord::from(&info);
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
