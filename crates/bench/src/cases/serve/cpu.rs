//! CPU per 4 KiB request, server and client together, next to servers without storage:
//! qemu-nbd on its null driver, nbdkit on memory.

use std::ffi::OsStr;

use anyhow::Result;

use crate::cases::server::{Server, served_pool};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::row;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(128 << 20, 256 << 20, 1 << 30), context.scale.pick(3, 7, 15));
    let count = context.scale.pick(60_000, 120_000, 240_000);
    let pool = context.ram("pool");
    served_pool(&pool, span, 0)?;
    let ours = Server::forkdisk(context, &pool, &context.ram("ours.sock"), &[])?;
    let mut peers = Vec::new();
    if context.options.peers {
        peers.push(("qemu-nbd-null", Server::qemu_nbd_null(span, &context.ram("qemu.sock"))?));
        let memory = [OsStr::new("memory"), OsStr::new(&span.to_string())].map(OsStr::to_owned);
        let memory: Vec<&OsStr> = memory.iter().map(AsRef::as_ref).collect();
        peers.push(("nbdkit-memory", Server::nbdkit(&memory, &context.ram("nbdkit.sock"))?));
        // Written once, since nbdkit takes neither memory nor read time for data it was never given.
        peers[1].1.cost("write", span, (span / 4096) as usize)?;
    }
    let mut rows = Vec::new();
    for (case, mode) in [("cpu/read-4k-random", "randread"), ("cpu/write-4k-random", "randwrite")] {
        let mut mine = Samples::default();
        let mut theirs = vec![(Samples::default(), Samples::default()); peers.len()];
        for round in 0..=times {
            let cost = ours.cost(mode, span, count)?;
            let others = peers.iter().map(|(_, peer)| peer.cost(mode, span, count)).collect::<Result<Vec<_>>>()?;
            if round > 0 {
                mine.push(cost);
                theirs.iter_mut().zip(others).for_each(|((costs, ratios), other)| {
                    costs.push(other);
                    ratios.push(cost / other);
                });
            }
        }
        rows.push(row(case, "forkdisk", "cpu_per_op", "us", &mine));
        for ((name, _), (costs, ratios)) in peers.iter().zip(&theirs) {
            rows.push(row(case, "forkdisk", &format!("cpu_ratio_to_{name}"), "ratio", ratios));
            rows.push(row(case, name, "cpu_per_op", "us", costs));
        }
    }
    ours.stop()?;
    Ok(rows)
}
