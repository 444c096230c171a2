//! The published table through a file system: `dd` into a file on ext4 in a guest, on a volume of a
//! pool and beside it on a dm-snapshot origin, without and with a snapshot.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkdisk::device::RequestKind;

use crate::model::{Label, Trace};
use crate::peers::{Lab, Measured};
use crate::rows::Row;
use crate::runner::Context;

/// Requests that a kernel has in flight when it writes its page cache back.
const WRITEBACK: usize = 32;

/// One line of the table.
struct Line {
    name: &'static str,
    op: &'static str,
    how: &'static str,
    block: &'static str,
}

const fn line(name: &'static str, op: &'static str, how: &'static str, block: &'static str) -> Line {
    Line { name, op, how, block }
}

const LINES: [Line; 5] = [
    line("create-dd", "create", "dd", "4096"),
    line("create-dd-fsync", "create", "dd-fsync", "4096"),
    line("update-dd", "update", "dd", "4096"),
    line("update-dd-fsync", "update", "dd-fsync", "4096"),
    line("update-dd-1m", "update", "dd", "1048576"),
];

/// Whom it is done with: how the scenario calls it, and its rows by the KiB of a chunk.
struct Peer {
    name: &'static str,
    chunks: &'static [(&'static str, &'static str)],
}

const OURS: Peer = Peer { name: "pool", chunks: &[("32", "forkdisk")] };
const THEIRS: Peer = Peer {
    name: "dm-snapshot",
    chunks: &[("8", "dm-snapshot-8k"), ("64", "dm-snapshot-64k"), ("512", "dm-snapshot-512k")],
};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let mut rows = table(context, &lab, &OURS)?;
    match table(context, &lab, &THEIRS) {
        Ok(theirs) => rows.extend(theirs),
        Err(error) => context.say(&format!("  no rows of dm-snapshot: {error:#}")),
    }
    Ok(rows)
}

fn table(context: &Context<'_>, lab: &Lab, peer: &Peer) -> Result<Vec<Row>> {
    let sizes: &[u64] = context.scale.pick(&[10], &[10, 100], &[10, 100, 1000]);
    let largest = sizes[sizes.len() - 1];
    // Room for the file, for what ext4 keeps beside it, and for a copy of all of it.
    let file_system = largest * 5 / 4 + 192;
    let disk = file_system * 5 / 2 + 64;
    let names: Vec<String> = sizes.iter().map(u64::to_string).collect();
    let sectors: Vec<String> =
        peer.chunks.iter().map(|(kib, _)| format!("{}", 2 * kib.parse::<u64>().unwrap_or(32))).collect();
    let mut variables = vec![
        ("PEER", peer.name.to_string()),
        ("SIZES", names.join(",")),
        ("CHUNKS", sectors.join(",")),
        ("FSMB", file_system.to_string()),
        ("BYTES", (disk << 20).to_string()),
    ];
    if peer.name == OURS.name {
        variables.push(("VOLUME", (file_system << 20).to_string()));
    }
    let limit = Duration::from_secs(context.scale.pick(240, 600, 7200));
    let measured = context.guest(lab, "bench-ext4", variables, 1, limit)?;
    let mut rows = Vec::new();
    for size in sizes {
        for line in &LINES {
            let size = size.to_string();
            let of = |chunk: &str| -> Result<&Measured> {
                let keys =
                    [("op", line.op), ("how", line.how), ("block", line.block), ("size", &size), ("chunk", chunk)];
                measured.iter().find(|m| m.is(&keys)).with_context(|| format!("{keys:?} was not measured"))
            };
            let case = format!("pool/{}-{size}m", line.name);
            for (chunk, target) in peer.chunks {
                let label = Label { workload: "w1", case: &case, target };
                rows.extend(compare(&label, of("0")?, of(chunk)?));
            }
        }
    }
    Ok(rows)
}

/// Without a snapshot ÷ with one, and what the device got per byte of the file.
fn compare(label: &Label<'_>, alone: &Measured, shared: &Measured) -> Vec<Row> {
    let trace = |recording| Trace { recording, depth: WRITEBACK };
    let (base, ours) = (trace(alone.disk()), trace(shared.disk()));
    let mut rows = label.ratios(&base, &ours);
    rows.push(label.flush_free(&base, &ours));
    // A checkpoint that would have come later, when much more had been written, is charged to this.
    let in_all = label.ratios(&trace(alone.disk_in_all()), &trace(shared.disk_in_all()));
    rows.extend(in_all.into_iter().map(|row| Row { metric: format!("{}_with_checkpoint", row.metric), ..row }));
    let per_byte = |bytes: u64| bytes as f64 / shared.bytes as f64;
    rows.extend([
        label.row("written_bytes_per_byte", "ratio", per_byte(trace(shared.disk_in_all()).written())),
        label.row("alone_written_bytes_per_byte", "ratio", per_byte(trace(alone.disk_in_all()).written())),
        label.row("read_bytes_per_byte", "ratio", per_byte(ours.recording.bytes(RequestKind::Read))),
        label.row("flushes", "count", ours.recording.count(RequestKind::Flush) as f64),
        label.row("alone_flushes", "count", base.recording.count(RequestKind::Flush) as f64),
        label.row("inversions", "count", ours.recording.inversions() as f64),
        label.row("guest_wall_ratio", "ratio", alone.seconds / shared.seconds),
    ]);
    rows
}
