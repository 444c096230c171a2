//! First writes in order on one device: time of the raw requests ÷ theirs, and their order.

use anyhow::Result;
use forkdisk::testing::{Recording, RequestKind};

use crate::model::{Label, Trace};
use crate::rows::Row;
use crate::runner::Context;

use super::{ARRIVALS, label, span};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = span(context);
    let mut rows = Vec::new();
    for arrival in &ARRIVALS {
        let case = format!("thin/{}", arrival.name);
        let label = label(&case);
        let ops = span as usize / arrival.len;
        let raw = Trace::of(arrival.raw(span), ops, arrival.depth);
        let ours = Trace::of(arrival.record(span)?, ops, arrival.depth);
        rows.extend(label.ratios(&raw, &ours));
        rows.extend(counts(&label, &ours.recording, span, ops));
    }
    Ok(rows)
}

/// Returns what reached a device when `ops` requests wrote `span` bytes.
pub fn counts(label: &Label<'_>, seen: &Recording, span: u64, ops: usize) -> Vec<Row> {
    let per_byte = |bytes: u64| bytes as f64 / span as f64;
    vec![
        label.row("inversions", "count", seen.inversions() as f64),
        label.row("gaps", "count", gaps(seen) as f64),
        label.row("data_requests_per_op", "ratio", seen.count(RequestKind::WriteData) as f64 / ops as f64),
        label.row("data_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::WriteData))),
        label.row("read_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::Read))),
        label.row("metadata_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::WriteMetadata))),
        label.row("flushes", "count", seen.count(RequestKind::Flush) as f64),
    ]
}

/// Counts the data writes that do not begin where the previous one ended.
fn gaps(recording: &Recording) -> usize {
    let data: Vec<_> = recording.requests.iter().filter(|r| r.kind == RequestKind::WriteData).collect();
    data.windows(2).filter(|pair| pair[0].offset + pair[0].len != pair[1].offset).count()
}
