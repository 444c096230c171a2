//! Instructions per read and first write on a clone of a clone, and so on, counted by callgrind in a separate process:
//! the count for twice as many requests less the count for once as many, so that one-time work cancels out.

use std::rc::Rc;

use anyhow::{Context as _, Result};
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool};
use forkdisk_uring::{Config, block_on};

use crate::callgrind::{self, WORK};
use crate::load::{self, Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::{Context, Scale};

use super::{OURS, PAGE, row};

/// Name of the part that runs in the other process.
pub const INSIDE: &str = "instructions-inside";
const SPAN: u64 = 32 << 20;
const COUNT: usize = 1000;
const DEPTHS: [usize; 2] = [1, 1000];
/// Pages that are written on each clone before it is cloned.
const WRITES: usize = 8;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    if context.scale == Scale::Quick {
        context.say("  left out with --quick: valgrind takes a minute");
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for work in ["read", "first-write"] {
        let mut first = None;
        for depth in DEPTHS {
            let total = |count: usize| -> Result<f64> {
                let costs = callgrind::count(context, ("fleet", INSIDE), &format!("{work} {depth} {count}"))?;
                Ok(costs.values().sum::<u64>() as f64)
            };
            let each = (total(2 * COUNT)? - total(COUNT)?) / COUNT as f64;
            let case = format!("instructions/{work}-at-depth-{depth}");
            rows.push(row(&case, OURS, "per_op", "instructions", &Samples::one(each)));
            let first = *first.get_or_insert(each);
            if depth > 1 {
                rows.push(row(&case, OURS, "ratio_to_depth_1", "ratio", &Samples::one(each / first)));
            }
        }
    }
    Ok(rows)
}

/// Makes a descent of clones in memory and reads or writes pages of the last one, one at a time. The work is `read` or
/// `first-write`, the depth, and the number of requests.
pub fn run_inside(_: &Context<'_>) -> Result<Vec<Row>> {
    let work = std::env::var(WORK).with_context(|| format!("{WORK} says what is to be done"))?;
    let mut words = work.split(' ');
    let write = words.next() == Some("first-write");
    let mut number = || words.next().and_then(|word| word.parse::<usize>().ok()).context("a depth and a number");
    let (depth, count) = (number()?, number()?);
    block_on(Config::default(), |rt| async move {
        let device = MemoryDevice::new(8 * SPAN);
        Pool::format(&device, &FormatOptions::new(8 * SPAN, *b"forkdisk-bench-6", 0)).await?;
        let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await?;
        pool.create("c0", &CreateOptions::new(SPAN, 0)).await?;
        let job = |write, len, offsets| Job { write, len, depth: 1, offsets };
        load::run(&rt, &pool, &pool.volume("c0")?, &job(true, 1 << 20, sequential(SPAN, 1 << 20))).await?;
        // There are as many volumes at every depth, and the same pages are written, so that only the depth differs.
        for level in 1..=DEPTHS[DEPTHS.len() - 1] {
            let above = if level <= depth { level - 1 } else { 0 };
            pool.clone_volume(&format!("c{above}"), &format!("c{level}"), 0).await?;
            let volume = pool.volume(&format!("c{}", level.min(depth)))?;
            load::run(&rt, &pool, &volume, &job(true, PAGE, random(SPAN, PAGE, WRITES, level as u64))).await?;
        }
        pool.clone_volume(&format!("c{depth}"), "tip", 0).await?;
        pool.checkpoint().await?;
        let tip = pool.volume("tip")?;
        load::run(&rt, &pool, &tip, &job(write, PAGE, random(SPAN, PAGE, count, 3))).await
    })??;
    Ok(vec![row("instructions/inside", OURS, "requests", "count", &Samples::one(count as f64))])
}
