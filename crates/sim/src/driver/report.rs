//! What a run reports.

use std::fmt;

use forkdisk::CheckReport;

/// Limit of steps of a single call.
pub const PATIENCE_STEPS: u64 = 3_000_000;

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

    /// Adds the place of the power cut, unless there is one.
    pub fn at(mut self, step: u64, mask: u64) -> Violation {
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

/// A single side crash, for replay: at this step, under this mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashPoint {
    /// Executor step of the run.
    pub step: u64,
    /// Number of the mask; `None`: the masks that the run would try itself.
    pub mask: Option<u64>,
}

/// Turns damage and leaks into a violation.
pub fn judge(report: &CheckReport) -> Result<(), Violation> {
    if report.damage.is_empty() && report.leaked == 0 {
        return Ok(());
    }
    let damage: Vec<&str> = report.damage.iter().take(4).map(String::as_str).collect();
    let what = format!(
        "check found {} faults ({}) and {} leaked pages",
        report.damage.len(),
        damage.join("; "),
        report.leaked
    );
    Err(Violation::new("P6", what))
}
