//! The rounds themselves, in any folder: writes, a clone, a removal, and what each took.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use forkdisk::device::Recording;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};
use rustix::fs::{Advice, fadvise};

use super::modes::Mode;
use crate::bare::children_cpu;
use crate::clock::{KernelThreads, process_cpu};
use crate::limits::{LIMIT, Limited as _};

const SEED: u64 = 5;
const PAGE: u64 = 4096;
const PIECE: usize = 1 << 20;
/// What is written.
const MARK: &[u8; 8] = b"DEADBEEF";

/// What is done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub mode: Mode,
    /// Bytes of the file.
    pub size: u64,
    /// Writes per round.
    pub writes: usize,
    pub rounds: usize,
    /// The kernel forgets the file before the writes of each round.
    pub cold: bool,
}

impl Plan {
    /// Room enough for two files that share nothing, as long as they become.
    pub fn pool_size(&self) -> u64 {
        let grown = if self.mode == Mode::IncrementalCoded { 4 << 30 } else { 0 };
        4 * self.size + grown + (512 << 20)
    }
}

/// What reached a device, and what is in use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Requests of all kinds.
    pub requests: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Pages of metadata read and written.
    pub map_pages: u64,
}

impl Counts {
    fn since(self, before: Counts) -> Counts {
        Counts {
            requests: self.requests - before.requests,
            bytes: self.bytes - before.bytes,
            map_pages: self.map_pages - before.map_pages,
        }
    }

    /// As far as it is more.
    fn less(self, other: Counts) -> Counts {
        Counts {
            requests: self.requests.saturating_sub(other.requests),
            bytes: self.bytes.saturating_sub(other.bytes),
            map_pages: self.map_pages.saturating_sub(other.map_pages),
        }
    }

    fn and(self, other: Counts) -> Counts {
        Counts {
            requests: self.requests + other.requests,
            bytes: self.bytes + other.bytes,
            map_pages: self.map_pages + other.map_pages,
        }
    }
}

/// Where the rounds take place.
pub trait Place {
    /// Where files are.
    fn dir(&self) -> &Path;

    /// Has everything that was put off done, deletions included: what was given up can be used again.
    fn settle(&self) -> Result<()>;

    /// The same where nothing was given up.
    fn write_out(&self) -> Result<()> {
        self.settle()
    }

    /// Waits until what has begun by itself has ended, as far as that is told.
    fn rest(&self) -> Result<()> {
        Ok(())
    }

    /// Whether what was synced may be in a log only, and has to be written to its place yet.
    fn has_log(&self) -> bool {
        false
    }

    /// Has that done.
    fn empty_log(&self) -> Result<()> {
        Ok(())
    }

    /// Everything that has reached the device since some beginning.
    fn counts(&self) -> Result<Counts>;

    /// What reading the first `len` bytes of the file `name` in order asks of the device, 1 MiB at a time.
    fn read(&self, name: &str, len: u64) -> Result<Recording>;

    /// Bytes of contents in use in all, and with whatever is kept about them; `None` where nobody tells.
    fn used(&self) -> Result<Option<(u64, u64)>>;
}

/// What a part of a round took, what it put off included.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    pub counts: Counts,
    /// Seconds of CPU: of the programs, and of the server where there is one.
    pub cpu: f64,
    /// The same and what threads of the kernel did, until they were at rest. Where it is told, and what was put off
    /// has been done.
    pub all_cpu: Option<f64>,
    /// Seconds until the program had ended.
    pub wall: f64,
    /// Seconds until everything was done.
    pub settled: f64,
}

/// One round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    pub write: Step,
    pub sync: Step,
    pub clone: Step,
    pub remove: Step,
    /// Distinct pages that were written.
    pub pages: u64,
    /// Of these, pages that the file held before: the kernel reads them to complete them.
    pub read: u64,
    /// Distinct pages that the file holds at the end.
    pub held: u64,
    /// Bytes of contents in use at the end, and with all metadata.
    pub used: Option<(u64, u64)>,
}

/// Does all of `plan`, on a new file, and removes what is left.
pub fn run(place: &impl Place, plan: &Plan) -> Result<Vec<Round>> {
    run_looking(place, plan, |_| Ok(()))
}

/// As [`run`], and what reading the file in order asks of the device when it is fresh and when all rounds are done.
pub fn run_reading(place: &impl Place, plan: &Plan) -> Result<(Vec<Round>, Vec<Recording>)> {
    let mut recordings = Vec::new();
    let look = |name: &str| {
        recordings.push(place.read(name, plan.size)?);
        place.settle()
    };
    let rounds = run_looking(place, plan, look)?;
    Ok((rounds, recordings))
}

