//! Writes and flushes of a volume in production while its branches write and flush as well.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};

use crate::cases::file;
use crate::cases::pools::PoolAt;
use crate::mounted::Mounted;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::bed::{Direct, Disk, Served, beside, durations, file_system, pool, reflink, write_until};
use super::{OURS, row};

const PRODUCTION: &str = "production";
const BRANCHES: usize = 10;

/// A disk in production, and branches of it.
trait Target {
    fn production(&mut self) -> Result<Box<dyn Disk>>;

    /// Returns clients of all branches.
    fn branches(&mut self) -> Result<Vec<Box<dyn Disk>>>;
}

/// Percentile 99 of each round, in seconds.
#[derive(Default)]
struct Measured {
    alone: Vec<f64>,
    crowded: Vec<f64>,
    /// Writes of all branches per second.
    rate: Vec<f64>,
}

type Make = fn(&Context<'_>, u64) -> Result<Box<dyn Target>>;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(32 << 20, 256 << 20, 1 << 30);
    let (rounds, time) = (context.scale.pick(3, 7, 15), Duration::from_secs_f64(context.scale.pick(0.5, 2.0, 4.0)));
    let mut targets = Vec::new();
    let all: [(&str, Make); 2] = [(OURS, ours), ("xfs", xfs)];
    for (name, make) in all.into_iter().filter(|(name, _)| context.options.peers || *name == OURS) {
        match make(context, span) {
            Ok(target) => targets.push((name, target, Measured::default())),
            Err(error) => context.say(&format!("  {name} cannot be measured here: {error:#}")),
        }
    }
    for _ in 0..rounds {
        for (name, target, measured) in &mut targets {
            if let Err(error) = measure(target.as_mut(), span, time, measured) {
                context.say(&format!("    {name}: {error:#}"));
            }
        }
    }
    let mut rows = Vec::new();
    for (name, _, measured) in &targets {
        let mut add = |metric: &str, unit: &str, samples: Samples| {
            rows.push(row("fsync/10-branches", name, metric, unit, &samples));
        };
        let micros = |seconds: &[f64]| seconds.iter().map(|seconds| seconds * 1e6).collect();
        add("production_p99_alone", "us", micros(&measured.alone));
        add("production_p99", "us", micros(&measured.crowded));
        add("production_p99_ratio_to_alone", "ratio", super::ratios(&measured.crowded, &measured.alone));
        add("branches_rate", "1/s", measured.rate.iter().copied().collect());
    }
    Ok(rows)
}

fn measure(target: &mut dyn Target, span: u64, time: Duration, measured: &mut Measured) -> Result<()> {
    let mut production = target.production()?;
    let (alone, ()) = beside(production.as_mut(), span, true, || {
        std::thread::sleep(time);
        Ok(())
    })?;
    let branches = target.branches()?;
    let (crowded, writes) = beside(production.as_mut(), span, true, || {
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ended = &ended;
            let write = |mut disk: Box<dyn Disk>| scope.spawn(move || write_until(disk.as_mut(), span, true, ended));
            let running: Vec<_> = branches.into_iter().map(write).collect();
            std::thread::sleep(time);
            ended.store(true, Ordering::Relaxed);
            let writes = running.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a client panicked"))));
            writes.map(|writes| Ok(writes?.len())).sum::<Result<usize>>()
        })
    })?;
    measured.alone.extend(durations(&alone).percentile(99.0));
    measured.crowded.extend(durations(&crowded).percentile(99.0));
    measured.rate.push(writes as f64 / time.as_secs_f64());
    Ok(())
}

fn names(round: usize) -> Vec<String> {
    (0..BRANCHES).map(|i| format!("branch{round}-{i}")).collect()
}

/// New branches for each round, so that their writes are the first to their pages.
struct Ours {
    served: Served,
    rounds: usize,
    _pool: PoolAt,
}

fn ours(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let pool = pool(context, "fsync", 4 * span + (2 << 30), (&[PRODUCTION], span))?;
    let served = Served::start(context, &pool, "fsync", &[])?;
    Ok(Box::new(Ours { served, rounds: 0, _pool: pool }))
}

impl Target for Ours {
    fn production(&mut self) -> Result<Box<dyn Disk>> {
        Ok(Box::new(self.served.nbd(PRODUCTION)?))
    }

    fn branches(&mut self) -> Result<Vec<Box<dyn Disk>>> {
        self.rounds += 1;
        let names = names(self.rounds);
        self.served.fork(PRODUCTION, &names)?;
        names.iter().map(|name| Ok(Box::new(self.served.nbd(name)?) as Box<dyn Disk>)).collect()
    }
}

/// Files on XFS and their clones, bypassing the page cache.
struct Xfs {
    files: Mounted,
    rounds: usize,
}

fn xfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "fsync-xfs", 4 * span + (2 << 30))?;
    file::plain(&files.dir().join(PRODUCTION), span)?;
    Ok(Box::new(Xfs { files, rounds: 0 }))
}

impl Target for Xfs {
    fn production(&mut self) -> Result<Box<dyn Disk>> {
        Ok(Box::new(Direct::open(&self.files.dir().join(PRODUCTION))?))
    }

    fn branches(&mut self) -> Result<Vec<Box<dyn Disk>>> {
        self.rounds += 1;
        let dir = self.files.dir();
        let names = names(self.rounds);
        names.iter().try_for_each(|name| reflink(&dir.join(PRODUCTION), &dir.join(name)).map(drop))?;
        rustix::fs::syncfs(File::open(dir)?)?;
        names.iter().map(|name| Ok(Box::new(Direct::open(&dir.join(name))?) as Box<dyn Disk>)).collect()
    }
}
