//! Instructions per break and per write in place, counted by callgrind in a separate process: the count
//! for twice as many requests less the count for once as many, so that one-time work cancels out.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, FormatOptions, MIN_VOLATILE_BYTES, OpenOptions, Pool, VolatileLog, VolatileMemory};
use forkdisk_uring::{Config, block_on};

use crate::callgrind::{self, Costs, WORK};
use crate::load::{self, Job, sequential};
use crate::rows::Row;
use crate::runner::Context;

use super::{PAGE, label, pages};

/// Name of the part that runs in the other process.
pub const INSIDE: &str = "instructions-inside";
const SPAN: u64 = 64 << 20;
const COUNT: u64 = 2000;
/// Number of the costliest functions that are listed.
const NAMED: usize = 3;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    // By the engine alone, and with a daemon's options: a volatile log, an interval and a clock.
    for work in ["in-place", "break", "in-place-served", "break-served"] {
        let count = |count: u64| callgrind::count(context, ("w2", INSIDE), &format!("{work} {count}"));
        let (once, twice) = (count(COUNT)?, count(2 * COUNT)?);
        let total = |costs: &Costs| costs.values().sum::<u64>() as f64;
        let case = format!("instructions/{work}");
        let row = |metric: &str, value: f64| label(&case).row(metric, "instructions", value / COUNT as f64);
        rows.push(row("per_op", total(&twice) - total(&once)));
        let mut costs: Vec<(f64, &String)> =
            twice.iter().map(|(name, &n)| (n as f64 - once.get(name).copied().unwrap_or(0) as f64, name)).collect();
        costs.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (cost, name) in costs.into_iter().take(NAMED) {
            rows.push(row(&format!("in {name}"), cost));
        }
    }
    Ok(rows)
}

/// Runs writes of 4 KiB in random order, one at a time, on a volume that was written, and is shared
/// if they are to break sharing. In memory: no device of the kernel is involved. The work is `in-place` or `break`,
/// with or without `-served`, and the number of requests.
pub fn run_inside(_: &Context<'_>) -> Result<Vec<Row>> {
    let work = std::env::var(WORK).with_context(|| format!("{WORK} says what is to be done"))?;
    let (what, count) = work.split_once(' ').context("what, and how often")?;
    let (shared, served, count): (_, _, u64) = (what.starts_with("break"), what.ends_with("-served"), count.parse()?);
    block_on(Config::default(), |rt| async move {
        let device = MemoryDevice::new(4 * SPAN);
        let format = FormatOptions::new(4 * SPAN, *b"forkdisk-bench-5", 0);
        Pool::format(&device, &format).await?;
        let options = if served { as_served() } else { OpenOptions::default() };
        let pool = Pool::open(device, std::rc::Rc::new(rt.clone()), options).await?;
        pool.create("v", &CreateOptions::new(SPAN, 0)).await?;
        let volume = pool.volume("v")?;
        let fill = Job { write: true, len: 1 << 20, depth: 1, offsets: sequential(SPAN, 1 << 20) };
        load::run(&rt, &pool, &volume, &fill).await?;
        pool.checkpoint().await?;
        // Without a snapshot the same work runs, except for the sharing.
        if shared {
            pool.snapshot(&[("v", "s")], 0).await?;
        } else {
            pool.flush().await?;
        }
        load::run(&rt, &pool, &volume, &pages(SPAN, count, 1, 3)).await
    })??;
    Ok(vec![label("instructions/inside").row("requests", "count", (SPAN / PAGE as u64) as f64)])
}

fn as_served() -> OpenOptions {
    let memory = VolatileMemory::new(vec![0; MIN_VOLATILE_BYTES.max(4096 + (2 << 20))]);
    let volatile = Some(VolatileLog::new(memory, [0; 32]));
    OpenOptions::default().with_volatile(volatile).with_commit_interval(Duration::from_secs(5)).with_clock(Some(|| 0))
}
