//! First writes of 4 KiB in random order to an origin with one snapshot, one at a time and 32.

use std::time::Duration;

use anyhow::Result;
use forkdisk::testing::DeviceModel;
use forkdisk_uring::{Config, block_on};

use crate::load::{Job, random, scattered};
use crate::rows::Row;
use crate::runner::{Context, Scale};

use super::super::origin::{self, Bed, Seen, Setup};
use super::label;

const PAGE: usize = 4096;
/// Seed of the order of writes, in the guest as well.
const SEED: u64 = 12;
/// Time of a request of the disk, also of the guest's: writes that are in flight together are so at a real disk, while
/// memory answers before the next one arrives.
pub const LATENCY: Duration = Duration::from_millis(10);
/// Numbers of writes in flight.
pub const DEPTHS: [usize; 2] = [1, 32];

/// MiB of the origin and number of writes that are compared with dm-snapshot, which has the same.
pub fn compared(scale: Scale) -> (u64, usize) {
    (scale.pick(16, 32, 32), scale.pick(256, 1024, 4096))
}

/// A run: the writes, on what, and what reached the disks.
struct Run {
    job: Job,
    setup: Setup,
    seen: Seen,
}

impl Run {
    fn new(job: Job, setup: Setup, latency: Duration) -> Result<Run> {
        let writes = job.clone();
        let seen = block_on(Config::default(), |rt| async move {
            let bed = Bed::with_latency(&rt, setup, latency).await?;
            bed.snapshot("s", false).await?;
            bed.settle().await?;
            bed.record(&writes).await
        })??;
        Ok(Run { job, setup, seen })
    }

    /// Chunks of 4 KiB, on a disk of which a part of the chunks is written once.
    fn of_pages(scale: Scale, depth: usize) -> Result<Run> {
        let (span, count) = (scale.pick(512 << 20, 1 << 30, 4 << 30), scale.pick(4096, 16_384, 65_536));
        let job = Job { write: true, len: PAGE, depth, offsets: random(span, PAGE, count, SEED) };
        Run::new(job, Setup { span, chunk: 4 << 10, copies: 1, second: false }, Duration::ZERO)
    }

    /// Chunks of 64 KiB, with the writes that dm-snapshot gets.
    fn of_chunks(scale: Scale, depth: usize) -> Result<Run> {
        let (mib, count) = compared(scale);
        let span = mib << 20;
        let job = Job { write: true, len: PAGE, depth, offsets: scattered(span, PAGE, count, SEED) };
        Run::new(job, Setup { span, chunk: 64 << 10, copies: 1, second: false }, LATENCY)
    }
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for depth in DEPTHS {
        for (name, run) in
            [("4k", Run::of_pages(context.scale, depth)?), ("64k", Run::of_chunks(context.scale, depth)?)]
        {
            let case = format!("random/chunk-{name}-qd{depth}");
            rows.extend(origin::rows(&label(&case), &run.job, &run.setup, &run.seen));
        }
    }
    Ok(rows)
}

/// Returns for each model the time of the writes to the origin alone ÷ the time with a snapshot, chunks of 64 KiB.
pub fn speeds(context: &Context<'_>, depth: usize) -> Result<Vec<(&'static DeviceModel, f64)>> {
    let Run { job, seen, .. } = Run::of_chunks(context.scale, depth)?;
    let (raw, ours) = (origin::raw(&job), &seen.phases(depth)[0]);
    let speed = |model| (model, origin::seconds(model, &raw) / origin::seconds(model, ours));
    Ok(DeviceModel::ALL.iter().map(speed).collect())
}
