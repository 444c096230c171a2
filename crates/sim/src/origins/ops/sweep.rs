//! Writes of many chunks, and exceptions that are removed again.

use std::collections::BTreeSet;

use super::delete::{Victim, delete, delete_and_cut};
use super::rollback::rolled_back;
use super::snapshot::{Sources, snapshot};
use super::target::{is_there, wait_for_controls};
use super::upkeep::{checkpoint, settle};
use super::write::put;
use crate::driver::{Op, Operation, Violation};
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};
use crate::rng::Rng;

/// Concurrent writes of one chunk each at many places of a range.
pub static SWEEP: Operation<Origins> = Operation {
    name: "sweep",
    weight: |focus| match focus {
        Sweeps => 2,
        _ => 0,
    },
    launch: sweep,
};

/// Leaves of the map of exceptions are filled for one snapshot and emptied except for a few pairs of
/// others; then one of those is deleted.
pub static THIN: Operation<Origins> = Operation {
    name: "thin",
    weight: |focus| match focus {
        Sweeps => 20,
        _ => 0,
    },
    launch: thin,
};

/// Distance between the numbers of operations, for the writes that one operation makes.
const IDS_PER_OPERATION: u32 = 1_000_000;

/// Writes many chunks of a range: their exceptions fill leaves of the map.
pub fn sweep(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[1]);
    let chunks = run.setup.origin / run.setup.chunk;
    let count = (chunks / *rng.pick(&[1, 1, 2, 4])).max(1);
    let (first, stride) = (rng.below(chunks - count + 1), *rng.pick(&[1, 1, 1, 2, 3]));
    touch(run, op.number, (first..first + count).step_by(stride).collect())
}

/// Writes a page of each of these chunks of the origin concurrently; the executor draws their order.
pub fn touch(run: &mut Run, number: u32, chunks: Vec<u64>) -> Result<(), Violation> {
    let key = run.known.origin;
    if !is_there(run, key)? {
        return Ok(());
    }
    for chunk in chunks {
        put(run, number, chunk, false)?;
    }
    run.wait(move |o| o.keys.contains(&key))
}

/// Makes a pair that is alone in its leaf be relabelled while the leaf before is not in memory.
fn thin(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let chunks = run.setup.origin / run.setup.chunk;
    let mut rng = Rng::new(op.draws[0]);
    rolled_back(run)?;
    for _ in 0..run.known.model.volumes().count() {
        delete_and_settle(run, op)?;
    }
    for i in 1..=4 {
        // Of the origin, and neither droppable nor writable.
        let draws = [rng.next(), 1, 1, 1, 0];
        snapshot(run, &Op { number: op.number + i * IDS_PER_OPERATION, draws, ..*op }, Sources::One)?;
        wait_for_controls(run)?;
        let few = match i {
            1 => 0,
            2 => rng.below(2),
            3 => 1 + rng.below(2),
            _ => 1 + rng.below(chunks / 80),
        };
        let mut places: BTreeSet<u64> = (0..few).map(|_| rng.below(chunks)).collect();
        // Inserting in ascending order leaves half a leaf behind; the other half fills it. The last
        // leaves stay full: nothing is merged with them.
        let (from, passes) = if i == 1 { (0, 1 + rng.below(4).min(1)) } else { (chunks - chunks / 4, 1) };
        if i <= 2 {
            places.extend(from..chunks);
        }
        for pass in 0..passes {
            let number = op.number + i * IDS_PER_OPERATION;
            touch(run, number, places.iter().copied().filter(|at| at % passes == pass).collect())?;
        }
    }
    delete_and_settle(run, op)?;
    // Pages that a replay changes would be in memory.
    if !rng.one_in(8) {
        checkpoint(run)?;
        run.drain()?;
    }
    let draws = [1 + rng.below(2), rng.next(), rng.next(), rng.next(), 0];
    delete_and_cut(run, &Op { draws, ..*op }, Victim::Any)
}

/// Deletes the oldest snapshot of the origin, and all of its exceptions.
fn delete_and_settle(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if delete(run, op, Victim::Oldest)? {
        wait_for_controls(run)?;
        settle(run)?;
        run.drain()?;
    }
    Ok(())
}
