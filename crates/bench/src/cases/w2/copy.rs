//! The published table with breaks that copy the chunk, next to dm-thin, and the effect of the
//! sub-job size on a device with high latency.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Result;
use forkdisk::testing::{DelayingDevice, DeviceModel, Recording, RequestKind};
use forkdisk::{BreakPolicy, CopierSettings, CreateOptions, FormatOptions, OpenOptions, Pool};
use forkdisk_uring::{Config, Rt, block_on};

use crate::load::{self, Job, sequential};
use crate::model::Trace;
use crate::rows::Row;
use crate::runner::Context;

use super::super::sparse::{Bed, Sparse};
use super::{CELLS, Cell, label, thin};

/// Compared sizes of a sub-job with high latency, in KiB.
const SUBJOBS: [u32; 3] = [64, 512, 1024];
/// Latency of each request there.
const LATENCY: Duration = Duration::from_millis(5);
/// The peer of the compared rows: dm-thin with the same sub-job size as the default here.
const PEER: &str = "dm-thin";

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(64 << 20, 128 << 20, 1 << 30);
    let mut rows = Vec::new();
    for cell in &CELLS {
        rows.extend(measure(cell, span)?);
    }
    for cell in CELLS.iter().filter(|cell| cell.copies()) {
        rows.extend(slow(context, cell)?);
    }
    if context.options.peers {
        match context.lab().and_then(|lab| thin::table(context, &lab)) {
            Ok(theirs) => rows.extend(theirs),
            Err(error) => context.say(&format!("  no rows of dm-thin: {error:#}")),
        }
        rows.extend(CELLS.iter().flat_map(|cell| ahead(&rows, cell)).collect::<Vec<_>>());
    }
    Ok(rows)
}

/// Measures what reaches the device, and its time as for dm-thin: with nothing shared ÷ breaking.
fn measure(cell: &Cell, span: u64) -> Result<Vec<Row>> {
    let ops = cell.dd(span).offsets.len();
    let (alone, shared) = (record(cell, span, false)?, record(cell, span, true)?);
    let (case, settings) = (format!("copy/{}", cell.name), CopierSettings::default());
    let label = label(&case);
    let base = Trace::of(alone, ops, 1);
    // The copier's maximum of requests in flight, all the time: the peer gets the same.
    let in_flight = cell.chunk.div_ceil(settings.subjob_size.into()).min(settings.split_count.into()) as usize;
    let ours = Trace { recording: shared, depth: base.depth.max(in_flight) };
    let mut rows = label.ratios(&base, &ours);
    rows.extend(label.times(&ours, span));
    let seen = &ours.recording;
    let per_byte = |bytes: u64| bytes as f64 / span as f64;
    rows.extend([
        label.row("written_bytes_per_byte", "ratio", per_byte(ours.written())),
        label.row("data_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::WriteData))),
        label.row("read_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::Read))),
        label.row("requests_per_op", "ratio", seen.transfers() as f64 / ops as f64),
        label.row("inversions", "count", seen.inversions() as f64),
        label.row("flushes", "count", seen.count(RequestKind::Flush) as f64),
    ]);
    Ok(rows)
}

fn options(cell: &Cell, span: u64) -> CreateOptions {
    CreateOptions::new(span, 0).with_chunk(cell.chunk).with_break_policy(BreakPolicy::Copy)
}

fn record(cell: &Cell, span: u64, shared: bool) -> Result<Recording> {
    let (job, volume) = (cell.dd(span), options(cell, span));
    block_on(Config::default(), |rt| async move {
        let bed = Bed::new(&rt, 8 * span, volume, OpenOptions::default()).await?;
        bed.fill(span).await?;
        if shared {
            bed.snapshot("s").await?;
        }
        bed.record(&job).await
    })?
}

/// Measures the break in wall-clock time with 5 ms per request, by the sub-job size.
fn slow(context: &Context<'_>, cell: &Cell) -> Result<Vec<Row>> {
    let span = context.scale.pick(8 << 20, 16 << 20, 64 << 20).max(cell.chunk);
    // As many writes as take about a second.
    let span = if cell.len < cell.chunk as usize / 8 { span.min(128 * cell.len as u64) } else { span };
    let case = format!("copy/{}", cell.name);
    let label = label(&case);
    let alone = timed(cell, span, None)?.as_secs_f64();
    let mut rows = Vec::new();
    let mut ratios = Vec::new();
    for kib in SUBJOBS {
        let ratio = alone / timed(cell, span, Some(kib << 10))?.as_secs_f64();
        rows.push(label.row(&format!("delay_5ms_{kib}k_ratio"), "ratio", ratio));
        ratios.push(ratio);
    }
    rows.push(label.row("delay_5ms_512k_over_64k", "ratio", ratios[1] / ratios[0]));
    Ok(rows)
}

/// Returns the time to write all of a volume: shared and copied in pieces of `subjob` bytes, or with nothing shared.
fn timed(cell: &Cell, span: u64, subjob: Option<u32>) -> Result<Duration> {
    let (job, volume) = (cell.dd(span), options(cell, span));
    block_on(Config::default(), |rt: Rt| async move {
        let size = 8 * span + (64 << 20);
        let device = DelayingDevice::new(Sparse::new(size), Rc::new(rt.clone()), LATENCY);
        Pool::format(&device, &FormatOptions::new(size, *b"forkdisk-bench-4", 0)).await?;
        let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await?;
        pool.create("v", &volume).await?;
        let v = pool.volume("v")?;
        let fill = Job { write: true, len: 1 << 20, depth: 8, offsets: sequential(span, 1 << 20) };
        load::run(&rt, &pool, &v, &fill).await?;
        if let Some(subjob_size) = subjob {
            let buffers = 16 << 20;
            pool.set_copier(CopierSettings::default().with_subjob_size(subjob_size).with_buffers(buffers)).await?;
            pool.snapshot(&[("v", "s")], 0).await?;
        }
        pool.checkpoint().await?;
        let start = Instant::now();
        load::run(&rt, &pool, &v, &job).await?;
        Ok(start.elapsed())
    })?
}

/// Returns forkdisk's ratio less dm-thin's, if both were measured; both relative to forkdisk's time
/// with nothing shared, so that dm-thin's own cost without a snapshot does not count in its favour.
fn ahead(rows: &[Row], cell: &Cell) -> Vec<Row> {
    let case = format!("copy/{}", cell.name);
    let of = |target: &str, metric: &str| {
        let found = rows.iter().find(|r| r.case == case && r.target == target && r.metric == metric);
        found.and_then(|row| row.median)
    };
    let row = |model: &DeviceModel| {
        let (ratio, time) = (format!("{}_ratio", model.name), format!("{}_ms_per_mib", model.name));
        let ours = of("forkdisk", &ratio)?;
        let ahead = ours - ours * of("forkdisk", &time)? / of(PEER, &time)?;
        Some(label(&case).row(&format!("{}_ahead_of_dm_thin", model.name), "difference", ahead))
    };
    DeviceModel::ALL.iter().filter_map(row).collect()
}
