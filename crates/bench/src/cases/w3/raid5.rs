//! First writes in order on a RAID5 array that counts read-modify-writes: time of the raw requests
//! ÷ theirs, and the array's reads.

use anyhow::Result;
use forkdisk::testing::{DeviceModel, Recording};

use crate::model::Label;
use crate::raid5::ARRAY;
use crate::rows::Row;
use crate::runner::Context;

use super::{ARRIVALS, label, span};

/// Requests in flight on each disk: the array has many to choose from.
const DEPTH: usize = 32;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = span(context);
    let mut rows = Vec::new();
    for arrival in &ARRIVALS {
        let case = format!("raid5/{}", arrival.name);
        let raw = arrival.raw(span);
        rows.extend(compare(&label(&case), &raw, &arrival.record(span)?, span));
        let of_raw = Label { target: "raw", ..label(&case) };
        rows.extend(compare(&of_raw, &raw, &raw, span).into_iter().filter(|row| row.unit != "ratio"));
    }
    Ok(rows)
}

/// Replays two recordings on the array and compares the results.
pub fn compare(label: &Label<'_>, raw: &Recording, seen: &Recording, span: u64) -> Vec<Row> {
    let (raw, out) = (ARRAY.replay(raw), ARRAY.replay(seen));
    let ratio = |model: &DeviceModel| {
        let value = raw.time(model, DEPTH).as_secs_f64() / out.time(model, DEPTH).as_secs_f64();
        label.row(&format!("{}_ratio", model.name), "ratio", value)
    };
    let per_byte = |bytes: u64| bytes as f64 / span as f64;
    let mut rows: Vec<Row> = DeviceModel::ALL.iter().map(ratio).collect();
    rows.extend([
        label.row("read_modify_writes", "count", out.of_data as f64),
        label.row("read_modify_writes_at_ends", "count", out.at_ends as f64),
        label.row("read_modify_writes_of_metadata", "count", out.of_metadata as f64),
        label.row("array_written_bytes_per_byte", "ratio", per_byte(out.written)),
        label.row("array_read_bytes_per_byte", "ratio", per_byte(out.read)),
    ]);
    rows
}
