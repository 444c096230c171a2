//! Deletions.

use super::snapshot::start_control;
use super::target::{any_of, rolling, wait_for_controls};
use crate::disk::Crash;
use crate::driver::{Op, Operation, Violation};
use crate::model::{Control, Volume};
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static DELETE: Operation<Origins> = Operation {
    name: "delete",
    weight: |focus| match focus {
        Plain => 14,
        Strikes => 8,
        Sweeps => 6,
    },
    launch: |run, op| delete(run, op, Victim::Any).map(drop),
};

/// Deletes the oldest of the snapshots.
pub static DELETE_OLDEST: Operation<Origins> = Operation {
    name: "delete-oldest",
    weight: |focus| match focus {
        Sweeps => 8,
        Strikes => 6,
        _ => 0,
    },
    launch: |run, op| delete(run, op, Victim::Oldest).map(drop),
};

/// Deletes a snapshot, and cuts the power while its exceptions are relabelled.
pub static DELETE_AND_CUT: Operation<Origins> = Operation {
    name: "delete-and-cut",
    weight: |focus| match focus {
        Sweeps => 4,
        Strikes => 3,
        _ => 0,
    },
    launch: |run, op| delete_and_cut(run, op, Victim::OfOrigin),
};

/// What is deleted.
#[derive(Clone, Copy)]
pub enum Victim {
    Any,
    /// The oldest snapshot of the origin.
    Oldest,
    /// A snapshot of the origin.
    OfOrigin,
}

/// Deletes a volume that is the backing of none, together with its snapshots. Returns whether something
/// is being deleted.
pub fn delete(run: &mut Run, op: &Op, victim: Victim) -> Result<bool, Violation> {
    if !wait_for_controls(run)? {
        return Ok(false);
    }
    let (origin, known) = (run.known.origin, &run.known);
    let rolling = rolling(run);
    let held = |key| rolling.as_deref() == Some(&known.model.name(key));
    let wanted = |key, v: &Volume| key != origin && v.name != "vol" && known.is_free(key) && !held(key);
    let of_origin = |key, v: &Volume| v.of == Some(origin) && wanted(key, v);
    let key = match victim {
        Victim::Oldest => any_of(run, 0, of_origin),
        Victim::OfOrigin => any_of(run, op.draws[0], of_origin),
        Victim::Any => any_of(run, op.draws[0], wanted),
    };
    let Some(key) = key else { return Ok(false) };
    let mut keys = vec![key];
    keys.extend(run.known.model.volumes().filter(|(_, v)| v.of == Some(key)).map(|(k, _)| k));
    let doomed = keys.clone();
    run.wait(move |o| o.keys.iter().any(|key| doomed.contains(key)))?;
    let names: Vec<String> = keys.iter().map(|&key| run.known.model.name(key)).collect();
    if run.known.model.get(key).is_none() {
        return Ok(false);
    }
    let (pool, text) = (run.session.pool.clone(), format!("delete {names:?}"));
    start_control(run, Control::Delete(keys.clone()), keys, text, async move {
        let all: Vec<&str> = names.iter().map(|name| &name[..]).collect();
        pool.delete(&all).await.into()
    });
    Ok(true)
}

/// The next life finds exceptions that are not relabelled, and no table in memory.
pub fn delete_and_cut(run: &mut Run, op: &Op, victim: Victim) -> Result<(), Violation> {
    if !delete(run, op, victim)? {
        return Ok(());
    }
    wait_for_controls(run)?;
    for _ in 0..op.draws[1] % 24 {
        run.step()?;
    }
    let crash = if op.draws[2].is_multiple_of(2) { Crash::Kill } else { Crash::Power };
    run.cut(crash, op.draws[3])
}