/// As [`run`]; `look` is told the name of the file when it is fresh, and when all rounds are done.
pub fn run_looking(place: &impl Place, plan: &Plan, mut look: impl FnMut(&str) -> Result<()>) -> Result<Vec<Round>> {
    let mut rng = SmallRng::seed_from_u64(SEED);
    let (mut current, mut next) = (place.dir().join("a"), place.dir().join("b"));
    fill(&current, plan.size, &mut rng)?;
    place.settle()?;
    let name_of = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    look(&name_of(&current))?;
    let mut held: HashSet<u64> = (0..plan.size.div_ceil(PAGE)).collect();
    let mut rounds = Vec::with_capacity(plan.rounds);
    for _ in 0..plan.rounds {
        let offsets = plan.mode.offsets(&mut rng, plan.size, plan.writes);
        let pages: HashSet<u64> = offsets.iter().flat_map(|o| [o / PAGE, (o + 7) / PAGE]).collect();
        let read = pages.intersection(&held).count() as u64;
        held.extend(&pages);
        let mut round = Round { pages: pages.len() as u64, read, held: held.len() as u64, ..Round::default() };
        let clone = |round: &mut Round| -> Result<()> {
            round.clone = step(place, Rest::Written, || program("cp", &[&current, &next]))?;
            Ok(())
        };
        if plan.mode.clones_first() {
            clone(&mut round)?;
        }
        let target = if plan.mode.clones_first() { &next } else { &current };
        // Behind a clone it is a file that the kernel has not seen yet. The first has been written by it.
        if plan.cold || (rounds.is_empty() && !plan.mode.clones_first()) {
            forget(target)?;
        }
        round.write = step(place, Rest::Left, || write(target, &offsets))?;
        round.sync = step(place, Rest::GivenBack, || sync(place.dir(), target))?;
        if !plan.mode.clones_first() {
            clone(&mut round)?;
        }
        round.remove = step(place, Rest::GivenBack, || program("rm", &[&current]))?;
        round.used = place.used()?;
        rounds.push(round);
        std::mem::swap(&mut current, &mut next);
    }
    look(&name_of(&current))?;
    fs::remove_file(&current)?;
    place.settle()?;
    Ok(rounds)
}

/// What becomes of what a part of a round has put off.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// The next part is charged with it, except for what begins by itself.
    Left,
    /// All is written to its place.
    Written,
    /// And what was given up can be used again.
    GivenBack,
}

/// Does `work`, which returns the CPU time of other processes, and what it has put off.
fn step(place: &impl Place, rest: Rest, work: impl FnOnce() -> Result<f64>) -> Result<Step> {
    // Between two parts nothing goes uncounted.
    let before = place.counts()?;
    let kernel = (rest != Rest::Left).then(KernelThreads::at_rest).flatten();
    let (cpu, start) = (process_cpu(), Instant::now());
    let others = work()?;
    let wall = start.elapsed().as_secs_f64();
    match rest {
        Rest::Left => place.rest()?,
        Rest::Written => place.write_out()?,
        Rest::GivenBack => place.settle()?,
    }
    let settled = start.elapsed().as_secs_f64();
    let cpu = (process_cpu() - cpu).as_secs_f64() + others;
    let threads = kernel.and_then(|before| Some(KernelThreads::at_rest()?.since(&before)));
    let mut counts = place.counts()?.since(before);
    let mut all_cpu = None;
    if let Some(threads) = threads {
        let later = if place.has_log() { in_log(place)? } else { (Counts::default(), 0.0) };
        counts = counts.and(later.0);
        all_cpu = Some(cpu + threads.as_secs_f64() + later.1);
    }
    Ok(Step { counts, cpu, all_cpu, wall, settled })
}

/// What it takes to write to its place what a log holds: what reaches the device, and seconds of the kernel's threads.
/// To have that done takes something itself, which emptying an empty log shows.
fn in_log(place: &impl Place) -> Result<(Counts, f64)> {
    let empty = || -> Result<(Counts, f64)> {
        let (counts, threads) = (place.counts()?, KernelThreads::at_rest());
        place.empty_log()?;
        let seconds = threads.zip(KernelThreads::at_rest()).map_or(0.0, |(a, b)| b.since(&a).as_secs_f64());
        Ok((place.counts()?.since(counts), seconds))
    };
    let (full, idle) = (empty()?, empty()?);
    Ok((full.0.less(idle.0), (full.1 - idle.1).max(0.0)))
}

fn fill(path: &Path, size: u64, rng: &mut SmallRng) -> Result<()> {
    let mut file = File::create_new(path).with_context(|| path.display().to_string())?;
    let mut piece = vec![0; PIECE];
    let mut left = size;
    while left > 0 {
        rng.fill_bytes(&mut piece);
        let len = left.min(PIECE as u64) as usize;
        file.write_all(&piece[..len])?;
        left -= len as u64;
    }
    Ok(file.sync_all()?)
}

fn write(path: &Path, offsets: &[u64]) -> Result<f64> {
    let file = File::options().write(true).open(path)?;
    offsets.iter().try_for_each(|&offset| file.write_all_at(MARK, offset))?;
    Ok(0.0)
}

fn sync(dir: &Path, file: &Path) -> Result<f64> {
    File::open(file)?.sync_all()?;
    rustix::fs::syncfs(File::open(dir)?)?;
    Ok(0.0)
}

fn forget(path: &Path) -> Result<()> {
    Ok(fadvise(File::open(path)?, 0, None, Advice::DontNeed)?)
}

/// Runs a program to its end; its CPU time in seconds.
fn program(name: &str, paths: &[&Path]) -> Result<f64> {
    let before = children_cpu();
    let ended =
        Command::new(name).args(paths).stdin(Stdio::null()).status_within(LIMIT).with_context(|| name.to_string())?;
    ensure!(ended.success(), "{name} {paths:?} failed");
    Ok((children_cpu() - before).as_secs_f64())
}
