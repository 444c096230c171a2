//! The end of a life of the engine: by a close, a power cut or a kill.

use crate::disk::Crash;
use crate::driver::{Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};

/// Closes cleanly and opens again.
pub static REOPEN: Operation<Volumes> = Operation {
    name: "reopen",
    weight: |profile| match profile {
        Ranges | Hosts | Names | Quotas | Bounds | Transactions | Folders | Lifetimes | Comparing => 2,
        Mixed | Forks | Full | Cuts | Blocks | Calm | Journal | Crowd | Files | Large | Copies | Gathering | Heirs => 1,
        _ => 0,
    },
    launch: |run, _| reopen(run),
};

/// Cuts the power and continues with what is left.
pub static CUT: Operation<Volumes> = Operation {
    name: "cut",
    weight: |profile| match profile {
        Cuts => 5,
        Transactions | Folders | Lifetimes | Comparing => 3,
        Files | Ranges | Hosts | Names | Quotas | Bounds => 2,
        Mixed | Forks | Full | Faults | Races | Blocks | Journal | Crowd | Large | Copies | Gathering | Heirs => 1,
        _ => 0,
    },
    launch: |run, op| run.cut(Crash::Power, op.draws[0]),
};

/// Kills the process and continues.
pub static KILL: Operation<Volumes> = Operation {
    name: "kill",
    weight: |profile| match profile {
        Cuts | Transactions | Folders | Lifetimes | Comparing => 3,
        Names => 2,
        Mixed | Journal | Files | Ranges | Hosts => 1,
        _ => 0,
    },
    launch: |run, op| run.cut(Crash::Kill, op.draws[0]),
};

/// Closes cleanly and opens again: everything is there, flushed or not.
pub fn reopen(run: &mut Run) -> Result<(), Violation> {
    run.drain()?;
    if run.trouble.armed.is_some() || run.trouble.patience.is_some() || run.session.disk.faults_hit() > 0 {
        return Ok(());
    }
    run.say(|| "close and open again".into());
    let pool = run.session.pool.clone();
    let closed = run.session.exec.run(PATIENCE_STEPS, async move { pool.close().await })?;
    closed.map_err(|e| Violation::new("P6", format!("the pool cannot be closed: {e}")))?;
    let start = run.known.model.tick();
    run.known.model.flushed(None, start);
    let mask = run.rng.next();
    run.cut(Crash::Power, mask)
}
