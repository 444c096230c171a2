//! Quotas: volumes never refer to more than their quotas, and quotas are durable.

use forkdisk::Mode;

use super::target::with;
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::place::PAGE;
use crate::history::run::{Run, Volumes};
use crate::model::Key;
use crate::rng::Rng;

/// Limits what a volume may refer to, when nothing else is in flight.
pub static SET_QUOTA: Operation<Volumes> = Operation {
    name: "set-quota",
    weight: |profile| match profile {
        Quotas => 8,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| set_quota(run, op, key)),
};

/// A volume's last quota.
#[derive(Clone, Copy)]
pub struct Quota {
    bytes: u64,
    /// Most bytes the volume may refer to: the quota, or what it held when that was set.
    most: u64,
}

/// Sets a quota above, at or below what the volume refers to, or none. Nothing else runs meanwhile, so
/// that what the volume held then is known.
fn set_quota(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    run.drain()?;
    judge_quotas(run)?;
    let sound = run.session.disk.faults_hit() == 0 && run.session.pool.info().mode != Mode::Failed;
    if !sound || run.known.model.get(key).is_none() {
        return Ok(());
    }
    let name = run.known.model.name(key);
    let wrong = |e: forkdisk::Error| Violation::new("P4", format!("the quota of {name}: {e}"));
    let held = run.session.pool.find(&name).map_err(wrong)?.referenced;
    let mut rng = Rng::new(op.draws[1]);
    let bytes = match rng.below(5) {
        0 => 0,
        1 => held,
        2 => held / 2,
        _ => held + rng.below(96 * PAGE),
    };
    run.say(|| format!("set the quota of {name}, which holds {held} bytes, to {bytes}"));
    let (pool, of) = (run.session.pool.clone(), name.clone());
    run.session.exec.run(PATIENCE_STEPS, async move { pool.set_quota(&of, bytes).await })?.map_err(wrong)?;
    let most = if bytes == 0 { u64::MAX } else { held.max(bytes) };
    run.world.quotas.insert(key, Quota { bytes, most });
    Ok(())
}

/// Checks that every quota has its last value and that no volume exceeds it. Must be called when nothing
/// is in flight.
pub fn judge_quotas(run: &mut Run) -> Result<(), Violation> {
    run.world.quotas.retain(|&key, _| run.known.model.get(key).is_some());
    if run.session.pool.info().mode == Mode::Failed || !run.known.pending.is_empty() {
        return Ok(());
    }
    for (&key, quota) in &run.world.quotas {
        let name = run.known.model.name(key);
        let info = run.session.pool.find(&name).map_err(|e| Violation::new("P4", e.to_string()))?;
        if info.quota != quota.bytes {
            let what = format!("{name} has a quota of {} bytes and was given {}", info.quota, quota.bytes);
            return Err(Violation::new("P4", what));
        }
        if info.referenced > quota.most {
            let what = format!("{name} refers to {} bytes and may only to {}", info.referenced, quota.most);
            return Err(Violation::new("P11", what));
        }
    }
    Ok(())
}

/// A snapshot may hold more than the volume's quota, and so may a rollback to it.
pub fn forgive_quota(run: &mut Run, key: Key) {
    if let Some(quota) = run.world.quotas.get_mut(&key) {
        quota.most = u64::MAX;
    }
}

/// Whether a write to one of these volumes may be refused because of its quota.
pub fn has_quota(run: &Run, keys: &[Key]) -> bool {
    keys.iter().any(|key| run.world.quotas.contains_key(key))
}
