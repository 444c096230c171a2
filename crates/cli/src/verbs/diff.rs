//! `diff`: what differs between two volumes or snapshots.

use anyhow::{Result, bail};
use clap::Args;
use forkdisk::{DiffClass, DiffRun};
use serde::Serialize;

use crate::address::{Address, same_pool};
use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::progress::Progress;
use crate::session::{Access, with_pool};

/// Show which parts of two volumes or snapshots differ
///
/// Classes: different (both have data), left_only (the right one has none), right_only.
#[derive(Args)]
pub struct DiffArgs {
    /// The older side
    #[arg(value_name = "LEFT")]
    left: String,

    /// The newer side; without it, the volume that the snapshot LEFT was taken of
    #[arg(value_name = "RIGHT")]
    right: Option<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// A part of the right side that is not as on the left; `exists` is false where it has no data.
#[derive(Serialize)]
struct Change {
    offset: u64,
    length: u64,
    exists: bool,
}

impl From<&DiffRun> for Change {
    fn from(run: &DiffRun) -> Change {
        Change { offset: run.offset, length: run.len, exists: run.class != DiffClass::LeftOnly }
    }
}

/// Compares maps, not data: shared parts are skipped whatever their size.
pub fn run(args: DiffArgs, global: &Global) -> Result<()> {
    let left = global.object(&args.left)?;
    let right = match &args.right {
        Some(text) => global.object(text)?,
        None => own_volume(&left)?,
    };
    let addresses = [left, right];
    let pool = same_pool(&addresses)?;
    let mut runs = with_pool(&pool, Access::Read, |session| async move {
        let _progress = Progress::spinner("comparing");
        Ok(session.pool.diff(&addresses[0].name, &addresses[1].name).await?)
    })?;
    runs.retain(|run| run.class != DiffClass::Same);
    if global.output.json() {
        return print_json(&runs.iter().map(Change::from).collect::<Vec<_>>());
    }
    let header = [Column::Right("OFFSET"), Column::Right("LENGTH"), Column::Left("CLASS")];
    let cells =
        |run: &DiffRun| vec![run.offset.to_string(), args.table.size(run.len), class_name(run.class).to_string()];
    args.table.print(&header, &runs.iter().map(cells).collect::<Vec<_>>())
}

fn own_volume(left: &Address) -> Result<Address> {
    if left.snapshot().is_none() {
        bail!("{} is a volume: name what to compare it with", left.show());
    }
    Ok(Address { pool: left.pool.clone(), name: left.volume().to_string() })
}

fn class_name(class: DiffClass) -> &'static str {
    match class {
        DiffClass::Same => "same",
        DiffClass::Different => "different",
        DiffClass::LeftOnly => "left_only",
        DiffClass::RightOnly => "right_only",
    }
}
