//! CPU time per request in place, on files in memory, next to a bare loop over io_uring.

use anyhow::Result;

use crate::clock::Took;
use crate::load::{Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::file::{Comparison, Pair, compare};

/// Rounds per sample, of which each side's cheapest counts: the kernel sometimes passes all
/// requests to a thread on another processor, which doubles their cost, for either side.
const BEST_OF: usize = 5;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(128 << 20, 512 << 20, 1 << 30);
    let times = context.scale.pick(5, 9, 15) * BEST_OF;
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
        let best: Vec<(f64, f64)> =
            pairs.chunks(BEST_OF).map(|few| (least(few, |p| p.ours), least(few, |p| p.raw))).collect();
        let ratio: Samples = best.iter().map(|(ours, raw)| ours / raw).collect();
        let ours: Samples = best.iter().map(|&(ours, _)| per_op(ours)).collect();
        let raw: Samples = best.iter().map(|&(_, raw)| per_op(raw)).collect();
        rows.push(Row::engine(case, "cpu_ratio", "ratio", &ratio));
        rows.push(Row::engine(case, "cpu_per_op", "us", &ours));
        rows.push(Row::new("engine", case, "bare-io_uring", "cpu_per_op", "us", &raw));
    }
    Ok(rows)
}

fn least(rounds: &[Pair], side: impl Fn(&Pair) -> Took) -> f64 {
    rounds.iter().map(|pair| side(pair).cpu).fold(f64::INFINITY, f64::min)
}
