//! The rounds themselves, in any folder: writes, a clone, a removal, and the cost of each.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use forkdisk::testing::Recording;
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
/// Data of each write.
const MARK: &[u8; 8] = b"DEADBEEF";

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub mode: Mode,
    /// Bytes of the file.
    pub size: u64,
    /// Writes per round.
    pub writes: usize,
    pub rounds: usize,
    /// Whether the file is dropped from the kernel's cache before the writes of each round.
    pub cold: bool,
}

impl Plan {
    /// Returns a size with room for two files that share nothing, at their final length.
    pub fn pool_size(&self) -> u64 {
        let grown = if self.mode == Mode::IncrementalCoded { 4 << 30 } else { 0 };
        4 * self.size + grown + (512 << 20)
    }
}

/// Counters of a device.
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

    /// Returns the difference, at least 0.
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

/// File system on which the rounds run.
pub trait Place {
    /// Returns the folder of the files.
    fn dir(&self) -> &Path;

    /// Completes all deferred work, including deletions: freed space is available afterwards.
    fn settle(&self) -> Result<()>;

    /// As [`settle`](Self::settle), if nothing was freed.
    fn write_out(&self) -> Result<()> {
        self.settle()
    }

    /// Waits until background work has ended, as far as that is known.
    fn rest(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether synced data may be only in a log and must still be written to its place.
    fn has_log(&self) -> bool {
        false
    }

    /// Writes the contents of the log to their place.
    fn empty_log(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the device's counters since a fixed start.
    fn counts(&self) -> Result<Counts>;

    /// Returns the device's requests for reading the first `len` bytes of the file `name` in order, 1 MiB at a time.
    fn read(&self, name: &str, len: u64) -> Result<Recording>;

    /// Returns the bytes of contents in use, and the same with all metadata; `None` if unknown.
    fn used(&self) -> Result<Option<(u64, u64)>>;
}

/// Cost of a part of a round, including its deferred work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    pub counts: Counts,
    /// Seconds of CPU: of the programs, and of the server if there is one.
    pub cpu: f64,
    /// The same plus threads of the kernel, until they were at rest. Set if known and if deferred
    /// work was completed.
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
    /// Distinct pages written.
    pub pages: u64,
    /// Of these, pages that the file had before: the kernel reads them to complete them.
    pub read: u64,
    /// Distinct pages of the file at the end.
    pub held: u64,
    /// Bytes of contents in use at the end, and the same with all metadata.
    pub used: Option<(u64, u64)>,
}

/// Runs all of `plan` on a new file, and removes what is left.
pub fn run(place: &impl Place, plan: &Plan) -> Result<Vec<Round>> {
    run_looking(place, plan, |_| Ok(()))
}

/// As [`run`], and records reading the file in order when it is new and after all rounds.
pub fn run_reading(place: &impl Place, plan: &Plan) -> Result<(Vec<Round>, Vec<Recording>)> {
    let mut recordings = Vec::new();
    let look = |name: &str| {
        recordings.push(place.read(name, plan.size)?);
        place.settle()
    };
    let rounds = run_looking(place, plan, look)?;
    Ok((rounds, recordings))
}

/// As [`run`]; calls `look` with the name of the file when it is new, and after all rounds.
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
        // After a clone the file is new to the kernel. The first one is in its cache, since it was written.
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

/// Handling of the deferred work of a part of a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// It is charged to the next part, except background work.
    Left,
    /// All is written to its place.
    Written,
    /// As `Written`, and freed space is available again.
    GivenBack,
}

/// Measures `work`, which returns the CPU time of other processes, and its deferred work.
fn step(place: &impl Place, rest: Rest, work: impl FnOnce() -> Result<f64>) -> Result<Step> {
    // Nothing between two parts is left out of the counts.
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

/// Measures writing the contents of a log to their place: requests to the device, and seconds of
/// the kernel's threads. Subtracts the cost of emptying an empty log.
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

/// Runs a program to its end; returns its CPU time in seconds.
fn program(name: &str, paths: &[&Path]) -> Result<f64> {
    let before = children_cpu();
    let ended =
        Command::new(name).args(paths).stdin(Stdio::null()).status_within(LIMIT).with_context(|| name.to_string())?;
    ensure!(ended.success(), "{name} {paths:?} failed");
    Ok((children_cpu() - before).as_secs_f64())
}
