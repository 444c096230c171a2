//! Which cases a benchmark consists of, and how they are run.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::cases;
use crate::goals::Goals;
use crate::rows::Row;

/// How long a benchmark may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scale {
    /// A minute or two: enough to see whether something is badly off.
    Quick,
    /// Below a quarter of an hour.
    Default,
    /// As long as it takes for a narrow spread.
    Full,
}

impl Scale {
    /// One of three figures.
    pub fn pick<T>(self, quick: T, default: T, full: T) -> T {
        match self {
            Scale::Quick => quick,
            Scale::Default => default,
            Scale::Full => full,
        }
    }
}

/// How a benchmark is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where files are made for what is timed on a real device. They are removed afterwards.
    pub dir: PathBuf,
    /// How long it may take.
    pub scale: Scale,
    /// One case only.
    pub only: Option<String>,
    /// The `forkdisk` program: some cases need a process of their own.
    pub program: PathBuf,
}

/// What a case gets: the options, and folders of its own that are removed when it has ended.
pub(crate) struct Context<'a> {
    pub options: &'a Options,
    pub scale: Scale,
    disk: TempDir,
    ram: TempDir,
}

/// Where files live in memory.
const RAM: &str = "/dev/shm";

impl Context<'_> {
    fn new(options: &Options) -> Result<Context<'_>> {
        let make = |at: &Path| {
            tempfile::Builder::new()
                .prefix("forkdisk-bench-")
                .tempdir_in(at)
                .with_context(|| format!("{}: cannot make a folder for files here", at.display()))
        };
        Ok(Context { options, scale: options.scale, disk: make(&options.dir)?, ram: make(Path::new(RAM))? })
    }

    /// A path on the device that is timed.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// A path in memory.
    pub fn ram(&self, name: &str) -> PathBuf {
        self.ram.path().join(name)
    }
}

type Case = fn(&Context<'_>) -> Result<Vec<Row>>;

/// The cases of `bench engine`, in order of trust: exact counts first, wall-clock time last.
pub const ENGINE_CASES: [&str; 9] =
    ["counts", "modelled", "chunks", "snapshots", "reopen", "memory", "cpu", "nbd", "wall"];

fn case(name: &str) -> Option<Case> {
    Some(match name {
        "counts" => cases::counts::run,
        "modelled" => cases::modelled::run,
        "chunks" => cases::chunks::run,
        "snapshots" => cases::snapshots::run,
        "reopen" => cases::reopen::run,
        "memory" => cases::memory::run,
        // The part of `memory` that has a process to itself.
        cases::memory::INSIDE => cases::memory::run_inside,
        "cpu" => cases::cpu::run,
        "nbd" => cases::nbd::run,
        "wall" => cases::wall::run,
        _ => return None,
    })
}

/// Runs `bench engine`; `progress` is told what is being done. A case that fails says so there, and
/// its required rows are missing in the result.
pub fn engine(options: &Options, progress: &dyn Fn(&str)) -> Result<Vec<Row>> {
    let names = match &options.only {
        None => ENGINE_CASES.to_vec(),
        Some(only) if case(only).is_some() => vec![only.as_str()],
        Some(only) => bail!("there is no case {only:?}; there are {}", ENGINE_CASES.join(", ")),
    };
    // Says before anything else when a folder cannot be had.
    Context::new(options)?;
    let mut rows = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let start = Instant::now();
        progress(&format!("[{}/{}] {name} ...", i + 1, names.len()));
        let run = case(name).context("a case that is listed")?;
        match Context::new(options).and_then(|context| run(&context)) {
            Ok(more) => rows.extend(more),
            Err(error) => progress(&format!("{name} failed: {error:#}")),
        }
        progress(&format!("[{}/{}] {name}: {:.1} s", i + 1, names.len(), start.elapsed().as_secs_f64()));
    }
    Goals::built_in()?.judge(&mut rows, "engine", |of| names.iter().any(|name| belongs(of, name)));
    Ok(rows)
}

/// Whether the row's case, such as `counts/first-4k-random`, is part of the case `name`.
fn belongs(row: &str, name: &str) -> bool {
    row.split('/').next() == Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_goal_of_the_engine_belongs_to_a_case() {
        let goals = Goals::built_in().unwrap();
        for goal in goals.all().iter().filter(|g| g.workload == "engine") {
            assert!(ENGINE_CASES.iter().any(|name| belongs(&goal.case, name)), "{}", goal.case);
        }
        assert!(ENGINE_CASES.iter().all(|name| case(name).is_some()));
    }
}
