//! Requests and bytes at the device per client request and per client byte.

use std::collections::HashSet;

use anyhow::{Result, ensure};
use forkdisk::testing::{Recording, Request, RequestKind};

use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::ram::{WORKS, Work};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(64 << 20, 1 << 30, 4 << 30);
    let mut rows = Vec::new();
    for work in &WORKS {
        rows.extend(count(work, span)?);
    }
    Ok(rows)
}

fn count(work: &Work, span: u64) -> Result<Vec<Row>> {
    let seen = work.record(span)?;
    let (ops, bytes) = ((span / work.len as u64) as f64, span as f64);
    let data = seen.bytes(RequestKind::WriteData);
    // A failure means that the rule to distinguish data from metadata no longer fits the engine.
    ensure!(!work.write || data >= span, "{}: {data} bytes of data were seen where clients wrote {span}", work.name);
    let metadata = RequestKind::WriteMetadata;
    let requests = if work.first { seen.count(RequestKind::WriteData) } else { seen.transfers() };
    let mut figures = vec![
        ("requests_per_op", requests as f64 / ops),
        ("read_bytes_per_byte", seen.bytes(RequestKind::Read) as f64 / bytes),
        ("metadata_bytes_per_byte", seen.bytes(metadata) as f64 / bytes),
        ("flushes", seen.count(RequestKind::Flush) as f64),
    ];
    if work.write {
        figures.push(("data_bytes_per_byte", data as f64 / bytes));
    }
    if work.write && !work.random {
        figures.push(("inversions", seen.inversions() as f64));
    }
    if work.first {
        figures.push(("data_read_bytes_per_byte", data_read(&seen) as f64 / bytes));
        figures.push(("metadata_requests_per_op", seen.count(metadata) as f64 / ops));
    }
    let row = |(metric, value): (&str, f64)| {
        let unit = if matches!(metric, "flushes" | "inversions") { "count" } else { "ratio" };
        Row::engine(&format!("counts/{}", work.name), metric, unit, &Samples::one(value))
    };
    Ok(figures.into_iter().map(row).collect())
}

/// Returns the bytes read in pages where clients' data was written: to complete a page, or to copy
/// a chunk. The engine's own pages lie elsewhere.
fn data_read(seen: &Recording) -> u64 {
    let pages = |r: &Request| r.offset / 4096..(r.offset + r.len).div_ceil(4096);
    let of_kind = |kind| seen.requests.iter().filter(move |r| r.kind == kind);
    let data: HashSet<u64> = of_kind(RequestKind::WriteData).flat_map(pages).collect();
    of_kind(RequestKind::Read).flat_map(pages).filter(|page| data.contains(page)).count() as u64 * 4096
}
