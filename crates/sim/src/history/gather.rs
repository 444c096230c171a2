//! Gathering, by request and by policy.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{ErrorKind, GatherPolicy};

use super::Violation;
use super::op::{Kind, Op};
use super::place;
use super::run::Run;
use crate::driver::Outcome;
use crate::model::Key;
use crate::rng::Rng;

/// Gathering in progress.
#[derive(Default)]
pub(super) struct Gathers {
    count: Cell<u32>,
    /// How far the last gathering call has processed its volume, in bytes.
    pub to: Cell<u64>,
}

impl Run {
    /// Gathers a volume or snapshot, whatever else is done to it meanwhile: often behind writes in flight.
    pub(super) fn gather(&mut self, op: &Op) -> Result<(), Violation> {
        if op.draws[3].is_multiple_of(2) {
            return self.with(op, |run, key| {
                run.burst(op, key)?;
                run.begin_gathering(op, key);
                Ok(())
            });
        }
        let mut keys = place::volumes(&self.known.model);
        if op.draws[1].is_multiple_of(4) {
            keys.extend(place::snapshots(&self.known.model, None));
        }
        if let Some(key) = place::choose(&keys, op.draws[0]) {
            self.begin_gathering(op, key);
        }
        Ok(())
    }

    /// Sometimes called while a checkpoint is written.
    pub(super) fn begin_gathering(&mut self, op: &Op, key: Key) {
        let (pool, name) = (self.session.pool.clone(), self.known.model.name(key));
        let text = format!("gather {name}");
        let gathers = Rc::clone(&self.world.gathers);
        gathers.to.set(0);
        gathers.count.set(gathers.count.get() + 1);
        self.submit_upkeep("gather", Vec::new(), text, async move {
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
            self.upkeep(Kind::Checkpoint);
        }
    }

    /// Sets the gather policy of a volume: mostly one that gathers as soon as there is something to do.
    pub(super) fn set_gather(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let (pool, name) = (self.session.pool.clone(), self.known.model.name(key));
        let mut rng = Rng::new(op.draws[1]);
        let policy = match rng.below(7) {
            0 => GatherPolicy::Off,
            1 => GatherPolicy::Idle,
            2 => GatherPolicy::Auto,
            _ => GatherPolicy::Above(1 + rng.below(12) as u8),
        };
        let text = format!("set the policy of gathering of {name} to {policy:?}");
        self.submit_upkeep("set gather", vec![key], text, async move { pool.set_gather(&name, policy).await.into() });
        Ok(())
    }
}
