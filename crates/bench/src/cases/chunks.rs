//! Effect of the chunk size on first writes in random order, and on reading them in order
//! afterwards. For information; the default of new volumes was chosen by it.

use anyhow::Result;
use forkdisk::testing::{DeviceModel, Recording, Request, RequestKind};
use forkdisk::{CreateOptions, OpenOptions};
use forkdisk_uring::{Config, block_on};

use crate::load::{self, Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::ram::{POOL, fresh};

const CHUNKS: [(&str, u64); 5] =
    [("4k", 4 << 10), ("16k", 16 << 10), ("64k", 64 << 10), ("256k", 256 << 10), ("1m", 1 << 20)];
const PAGE: usize = 4096;
const READ: usize = 1 << 20;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(128 << 20, 1 << 30, 4 << 30);
    let mut rows = Vec::new();
    for (name, chunk) in CHUNKS {
        // All pages in random order, and a sixteenth of them.
        for (part, how) in [(1, "all"), (16, "sparse")] {
            rows.extend(measure(&format!("chunks/{name}-{how}"), chunk, span, part)?);
        }
    }
    Ok(rows)
}

fn measure(case: &str, chunk: u64, span: u64, part: u64) -> Result<Vec<Row>> {
    let written = span / part;
    let writes =
        Job { write: true, len: PAGE, depth: 32, offsets: random(span, PAGE, (written / PAGE as u64) as usize, 1) };
    let reads = Job { write: false, len: READ, depth: 8, offsets: sequential(span, READ) };
    let raw = |job: &Job| {
        let kind = if job.write { RequestKind::WriteData } else { RequestKind::Read };
        let request = |&offset: &u64| Request { kind, offset, len: job.len as u64 };
        Recording { requests: job.offsets.iter().map(request).collect() }
    };
    let (wrote, read, used) = {
        let (writes, reads) = (writes.clone(), reads.clone());
        block_on(Config::default(), |rt| async move {
            let pool = fresh(&rt, POOL, OpenOptions::default()).await?;
            pool.create("v", &CreateOptions::new(span, 0).with_chunk(chunk)).await?;
            let volume = pool.volume("v")?;
            let before = pool.info().unused;
            pool.device().take();
            load::run(&rt, &pool, &volume, &writes).await?;
            pool.flush().await?;
            pool.checkpoint().await?;
            let wrote = pool.device().take();
            let used = before - pool.info().unused;
            load::run(&rt, &pool, &volume, &reads).await?;
            anyhow::Ok((wrote, pool.device().take(), used))
        })??
    };
    let mut rows = Vec::new();
    let mut row = |metric: &str, unit: &str, value| rows.push(Row::engine(case, metric, unit, &Samples::one(value)));
    for model in &DeviceModel::ALL {
        let time = |seen: &Recording, depth| model.time(seen, depth).as_secs_f64();
        row(&format!("write_{}_ratio", model.name), "ratio", time(&raw(&writes), 32) / time(&wrote, 32));
        if part == 1 {
            row(&format!("reread_{}_ratio", model.name), "ratio", time(&raw(&reads), 8) / time(&read, 8));
        }
    }
    row("used_bytes_per_byte", "ratio", used as f64 / written as f64);
    Ok(rows)
}
