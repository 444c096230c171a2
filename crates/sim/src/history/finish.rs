//! The end of a run: everything is verified once more, everything is deleted, and nothing must be left (I7).

use forkdisk::{Mode, PoolInfo};

use super::recover;
use super::run::{Run, format};
use super::{Setup, Violation};
use crate::disk::{Crash, SimDisk};
use crate::driver::{Outcome, PATIENCE_STEPS};
use crate::executor::Executor;
use crate::model::{Control, Key, Rule};

impl Run {
    pub(super) fn finish(&mut self) -> Result<(), Violation> {
        self.session.disk.disarm();
        self.drain()?;
        if self.session.pool.info().mode == Mode::Failed || !self.known.pending.is_empty() {
            let mask = self.rng.next();
            self.cut(Crash::Power, mask)?;
        }
        self.judge_quotas()?;
        self.session.check()?;
        self.compare_all()?;
        self.remove_names()?;
        self.delete_all()?;
        self.settle_and_count()
    }

    /// Compares every volume with the model while the pool is open.
    pub(super) fn compare_all(&mut self) -> Result<(), Violation> {
        let now = self.known.model.tick();
        let keys: Vec<Key> = self.known.model.volumes().map(|(key, _)| key).collect();
        for key in keys {
            self.session.compare(&mut self.known.model, key, Rule::Since(now), false)?;
        }
        let (expected, found) = (self.known.model.listing(), self.session.listing());
        if expected != found {
            return Err(Violation::new("P4", format!("the pool lists {found:?} instead of {expected:?}")));
        }
        Ok(())
    }

    fn delete_all(&mut self) -> Result<(), Violation> {
        let mut roots = super::place::volumes(&self.known.model);
        self.rng.shuffle(&mut roots);
        for root in roots {
            let mut keys = super::place::snapshots(&self.known.model, Some(root));
            if self.rng.one_in(2) {
                // Individually, snapshots in any order, instead of all at once.
                self.rng.shuffle(&mut keys);
                for key in std::mem::take(&mut keys) {
                    self.control(Control::Delete(vec![key]))?;
                    self.drain()?;
                }
            }
            keys.push(root);
            self.control(Control::Delete(keys))?;
            self.drain()?;
        }
        Ok(())
    }

    /// I7: an empty pool uses what a new one uses.
    fn settle_and_count(&mut self) -> Result<(), Violation> {
        for (name, checkpoint) in [("settle", false), ("checkpoint", true), ("settle", false), ("checkpoint", true)] {
            let pool = self.session.pool.clone();
            self.submit_upkeep(name, Vec::new(), name.to_owned(), async move {
                Outcome::from(if checkpoint { pool.checkpoint().await } else { pool.wait_freed().await })
            });
            self.drain()?;
        }
        self.session.check()?;
        let found = self.session.pool.info();
        let fresh = fresh(&self.setup, found.size)?;
        if found.used != fresh.used || found.freeing != 0 || found.volumes + found.snapshots != 0 {
            return Err(Violation::new(
                "P6",
                format!(
                    "everything is deleted, but {} bytes are used ({} of metadata) and {} are being freed; a new pool \
                     of {} bytes uses {} ({} of metadata)",
                    found.used, found.metadata, found.freeing, found.size, fresh.used, fresh.metadata
                ),
            ));
        }
        self.session.contract()
    }
}

/// Returns what a new pool of this size reports, after the same last steps.
fn fresh(setup: &Setup, size: u64) -> Result<PoolInfo, Violation> {
    let exec = Executor::new(1);
    let disk = SimDisk::new(format(setup, size)?, &exec, 1);
    let session = recover::start(setup, exec, disk)?;
    let pool = session.pool.clone();
    let done = session.exec.run(PATIENCE_STEPS, async move { pool.checkpoint().await })?;
    done.map_err(|e| Violation::new("P6", format!("a new pool cannot write a checkpoint: {e}")))?;
    Ok(session.pool.info())
}
