//! CPU time per request in place, on files in memory, beside a bare loop over io_uring.

use anyhow::Result;

use crate::load::{Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::file::{Comparison, compare};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(128 << 20, 512 << 20, 1 << 30);
    let times = context.scale.pick(15, 31, 51);
    let small = |write| Job { write, len: 4096, depth: 32, offsets: random(span, 4096, 131_072, 3) };
    let large = |write| Job { write, len: 1 << 20, depth: 8, offsets: sequential(span, 1 << 20) };
    let jobs = [
        ("cpu/read-4k-random", small(false)),
        ("cpu/write-4k-random", small(true)),
        ("cpu/read-1m-seq", large(false)),
        ("cpu/write-1m-seq", large(true)),
    ];
    let work: Vec<Job> = jobs.iter().map(|(_, job)| job.clone()).collect();
    let (pool, plain) = (&context.ram("pool"), &context.ram("plain"));
    let results = compare(&Comparison { pool, plain, span, times, cost: Some(|took| took.cpu) }, &work)?;
    let mut rows = Vec::new();
    for ((case, job), pairs) in jobs.iter().zip(&results) {
        let per_op = |cpu: f64| cpu * 1e6 / job.offsets.len() as f64;
        let ratio: Samples = pairs.iter().map(|p| p.ours.cpu / p.raw.cpu).collect();
        let ours: Samples = pairs.iter().map(|p| per_op(p.ours.cpu)).collect();
        let raw: Samples = pairs.iter().map(|p| per_op(p.raw.cpu)).collect();
        rows.push(Row::engine(case, "cpu_ratio", "ratio", &ratio));
        rows.push(Row::engine(case, "cpu_per_op", "us", &ours));
        rows.push(Row::new("engine", case, "bare-io_uring", "cpu_per_op", "us", &raw));
    }
    Ok(rows)
}
