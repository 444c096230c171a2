//! Peak memory of a process with a large pool; the case runs in a separate process.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use forkdisk::CreateOptions;
use forkdisk_uring::{Config, block_on};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::limits::{LIMIT, Limited as _};
use crate::load::{self, Job};
use crate::rows::{Row, Samples};
use crate::runner::{Context, Scale};

use super::file;

/// Name of the part that runs in the other process.
pub const INSIDE: &str = "memory-inside";
const VOLUME_SIZE: u64 = 1 << 50;
const POOL_SIZE: u64 = 64 << 30;
const SNAPSHOTS: usize = 10_000;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let options = context.options;
    let scale = match context.scale {
        Scale::Quick => Some("--quick"),
        Scale::Default => None,
        Scale::Full => Some("--full"),
    };
    let mut command = Command::new(&options.program);
    command.args(["bench", "engine", "--only", INSIDE, "--json", "--dir"]).arg(&options.dir).args(scale);
    let output = command.output_within(LIMIT).context("starting a process for the case")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the process of the case failed: {said}");
    let rows: Vec<Row> = serde_json::from_slice(&output.stdout).context("what the process of the case answered")?;
    ensure!(!rows.is_empty(), "the process of the case answered nothing: {said}");
    Ok(rows)
}

/// Scattered writes over a whole sparse volume, snapshots with writes between them, scattered reads.
pub fn run_inside(context: &Context<'_>) -> Result<Vec<Row>> {
    let path = context.ram("pool");
    let count = context.scale.pick(20_000, 100_000, 500_000);
    let info = block_on(Config::default(), |rt| async move {
        let pool = file::make(&rt, &path, POOL_SIZE).await?;
        pool.create("v", &CreateOptions::new(VOLUME_SIZE, 0)).await?;
        let volume = pool.volume("v")?;
        let mut rng = SmallRng::seed_from_u64(5);
        let mut scattered = |count: usize, write| Job {
            write,
            len: 4096,
            depth: 32,
            offsets: (0..count).map(|_| rng.random_range(0..VOLUME_SIZE / 4096) * 4096).collect(),
        };
        let written = scattered(count, true);
        load::run(&rt, &pool, &volume, &written).await?;
        for i in 0..SNAPSHOTS {
            load::run(&rt, &pool, &volume, &scattered(1, true)).await?;
            pool.snapshot(&[("v", &format!("s{i}"))], 0).await?;
        }
        load::run(&rt, &pool, &volume, &Job { write: false, ..written }).await?;
        drop(volume);
        let info = pool.info();
        pool.close().await?;
        anyhow::Ok(info)
    })??;
    let case = "memory/1p-10000-snapshots";
    let row = |metric, unit, value| Row::engine(case, metric, unit, &Samples::one(value));
    let mib = (1 << 20) as f64;
    Ok(vec![
        row("rss_peak", "MiB", high_water()? as f64 / mib),
        row("snapshots", "count", info.snapshots as f64),
        row("pool_used", "MiB", info.used as f64 / mib),
    ])
}

/// Returns the peak memory of this process, in bytes.
fn high_water() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM in /proc/self/status")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().with_context(|| format!("VmHWM:{line}"))?;
    Ok(kib << 10)
}
