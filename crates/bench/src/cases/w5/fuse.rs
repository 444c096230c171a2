//! Throughput and CPU of a volume's file ÷ those of a file passed through by the same library, both
//! in memory, alternating.
//!
//! Client and servers share one processor. Otherwise chance decides whether a request wakes a
//! sleeping processor, which on a virtual machine takes ten times as long as the request.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Result;
use rustix::fs::{Advice, fadvise};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::bed::{Bed, Through};
use super::rounds::Place;
use super::{label, passthrough};
use crate::bare::Bare;
use crate::clock::{Stopwatch, Took};
use crate::load::{Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::Context;

/// Access pattern of a case.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    len: usize,
    random: bool,
    direct: bool,
    /// Requests in flight for direct I/O; each depth is measured separately.
    depths: &'static [usize],
}

const SEED: u64 = 9;
/// Bytes written alternately to each file before anything is timed.
const FILL: usize = 1 << 20;

pub fn sequential_direct(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, Shape { name: "fuse-1m-seq-direct", len: 1 << 20, random: false, direct: true, depths: &[1, 8] })
}

pub fn sequential_cached(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, Shape { name: "fuse-1m-seq-cached", len: 1 << 20, random: false, direct: false, depths: &[1] })
}

pub fn random_direct(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, Shape { name: "fuse-4k-random-direct", len: 4096, random: true, direct: true, depths: &[1, 32] })
}

pub fn random_cached(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, Shape { name: "fuse-4k-random-cached", len: 4096, random: true, direct: false, depths: &[1] })
}

fn run(context: &Context<'_>, shape: Shape) -> Result<Vec<Row>> {
    let everywhere = sched_getaffinity(None)?;
    let one = (0..CpuSet::MAX_CPU).find(|&cpu| everywhere.is_set(cpu)).unwrap_or(0);
    let mut only = CpuSet::new();
    only.set(one);
    // Threads started from here on inherit the affinity.
    sched_setaffinity(None, &only)?;
    let rows = compare(context, shape);
    sched_setaffinity(None, &everywhere)?;
    rows
}

fn compare(context: &Context<'_>, shape: Shape) -> Result<Vec<Row>> {
    let span: u64 = context.scale.pick(64 << 20, 256 << 20, 512 << 20);
    let times = context.scale.pick(3, 21, 45);
    let bed = Bed::in_memory(context, span + (256 << 20))?;
    let ours = bed.dir().join("v");
    let through = Through::new(context, span)?;
    let theirs = through.dir().join(passthrough::NAME);
    File::create(&ours)?.set_len(span)?;
    fill(&[&ours, &theirs], span)?;
    bed.settle()?;
    let label = label(shape.name);
    let mut rows = Vec::new();
    let (mut throughput, mut cpu) = (Vec::new(), Vec::new());
    for &depth in shape.depths {
        for write in [false, true] {
            let count = if shape.random { context.scale.pick(4096, 16_384, 65_536) } else { span as usize / shape.len };
            let offsets = match shape.random {
                true => random(span, shape.len, count, SEED),
                false => sequential(span, shape.len),
            };
            let job = Job { write, len: shape.len, depth, offsets };
            let (mut faster, mut cheaper) = (Samples::default(), Samples::default());
            for round in 0..=times {
                let (first, second) = if round % 2 == 0 { (&ours, &theirs) } else { (&theirs, &ours) };
                let (a, b) = (timed(first, &job, shape.direct)?, timed(second, &job, shape.direct)?);
                let (us, it) = if round % 2 == 0 { (a, b) } else { (b, a) };
                if round > 0 {
                    faster.push(it.wall / us.wall);
                    cheaper.push(us.cpu / it.cpu);
                }
            }
            let what = format!("{}_qd{depth}", if write { "write" } else { "read" });
            rows.push(label.rows(&format!("{what}_throughput_ratio"), "ratio", &faster));
            rows.push(label.rows(&format!("{what}_cpu_ratio"), "ratio", &cheaper));
            throughput.extend(faster.median());
            cpu.extend(cheaper.median());
        }
    }
    let least = throughput.into_iter().fold(f64::INFINITY, f64::min);
    rows.push(label.row("throughput_ratio_to_passthrough", "ratio", least));
    rows.push(label.row("cpu_ratio_to_passthrough", "ratio", cpu.into_iter().fold(0.0, f64::max)));
    through.end()?;
    bed.end()?;
    Ok(rows)
}

/// Writes both files piece by piece, alternating: memory that a machine allocates first is slower
/// than later memory, by more than the differences measured here.
fn fill(paths: &[&Path], span: u64) -> Result<()> {
    for at in (0..span).step_by(FILL) {
        let piece = Job { write: true, len: FILL, depth: 1, offsets: [at].into() };
        paths.iter().try_for_each(|path| cached(path, &piece))?;
    }
    Ok(())
}

/// Starts with neither file in the kernel's cache, where direct writes would have to search it: the
/// volume's file keeps the pages written by `fill` when it is reopened, the other does not.
fn timed(path: &Path, job: &Job, direct: bool) -> Result<Took> {
    fadvise(File::open(path)?, 0, None, Advice::DontNeed)?;
    if direct {
        let mut client = Bare::open(path, job.depth, job.len)?;
        let watch = Stopwatch::start();
        client.run(job)?;
        return Ok(watch.stop());
    }
    let watch = Stopwatch::start();
    cached(path, job)?;
    Ok(watch.stop())
}

/// Runs one client through the kernel's cache; its writes are durable at the end.
fn cached(path: &Path, job: &Job) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut buf = vec![1; job.len];
    for &offset in job.offsets.iter() {
        match job.write {
            true => file.write_all_at(&buf, offset)?,
            false => file.read_exact_at(&mut buf, offset)?,
        }
    }
    if job.write {
        file.sync_data()?;
    }
    Ok(())
}
