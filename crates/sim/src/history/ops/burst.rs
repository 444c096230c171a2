//! Several writes at once to neighbouring places of one chunk.

use super::target::{size_of, with};
use super::write::write;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place::{PAGE, Place};
use crate::history::run::{AllowedFailure, Inflight, Run, Volumes};
use crate::model::Key;
use crate::rng::Rng;

const SECTOR: u64 = 512;

pub static BURST: Operation<Volumes> = Operation {
    name: "burst",
    weight: |profile| match profile {
        Copies => 14,
        Quotas | Bounds => 12,
        Gathering => 6,
        Heirs => 2,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| burst(run, op, key)),
};

/// Makes up to six concurrent writes, contiguous or overlapping, all near one place: later ones find the
/// chunk being copied for the first.
pub fn burst(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[1]);
    let size = size_of(run, key);
    let first = rng.below(size.div_ceil(PAGE).max(1)) * PAGE;
    let unit = *rng.pick(&[SECTOR, PAGE, PAGE, 4 * PAGE]);
    let spread = *rng.pick(&[1, 4, 16]);
    for i in 0..2 + rng.below(5) {
        let at = if rng.one_in(2) { i } else { rng.below(spread) };
        let place = Place { offset: first + at * unit, len: unit * (1 + rng.below(3)) }.within(size);
        // Which of two writes to one place came last must be known.
        let Some(place) = place else { continue };
        let over = |run: &Run, id: &u64, o: &Inflight| {
            o.keys.first() == Some(&key)
                && run
                    .world
                    .places
                    .get(id)
                    .is_some_and(|p| p.offset < place.offset + place.len && place.offset < p.offset + p.len)
        };
        let busy = run.inflight.iter().any(|(id, o)| over(run, id, o));
        if busy && op.draws[2].is_multiple_of(2) {
            continue;
        }
        let one = op.write_of(i);
        write(run, &one, key, Some(place), AllowedFailure::Nothing)?;
    }
    Ok(())
}
