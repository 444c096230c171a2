//! Clones.

use super::snapshot::{is_crowded, start_control};
use super::target::{any_of, is_certain, wait_for_controls};
use crate::driver::{Class, Life, Op, Operation, Start, Violation};
use crate::model::Control;
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static CLONE: Operation<Origins> = Operation {
    name: "clone",
    weight: |focus| match focus {
        Plain => 5,
        Strikes => 2,
        Sweeps => 1,
    },
    launch: clone_one,
};

/// Makes a clone independent of its backing.
pub static FLATTEN: Operation<Origins> = Operation {
    name: "flatten",
    weight: |focus| match focus {
        Plain => 2,
        Strikes => 1,
        _ => 0,
    },
    launch: flatten,
};

/// What makes a clone independent of its backing.
pub const FLATTENING: &str = "flatten";

fn clone_one(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if !wait_for_controls(run)? || is_crowded(run) {
        return Ok(());
    }
    let origin = run.known.origin;
    let Some(key) = any_of(run, op.draws[0], |key, _| key != origin) else { return Ok(()) };
    if !is_certain(run, key)? {
        return Ok(());
    }
    let (source, name) = (run.known.model.name(key), format!("c{}", op.number));
    let text = format!("clone {source} {name}");
    let (pool, control) = (run.session.pool.clone(), Control::Clone(key, name.clone()));
    start_control(
        run,
        control,
        vec![key],
        text,
        async move { pool.clone_volume(&source, &name, 1).await.map(drop).into() },
    );
    Ok(())
}

/// Flattens a clone; its reads and writes continue meanwhile.
fn flatten(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if !wait_for_controls(run)? {
        return Ok(());
    }
    let rests = run.known.rests.clone();
    let Some(key) = any_of(run, op.draws[0], |key, v| v.of.is_none() && rests.contains_key(&key)) else {
        return Ok(());
    };
    run.wait(|o| matches!(o.class, Class::Other(_)))?;
    if !run.known.rests.contains_key(&key) || run.known.flattening.contains(&key) {
        return Ok(());
    }
    run.known.flattening.insert(key);
    let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
    let text = format!("flatten {name}");
    let start = Start::new(Class::Other(FLATTENING), run.known.model.tick(), vec![key], text).with_need(true);
    let future = async move { pool.flatten(&name, |_, _| true).await.map(drop).into() };
    run.submit(start, future, move |run, ended| {
        if ended.is_ok() {
            run.known.flattened(key);
        } else if !run.session.has_failed() {
            // In a failed pool only the next open tells.
            run.known.flattening.remove(&key);
        }
        Ok(())
    });
    Ok(())
}
