//! Discards, and writes of zeroes.

use super::target::{handle, size_of, with};
use super::write::change;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::place::{PAGE, Place};
use crate::history::run::{AllowedFailure, Run, Volumes};
use crate::model::{Key, What};

pub static DISCARD: Operation<Volumes> = Operation {
    name: "discard",
    weight: |profile| match profile {
        Journal => 200,
        Races => 16,
        Quotas | Bounds => 10,
        Full | Large | Hosts => 8,
        Mixed | Forks | Calm => 6,
        Faults | Blocks => 5,
        Cuts | Files | Ranges | Copies => 4,
        Crowd | Gathering | Names => 2,
        Heirs => 1,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| launch(run, op, key, Clearing::Discard)),
};

pub static ZERO: Operation<Volumes> = Operation {
    name: "zero",
    weight: |profile| match profile {
        Journal => 40,
        Races => 8,
        Large => 6,
        Mixed | Calm => 5,
        Forks | Full | Faults | Blocks | Copies | Quotas | Bounds => 4,
        Hosts => 3,
        Cuts | Files | Ranges => 2,
        Gathering => 1,
        _ => 0,
    },
    launch: |run, op| {
        let fua = op.draws[3].is_multiple_of(6);
        with(run, op, |run, key| launch(run, op, key, Clearing::Zero { fua }))
    },
};

/// How a range is cleared.
#[derive(Clone, Copy)]
pub enum Clearing {
    Discard,
    Zero { fua: bool },
}

fn launch(run: &mut Run, op: &Op, key: Key, clearing: Clearing) -> Result<(), Violation> {
    match place::range(op, size_of(run, key)) {
        Some(Place { offset, len }) => clear(run, key, clearing, offset, len),
        None => Ok(()),
    }
}

/// Discards or zeroes a range.
pub fn clear(run: &mut Run, key: Key, clearing: Clearing, offset: u64, len: u64) -> Result<(), Violation> {
    let volume = handle(run, key)?;
    let name = run.known.model.name(key);
    match clearing {
        Clearing::Discard => {
            let end = offset + len;
            // The last page of a volume counts as whole.
            let to = if end == size_of(run, key) { end } else { end / PAGE * PAGE };
            let from = offset.next_multiple_of(PAGE);
            let rec = run.known.model.write(key, from, to.saturating_sub(from), What::Zero);
            let text = format!("discard {name} {offset}+{len}");
            let future = async move { volume.discard(offset, len).await.into() };
            change(run, (rec, false, AllowedFailure::Discard), vec![key], text, future);
        }
        Clearing::Zero { fua } => {
            let rec = run.known.model.write(key, offset, len, What::Zero);
            let text = format!("zero {name} {offset}+{len}{}", if fua { " fua" } else { "" });
            let future = async move { volume.write_zeroes(offset, len, fua).await.into() };
            change(run, (rec, fua, AllowedFailure::Nothing), vec![key], text, future);
        }
    }
    Ok(())
}
