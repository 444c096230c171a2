//! Reads.

use super::target::{family, handle, is_control, is_unsure, size_of, with_one_of};
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::place::Place;
use crate::history::run::{Run, Volumes};
use crate::model::Key;

pub static READ: Operation<Volumes> = Operation {
    name: "read",
    weight: |profile| match profile {
        Races | Calm => 30,
        Mixed | Journal => 20,
        Faults => 14,
        Ranges | Large | Copies => 12,
        Forks => 10,
        Full | Blocks | Files | Gathering | Hosts => 8,
        Crowd | Quotas | Bounds => 6,
        Cuts | Heirs | Transactions | Folders | Lifetimes | Comparing => 4,
        Names => 2,
        _ => 0,
    },
    launch: read_any,
};

fn read_any(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut keys = place::volumes(&run.known.model);
    if op.draws[0].is_multiple_of(3) {
        keys.extend(place::snapshots(&run.known.model, None));
    }
    with_one_of(run, op, &keys, |run, key| read(run, op, key))
}

pub fn read(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let draw = op.draws[4].is_multiple_of(8);
    let size = size_of(run, key);
    let place = if draw { place::ragged(op, size) } else { place::range(op, size) };
    place.map_or(Ok(()), |place| look_at(run, key, place))
}

/// Reads a range unless a control operation blocks it or it is deleted.
pub fn probe(run: &mut Run, key: Key, place: Place) -> Result<(), Violation> {
    let family = family(run, key);
    let busy = run.inflight.values().any(|o| is_control(o, key) || is_control(o, family));
    match place.within(size_of(run, key)) {
        Some(place) if !busy && !is_unsure(run, family) => look_at(run, key, place),
        _ => Ok(()),
    }
}

fn look_at(run: &mut Run, key: Key, place: Place) -> Result<(), Violation> {
    let volume = handle(run, key)?;
    let vague = run.inflight.values().any(|o| is_control(o, key) && o.class.is_rollback());
    run.submit_read(volume, key, (place.offset, place.len), vague);
    Ok(())
}
