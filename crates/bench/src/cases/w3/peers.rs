//! The same `dd` through a kernel: dm-thin and a volume of a pool next to the raw device, on one
//! device and on RAID5, both the counting array and md.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context as _, Result};
use forkdisk::testing::{DeviceModel, Recording, RequestKind};

use crate::model::{Label, Trace};
use crate::peers::{LATENCY, Lab, Measured};
use crate::rows::Row;
use crate::runner::Context;

use super::raid5;
use super::thin::counts;

const PIECE: u64 = 2 << 20;
/// Requests that a kernel has in flight when it writes back its page cache.
const WRITEBACK: usize = 32;
/// Disks of the array, and one for dm-thin's metadata.
const DISKS: usize = 5;
const MEMBERS: usize = 4;

/// Returns the number of requests of 2 MiB: whole stripes.
fn count(context: &Context<'_>) -> u64 {
    context.scale.pick(99, 999, 999)
}

fn limit(context: &Context<'_>) -> Duration {
    Duration::from_secs(context.scale.pick(180, 1200, 3600))
}

fn find<'a>(measured: &'a [Measured], keys: &[(&str, &str)]) -> Result<&'a Measured> {
    measured.iter().find(|m| m.is(keys)).with_context(|| format!("{keys:?} was not measured"))
}

/// Measures on one device, and on the counting array.
pub fn first(context: &Context<'_>) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let count = count(context);
    let bytes = count * PIECE;
    let theirs = run(context, &lab, "dm-thin", "", bytes * 2 + (64 << 20), None)?;
    let mut rows = Vec::new();
    for how in ["cached", "direct"] {
        let ours = run(context, &lab, "pool", how, bytes * 2 + (256 << 20), Some(bytes))?;
        let raw = find(&theirs, &[("what", "raw"), ("how", how)])?;
        let targets = [
            ("forkdisk", find(&ours, &[("how", how)])?),
            ("dm-thin", find(&theirs, &[("what", "thin-skip"), ("how", how)])?),
            ("dm-thin-zeroing", find(&theirs, &[("what", "thin-zero"), ("how", how)])?),
        ];
        for (target, thin) in targets {
            let (one, array) = (format!("thin/{how}"), format!("raid5/{how}"));
            let label = Label { workload: "w3", case: &one, target };
            let trace = |m: &Measured| match how {
                "cached" => Trace { recording: m.disk_in_all(), depth: WRITEBACK },
                _ => Trace::of(m.disk_in_all(), count as usize, 1),
            };
            rows.extend(label.ratios(&trace(raw), &trace(thin)));
            rows.extend(counts(&label, &thin.disk_in_all(), bytes, count as usize));
            let label = Label { workload: "w3", case: &array, target };
            rows.extend(raid5::compare(&label, &raw.disk_in_all(), &thin.disk_in_all(), bytes));
        }
    }
    Ok(rows)
}

fn run(
    context: &Context<'_>,
    lab: &Lab,
    peer: &str,
    how: &str,
    size: u64,
    volume: Option<u64>,
) -> Result<Vec<Measured>> {
    let mut variables = vec![
        ("PEER", peer.to_string()),
        ("HOW", how.to_string()),
        ("COUNT", count(context).to_string()),
        ("BYTES", size.next_multiple_of(1 << 20).to_string()),
        ("D1MB", "32".to_string()),
    ];
    variables.extend(volume.map(|bytes| ("VOLUME", bytes.to_string())));
    context.guest(lab, "bench-thin-first", variables, 1, limit(context))
}

/// Measures on md.
pub fn md(context: &Context<'_>) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let bytes = count(context) * PIECE;
    let variables = vec![
        ("COUNT", count(context).to_string()),
        // Twice the data over three disks, and space for the metadata of md and a pool.
        ("BYTES", (bytes * 2 / 3 + (256 << 20)).next_multiple_of(1 << 20).to_string()),
        ("D1MB", "1".to_string()),
        ("LATENCY", LATENCY.as_millis().to_string()),
    ];
    let measured = context.guest(&lab, "bench-md-first", variables, DISKS, limit(context))?;
    let raw = find(&measured, &[("what", "raw")])?;
    let mut rows = Vec::new();
    for (target, what) in [("forkdisk", "pool"), ("dm-thin", "thin-skip"), ("raw", "raw")] {
        let label = Label { workload: "w3", case: "md-raid5/cached", target };
        rows.extend(members(&label, raw, find(&measured, &[("what", what)])?));
    }
    Ok(rows)
}

/// Returns what the array's disks received, and their time: that of the slowest.
fn members(label: &Label<'_>, raw: &Measured, seen: &Measured) -> Vec<Row> {
    let slowest = |m: &Measured, model: &DeviceModel| {
        m.seen.disks[..MEMBERS].iter().map(|disk| model.time(disk, WRITEBACK)).max().unwrap_or_default().as_secs_f64()
    };
    let ratio = |model: &DeviceModel| {
        label.row(&format!("{}_ratio", model.name), "ratio", slowest(raw, model) / slowest(seen, model))
    };
    let of = |kind| seen.seen.disks[..MEMBERS].iter().map(|disk| disk.bytes(kind)).sum::<u64>() as f64;
    let written = of(RequestKind::WriteData) + of(RequestKind::WriteMetadata);
    let (data, metadata) = rows_read(&seen.seen.disks[..MEMBERS]);
    // The kernel's own write-back does not always fill a stripe at once.
    let (without, _) = rows_read(&raw.seen.disks[..MEMBERS]);
    let mut rows: Vec<Row> = DeviceModel::ALL.iter().map(ratio).collect();
    rows.extend([
        label.row("read_modify_writes", "count", data as f64),
        label.row("read_modify_writes_beyond_raw", "count", data.saturating_sub(without) as f64),
        label.row("read_modify_writes_of_metadata", "count", metadata as f64),
        label.row("array_written_bytes_per_byte", "ratio", written / seen.bytes as f64),
        label.row("array_read_bytes_per_byte", "ratio", of(RequestKind::Read) / seen.bytes as f64),
        label.row("guest_wall_ratio", "ratio", raw.seconds / seen.seconds),
    ]);
    rows
}

/// Counts the rows of the array (one page of each disk) that were read: those in which only zeroes
/// were written, which is data, and the others.
fn rows_read(disks: &[Recording]) -> (usize, usize) {
    let pages = |kind: RequestKind| {
        let of_kind = disks.iter().flat_map(move |disk| disk.requests.iter().filter(move |r| r.kind == kind));
        of_kind.flat_map(|r| r.offset / 4096..(r.offset + r.len).div_ceil(4096)).collect::<HashSet<u64>>()
    };
    let (read, metadata) = (pages(RequestKind::Read), pages(RequestKind::WriteMetadata));
    let of_metadata = read.intersection(&metadata).count();
    (read.len() - of_metadata, of_metadata)
}

#[cfg(test)]
mod tests {
    use forkdisk::testing::Request;

    use super::*;

    #[test]
    fn rows_that_were_read_are_told_apart_by_what_was_written_in_them() {
        let request = |kind, offset| Request { kind, offset, len: 8192 };
        let first = Recording { requests: vec![request(RequestKind::Read, 0), request(RequestKind::Read, 1 << 20)] };
        let second = Recording {
            requests: vec![request(RequestKind::WriteData, 0), request(RequestKind::WriteMetadata, (1 << 20) + 4096)],
        };
        assert_eq!(rows_read(&[first, second]), (3, 1));
    }
}
