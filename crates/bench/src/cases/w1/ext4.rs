//! The published table through a file system: `dd` into a file on ext4 in a guest, on a volume of a
//! pool and on a dm-snapshot origin, without and with a snapshot.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkdisk::testing::{Recording, RequestKind};

use crate::model::{Label, Trace};
use crate::peers::{LATENCY, Lab, Measured};
use crate::rows::Row;
use crate::runner::Context;

/// Requests that a kernel has in flight when it writes back its page cache.
pub const WRITEBACK: usize = 32;

/// One line of the table.
pub struct Line {
    pub name: &'static str,
    /// `create` or `update`.
    pub op: &'static str,
    /// `dd` or `dd-fsync`.
    pub how: &'static str,
    /// Size of each write, as for `dd`.
    pub block: &'static str,
}

const fn line(name: &'static str, op: &'static str, how: &'static str, block: &'static str) -> Line {
    Line { name, op, how, block }
}

pub const LINES: [Line; 5] = [
    line("create-dd", "create", "dd", "4096"),
    line("create-dd-fsync", "create", "dd-fsync", "4096"),
    line("update-dd", "update", "dd", "4096"),
    line("update-dd-fsync", "update", "dd-fsync", "4096"),
    line("update-dd-1m", "update", "dd", "1048576"),
];

/// Chunk in KiB of a volume of a pool, as the scenario takes it.
const OF_POOL: &str = "32";
/// Chunks in KiB of dm-snapshot, and the labels of their rows.
const OF_PEER: [(&str, &str); 3] = [("8", "dm-snapshot-8k"), ("64", "dm-snapshot-64k"), ("512", "dm-snapshot-512k")];

/// Storage below the file system.
#[derive(Clone, Copy, PartialEq)]
pub enum Peer {
    /// A volume of a pool.
    Pool,
    /// An origin that is protected in place.
    Origin,
    /// dm-snapshot.
    Kernel,
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let mut rows = rows(&Table::measure(context, &lab, Peer::Pool, &[OF_POOL])?, OF_POOL, "forkdisk")?;
    let chunks = OF_PEER.map(|(chunk, _)| chunk);
    match Table::measure(context, &lab, Peer::Kernel, &chunks) {
        Ok(theirs) => {
            for (chunk, target) in OF_PEER {
                rows.extend(self::rows(&theirs, chunk, target)?);
            }
        }
        Err(error) => context.say(&format!("  no rows of dm-snapshot: {error:#}")),
    }
    Ok(rows)
}

fn rows(table: &Table, chunk: &str, target: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for Pair { line, alone, shared } in table.pairs(chunk)? {
        rows.extend(compare(&Label { workload: "w1", case: &format!("pool/{line}"), target }, alone, shared));
    }
    Ok(rows)
}

/// All measurements of one guest.
pub struct Table {
    measured: Vec<Measured>,
    sizes: &'static [u64],
    /// Size of the file system in bytes.
    pub span: u64,
}

/// One line of the table, without and with a snapshot.
pub struct Pair<'a> {
    /// Name, such as `create-dd-10m`.
    pub line: String,
    pub alone: &'a Measured,
    pub shared: &'a Measured,
}

