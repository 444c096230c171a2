//! Cost of deleting a snapshot from the middle of a chain: everything that reaches the disk until
//! its space is free and a checkpoint was written, less the cost of deleting a snapshot with no
//! kept chunks, per chunk.

use anyhow::Result;
use forkdisk::testing::{Recording, RequestKind};
use forkdisk_uring::{Config, block_on};

use crate::load::{Job, random};
use crate::model::Label;
use crate::rows::Row;
use crate::runner::Context;

use super::super::origin::{Bed, CHUNK, Seen, Setup};
use super::label;

/// Chunks kept for each of the other snapshots.
const OTHERS: usize = 32;
/// Chunks kept for the deleted snapshot, and the factor for the second measurement.
const DELTA: usize = 512;
const TIMES: usize = 8;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(1 << 30, 4 << 30, 16 << 30);
    let mut rows = Vec::new();
    for snapshots in [16, 1000] {
        context.say(&format!("  {snapshots} snapshots"));
        let none = Cost::of(&measure(span, snapshots, 0)?);
        let case = format!("delete/0-chunks-of-{snapshots}");
        rows.extend(none.rows(&label(&case)));
        let mut first: Option<[f64; 2]> = None;
        for chunks in [DELTA, DELTA * TIMES] {
            let cost = Cost::of(&measure(span, snapshots, chunks)?);
            let case = format!("delete/{chunks}-chunks-of-{snapshots}");
            let label = label(&case);
            rows.extend(cost.rows(&label));
            // A difference of one request or page is noise.
            let beyond = |all: f64, fixed: f64| (all - fixed).max(1.0) / chunks as f64;
            let per_chunk = [beyond(cost.requests, none.requests), beyond(cost.bytes, none.bytes)];
            rows.push(label.row("requests_per_chunk", "ratio", per_chunk[0]));
            rows.push(label.row("bytes_per_chunk", "bytes", per_chunk[1]));
            match first {
                None => first = Some(per_chunk),
                Some(small) => {
                    let growth = |i: usize| per_chunk[i] / small[i];
                    rows.push(label.row("requests_per_chunk_growth", "ratio", growth(0)));
                    rows.push(label.row("bytes_per_chunk_growth", "ratio", growth(1)));
                }
            }
        }
    }
    Ok(rows)
}

/// Totals of what reached the disk.
struct Cost {
    requests: f64,
    bytes: f64,
    data: f64,
}

impl Cost {
    fn of(seen: &Seen) -> Cost {
        let requests: u64 = seen.disks.iter().map(Recording::transfers).sum();
        let bytes = seen.written() + seen.bytes(RequestKind::Read);
        Cost { requests: requests as f64, bytes: bytes as f64, data: seen.bytes(RequestKind::WriteData) as f64 }
    }

    fn rows(&self, label: &Label<'_>) -> [Row; 3] {
        [
            label.row("requests", "count", self.requests),
            label.row("bytes", "bytes", self.bytes),
            label.row("data_bytes", "bytes", self.data),
        ]
    }
}

/// Records what reaches the disk while the snapshot in the middle is deleted.
fn measure(span: u64, snapshots: usize, delta: usize) -> Result<Seen> {
    block_on(Config::default(), |rt| async move {
        let bed = Bed::new(&rt, Setup { span, chunk: CHUNK, copies: 3, second: false }).await?;
        let middle = snapshots / 2;
        for i in 0..snapshots {
            bed.snapshot(&format!("s{i}"), false).await?;
            let count = if i == middle { delta } else { OTHERS };
            let offsets = random(span, CHUNK as usize, count, i as u64);
            bed.run(&Job { write: true, len: 4096, depth: 8, offsets }).await?;
        }
        bed.settle().await?;
        bed.settle().await?;
        bed.watch();
        bed.delete(&format!("s{middle}")).await?;
        bed.settle().await?;
        Ok(bed.taken())
    })?
}
