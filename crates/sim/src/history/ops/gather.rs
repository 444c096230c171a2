//! Gathering, by request and by policy.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{ErrorKind, GatherPolicy};

use super::burst::burst;
use super::target::with;
use super::upkeep::checkpoint;
use crate::driver::{Op, Operation, Outcome, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::Key;
use crate::rng::Rng;

/// Gathers the scattered pages of a volume or snapshot.
pub static GATHER: Operation<Volumes> = Operation {
    name: "gather",
    weight: |profile| match profile {
        Gathering => 30,
        Bounds => 6,
        Hosts | Heirs => 2,
        _ => 0,
    },
    launch: gather,
};

/// Changes the gather policy.
pub static SET_GATHER: Operation<Volumes> = Operation {
    name: "set-gather",
    weight: |profile| match profile {
        Gathering => 3,
        Heirs | Bounds => 2,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| set_gather(run, op, key)),
};

/// Gathering in progress.
#[derive(Default)]
pub struct Gathers {
    count: Cell<u32>,
    /// How far the last gathering call has processed its volume, in bytes.
    pub to: Cell<u64>,
}

/// Gathers a volume or snapshot, whatever else is done to it meanwhile: often behind writes in flight.
pub fn gather(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if op.draws[3].is_multiple_of(2) {
        return with(run, op, |run, key| {
            burst(run, op, key)?;
            begin_gathering(run, op, key);
            Ok(())
        });
    }
    let mut keys = place::volumes(&run.known.model);
    if op.draws[1].is_multiple_of(4) {
        keys.extend(place::snapshots(&run.known.model, None));
    }
    if let Some(key) = place::choose(&keys, op.draws[0]) {
        begin_gathering(run, op, key);
    }
    Ok(())
}

/// Sometimes called while a checkpoint is written.
pub fn begin_gathering(run: &mut Run, op: &Op, key: Key) {
    let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
    let text = format!("gather {name}");
    let gathers = Rc::clone(&run.world.gathers);
    gathers.to.set(0);
    gathers.count.set(gathers.count.get() + 1);
    run.submit_upkeep("gather", Vec::new(), text, async move {
        let noted = |at, _| {
            gathers.to.set(at);
            true
        };
        let outcome = pool.gather(&name, noted).await;
        gathers.count.set(gathers.count.get() - 1);
        match outcome {
            // It was deleted meanwhile, or renamed before.
            Err(e) if e.kind() == ErrorKind::NotFound => Outcome::default(),
            // Most likely the same volume.
            Err(e) if e.kind() == ErrorKind::Busy && gathers.count.get() > 0 => Outcome::default(),
            other => other.map(drop).into(),
        }
    });
    if op.draws[4].is_multiple_of(3) {
        checkpoint(run);
    }
}

/// Sets the gather policy of a volume: mostly one that gathers as soon as there is something to do.
fn set_gather(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
    let mut rng = Rng::new(op.draws[1]);
    let policy = match rng.below(7) {
        0 => GatherPolicy::Off,
        1 => GatherPolicy::Idle,
        2 => GatherPolicy::Auto,
        _ => GatherPolicy::Above(1 + rng.below(12) as u8),
    };
    let text = format!("set the policy of gathering of {name} to {policy:?}");
    run.submit_upkeep("set gather", vec![key], text, async move { pool.set_gather(&name, policy).await.into() });
    Ok(())
}
