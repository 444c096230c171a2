//! Quotas: volumes never refer to more than their quotas, and quotas are durable.

use forkdisk::Mode;

use super::Violation;
use super::op::Op;
use super::run::Run;
use crate::driver::PATIENCE_STEPS;
use crate::model::Key;
use crate::rng::Rng;

const PAGE: u64 = 4096;

/// A volume's last quota.
#[derive(Clone, Copy)]
pub(super) struct Quota {
    bytes: u64,
    /// Most bytes the volume may refer to: the quota, or what it held when that was set.
    most: u64,
}

impl Run {
    /// Sets a quota above, at or below what the volume refers to, or none. Nothing else runs meanwhile, so
    /// that what the volume held then is known.
    pub(super) fn set_quota(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        self.drain()?;
        self.judge_quotas()?;
        let sound = self.session.disk.faults_hit() == 0 && self.session.pool.info().mode != Mode::Failed;
        if !sound || self.known.model.get(key).is_none() {
            return Ok(());
        }
        let name = self.known.model.name(key);
        let wrong = |e: forkdisk::Error| Violation::new("P4", format!("the quota of {name}: {e}"));
        let held = self.session.pool.find(&name).map_err(wrong)?.referenced;
        let mut rng = Rng::new(op.draws[1]);
        let bytes = match rng.below(5) {
            0 => 0,
            1 => held,
            2 => held / 2,
            _ => held + rng.below(96 * PAGE),
        };
        self.say(|| format!("set the quota of {name}, which holds {held} bytes, to {bytes}"));
        let (pool, of) = (self.session.pool.clone(), name.clone());
        self.session.exec.run(PATIENCE_STEPS, async move { pool.set_quota(&of, bytes).await })?.map_err(wrong)?;
        let most = if bytes == 0 { u64::MAX } else { held.max(bytes) };
        self.world.quotas.insert(key, Quota { bytes, most });
        Ok(())
    }

    /// Checks that every quota has its last value and that no volume exceeds it. Must be called when nothing
    /// is in flight.
    pub(super) fn judge_quotas(&mut self) -> Result<(), Violation> {
        self.world.quotas.retain(|&key, _| self.known.model.get(key).is_some());
        if self.session.pool.info().mode == Mode::Failed || !self.known.pending.is_empty() {
            return Ok(());
        }
        for (&key, quota) in &self.world.quotas {
            let name = self.known.model.name(key);
            let info = self.session.pool.find(&name).map_err(|e| Violation::new("P4", e.to_string()))?;
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
    pub(super) fn forgive_quota(&mut self, key: Key) {
        if let Some(quota) = self.world.quotas.get_mut(&key) {
            quota.most = u64::MAX;
        }
    }

    /// Whether a write to one of these volumes may be refused because of its quota.
    pub(super) fn has_quota(&self, keys: &[Key]) -> bool {
        keys.iter().any(|key| self.world.quotas.contains_key(key))
    }
}
