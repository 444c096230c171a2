//! The cases of each benchmark, and how they are run.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use tempfile::TempDir;

use crate::cases::{self, w5};
use crate::ending::{Thing, Undoable};
use crate::goals::{Goal, Goals};
use crate::peers::{Guest, Lab, Measured};
use crate::rows::Row;

/// Duration of a benchmark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// A minute or two: enough to detect a large regression.
    #[default]
    Quick,
    /// Less than a quarter of an hour.
    Default,
    /// As long as it takes for a narrow spread.
    Full,
}

impl Scale {
    /// Selects one of three values.
    pub fn pick<T>(self, quick: T, default: T, full: T) -> T {
        match self {
            Scale::Quick => quick,
            Scale::Default => default,
            Scale::Full => full,
        }
    }
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder for files that are timed on a real device. The files are removed afterwards.
    pub dir: PathBuf,
    /// Duration of the run.
    pub scale: Scale,
    /// One case only.
    pub only: Option<String>,
    /// Whether the peers are measured as well.
    pub peers: bool,
    /// Number of rounds, for benchmarks with rounds; `None`: the default.
    pub rounds: Option<usize>,
    /// Bytes of the file for such benchmarks; `None`: the default.
    pub size: Option<u64>,
    /// The `forkdisk` program, for cases that need a separate process.
    pub program: PathBuf,
}

/// Environment of a case: the options, and private folders that are removed when it has ended.
pub(crate) struct Context<'a> {
    pub options: &'a Options,
    progress: &'a dyn Fn(&str),
    pub scale: Scale,
    // Declared last, so that they are unregistered after the folders are removed.
    disk: TempDir,
    ram: TempDir,
    _undoable: [Undoable; 2],
}

/// Folder for files in memory.
const RAM: &str = "/dev/shm";

impl<'a> Context<'a> {
    fn new(options: &'a Options, progress: &'a dyn Fn(&str)) -> Result<Context<'a>> {
        let make = |at: &Path| {
            tempfile::Builder::new()
                .prefix("forkdisk-bench-")
                .tempdir_in(at)
                .with_context(|| format!("{}: cannot make a folder for files here", at.display()))
        };
        let (disk, ram) = (make(&options.dir)?, make(Path::new(RAM))?);
        let undoable = [&disk, &ram].map(|dir| Undoable::new(Thing::Folder(dir.path().to_path_buf())));
        Ok(Context { options, progress, scale: options.scale, disk, ram, _undoable: undoable })
    }

    /// Reports the current activity.
    pub fn say(&self, text: &str) {
        (self.progress)(text);
    }

    /// Returns a path on the timed device.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// Unpacks the laboratory for guests. The error names what this machine lacks for it.
    pub fn lab(&self) -> Result<Lab> {
        Lab::unpack(&self.disk("lab")).context("the kernel's own targets cannot be measured here")
    }

    /// Runs a scenario in a guest with `disks` disks.
    pub fn guest(
        &self,
        lab: &Lab,
        scenario: &str,
        variables: Vec<(&'static str, String)>,
        disks: usize,
        limit: Duration,
    ) -> Result<Vec<Measured>> {
        let guest = Guest { lab, program: &self.options.program, scenario, variables, disks, limit };
        // Not in memory: a guest mounts its own `/dev`, which hides `/dev/shm`.
        guest.run(self.disk.path(), self.progress)
    }

    /// Returns a path in memory.
    pub fn ram(&self, name: &str) -> PathBuf {
        self.ram.path().join(name)
    }
}

type Case = fn(&Context<'_>) -> Result<Vec<Row>>;

/// A benchmark: cases in order of reliability, exact counts first, wall-clock time last.
pub struct Benchmark {
    name: &'static str,
    cases: &'static [(&'static str, Case)],
    /// Cases about peers only.
    peers: &'static [(&'static str, Case)],
    /// Parts of cases that run in a separate process.
    inside: &'static [(&'static str, Case)],
}

