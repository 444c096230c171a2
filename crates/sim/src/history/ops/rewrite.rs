//! Writes of what may be there already, for volumes that do not store such writes.

use super::target::{handle, is_unsure, with};
use super::write::change;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place::{PAGE, Place};
use crate::history::run::{AllowedFailure, Run, Volumes};
use crate::model::{Key, What};
use crate::pattern::SECTOR;
use crate::rng::Rng;

/// Repeats a recent write of the volume, done or in flight, in whole or in part, or with more behind it.
pub static REWRITE: Operation<Volumes> = Operation {
    name: "rewrite",
    weight: |profile| match profile {
        Comparing => 40,
        _ => 0,
    },
    launch: |run, op| with(run, op, rewrite_of(op)),
};

/// Writes pages of zeroes as data.
pub static WRITE_ZEROES: Operation<Volumes> = Operation {
    name: "write-zeroes",
    weight: |profile| match profile {
        Comparing => 16,
        _ => 0,
    },
    launch: |run, op| {
        with(run, op, |run, key| match crate::history::place::range(op, super::target::size_of(run, key)) {
            Some(place) => launch(run, op, key, place, What::Zero),
            None => Ok(()),
        })
    },
};

/// Number of writes of a volume that can be repeated.
const RECENT_COUNT: usize = 6;

/// Notes a write that can be repeated.
pub fn note(run: &mut Run, key: Key, number: u32, place: Place) {
    if run.setup.profile == Comparing {
        let recent = run.world.recent.entry(key).or_default();
        recent.push((number, place));
        if recent.len() > RECENT_COUNT {
            recent.remove(0);
        }
    }
}

fn rewrite_of(op: &Op) -> impl FnOnce(&mut Run, Key) -> Result<(), Violation> + '_ {
    |run, key| {
        let recent = run.world.recent.get(&key).cloned().unwrap_or_default();
        let mut rng = Rng::new(op.draws[2]);
        let size = super::target::size_of(run, key);
        let Some(&(number, Place { offset, len })) = (!recent.is_empty()).then(|| rng.pick(&recent)) else {
            return Ok(());
        };
        // A volume that was made smaller meanwhile, or has an uncertain size.
        if offset + len > size || is_unsure(run, key) {
            return Ok(());
        }
        let sectors = len / SECTOR as u64;
        let place = match rng.below(4) {
            0 if sectors > 1 => {
                let skipped = rng.below(sectors) * SECTOR as u64;
                Place { offset: offset + skipped, len: len - skipped }
            }
            1 => Place { offset, len: (len + (1 + rng.below(4)) * PAGE).min(size - offset) },
            _ => Place { offset, len },
        };
        launch(run, op, key, place, What::Mark(number))
    }
}

fn launch(run: &mut Run, op: &Op, key: Key, place: Place, what: What) -> Result<(), Violation> {
    let Place { offset, len } = place;
    let fua = op.draws[3].is_multiple_of(6);
    let volume = handle(run, key)?;
    let mut buf = run.session.pool.buffer(len as usize);
    let data = match what {
        What::Mark(number) => {
            run.known.model.bytes(key, offset, number, &mut buf);
            format!("write {number}")
        }
        _ => {
            buf.fill(0);
            "zeroes".to_string()
        }
    };
    let text =
        format!("rewrite {} {offset}+{len} with {data}{}", run.known.model.name(key), if fua { " fua" } else { "" });
    let rec = run.known.model.write(key, offset, len, what);
    run.known.model.spread();
    let id = change(run, (rec, fua, AllowedFailure::Nothing), vec![key], text, async move {
        volume.write(offset, buf, fua).await.0.into()
    });
    run.world.places.insert(id, place);
    Ok(())
}
