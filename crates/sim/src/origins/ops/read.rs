//! Reads.

use super::target::{any_of, handle, is_there, place};
use super::write::{Style, write};
use crate::driver::{Op, Operation, Violation};
use crate::model::Key;
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static READ: Operation<Origins> = Operation {
    name: "read",
    weight: |focus| match focus {
        Plain => 30,
        Strikes => 10,
        Sweeps => 6,
    },
    launch: read,
};

/// Overwrites the backing of a running read of a snapshot.
pub static CHASE: Operation<Origins> = Operation {
    name: "chase",
    weight: |focus| match focus {
        Plain => 8,
        Strikes => 4,
        Sweeps => 2,
    },
    launch: chase,
};

pub fn read(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = any_of(run, op.draws[0], |_, _| true) else { return Ok(()) };
    look_at(run, op, key, op.draws[3].is_multiple_of(8))
}

/// Reads a snapshot and at once overwrites its backing in the origin, so that one may overtake the other.
fn chase(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let origin = run.known.origin;
    let Some(key) = any_of(run, op.draws[0], |_, v| v.of == Some(origin)) else { return Ok(()) };
    for _ in 0..1 + op.draws[3] % 3 {
        look_at(run, op, key, false)?;
    }
    write(run, &Op { draws: [1, op.draws[1], op.draws[2], op.draws[3], 0], ..*op }, Style::Plain)
}

fn look_at(run: &mut Run, op: &Op, key: Key, ragged: bool) -> Result<(), Violation> {
    if !is_there(run, key)? {
        return Ok(());
    }
    let size = run.known.model.get(key).map_or(0, |v| v.size);
    let (offset, len) = place([op.draws[1], op.draws[2]], size, ragged);
    let Some(volume) = handle(run, key)? else { return Ok(()) };
    run.submit_read(volume, key, (offset, len), false);
    Ok(())
}