impl Table {
    /// Runs the guest; `chunks` in KiB.
    pub fn measure(context: &Context<'_>, lab: &Lab, peer: Peer, chunks: &[&str]) -> Result<Table> {
        let sizes: &[u64] = context.scale.pick(&[10], &[10, 100], &[10, 100, 1000]);
        let largest = sizes[sizes.len() - 1];
        // Room for the file, for ext4's own metadata, and for a copy of all of it.
        let file_system = largest * 5 / 4 + 192;
        let disk = file_system * 5 / 2 + 64;
        let names: Vec<String> = sizes.iter().map(u64::to_string).collect();
        let kib = |chunk: &&str| chunk.parse::<u64>().context("the KiB of a chunk");
        let kib: Vec<u64> = chunks.iter().map(kib).collect::<Result<_>>()?;
        let sectors: Vec<String> = kib.iter().map(|kib| (2 * kib).to_string()).collect();
        let mut variables = vec![
            ("SIZES", names.join(",")),
            ("CHUNKS", sectors.join(",")),
            ("FSMB", file_system.to_string()),
            ("BYTES", (disk << 20).to_string()),
            ("LATENCY", LATENCY.as_millis().to_string()),
        ];
        variables.push(("PEER", if peer == Peer::Kernel { "dm-snapshot" } else { "forkdisk" }.to_string()));
        if peer != Peer::Kernel {
            variables.push(("VOLUME", (file_system << 20).to_string()));
        }
        if peer == Peer::Origin {
            variables.push(("ORIGIN_CHUNK", (kib[0] << 10).to_string()));
        }
        let limit = Duration::from_secs(context.scale.pick(400, 1200, 7200));
        Ok(Table { measured: context.guest(lab, "bench-ext4", variables, 1, limit)?, sizes, span: file_system << 20 })
    }

    /// Returns all lines with this chunk.
    pub fn pairs(&self, chunk: &str) -> Result<Vec<Pair<'_>>> {
        let mut pairs = Vec::new();
        for size in self.sizes {
            for line in &LINES {
                let size = size.to_string();
                let of = |chunk: &str| -> Result<&Measured> {
                    let keys =
                        [("op", line.op), ("how", line.how), ("block", line.block), ("size", &size), ("chunk", chunk)];
                    self.measured.iter().find(|m| m.is(&keys)).with_context(|| format!("{keys:?} was not measured"))
                };
                pairs.push(Pair { line: format!("{}-{size}m", line.name), alone: of("0")?, shared: of(chunk)? });
            }
        }
        Ok(pairs)
    }
}

/// Returns time without a snapshot ÷ with one, and the device's bytes per byte of the file.
pub fn compare(label: &Label<'_>, alone: &Measured, shared: &Measured) -> Vec<Row> {
    let [done, in_all] = [[alone.disk(), shared.disk()], [alone.disk_in_all(), shared.disk_in_all()]];
    let mut rows = compare_traces(label, done, in_all, shared.bytes);
    rows.push(label.row("guest_wall_ratio", "ratio", alone.seconds / shared.seconds));
    rows
}

/// Compares what reached the device, without and with a snapshot: until the client's `bytes` were
/// synced (`done`), and including later work (`in_all`).
pub fn compare_traces(label: &Label<'_>, done: [Recording; 2], in_all: [Recording; 2], bytes: u64) -> Vec<Row> {
    let trace = |recording| Trace { recording, depth: WRITEBACK };
    let ([base, ours], [base_in_all, ours_in_all]) = (done.map(trace), in_all.map(trace));
    let mut rows = label.ratios(&base, &ours);
    rows.push(label.flush_free(&base, &ours));
    // Charges the job with a checkpoint that would otherwise come later, after many more writes.
    let in_all = label.ratios(&base_in_all, &ours_in_all);
    rows.extend(in_all.into_iter().map(|row| Row { metric: format!("{}_with_checkpoint", row.metric), ..row }));
    let per_byte = |moved: u64| moved as f64 / bytes as f64;
    rows.extend([
        label.row("written_bytes_per_byte", "ratio", per_byte(ours_in_all.written())),
        label.row("alone_written_bytes_per_byte", "ratio", per_byte(base_in_all.written())),
        label.row("read_bytes_per_byte", "ratio", per_byte(ours.recording.bytes(RequestKind::Read))),
        label.row("flushes", "count", ours.recording.count(RequestKind::Flush) as f64),
        label.row("alone_flushes", "count", base.recording.count(RequestKind::Flush) as f64),
        label.row("inversions", "count", ours.recording.inversions() as f64),
    ]);
    rows
}
