//! The end of a run: everything is verified once more, everything is deleted, and nothing must be left (I7).

use forkdisk::{Mode, PoolInfo};

use super::ops::folder_bound::{judge_folders, remove_folders};
use super::ops::inherit::judge_inherited;
use super::ops::{bound::judge_bounds, delete::delete, names::remove_names, quota::judge_quotas};
use super::recover;
use super::run::{Run, format};
use super::{Setup, Violation};
use crate::disk::{Crash, SimDisk};
use crate::driver::{Outcome, PATIENCE_STEPS};
use crate::executor::Executor;
use crate::model::{Key, Rule};

pub fn finish(run: &mut Run) -> Result<(), Violation> {
    run.session.disk.disarm();
    run.drain()?;
    if run.session.pool.info().mode == Mode::Failed || !run.known.pending.is_empty() {
        let mask = run.rng.next();
        run.cut(Crash::Power, mask)?;
    }
    judge_quotas(run)?;
    judge_bounds(run)?;
    judge_folders(run)?;
    judge_inherited(run)?;
    run.session.check()?;
    compare_all(run)?;
    remove_names(run)?;
    delete_all(run)?;
    remove_folders(run)?;
    settle_and_count(run)
}

/// Compares every volume with the model while the pool is open.
pub fn compare_all(run: &mut Run) -> Result<(), Violation> {
    let now = run.known.model.tick();
    let keys: Vec<Key> = run.known.model.volumes().map(|(key, _)| key).collect();
    for key in keys {
        run.session.compare(&mut run.known.model, key, Rule::Since(now), false)?;
    }
    let (expected, found) = (run.known.model.listing(), run.session.listing());
    if expected != found {
        return Err(Violation::new("P4", format!("the pool lists {found:?} instead of {expected:?}")));
    }
    Ok(())
}

pub fn delete_all(run: &mut Run) -> Result<(), Violation> {
    let mut roots = super::place::volumes(&run.known.model);
    run.rng.shuffle(&mut roots);
    for root in roots {
        let mut keys = super::place::snapshots(&run.known.model, Some(root));
        if run.rng.one_in(2) {
            // Individually, snapshots in any order, instead of all at once.
            run.rng.shuffle(&mut keys);
            for key in std::mem::take(&mut keys) {
                delete(run, vec![key])?;
                run.drain()?;
            }
        }
        keys.push(root);
        delete(run, keys)?;
        run.drain()?;
    }
    Ok(())
}

/// I7: an empty pool uses what a new one uses.
pub fn settle_and_count(run: &mut Run) -> Result<(), Violation> {
    for (name, checkpoint) in [("settle", false), ("checkpoint", true), ("settle", false), ("checkpoint", true)] {
        let pool = run.session.pool.clone();
        run.submit_upkeep(name, Vec::new(), name.to_owned(), async move {
            Outcome::from(if checkpoint { pool.checkpoint().await } else { pool.wait_freed().await })
        });
        run.drain()?;
    }
    run.session.check()?;
    let found = run.session.pool.info();
    let fresh = fresh(&run.setup, found.size)?;
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
    run.session.contract()
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
