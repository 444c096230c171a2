//! Reading snapshot 1 when 999 follow it, next to reading it when it is the only one. Between the snapshots
//! the origin is overwritten piece by piece, so that the contents of snapshot 1 are kept all over the chain.

use anyhow::Result;
use forkdisk::testing::{DeviceModel, RequestKind};
use forkdisk_uring::{Config, block_on};

use crate::clock::Stopwatch;
use crate::load::{self, Job, random, sequential};
use crate::rows::Row;
use crate::runner::Context;

use super::super::origin::{Bed, CHUNK, Seen, Setup, seconds};
use super::label;

const MANY: usize = 1000;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span: u64 = context.scale.pick(256 << 20, 1 << 30, 4 << 30);
    let count = context.scale.pick(8192, 32_768, 131_072);
    let jobs = [
        ("1m-seq", Job { write: false, len: 1 << 20, depth: 8, offsets: sequential(span, 1 << 20) }),
        ("4k-random", Job { write: false, len: 4096, depth: 32, offsets: random(span, 4096, count, 3) }),
    ];
    context.say("  1 snapshot");
    let one = measure(span, 1, &jobs)?;
    context.say(&format!("  {MANY} snapshots"));
    let many = measure(span, MANY, &jobs)?;
    let mut rows = Vec::new();
    for (((name, job), (one, cpu_of_one)), (many, cpu)) in jobs.iter().zip(&one).zip(&many) {
        let case = format!("read-of-1-of-1000/{name}");
        let label = label(&case);
        let (a, b) = (&one.phases(job.depth)[0], &many.phases(job.depth)[0]);
        for model in &DeviceModel::ALL {
            let ratio = seconds(model, a) / seconds(model, b);
            rows.push(label.row(&format!("{}_ratio_to_one_snapshot", model.name), "ratio", ratio));
        }
        let per_byte = |seen: &Seen| seen.bytes(RequestKind::Read) as f64 / job.bytes() as f64;
        let per_op = |seen: &Seen| seen.count(RequestKind::Read) as f64 / job.offsets.len() as f64;
        rows.extend([
            label.row("read_bytes_per_byte", "ratio", per_byte(many)),
            label.row("read_bytes_per_byte_of_one", "ratio", per_byte(one)),
            label.row("requests_per_op", "ratio", per_op(many)),
            label.row("requests_per_op_of_one", "ratio", per_op(one)),
            label.row("cpu_ratio_to_one_snapshot", "ratio", cpu_of_one / cpu),
        ]);
    }
    Ok(rows)
}

/// Records what reaches the disk, with seconds of CPU, for each of the jobs on snapshot 1.
fn measure(span: u64, snapshots: usize, jobs: &[(&'static str, Job)]) -> Result<Vec<(Seen, f64)>> {
    let jobs: Vec<Job> = jobs.iter().map(|(_, job)| job.clone()).collect();
    block_on(Config::default(), |rt| async move {
        let bed = Bed::new(&rt, Setup { span, chunk: CHUNK, copies: 2, second: false }).await?;
        // Half of the chunks, in random order, the same for both.
        let all = random(span, CHUNK as usize, (span / CHUNK / 2) as usize, 7);
        bed.snapshot("s1", false).await?;
        for (i, part) in all.chunks(all.len().div_ceil(MANY)).enumerate() {
            if (1..snapshots).contains(&i) {
                bed.snapshot(&format!("s{}", i + 1), false).await?;
            }
            bed.run(&Job { write: true, len: 4096, depth: 8, offsets: part.into() }).await?;
        }
        bed.settle().await?;
        let volume = bed.open("s1")?;
        let mut results = Vec::new();
        for job in &jobs {
            bed.watch();
            let watch = Stopwatch::start();
            load::run(&bed.rt, &bed.pool, &volume, job).await?;
            results.push((bed.taken(), watch.stop().cpu));
        }
        Ok(results)
    })?
}
