//! Checkpoints, verification, released space, and the policy of an origin.

use forkdisk::ErrorKind;

use crate::disk::LyingDevice;
use crate::driver::{Class, Life, Op, Operation, Outcome, Start, Violation, judge};
use crate::origins::ORIGIN;
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static CHECKPOINT: Operation<Origins> = Operation {
    name: "checkpoint",
    weight: |focus| match focus {
        Plain => 4,
        Strikes | Sweeps => 3,
    },
    launch: |run, _| checkpoint(run),
};

pub static CHECK: Operation<Origins> = Operation {
    name: "check",
    weight: |focus| match focus {
        Plain | Strikes | Sweeps => 1,
    },
    launch: |run, _| check(run),
};

pub static SETTLE: Operation<Origins> = Operation {
    name: "settle",
    weight: |focus| match focus {
        Sweeps => 2,
        Plain | Strikes => 1,
    },
    launch: |run, _| settle(run),
};

/// Changes how much is copied ahead, and what happens when the pool is full.
pub static SET: Operation<Origins> = Operation {
    name: "set",
    weight: |focus| match focus {
        Plain | Strikes => 2,
        Sweeps => 1,
    },
    launch: set,
};

pub fn checkpoint(run: &mut Run) -> Result<(), Violation> {
    upkeep(run, "checkpoint", |pool| async move { pool.checkpoint().await.into() })
}

pub fn settle(run: &mut Run) -> Result<(), Violation> {
    upkeep(run, "settle", |pool| async move { pool.wait_freed().await.into() })
}

fn check(run: &mut Run) -> Result<(), Violation> {
    upkeep(run, "check", |pool| async move {
        match pool.check().await {
            Ok(report) => Outcome { report: Some(report), ..Outcome::default() },
            Err(e) if e.kind() == ErrorKind::Busy => Outcome::default(),
            Err(e) => Err(e).into(),
        }
    })
}

pub fn upkeep<F: Future<Output = Outcome> + 'static>(
    run: &mut Run,
    what: &str,
    f: impl FnOnce(forkdisk::Pool<LyingDevice>) -> F,
) -> Result<(), Violation> {
    let start = Start::new(Class::Other("upkeep"), run.known.model.tick(), Vec::new(), what.into());
    let future = f(run.session.pool.clone());
    run.submit(start, future, |run, ended| match run.session.faults_hit() {
        0 => ended.outcome.report.iter().try_for_each(judge),
        // A check reports unreadable data as damage and leaks.
        _ => Ok(()),
    });
    Ok(())
}

fn set(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let (ahead, full) = run.setup.policy(op.draws[0]);
    upkeep(run, "set", |pool| async move { pool.set_origin(ORIGIN, ahead, full).await.into() })
}
