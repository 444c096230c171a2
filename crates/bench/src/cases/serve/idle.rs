//! Cost of a thousand open idle exports for one that is in use: the same work alternates between
//! two servers, one of which has them.

use anyhow::{Context as _, Result};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::cases::fio::Load;
use crate::cases::server::{Server, served_pool};
use crate::nbd::Nbd;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::row;

const EXPORTS: usize = 1000;
/// Descriptors for this many connections, of the server and its client.
const FILES: u64 = 2 * EXPORTS as u64;
const CASE: &str = "idle/1000-exports";

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(128 << 20, 256 << 20, 1 << 30), context.scale.pick(5, 11, 21));
    let count = context.scale.pick(100_000, 200_000, 400_000);
    let (alone, crowded) = (context.ram("alone"), context.ram("crowded"));
    served_pool(&alone, span, 0)?;
    served_pool(&crowded, span, EXPORTS)?;
    allow_files()?;
    let flags = ["--max-connections", "1100"];
    let without = Server::forkdisk(context, &alone, &context.ram("alone.sock"), &flags)?;
    let socket = context.ram("crowded.sock");
    let with = Server::forkdisk(context, &crowded, &socket, &flags)?;
    let idle = (0..EXPORTS).map(|i| Nbd::connect(&socket, &format!("idle{i}"))).collect::<Result<Vec<_>>>()?;
    let flags = ["--norandommap".into(), "--io_size=1t".into(), format!("--number_ios={count}")];
    let mut rows = Vec::new();
    for (word, mode) in [("read", "randread"), ("write", "randwrite")] {
        let load = Load { mode, len: 4096, depth: 32, connections: 1, span, flags: &flags };
        let (mut rates, mut lone, mut ratio) = (Samples::default(), Samples::default(), Samples::default());
        for round in 0..=times {
            // Alternates the order, since the first run affects the state of the processor.
            let first = (round % 2 == 0).then(|| with.load(&load)).transpose()?;
            let b = without.load(&load)?.rate;
            let a = match first {
                Some(done) => done.rate,
                None => with.load(&load)?.rate,
            };
            if round > 0 {
                rates.push(a / 4096.0);
                lone.push(b / 4096.0);
                ratio.push(a / b);
            }
        }
        let case = format!("{CASE}-{word}-4k");
        rows.push(row(&case, "forkdisk", "throughput_ratio", "ratio", &ratio));
        rows.push(row(&case, "forkdisk", "requests_per_second", "1/s", &rates));
        rows.push(row(&case, "forkdisk-alone", "requests_per_second", "1/s", &lone));
    }
    drop(idle);
    without.stop()?;
    with.stop()?;
    Ok(rows)
}

/// Raises the limit of open files, which the servers inherit.
pub fn allow_files() -> Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < FILES) {
        limit.current = Some(limit.maximum.map_or(FILES, |most| most.min(FILES)));
        setrlimit(Resource::Nofile, limit).context("raising the number of files that may be open")?;
    }
    Ok(())
}
