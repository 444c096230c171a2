//! CPU time per request over NBD, server and client together, next to qemu-nbd on a plain file.
//! Both serve files in memory to the same client, fio, alternating.

use anyhow::Result;

use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::file;
use super::server::{QEMU_NBD, Server, served_pool};

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(128 << 20, 256 << 20, 1 << 30), context.scale.pick(3, 7, 15));
    let count = context.scale.pick(60_000, 120_000, 240_000);
    let (pool, plain) = (context.ram("pool"), context.ram("plain"));
    file::plain(&plain, span)?;
    served_pool(&pool, span, 0)?;
    let ours = Server::forkdisk(context, &pool, &context.ram("ours.sock"), &[])?;
    let peer = Server::qemu_nbd(&plain, &context.ram("peer.sock"))?;
    let mut rows = Vec::new();
    for (case, mode) in [("nbd/read-4k-random", "randread"), ("nbd/write-4k-random", "randwrite")] {
        let (mut mine, mut theirs, mut ratio) = (Samples::default(), Samples::default(), Samples::default());
        for round in 0..=times {
            let (a, b) = (ours.cost(mode, span, count)?, peer.cost(mode, span, count)?);
            if round > 0 {
                mine.push(a);
                theirs.push(b);
                ratio.push(a / b);
            }
        }
        rows.push(Row::engine(case, "cpu_ratio", "ratio", &ratio));
        rows.push(Row::engine(case, "cpu_per_op", "us", &mine));
        rows.push(Row::new("engine", case, QEMU_NBD, "cpu_per_op", "us", &theirs));
    }
    ours.stop()?;
    Ok(rows)
}