impl Benchmark {
    /// The engine alone.
    pub const ENGINE: Benchmark = Benchmark {
        name: "engine",
        cases: &[
            ("counts", cases::counts::run),
            ("modelled", cases::modelled::run),
            ("chunks", cases::chunks::run),
            ("snapshots", cases::snapshots::run),
            ("reopen", cases::reopen::run),
            ("memory", cases::memory::run),
            ("cpu", cases::cpu::run),
            ("nbd", cases::nbd::run),
            ("wall", cases::wall::run),
        ],
        peers: &[],
        inside: &[(cases::memory::INSIDE, cases::memory::run_inside)],
    };

    /// Sequential writes under a snapshot, through a file system: on an attached volume, and in a guest.
    pub const W1: Benchmark = Benchmark {
        name: "w1",
        cases: &[("attached", cases::w1::attached::run)],
        peers: &[("pool", cases::w1::ext4::run)],
        inside: &[],
    };

    /// Breaking sharing: large blocks, random pages, many snapshots.
    pub const W2: Benchmark = Benchmark {
        name: "w2",
        cases: &[
            ("split", cases::w2::split::run),
            ("copy", cases::w2::copy::run),
            ("random", cases::w2::random::run),
            ("snapshots", cases::w2::snapshots::run),
            ("instructions", cases::w2::instructions::run),
            ("wall", cases::w2::wall::run),
        ],
        peers: &[("dm-thin-random", cases::w2::thin::random)],
        inside: &[(cases::w2::instructions::INSIDE, cases::w2::instructions::run_inside)],
    };

    /// The same on an origin protected in place.
    pub const W1_ORIGIN: Benchmark = Benchmark {
        name: "w1",
        cases: &[
            ("origin-8k", cases::w1::origin::small),
            ("origin-64k", cases::w1::origin::medium),
            ("origin-512k", cases::w1::origin::large),
        ],
        peers: &[],
        inside: &[],
    };

    /// First writes in order, on a plain device and on RAID5.
    pub const W3: Benchmark = Benchmark {
        name: "w3",
        cases: &[("thin", cases::w3::thin::run), ("raid5", cases::w3::raid5::run)],
        peers: &[("dd", cases::w3::peers::first), ("md-raid5", cases::w3::peers::md)],
        inside: &[],
    };

    /// The NBD server, next to other servers.
    pub const SERVE: Benchmark = Benchmark {
        name: "serve",
        cases: &[
            ("cpu", cases::serve::cpu::run),
            ("idle", cases::serve::idle::run),
            ("sequential", cases::serve::sequential::run),
        ],
        peers: &[],
        inside: &[],
    };

    /// Many snapshots of an origin in place.
    pub const W4: Benchmark = Benchmark {
        name: "w4",
        cases: &[
            ("chained", cases::w4::many::chained),
            ("independent", cases::w4::many::independent),
            ("random", cases::w4::random::run),
            ("read-of-1-of-1000", cases::w4::read::run),
            ("delete", cases::w4::delete::run),
        ],
        peers: &[("dm-snapshot", cases::w4::peers::run)],
        inside: &[],
    };

    /// Clone, modify, delete, repeat, through the files of a mounted pool.
    pub const W5: Benchmark = Benchmark {
        name: "w5",
        cases: &[
            ("random-coded", cases::w5::random_coded),
            ("random-described", cases::w5::random_described),
            ("incremental-coded", cases::w5::incremental_coded),
            ("incremental-described", cases::w5::incremental_described),
            ("fixed-described", cases::w5::fixed_described),
            ("size", cases::w5::size::run_all),
            ("read-after-20-rounds", cases::w5::read::run),
            ("read-after-gathering", cases::w5::read::run_gathered),
            ("fuse-1m-seq-direct", cases::w5::fuse::sequential_direct),
            ("fuse-1m-seq-cached", cases::w5::fuse::sequential_cached),
            ("fuse-4k-random-direct", cases::w5::fuse::random_direct),
            ("fuse-4k-random-cached", cases::w5::fuse::random_cached),
        ],
        peers: &[],
        inside: &[],
    };

