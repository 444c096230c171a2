//! The loop of programs that search: branch, change, evaluate. Wide: all branches from one state. Deep: each from the
//! one before. The state is a file on a mount; a query reads a fixed set of its pages.

use std::fs::File;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use rustix::fs::{Advice, fadvise};

use crate::cases::file;
use crate::cases::pools::{MountedPool, PoolAt};
use crate::load::random;
use crate::mounted::Mounted;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::bed::{Disk, clone_file, file_system, open, pool, reflink};
use super::{OURS, PAGE, percentiles, row};

const STATE: &str = "state";
/// Pages that a query reads, and that a change writes.
const READS: usize = 64;
const WRITES: usize = 8;
/// Queries that are timed together.
const QUERIES: usize = 10;

struct Plan {
    span: u64,
    branches: usize,
    rounds: usize,
}

/// Files that are branched.
trait Target {
    fn path(&self, name: &str) -> PathBuf;

    fn branch(&self, from: &Path, to: &Path) -> Result<File>;

    /// Returns how many branches it makes of those that are planned.
    fn most(&self, planned: usize) -> usize {
        planned
    }
}

type Make = fn(&Context<'_>, &Plan) -> Result<Box<dyn Target>>;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let plan = Plan {
        span: context.scale.pick(32 << 20, 64 << 20, 256 << 20),
        branches: context.scale.pick(300, 1000, 1000),
        rounds: context.scale.pick(11, 21, 41),
    };
    let all: [(&str, Make); 2] = [(OURS, ours), ("xfs", xfs)];
    let mut rows = Vec::new();
    for (name, make) in all.into_iter().filter(|(name, _)| context.options.peers || *name == OURS) {
        context.say(&format!("  {name}"));
        match make(context, &plan).and_then(|target| measure(target.as_ref(), &plan, name)) {
            Ok(more) => rows.extend(more),
            Err(error) => context.say(&format!("    {name} cannot be measured here: {error:#}")),
        }
    }
    Ok(rows)
}

fn measure(target: &dyn Target, plan: &Plan, name: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut deepest = String::new();
    for shape in ["wide", "deep"] {
        let mut seconds = Samples::default();
        let mut last = STATE.to_string();
        for index in 0..target.most(plan.branches) {
            let new = format!("{shape}{index}");
            let start = Instant::now();
            let mut file = target.branch(&target.path(&last), &target.path(&new))?;
            query(&mut file, plan)?;
            seconds.push(start.elapsed().as_secs_f64());
            let places = random(plan.span, PAGE, WRITES, index as u64);
            places.iter().try_for_each(|&place| Disk::write(&mut file, place, &[2; PAGE]))?;
            if shape == "deep" {
                last = new;
            }
        }
        rows.extend(percentiles(&format!("branches/{shape}"), name, "create_and_query", &seconds));
        deepest = last;
    }
    rustix::fs::syncfs(File::open(target.path(""))?)?;
    let mut ratio = Samples::default();
    for round in 0..plan.rounds {
        let mut both = ["deep0", &deepest];
        // In turns, since the first one finds the processor in another state.
        if round % 2 == 1 {
            both.reverse();
        }
        let of = |path: &str| timed_query(&target.path(path), plan);
        let (first, second) = (of(both[0])?, of(both[1])?);
        ratio.push(if round % 2 == 1 { first / second } else { second / first });
    }
    rows.push(row("branches/deep", name, "query_ratio_to_depth_1", "ratio", &ratio));
    Ok(rows)
}

/// Returns the seconds of some queries that find nothing in the page cache.
fn timed_query(path: &Path, plan: &Plan) -> Result<f64> {
    let mut file = open(path)?;
    let mut seconds = 0.0;
    for _ in 0..QUERIES {
        fadvise(&file, 0, NonZeroU64::new(plan.span), Advice::DontNeed)?;
        let start = Instant::now();
        query(&mut file, plan)?;
        seconds += start.elapsed().as_secs_f64();
    }
    Ok(seconds)
}

/// Reads the same pages at every call.
fn query(file: &mut File, plan: &Plan) -> Result<()> {
    // Otherwise the kernel reads ahead, and reads the more the luckier it guesses.
    fadvise(&*file, 0, None, Advice::Random)?;
    let mut page = [0; PAGE];
    random(plan.span, PAGE, READS, 77).iter().try_for_each(|&place| Disk::read(file, place, &mut page))
}

/// A pool that is mounted; a branch is what `cp` makes.
struct Ours {
    mounted: MountedPool,
    _pool: PoolAt,
}

fn ours(context: &Context<'_>, plan: &Plan) -> Result<Box<dyn Target>> {
    let pool = pool(context, "branches", 2 * plan.span + (2 << 30), (&[STATE], plan.span))?;
    let mounted = MountedPool::new(context, pool.path(), ("branches", "auto"), STATE)?;
    Ok(Box::new(Ours { mounted, _pool: pool }))
}

impl Target for Ours {
    fn path(&self, name: &str) -> PathBuf {
        self.mounted.file(name)
    }

    fn branch(&self, from: &Path, to: &Path) -> Result<File> {
        clone_file(from, to)
    }
}

struct Xfs(Mounted);

fn xfs(context: &Context<'_>, plan: &Plan) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "branches-xfs", 2 * plan.span + (2 << 30))?;
    file::plain(&files.dir().join(STATE), plan.span)?;
    Ok(Box::new(Xfs(files)))
}

impl Target for Xfs {
    /// The time of a reflink follows the number of extents.
    fn most(&self, planned: usize) -> usize {
        planned / 5
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.dir().join(name)
    }

    fn branch(&self, from: &Path, to: &Path) -> Result<File> {
        reflink(from, to)
    }
}
