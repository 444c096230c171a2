//! Random histories of client operations, run against the engine and the model at once.

mod audit;
mod copying;
mod fault;
mod finish;
mod gather;
mod launch;
mod names;
mod op;
mod place;
mod pool_image;
mod quota;
mod recover;
mod run;
mod shadow;
mod small;
mod succession;
mod verb;
mod weights;

use std::fmt;

pub use op::{Kind, Op, Profile, Setup};
pub use pool_image::{Contents, PoolImage, page_of, read_all};
pub use recover::{
    Entrance, PATIENCE_STEPS, Recovered, Session, judge, lasting_options, new_memory, open_options, recover,
};
pub use run::{CrashPoint, Run, run_history};
pub use small::{Small, run_small};

/// A promise that was broken, and where.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The promise, by its number (or `panic`, `hang`, `contract`).
    pub promise: &'static str,
    /// The description of what happened.
    pub what: String,
    /// The step of the run at which power was cut beside it, and the mask; `None` if it happened
    /// in the run itself.
    pub cut: Option<(u64, u64)>,
}

impl Violation {
    /// Creates a violation in the run itself.
    pub fn new(promise: &'static str, what: impl Into<String>) -> Violation {
        Violation { promise, what: what.into(), cut: None }
    }

    pub(crate) fn at(mut self, step: u64, mask: u64) -> Violation {
        self.cut.get_or_insert((step, mask));
        self
    }
}

impl From<crate::model::Bad> for Violation {
    fn from(bad: crate::model::Bad) -> Violation {
        Violation::new(bad.promise, bad.what)
    }
}

impl From<crate::executor::Stuck> for Violation {
    fn from(stuck: crate::executor::Stuck) -> Violation {
        Violation::new("hang", stuck.to_string())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.promise, self.what)?;
        if let Some((step, mask)) = self.cut {
            write!(f, " (power cut at step {step}, mask {mask})")?;
        }
        Ok(())
    }
}

/// Statistics of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Crash images that the exploration produced.
    pub crash_states: u64,
    /// Number of different ones: each was recovered and verified.
    pub distinct: u64,
    /// Instants at which the power was cut or the process killed.
    pub cuts: u64,
    /// Device requests that were made to fail.
    pub faults: u64,
    /// Damaged images that were opened.
    pub flips: u64,
    /// Operations that were acknowledged or refused.
    pub operations: u64,
    /// Executor steps.
    pub steps: u64,
}

impl Stats {
    /// Adds another run's numbers.
    pub fn add(&mut self, other: &Stats) {
        self.crash_states += other.crash_states;
        self.distinct += other.distinct;
        self.cuts += other.cuts;
        self.faults += other.faults;
        self.flips += other.flips;
        self.operations += other.operations;
        self.steps += other.steps;
    }
}
