//! Wall-clock time on a real device, alternating with a plain file next to the pool: raw ÷ pool.

use anyhow::Result;

use crate::load::{Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::file::{Comparison, compare};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(256 << 20, 1 << 30, 4 << 30);
    let (times, count) = (context.scale.pick(15, 31, 51), context.scale.pick(8192, 32_768, 131_072));
    let small = |write| Job { write, len: 4096, depth: 32, offsets: random(span, 4096, count, 4) };
    let large = |write| Job { write, len: 1 << 20, depth: 8, offsets: sequential(span, 1 << 20) };
    let jobs = [
        ("wall/read-4k-random", small(false)),
        ("wall/write-4k-random", small(true)),
        ("wall/read-1m-seq", large(false)),
        ("wall/write-1m-seq", large(true)),
    ];
    let work: Vec<Job> = jobs.iter().map(|(_, job)| job.clone()).collect();
    let (pool, plain) = (&context.disk("pool"), &context.disk("plain"));
    let results = compare(&Comparison { pool, plain, span, times, cost: None }, &work)?;
    let mut rows = Vec::new();
    for ((case, job), pairs) in jobs.iter().zip(&results) {
        let rate = |seconds: f64| job.bytes() as f64 / seconds / 1e6;
        let ratio: Samples = pairs.iter().map(|p| p.raw.wall / p.ours.wall).collect();
        let ours: Samples = pairs.iter().map(|p| rate(p.ours.wall)).collect();
        let raw: Samples = pairs.iter().map(|p| rate(p.raw.wall)).collect();
        rows.push(Row::engine(case, "wall_ratio", "ratio", &ratio));
        rows.push(Row::engine(case, "throughput", "MB/s", &ours));
        rows.push(Row::new("engine", case, "raw", "throughput", "MB/s", &raw));
        let per_op = |cpu: f64| cpu * 1e6 / job.offsets.len() as f64;
        let ours: Samples = pairs.iter().map(|p| per_op(p.ours.cpu)).collect();
        let raw: Samples = pairs.iter().map(|p| per_op(p.raw.cpu)).collect();
        rows.push(Row::engine(case, "cpu_per_op", "us", &ours));
        rows.push(Row::new("engine", case, "raw", "cpu_per_op", "us", &raw));
    }
    Ok(rows)
}
