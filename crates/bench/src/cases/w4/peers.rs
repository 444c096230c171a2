//! dm-snapshot in a guest: the same `dd` and the same random pages under 1 to 16 snapshots, each of
//! which gets a separate copy.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkdisk::testing::RequestKind;

use crate::model::{Label, Trace};
use crate::peers::Measured;
use crate::rows::Row;
use crate::runner::Context;

use super::label;
use super::random::{self, DEPTHS};

/// Requests that its copier has in flight.
const COPYING: usize = 8;
const COUNTS: [&str; 5] = ["1", "2", "4", "8", "16"];

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let (mib, ops) = random::compared(context.scale);
    // Copies go to separate exception stores after the origin, which also need room for their metadata.
    let store = mib * 9 / 8 + 2;
    let variables = vec![
        ("MIB", mib.to_string()),
        ("OPS", ops.to_string()),
        ("LATENCY", random::LATENCY.as_millis().to_string()),
        ("STORE", store.to_string()),
        ("COUNTS", COUNTS.join(",")),
        ("D1MB", (16 * store).to_string()),
        ("BYTES", ((mib + 16 * store + 1) << 20u64).to_string()),
    ];
    let limit = Duration::from_secs(context.scale.pick(240, 480, 1800));
    let measured = context.guest(&lab, "bench-origin-many", variables, 1, limit)?;
    let find = |keys: &[(&str, &str)]| -> Result<&Measured> {
        measured.iter().find(|m| m.is(keys)).with_context(|| format!("{keys:?} was not measured"))
    };
    let mut rows = Vec::new();
    let raw = find(&[("what", "raw")])?;
    for count in COUNTS {
        // dm-snapshot has only independent snapshots.
        let case = format!("independent/{count}");
        let label = Label { workload: "w4", case: &case, target: "dm-snapshot" };
        rows.extend(compare(&label, raw, find(&[("what", "dd"), ("n", count)])?, 1));
    }
    for depth in DEPTHS {
        let text = depth.to_string();
        let (raw, one) = (
            find(&[("what", "raw-random"), ("depth", &text)])?,
            find(&[("what", "random"), ("depth", &text), ("n", "1")])?,
        );
        let case = format!("random/chunk-64k-qd{depth}");
        rows.extend(compare(&Label { workload: "w4", case: &case, target: "dm-snapshot" }, raw, one, depth));
        let (base, theirs) = traces(raw, one, depth);
        for (model, speed) in random::speeds(context, depth)? {
            let ahead = speed - base.time(model).as_secs_f64() / theirs.time(model).as_secs_f64();
            rows.push(label(&case).row(&format!("{}_ahead_of_dm_snapshot", model.name), "ratio", ahead));
        }
    }
    Ok(rows)
}

/// Returns what the disk got without and with a snapshot.
fn traces(raw: &Measured, seen: &Measured, clients: usize) -> (Trace, Trace) {
    let base = Trace { recording: raw.disk(), depth: clients };
    (base, Trace { recording: seen.disk(), depth: clients.max(COPYING) })
}

fn compare(label: &Label<'_>, raw: &Measured, seen: &Measured, clients: usize) -> Vec<Row> {
    let (base, theirs) = traces(raw, seen, clients);
    let mut rows = label.ratios(&base, &theirs);
    rows.push(label.flush_free(&base, &theirs));
    let per_byte = |bytes: u64| bytes as f64 / seen.bytes as f64;
    rows.extend([
        label.row("written_bytes_per_byte", "ratio", per_byte(theirs.written())),
        label.row("read_bytes_per_byte", "ratio", per_byte(theirs.recording.bytes(RequestKind::Read))),
        label.row("flushes", "count", theirs.recording.count(RequestKind::Flush) as f64),
        label.row("guest_wall_ratio", "ratio", raw.seconds / seen.seconds),
    ]);
    rows
}
