//! Rollbacks.

use forkdisk::ErrorKind;

use super::snapshot::start_control;
use super::target::{any_of, is_quiet, is_there, rolling, wait_for_controls};
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::model::Control;
use crate::origins::ORIGIN;
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

/// The origin gets the contents of one of its snapshots.
pub static ROLLBACK: Operation<Origins> = Operation {
    name: "rollback",
    weight: |focus| match focus {
        Strikes => 10,
        Plain => 4,
        Sweeps => 3,
    },
    launch: roll_back,
};

/// Waits until a rollback has restored everything.
pub static ROLLED_BACK: Operation<Origins> = Operation {
    name: "rolled-back",
    weight: |focus| match focus {
        Strikes => 2,
        Plain | Sweeps => 1,
    },
    launch: |run, _| rolled_back(run),
};

/// Starts a rollback: everything else waits for the acknowledgement, but not for the background work.
pub fn roll_back(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if !wait_for_controls(run)? || rolling(run).is_some() {
        return Ok(());
    }
    let origin = run.known.origin;
    let Some(key) = any_of(run, op.draws[0], |_, v| v.of == Some(origin)) else { return Ok(()) };
    run.wait(move |o| o.keys.contains(&origin) || o.keys.contains(&key))?;
    if !is_there(run, key)? {
        return Ok(());
    }
    let name = run.known.model.name(key);
    let Some((_, snapshot)) = name.split_once('@').map(|(a, b)| (a.to_string(), b.to_string())) else {
        return Ok(());
    };
    let (pool, text) = (run.session.pool.clone(), format!("roll back to {name}"));
    start_control(run, Control::Rollback(origin, key), vec![origin, key], text, async move {
        pool.rollback(ORIGIN, &snapshot).await.into()
    });
    wait_for_controls(run).map(drop)
}

/// Waits for the end of a rollback, unless there is no space for what it overwrites, or requests fail.
pub fn rolled_back(run: &mut Run) -> Result<(), Violation> {
    if !is_quiet(run)? || rolling(run).is_none() {
        return Ok(());
    }
    run.say(|| "waits until the rollback has ended".into());
    let pool = run.session.pool.clone();
    match run.session.exec.run(PATIENCE_STEPS, async move { pool.wait_rollback(ORIGIN, |_, _| true).await })? {
        Err(e) if e.kind() != ErrorKind::NoSpace => Err(Violation::new("P6", format!("a rollback does not end: {e}"))),
        _ => Ok(()),
    }
}
