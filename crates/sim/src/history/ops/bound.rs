//! Bounds: no volume diverges further than its bound allows, and bounds are durable. What is charged to a volume is
//! compared with the entries of all maps by every check.

use forkdisk::{Changes, ExtensionChanges, Mode};

use super::target::with;
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::place::PAGE;
use crate::history::run::{Run, Volumes};
use crate::model::Key;
use crate::rng::Rng;

/// Bounds how far a volume may diverge, when nothing else is in flight.
pub static SET_BOUND: Operation<Volumes> = Operation {
    name: "set-bound",
    weight: |profile| match profile {
        Bounds => 14,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| set_bound(run, op, key)),
};

/// A volume's last bound.
#[derive(Clone, Copy)]
pub struct Bound {
    bytes: u64,
    /// Most bytes that may be charged to the volume: the bound, or what was charged when it was set.
    most: u64,
}

/// Sets a bound above, at or below what the volume has diverged, or none, or another property of the volume. Nothing
/// else runs meanwhile, so that what was charged to the volume is known.
fn set_bound(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    run.drain()?;
    judge_bounds(run)?;
    let sound = run.session.disk.faults_hit() == 0 && run.session.pool.info().mode != Mode::Failed;
    if !sound || run.known.model.get(key).is_none() {
        return Ok(());
    }
    let name = run.known.model.name(key);
    let wrong = |e: forkdisk::Error| Violation::new("P4", format!("the bound of {name}: {e}"));
    let held = run.session.pool.find(&name).map_err(wrong)?.diverged;
    let mut rng = Rng::new(op.draws[1]);
    let bytes = match rng.below(8) {
        0 => Some(0),
        1 => Some(held.max(PAGE)),
        2 => Some((held / 2).max(PAGE)),
        3 | 4 => None,
        5 => Some(held + PAGE + rng.below(96 * PAGE)),
        _ => Some(held + PAGE + rng.below(2048 * PAGE)),
    };
    let label = [("bound".to_string(), Some(rng.below(100).to_string()))].into();
    let extension = match bytes {
        Some(_) => ExtensionChanges::default().with_diverge(bytes),
        None => ExtensionChanges::default().with_labels(label),
    };
    run.say(|| format!("set the bound of {name}, which has diverged by {held} bytes, to {bytes:?}"));
    let (pool, of) = (run.session.pool.clone(), name.clone());
    let set = async move { pool.set(&of, &Changes::default().with_extension(extension)).await };
    match run.session.exec.run(PATIENCE_STEPS, set)? {
        // A first bound, or a first label, needs a slot.
        Err(e) if e.kind() == forkdisk::ErrorKind::NoSpace => return Ok(()),
        done => done.map_err(wrong)?,
    }
    if let Some(bytes) = bytes {
        let most = if bytes == 0 { 0 } else { held.max(bytes) };
        run.world.bounds.insert(key, Bound { bytes, most });
    }
    Ok(())
}

/// Checks that every bound has its last value and that no volume has diverged further. Must be called when nothing is
/// in flight.
pub fn judge_bounds(run: &mut Run) -> Result<(), Violation> {
    run.world.bounds.retain(|&key, _| run.known.model.get(key).is_some());
    if run.world.bounds.is_empty() || run.session.pool.info().mode == Mode::Failed || !run.known.pending.is_empty() {
        return Ok(());
    }
    // After a crash what was freed before may be charged again, until it is freed again.
    let pool = run.session.pool.clone();
    let freed = run.session.exec.run(PATIENCE_STEPS, async move { pool.wait_freed().await })?;
    if freed.is_err() {
        return Ok(());
    }
    for (&key, bound) in &run.world.bounds {
        let name = run.known.model.name(key);
        let info = run.session.pool.find(&name).map_err(|e| Violation::new("P4", e.to_string()))?;
        if info.diverge != bound.bytes {
            let what = format!("{name} has a bound of {} bytes and was given {}", info.diverge, bound.bytes);
            return Err(Violation::new("P4", what));
        }
        if info.diverged > bound.most {
            let what = format!("{name} has diverged by {} bytes and may only by {}", info.diverged, bound.most);
            return Err(Violation::new("P12", what));
        }
    }
    Ok(())
}

/// Whether a write to one of these volumes may be refused because of its bound.
pub fn has_bound(run: &Run, keys: &[Key]) -> bool {
    keys.iter().any(|key| run.world.bounds.contains_key(key))
}
