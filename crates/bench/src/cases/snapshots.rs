//! Cost of a snapshot and of a clone, by the size of the volume.

use anyhow::Result;
use forkdisk::testing::{Recording, RequestKind};
use forkdisk::{CreateOptions, OpenOptions};
use forkdisk_uring::{Config, Rt, block_on};

use crate::clock::Stopwatch;
use crate::load::{self, Job};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::ram::{self, RamPool};

const SIZES: [(&str, u64); 3] = [("1g", 1 << 30), ("1t", 1 << 40), ("1p", 1 << 50)];
/// Pages written beforehand, scattered over the volume.
const SCATTERED: u64 = 4096;
const VERBS: [&str; 2] = ["snapshot", "clone"];

/// Costs of a verb: microseconds of CPU, and what reached the device.
#[derive(Default)]
struct Cost {
    cpu: Samples,
    flushes: Samples,
    reads: Samples,
    written: Samples,
}

impl Cost {
    fn add(&mut self, cpu: f64, seen: &Recording) {
        self.cpu.push(cpu * 1e6);
        self.flushes.push(seen.count(RequestKind::Flush) as f64);
        self.reads.push(seen.count(RequestKind::Read) as f64);
        self.written.push(seen.bytes(RequestKind::WriteMetadata) as f64);
    }
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let times = context.scale.pick(300, 1000, 3000);
    let costs = block_on(Config::default(), |rt| async move {
        let mut pools = Vec::new();
        for (_, size) in SIZES {
            pools.push(prepare(&rt, size).await?);
        }
        measure(&pools, times).await
    })??;
    let cpu = |of: &[Cost; 2], verb: usize| of[verb].cpu.median().unwrap_or_default();
    let mut rows = Vec::new();
    for ((label, _), of) in SIZES.iter().zip(&costs) {
        for (verb, cost) in of.iter().enumerate() {
            let case = format!("snapshots/{}-{label}", VERBS[verb]);
            let growth = Samples::one(cpu(of, verb) / cpu(&costs[0], verb));
            rows.push(Row::engine(&case, "flushes", "count", &cost.flushes));
            rows.push(Row::engine(&case, "page_reads", "count", &cost.reads));
            rows.push(Row::engine(&case, "written", "bytes", &cost.written));
            rows.push(Row::engine(&case, "cpu", "us", &cost.cpu));
            rows.push(Row::engine(&case, "cpu_ratio_to_1g", "ratio", &growth));
        }
    }
    Ok(rows)
}

/// Creates a pool with a volume of `size` bytes and scattered writes.
async fn prepare(rt: &Rt, size: u64) -> Result<RamPool> {
    let pool = ram::fresh(rt, ram::POOL, OpenOptions::default()).await?;
    pool.create("v", &CreateOptions::new(size, 0)).await?;
    let offsets = (0..SCATTERED).map(|i| size / SCATTERED * i).collect();
    let scattered = Job { write: true, len: 4096, depth: 32, offsets };
    load::run(rt, &pool, &pool.volume("v")?, &scattered).await?;
    pool.checkpoint().await?;
    Ok(pool)
}

/// Measures each pool and verb. The pools alternate. Before each snapshot and each clone there is
/// one write that was not flushed.
async fn measure(pools: &[RamPool], times: usize) -> Result<Vec<[Cost; 2]>> {
    let mut costs: Vec<[Cost; 2]> = pools.iter().map(|_| Default::default()).collect();
    for i in 0..times {
        for (pool, of) in pools.iter().zip(&mut costs) {
            for (verb, cost) in of.iter_mut().enumerate() {
                let mut buf = pool.buffer(4096);
                buf.fill(0);
                pool.volume("v")?.write(i as u64 % 256 * 4096, buf, false).await.0?;
                pool.device().take();
                let watch = Stopwatch::start();
                match verb {
                    0 => drop(pool.snapshot(&[("v", &format!("s{i}"))], 0).await?),
                    _ => drop(pool.clone_volume(&format!("v@s{i}"), &format!("c{i}"), 0).await?),
                }
                cost.add(watch.stop().cpu, &pool.device().take());
            }
        }
    }
    Ok(costs)
}
