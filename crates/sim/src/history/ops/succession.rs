//! Successions: a volume is filled, forked, changed in part and deleted, and its heir is forked again, so
//! that two volumes have separate tables above leaves that they share, while the original place of the
//! leaves' pages is free. Then one of them releases blocks while the other is gathered and written.
//!
//! Random operations hardly ever produce this order. Each operation advances a succession by one step; the
//! rest of the history runs in between, and sometimes a step is left out.

use super::clear::{Clearing, clear};
use super::control::new_name;
use super::create::create;
use super::delete::delete;
use super::fork::clone;
use super::gather::begin_gathering;
use super::target::{size_of, unhindered};
use super::upkeep::{checkpoint, settle};
use super::write::write;
use crate::driver::{MAX_WRITES, Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::place::{BLOCK, PAGE, Place};
use crate::history::run::{AllowedFailure, Run, Volumes};
use crate::model::Key;
use crate::rng::{Rng, mix};

/// The next step of a succession.
pub static HEIR: Operation<Volumes> = Operation {
    name: "heir",
    weight: |profile| match profile {
        Heirs => 80,
        _ => 0,
    },
    launch: succeed,
};

/// The next step, and the names of the members.
#[derive(Default)]
pub struct CloneSuccession {
    step: u8,
    /// The one that is deleted, its clone, and the clone of that.
    names: [String; 3],
    /// Blocks of each of them.
    blocks: u64,
    /// The block that is released.
    block: u64,
}

/// A member of a succession.
#[derive(Clone, Copy)]
enum Member {
    Source,
    Heir,
    Next,
}

/// Runs the next step of the succession.
fn succeed(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[1]);
    let step = run.world.succession.step;
    run.world.succession.step = (step + 1) % 13;
    // Steps that create the volumes are never left out.
    if !matches!(step, 0 | 2 | 6) && rng.one_in(16) {
        return Ok(());
    }
    match step {
        0 => begin_succession(run, &mut rng),
        1 => by(run, Member::Source, |run, key| write_blocks(run, op, key)),
        2 => fork_one(run, Member::Source, Member::Heir),
        3 => by(run, Member::Heir, |run, key| scatter(run, op, key)),
        4 => by(run, Member::Source, remove_all),
        5 | 8 => {
            if rng.one_in(3) {
                settle(run);
            } else {
                checkpoint(run);
            }
            run.drain()
        }
        6 => fork_one(run, Member::Heir, Member::Next),
        7 => {
            let other = (run.world.succession.block + 1) % run.world.succession.blocks.max(1);
            by(run, Member::Next, |run, key| touch(run, op, key, other, 1))?;
            by(run, Member::Heir, |run, key| touch(run, op, key, other, 2))
        }
        9 => give_up(run, op, &mut rng),
        10 => write_given_up(run, op, &mut rng),
        11 => by(run, Member::Heir, remove_all),
        _ => by(run, Member::Next, remove_all),
    }
}

fn begin_succession(run: &mut Run, rng: &mut Rng) -> Result<(), Violation> {
    let blocks = 3 + rng.below(2);
    let names = [new_name(run, "v"), new_name(run, "c"), new_name(run, "c")];
    run.world.succession = CloneSuccession { step: 1, names, blocks, block: rng.below(blocks) };
    let first = run.world.succession.names[0].clone();
    create(run, first, blocks * BLOCK)?;
    run.drain()
}

/// Calls `f` with a member that exists and that nothing blocks.
fn by(run: &mut Run, member: Member, f: impl FnOnce(&mut Run, Key) -> Result<(), Violation>) -> Result<(), Violation> {
    let name = &run.world.succession.names[member as usize];
    let mut volumes = place::volumes(&run.known.model).into_iter();
    match volumes.find(|&key| run.known.model.name(key) == *name) {
        Some(key) => unhindered(run, key, f),
        None => Ok(()),
    }
}

fn fork_one(run: &mut Run, from: Member, to: Member) -> Result<(), Violation> {
    let name = run.world.succession.names[to as usize].clone();
    by(run, from, |run, key| clone(run, key, name))?;
    run.drain()
}

fn remove_all(run: &mut Run, key: Key) -> Result<(), Violation> {
    let mut victims = place::snapshots(&run.known.model, Some(key));
    victims.push(key);
    delete(run, victims)
}

fn write_blocks(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    for i in 0..run.world.succession.blocks {
        write_one(run, op, key, Place { offset: i * BLOCK, len: BLOCK }, i)?;
    }
    run.wait(|o| o.keys.contains(&key))
}

/// Writes single pages of all blocks.
fn scatter(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    (0..MAX_WRITES).try_for_each(|i| touch(run, op, key, i % run.world.succession.blocks, i))
}

/// Writes one page of a block; each write of an operation has different pages.
fn touch(run: &mut Run, op: &Op, key: Key, block: u64, i: u64) -> Result<(), Violation> {
    let page = Rng::new(mix(&[op.draws[2], i])).below(256 / MAX_WRITES) * MAX_WRITES + i;
    write_one(run, op, key, Place { offset: block * BLOCK + page * PAGE, len: PAGE }, i)
}

fn write_one(run: &mut Run, op: &Op, key: Key, place: Place, i: u64) -> Result<(), Violation> {
    if run.known.model.get(key).is_none() {
        return Ok(());
    }
    let mut one = op.write_of(i);
    // All of them are durable at once, or none.
    one.draws[3] = op.draws[3];
    write(run, &one, key, place.within(size_of(run, key)), AllowedFailure::Nothing)
}

/// The heir releases a block just before that is gathered for its clone, or at any time, and the clone is
/// written there.
fn give_up(run: &mut Run, op: &Op, rng: &mut Rng) -> Result<(), Violation> {
    let offset = run.world.succession.block * BLOCK;
    by(run, Member::Next, |run, key| {
        begin_gathering(run, op, key);
        Ok(())
    })?;
    if rng.one_in(4) {
        let_go_on(run, rng)?;
    } else {
        until_gathered(run, offset.saturating_sub(BLOCK))?;
    }
    let clearing = if rng.one_in(4) { Clearing::Zero { fua: false } } else { Clearing::Discard };
    let is_deleted = rng.one_in(8);
    by(run, Member::Heir, |run, key| match size_of(run, key) >= offset + BLOCK {
        _ if is_deleted => remove_all(run, key),
        true => clear(run, key, clearing, offset, BLOCK),
        false => Ok(()),
    })?;
    if rng.one_in(2) {
        until_gathered(run, offset + BLOCK)?;
    }
    write_given_up(run, op, rng)
}

/// Runs steps until a gathering call has reached this byte, or none is left.
fn until_gathered(run: &mut Run, to: u64) -> Result<(), Violation> {
    while run.world.gathers.to.get() < to && run.inflight.values().any(|o| o.text.starts_with("gather")) {
        run.step()?;
    }
    Ok(())
}

/// Writes single pages in sequence.
fn write_given_up(run: &mut Run, op: &Op, rng: &mut Rng) -> Result<(), Violation> {
    let block = run.world.succession.block;
    for i in 0..MAX_WRITES {
        let_go_on(run, rng)?;
        by(run, Member::Next, |run, key| touch(run, op, key, block, i))?;
    }
    Ok(())
}

/// Runs some steps, few more often than many.
fn let_go_on(run: &mut Run, rng: &mut Rng) -> Result<(), Violation> {
    let most = 4 << rng.below(4);
    for _ in 0..rng.below(most) {
        run.step()?;
    }
    Ok(())
}
