//! First writes of 4 KiB in random order after a snapshot: their time ÷ that of the same writes
//! with nothing shared, all bytes written per client byte, and space.

use anyhow::Result;
use forkdisk::testing::{Recording, Request, RequestKind};
use forkdisk::{CreateOptions, OpenOptions};
use forkdisk_uring::{Config, Rt, block_on};

use crate::load::{Job, scattered};
use crate::model::{Label, Trace};
use crate::rows::Row;
use crate::runner::{Context, Scale};

use super::super::sparse::Bed;
use super::{PAGE, label, pages};

/// Seed for the order of the earlier writes to a scattered volume.
const BEFORE: u64 = 11;
/// Seed for the order of the measured writes.
const MEASURED: u64 = 12;
/// Dirty budget in which most changes of a large volume fit.
const LARGE_BUDGET: usize = 2 << 30;

/// How the volume was written before.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    /// In order: its blocks are contiguous.
    InOrder,
    /// In random order: its pages are spread over the pool.
    Scattered,
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span: u64 = context.scale.pick(256 << 20, 1 << 30, 1 << 30);
    let mut rows = Vec::new();
    for (before, prefix) in [(Before::InOrder, ""), (Before::Scattered, "scattered-")] {
        for depth in [1, 32] {
            let case = format!("random/{prefix}4k-qd{depth}");
            rows.extend(compare(&label(&case), span, before, depth)?);
        }
    }
    rows.push(space(span)?);
    let large: u64 = 1 << 40;
    let count = context.scale.pick(1 << 17, 1 << 18, 1 << 20);
    context.say("  a volume of 1 TiB, default budget");
    rows.extend(on_large(&label("random/4k-1t"), large, count, OpenOptions::default())?);
    if context.scale > Scale::Quick {
        context.say("  a volume of 1 TiB, budget 2 GiB");
        let count = context.scale.pick(0, 1 << 20, 1 << 21);
        let options = OpenOptions::default().with_dirty(LARGE_BUDGET);
        rows.extend(on_large(&label("random/4k-1t-budget-2g"), large, count, options)?);
    }
    Ok(rows)
}

/// Measures writes to all of a volume in random order, with everything shared and with nothing shared.
fn compare(label: &Label<'_>, span: u64, before: Before, depth: usize) -> Result<Vec<Row>> {
    let job = pages(span, span / PAGE as u64, depth, MEASURED);
    let record = |shared: bool| {
        let job = job.clone();
        block_on(Config::default(), move |rt| async move {
            let bed = prepared(&rt, span, before, OpenOptions::default()).await?;
            if shared {
                bed.snapshot("s").await?;
            }
            bed.record(&job).await
        })?
    };
    let (alone, shared): (Recording, Recording) = (record(false)?, record(true)?);
    let ops = job.offsets.len();
    let (alone, shared) = (Trace::of(alone, ops, depth), Trace::of(shared, ops, depth));
    let mut rows = label.ratios(&alone, &shared);
    rows.extend(written(label, &shared, span));
    Ok(rows)
}

/// Returns the bytes written and read per client byte, and the requests.
fn written(label: &Label<'_>, seen: &Trace, bytes: u64) -> Vec<Row> {
    let recording = &seen.recording;
    let per_byte = |of: u64| of as f64 / bytes as f64;
    let ops = (bytes / PAGE as u64) as f64;
    vec![
        label.row("written_bytes_per_byte", "ratio", per_byte(seen.written())),
        label.row("data_bytes_per_byte", "ratio", per_byte(recording.bytes(RequestKind::WriteData))),
        label.row("read_bytes_per_byte", "ratio", per_byte(recording.bytes(RequestKind::Read))),
        label.row("data_requests_per_op", "ratio", recording.count(RequestKind::WriteData) as f64 / ops),
        label.row("metadata_requests_per_op", "ratio", recording.count(RequestKind::WriteMetadata) as f64 / ops),
        label.row("flushes", "count", recording.count(RequestKind::Flush) as f64),
    ]
}

async fn prepared(rt: &Rt, span: u64, before: Before, options: OpenOptions) -> Result<Bed> {
    let bed = Bed::new(rt, 4 * span, CreateOptions::new(span, 0), options).await?;
    match before {
        Before::InOrder => bed.fill(span).await?,
        Before::Scattered => {
            bed.pool.device().pause(true);
            bed.run(&pages(span, span / PAGE as u64, 32, BEFORE)).await?;
            bed.settle().await?;
            bed.pool.device().pause(false);
        }
    }
    Ok(bed)
}

/// Measures the space for random writes to a quarter of a clone.
fn space(span: u64) -> Result<Row> {
    let count = span / PAGE as u64 / 4;
    let taken = block_on(Config::default(), |rt| async move {
        let bed = prepared(&rt, span, Before::InOrder, OpenOptions::default()).await?;
        bed.snapshot("s").await?;
        bed.pool.clone_volume("v@s", "clone", 0).await?;
        bed.settle().await?;
        let before = bed.pool.info().used;
        let clone = Bed { volume: bed.pool.volume("clone")?, ..bed };
        clone.run(&pages(span, count, 32, MEASURED)).await?;
        // Space freed by the first checkpoint is in use until the second.
        clone.settle().await?;
        clone.settle().await?;
        anyhow::Ok(clone.pool.info().used - before)
    })??;
    Ok(label("random/4k-clone").row("space_per_byte", "ratio", taken as f64 / (count * PAGE as u64) as f64))
}

/// Measures `count` pages of a large volume that was written in order and is shared. With nothing
/// shared, the same writes are exactly the clients' requests, in place.
fn on_large(label: &Label<'_>, span: u64, count: u64, options: OpenOptions) -> Result<Vec<Row>> {
    let job = Job { write: true, len: PAGE, depth: 32, offsets: scattered(span, PAGE, count as usize, MEASURED) };
    let request = |&offset: &u64| Request { kind: RequestKind::WriteData, offset, len: PAGE as u64 };
    let flush = Request { kind: RequestKind::Flush, offset: 0, len: 0 };
    let alone = Recording { requests: job.offsets.iter().map(request).chain([flush]).collect() };
    let shared = block_on(Config::default(), |rt| async move {
        let bed = prepared(&rt, span, Before::InOrder, options).await?;
        bed.snapshot("s").await?;
        bed.record(&job).await
    })??;
    let (alone, shared) = (Trace { recording: alone, depth: 32 }, Trace::of(shared, count as usize, 32));
    let mut rows = label.ratios(&alone, &shared);
    rows.extend(written(label, &shared, count * PAGE as u64));
    Ok(rows)
}