    /// Every door to a volume, next to the same doors of other programs.
    pub const DOORS: Benchmark = Benchmark {
        name: "doors",
        cases: &[("idle", cases::doors::run_idle), ("cpu", cases::doors::run_cpu), ("clock", cases::doors::run_clock)],
        peers: &[],
        inside: &[],
    };

    /// Branches and fleets of volumes, next to qcow2 overlays and the clones of XFS and btrfs.
    pub const FLEET: Benchmark = Benchmark {
        name: "fleet",
        cases: &[
            ("storm", cases::fleet::run_storm),
            ("open-loop", cases::fleet::run_open_loop),
            ("fork", cases::fleet::run_fork),
            ("reset", cases::fleet::run_reset),
            ("depth", cases::fleet::run_depth),
            ("instructions", cases::fleet::instructions::run),
            ("fsync", cases::fleet::run_fsync),
            ("delete", cases::fleet::run_delete),
            ("branches", cases::fleet::run_branches),
            ("pgbench", cases::fleet::run_pgbench),
        ],
        peers: &[],
        inside: &[(cases::fleet::instructions::INSIDE, cases::fleet::instructions::run_inside)],
    };

    /// Returns the name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn names(&self, peers: bool) -> Vec<&'static str> {
        let of_peers = self.peers.iter().filter(|_| peers);
        self.cases.iter().chain(of_peers).map(|&(name, _)| name).collect()
    }

    fn case(&self, name: &str) -> Option<Case> {
        self.cases.iter().chain(self.peers).chain(self.inside).find(|(of, _)| *of == name).map(|&(_, case)| case)
    }

    /// Runs the benchmark; `progress` is called with the current activity. A failed case is
    /// reported there, and its required rows are missing in the result.
    pub fn run(&self, options: &Options, progress: &dyn Fn(&str)) -> Result<Vec<Row>> {
        let names = match &options.only {
            None => self.names(options.peers),
            Some(only) if self.case(only).is_some() => vec![only.as_str()],
            Some(only) => bail!("there is no case {only:?}; there are {}", self.names(true).join(", ")),
        };
        // Fails first if a folder cannot be created.
        Context::new(options, progress)?;
        let mut rows = Vec::new();
        for (i, name) in names.iter().enumerate() {
            let start = Instant::now();
            progress(&format!("[{}/{}] {name} ...", i + 1, names.len()));
            let run = self.case(name).context("a case that is listed")?;
            match Context::new(options, progress).and_then(|context| run(&context)) {
                Ok(more) => rows.extend(more),
                Err(error) => progress(&format!("{name} failed: {error:#}")),
            }
            progress(&format!("[{}/{}] {name}: {:.1} s", i + 1, names.len(), start.elapsed().as_secs_f64()));
        }
        let wanted = |goal: &Goal| {
            let is_due = w5::is_in_long_run(&goal.case, options.rounds).unwrap_or(goal.from <= options.scale);
            let here = (options.peers || !goal.peers) && is_due;
            here && names.iter().any(|name| belongs(&goal.case, name))
        };
        Goals::built_in()?.judge(&mut rows, self.name, wanted);
        Ok(rows)
    }
}

/// Returns whether the row's case, such as `counts/first-4k-random`, is part of the case `name`.
fn belongs(row: &str, name: &str) -> bool {
    row.split('/').next() == Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_goal_belongs_to_a_case() {
        let goals = Goals::built_in().unwrap();
        use Benchmark as B;
        let all = [B::ENGINE, B::SERVE, B::W1, B::W1_ORIGIN, B::W2, B::W3, B::W4, B::W5, B::DOORS, B::FLEET];
        for benchmark in all {
            let of_origin = |names: &[&str]| names.iter().any(|name| name.starts_with("origin-"));
            let origin = of_origin(&benchmark.names(true));
            let other = |g: &&Goal| of_origin(&[&g.case]) != origin;
            let has = |g: &&Goal| g.workload == benchmark.name && !other(g);
            for goal in goals.all().iter().filter(has) {
                assert!(benchmark.names(true).iter().any(|name| belongs(&goal.case, name)), "{}", goal.case);
            }
            assert!(benchmark.names(true).iter().all(|name| benchmark.case(name).is_some()));
        }
    }
}
