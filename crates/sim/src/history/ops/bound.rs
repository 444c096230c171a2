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
    /// Bytes that are reserved.
    reserve: u64,
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
    let reserve = rng.one_in(3).then(|| if rng.one_in(4) { 0 } else { PAGE + rng.below(1536 * PAGE) });
    let label = [("bound".to_string(), Some(rng.below(100).to_string()))].into();
    let extension = match bytes {
        Some(_) => ExtensionChanges::default().with_diverge(bytes).with_reserve(reserve),
        None => ExtensionChanges::default().with_labels(label),
    };
    run.say(|| {
        format!("set the bound of {name}, which has diverged by {held} bytes, to {bytes:?}, its reserve to {reserve:?}")
    });
    let (pool, of) = (run.session.pool.clone(), name.clone());
    let set = async move { pool.set(&of, &Changes::default().with_extension(extension)).await };
    match run.session.exec.run(PATIENCE_STEPS, set)? {
        // A first bound, or a first label, needs a slot, and what is reserved has to be there.
        Err(e) if e.kind() == forkdisk::ErrorKind::NoSpace => return Ok(()),
        done => done.map_err(wrong)?,
    }
    if let Some(bytes) = bytes {
        let most = if bytes == 0 { u64::MAX } else { held.max(bytes) };
        let before = run.world.bounds.get(&key).map_or(0, |bound| bound.reserve);
        run.world.bounds.insert(key, Bound { bytes, most, reserve: reserve.unwrap_or(before) });
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
    judge_held(run)?;
    for (&key, bound) in &run.world.bounds {
        let name = run.known.model.name(key);
        let info = run.session.pool.find(&name).map_err(|e| Violation::new("P4", e.to_string()))?;
        if (info.diverge, info.reserve) != (bound.bytes, bound.reserve) {
            let (has, was) = ((info.diverge, info.reserve), (bound.bytes, bound.reserve));
            let what = format!("{name} has a bound and a reserve of {has:?} bytes and was given {was:?}");
            return Err(Violation::new("P4", what));
        }
        if info.diverged > bound.most {
            let what = format!("{name} has diverged by {} bytes and may only by {}", info.diverged, bound.most);
            return Err(Violation::new("P12", what));
        }
    }
    Ok(())
}

/// Checks that what others can take does not include what is reserved, with a table for each MiB that it is written to.
fn judge_held(run: &Run) -> Result<(), Violation> {
    let (pool, mut held) = (run.session.pool.info(), 0);
    for &key in run.world.bounds.keys() {
        let Ok(info) = run.session.pool.find(&run.known.model.name(key)) else { continue };
        let left = info.reserve.saturating_sub(info.diverged) / PAGE;
        held += (left + left.min(info.size.div_ceil(1 << 20))) * PAGE;
    }
    if pool.free > 0 && pool.free + held > pool.unused {
        let what = format!("{} of {} bytes can be taken, and {held} are reserved", pool.free, pool.unused);
        return Err(Violation::new("P13", what));
    }
    Ok(())
}

/// Why an operation on one of these volumes must not be refused for want of space: what is reserved for it, less what
/// may be in flight. `None`: it may.
pub fn has_reserve(run: &Run, keys: &[Key]) -> Option<String> {
    let in_flight: u64 = run.world.places.values().map(|place| place.len + 2 * PAGE).sum();
    let left = |key: &Key| {
        let bound = run.world.bounds.get(key)?;
        let info = run.session.pool.find(&run.known.model.name(*key)).ok()?;
        bound.reserve.checked_sub(info.diverged + in_flight + MARGIN_BYTES).filter(|&left| left > 0)
    };
    // Of a range clone, the target has to have it.
    let all: Option<Vec<u64>> = keys.iter().map(left).collect();
    all?.into_iter().min().map(|left| format!("more than {left} bytes are reserved"))
}

/// Most bytes that one operation writes.
const MARGIN_BYTES: u64 = 5 << 18;

/// Whether a write to one of these volumes may be refused because of its bound.
pub fn has_bound(run: &Run, keys: &[Key]) -> bool {
    keys.iter().any(|key| run.world.bounds.contains_key(key))
}
