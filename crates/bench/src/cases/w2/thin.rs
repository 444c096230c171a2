//! dm-thin in a guest: the published table, and random pages. A break there copies the block.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkdisk::testing::RequestKind;

use crate::model::{Label, Trace};
use crate::peers::{Lab, Measured};
use crate::rows::Row;
use crate::runner::Context;

use super::{CELLS, Cell, PAGE};

/// Sizes of a sub-job, in KiB, and the labels of their rows.
const SUBJOBS: [(u64, &str); 2] = [(64, "dm-thin-64k"), (512, "dm-thin")];
/// Most sub-jobs of one copy that it has in flight.
const SPLIT_COUNT: u64 = 8;
/// MiB for writes of 4 KiB, which take long.
const OF_PAGES: u64 = 16;
/// Block size of dm-thin for random pages, in KiB.
const BLOCK_KIB: &str = "64";

/// Returns dm-thin's rows of `copy/…`: time with nothing shared ÷ time of the break.
pub fn table(context: &Context<'_>, lab: &Lab) -> Result<Vec<Row>> {
    let mib = context.scale.pick(32, 128, 1024);
    let size = |cell: &Cell| if cell.len == PAGE { OF_PAGES.min(mib) } else { mib };
    let sizes: Vec<String> =
        CELLS.iter().map(|cell| format!("{}:{}:{}", cell.chunk >> 10, cell.len >> 10, size(cell))).collect();
    let variables = vec![
        ("SIZES", sizes.join(",")),
        ("SUBS", SUBJOBS.map(|(sub, _)| sub.to_string()).join(",")),
        ("BYTES", ((3 * mib.max(64)) << 20).to_string()),
        // Metadata lies after the data, on the same device.
        ("D1MB", "32".to_string()),
    ];
    let limit = Duration::from_secs(context.scale.pick(240, 480, 3600));
    let measured = context.guest(lab, "bench-thin-break", variables, 1, limit)?;
    let mut rows = Vec::new();
    for cell in &CELLS {
        let (block, io) = ((cell.chunk >> 10).to_string(), (cell.len >> 10).to_string());
        let of = |keys: &[(&str, &str)]| -> Result<&Measured> {
            let fits = |m: &&Measured| m.is(&[("bs", &block), ("io", &io)]) && m.is(keys);
            measured.iter().find(fits).with_context(|| format!("{} with {keys:?} was not measured", cell.name))
        };
        let case = format!("copy/{}", cell.name);
        let alone = of(&[("what", "alone")])?;
        for (sub, target) in SUBJOBS {
            let shared = of(&[("what", "break"), ("sub", &sub.to_string())])?;
            let label = Label { workload: "w2", case: &case, target };
            let in_flight = (cell.chunk >> 10).div_ceil(sub).min(SPLIT_COUNT) as usize;
            rows.extend(compare(&label, alone, shared, cell.len as u64, 1, in_flight));
        }
    }
    Ok(rows)
}

/// Returns dm-thin's rows of `random/…` and `snapshots/…`.
pub fn random(context: &Context<'_>) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let counts = context.scale.pick("1,16", "1,16,256", "1,16,256,1000");
    let variables = vec![
        ("MIB", "512".to_string()),
        ("OPS", context.scale.pick("256", "1024", "4096").to_string()),
        ("BETWEEN", "8".to_string()),
        ("COUNTS", counts.to_string()),
        ("DEPTHS", "1,32".to_string()),
        ("BS", BLOCK_KIB.to_string()),
        ("BYTES", (4u64 << 30).to_string()),
        ("D1MB", "64".to_string()),
    ];
    let limit = Duration::from_secs(context.scale.pick(240, 480, 3600));
    let measured = context.guest(&lab, "bench-thin-random", variables, 1, limit)?;
    let mut rows = Vec::new();
    for depth in [1, 32] {
        let text = depth.to_string();
        let of = |keys: &[(&str, &str)]| -> Result<&Measured> {
            let fits = |m: &&Measured| m.is(&[("depth", &text)]) && m.is(keys);
            measured.iter().find(fits).with_context(|| format!("depth {depth} with {keys:?} was not measured"))
        };
        let (alone, first) = (of(&[("what", "alone")])?, of(&[("snapshots", "1")])?);
        let case = format!("random/4k-qd{depth}");
        let label = Label { workload: "w2", case: &case, target: "dm-thin" };
        rows.extend(compare(&label, alone, first, PAGE as u64, depth, depth));
        for count in counts.split(',').filter(|&count| count != "1") {
            let case = format!("snapshots/{count}-qd{depth}");
            let label = Label { workload: "w2", case: &case, target: "dm-thin" };
            let trace = |m: &Measured| Trace { recording: m.disk(), depth };
            rows.extend(label.ratios(&trace(first), &trace(of(&[("snapshots", count)])?)));
        }
    }
    Ok(rows)
}

/// Returns ratios and counts of a measurement relative to the same with nothing shared. `clients`
/// requests of `len` bytes are made at a time; the peer itself has up to `in_flight` on the device
/// while it copies, and the model allows that number all the time.
fn compare(
    label: &Label<'_>,
    alone: &Measured,
    shared: &Measured,
    len: u64,
    clients: usize,
    in_flight: usize,
) -> Vec<Row> {
    let ops = (shared.bytes / len) as usize;
    let base = Trace::of(alone.disk(), ops, clients);
    let ours = Trace { recording: shared.disk(), depth: base.depth.max(in_flight) };
    let mut rows = label.ratios(&base, &ours);
    rows.extend(label.times(&ours, shared.bytes));
    let per_byte = |bytes: u64| bytes as f64 / shared.bytes as f64;
    rows.extend([
        label.row("written_bytes_per_byte", "ratio", per_byte(ours.written())),
        label.row("read_bytes_per_byte", "ratio", per_byte(ours.recording.bytes(RequestKind::Read))),
        label.row("requests_per_op", "ratio", ours.recording.transfers() as f64 / ops as f64),
        label.row("flushes", "count", ours.recording.count(RequestKind::Flush) as f64),
        label.row("guest_wall_ratio", "ratio", alone.seconds / shared.seconds),
        label.row("guest_cpu_per_op", "us", shared.cpu * 1e6 / ops as f64),
    ]);
    rows
}
