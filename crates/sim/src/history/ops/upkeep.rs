//! Checkpoints, verification, released space, and growth.

use crate::driver::{Class, Op, Operation, Outcome, Start, Violation, judge};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};

pub static CHECKPOINT: Operation<Volumes> = Operation {
    name: "checkpoint",
    weight: |profile| match profile {
        Ranges | Hosts => 6,
        Faults | Races | Gathering | Names => 4,
        Forks | Cuts | Blocks | Files | Large | Quotas | Bounds => 3,
        Mixed | Full | Copies | Heirs | Transactions | Folders | Lifetimes | Comparing => 2,
        Calm | Journal | Crowd => 1,
        _ => 0,
    },
    launch: |run, _| {
        checkpoint(run);
        Ok(())
    },
};

pub static CHECK: Operation<Volumes> = Operation {
    name: "check",
    weight: |profile| match profile {
        Ranges => 2,
        Mixed | Forks | Blocks | Files | Transactions | Folders | Lifetimes | Comparing => 1,
        _ => 0,
    },
    launch: |run, _| {
        check(run);
        Ok(())
    },
};

pub static SETTLE: Operation<Volumes> = Operation {
    name: "settle",
    weight: |profile| match profile {
        Full | Ranges | Gathering | Hosts => 2,
        Mixed | Forks | Faults | Files | Large | Heirs | Names | Transactions | Folders | Lifetimes | Comparing => 1,
        _ => 0,
    },
    launch: |run, _| {
        settle(run);
        Ok(())
    },
};

pub static GROW: Operation<Volumes> = Operation {
    name: "grow",
    weight: |profile| match profile {
        Full | Faults => 2,
        Mixed | Cuts | Hosts => 1,
        _ => 0,
    },
    launch: grow,
};

pub fn checkpoint(run: &mut Run) {
    let pool = run.session.pool.clone();
    run.submit_upkeep("checkpoint", Vec::new(), "checkpoint".into(), async move { pool.checkpoint().await.into() });
}

pub fn settle(run: &mut Run) {
    let pool = run.session.pool.clone();
    run.submit_upkeep("settle", Vec::new(), "settle".into(), async move { pool.wait_freed().await.into() });
}

pub fn check(run: &mut Run) {
    let pool = run.session.pool.clone();
    let future = async move {
        match pool.check().await {
            Ok(report) => Outcome { report: Some(report), ..Outcome::default() },
            Err(e) => Err(e).into(),
        }
    };
    let start = Start::new(Class::Other("check"), run.known.model.tick(), Vec::new(), "check".into());
    run.submit(start, future, |_, ended| ended.outcome.report.iter().try_for_each(judge));
}

pub fn grow(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if run.inflight.values().any(|o| o.class.is("grow")) {
        return Ok(());
    }
    grow_to(run, (1 + op.draws[0] % 6) << 20)
}

/// Lengthens the pool, unless it has grown enough.
pub fn grow_to(run: &mut Run, more: u64) -> Result<(), Violation> {
    let size = run.session.pool.info().size + more;
    if size > run.setup.pool * 3 {
        return Ok(());
    }
    let (pool, text) = (run.session.pool.clone(), format!("grow the pool to {size}"));
    run.submit_upkeep("grow", Vec::new(), text, async move { pool.grow(size).await.into() });
    Ok(())
}
