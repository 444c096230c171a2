//! The published table with breaks that copy nothing: what reaches the device, and its time ÷ that
//! of the same `dd` on the same volume with nothing shared.

use anyhow::Result;
use forkdisk::testing::{Recording, RequestKind};
use forkdisk::{CreateOptions, OpenOptions};
use forkdisk_uring::{Config, block_on};

use crate::model::Trace;
use crate::rows::Row;
use crate::runner::Context;

use super::super::sparse::Bed;
use super::{CELLS, Cell, label};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(256 << 20, 1 << 30, 1 << 30);
    let mut rows = Vec::new();
    for cell in &CELLS {
        rows.extend(measure(cell, span)?);
    }
    Ok(rows)
}

fn measure(cell: &Cell, span: u64) -> Result<Vec<Row>> {
    let ops = cell.dd(span).offsets.len();
    let (alone, shared) = (record(cell, span, false)?, record(cell, span, true)?);
    let case = format!("split/{}", cell.name);
    let label = label(&case);
    let (alone, shared) = (Trace::of(alone, ops, 1), Trace::of(shared, ops, 1));
    let mut rows = label.ratios(&alone, &shared);
    let seen = &shared.recording;
    let per_byte = |bytes: u64| bytes as f64 / span as f64;
    rows.extend([
        label.row("data_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::WriteData))),
        label.row("read_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::Read))),
        label.row("metadata_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::WriteMetadata))),
        label.row("data_requests_per_op", "ratio", seen.count(RequestKind::WriteData) as f64 / ops as f64),
        label.row("inversions", "count", seen.inversions() as f64),
        label.row("flushes", "count", seen.count(RequestKind::Flush) as f64),
    ]);
    Ok(rows)
}

/// Records what reaches the device when all of a volume is written again, all of it shared or nothing.
fn record(cell: &Cell, span: u64, shared: bool) -> Result<Recording> {
    let (cell, job) = (*cell, cell.dd(span));
    block_on(Config::default(), |rt| async move {
        let volume = CreateOptions::new(span, 0).with_chunk(cell.chunk);
        let bed = Bed::new(&rt, 8 * span, volume, OpenOptions::default()).await?;
        bed.fill(span).await?;
        if shared {
            bed.snapshot("s").await?;
        }
        bed.record(&job).await
    })?
}
