//! Successions: a volume is filled, forked, changed in part and deleted, and its heir is forked again, so
//! that two volumes have separate tables above leaves that they share, while the original place of the
//! leaves' pages is free. Then one of them releases blocks while the other is gathered and written.
//!
//! Random operations hardly ever produce this order. Each operation advances a succession by one step; the
//! rest of the history runs in between, and sometimes a step is left out.

use super::Violation;
use super::op::{Kind, MAX_WRITES, Op};
use super::place::{self, Place};
use super::run::{AllowedFailure, Run};
use crate::model::{Control, Key};
use crate::rng::{Rng, mix};

const PAGE: u64 = 4096;
const BLOCK: u64 = 1 << 20;

/// The next step, and the names of the members.
#[derive(Default)]
pub(super) struct CloneSuccession {
    step: u8,
    /// The one that is deleted, its clone, and the clone of that.
    names: [String; 3],
    /// Blocks of each of them.
    blocks: u64,
    /// The block that is released.
    block: u64,
}

/// The member of a succession.
#[derive(Clone, Copy)]
enum Who {
    Source,
    Heir,
    Next,
}

impl Run {
    /// Runs the next step of the succession.
    pub(super) fn clone(&mut self, op: &Op) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[1]);
        let step = self.world.succession.step;
        self.world.succession.step = (step + 1) % 13;
        // Steps that create the volumes are never left out.
        if !matches!(step, 0 | 2 | 6) && rng.one_in(16) {
            return Ok(());
        }
        match step {
            0 => self.begin_succession(&mut rng),
            1 => self.by(Who::Source, |run, key| run.write_blocks(op, key)),
            2 => self.fork(Who::Source, Who::Heir),
            3 => self.by(Who::Heir, |run, key| run.scatter(op, key)),
            4 => self.by(Who::Source, |run, key| run.remove(key)),
            5 | 8 => {
                self.upkeep(if rng.one_in(3) { Kind::Settle } else { Kind::Checkpoint });
                self.drain()
            }
            6 => self.fork(Who::Heir, Who::Next),
            7 => {
                let other = (self.world.succession.block + 1) % self.world.succession.blocks.max(1);
                self.by(Who::Next, |run, key| run.touch(op, key, other, 1))?;
                self.by(Who::Heir, |run, key| run.touch(op, key, other, 2))
            }
            9 => self.give_up(op, &mut rng),
            10 => self.write_given_up(op, &mut rng),
            11 => self.by(Who::Heir, |run, key| run.remove(key)),
            _ => self.by(Who::Next, |run, key| run.remove(key)),
        }
    }

    fn begin_succession(&mut self, rng: &mut Rng) -> Result<(), Violation> {
        let blocks = 3 + rng.below(2);
        let names = [self.name("v"), self.name("c"), self.name("c")];
        self.world.succession = CloneSuccession { step: 1, names, blocks, block: rng.below(blocks) };
        let control = Control::Create(self.world.succession.names[0].clone(), blocks * BLOCK);
        self.control(control)?;
        self.drain()
    }

    /// Calls `f` with a member that exists and that nothing blocks.
    fn by(&mut self, who: Who, f: impl FnOnce(&mut Self, Key) -> Result<(), Violation>) -> Result<(), Violation> {
        let name = &self.world.succession.names[who as usize];
        let mut volumes = place::volumes(&self.known.model).into_iter();
        match volumes.find(|&key| self.known.model.name(key) == *name) {
            Some(key) => self.unhindered(key, f),
            None => Ok(()),
        }
    }

    fn fork(&mut self, from: Who, to: Who) -> Result<(), Violation> {
        let name = self.world.succession.names[to as usize].clone();
        self.by(from, |run, key| run.control(Control::Clone(key, name)))?;
        self.drain()
    }

    fn remove(&mut self, key: Key) -> Result<(), Violation> {
        let mut victims = place::snapshots(&self.known.model, Some(key));
        victims.push(key);
        self.control(Control::Delete(victims))
    }

    fn write_blocks(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        for i in 0..self.world.succession.blocks {
            self.write_one(op, key, Place { offset: i * BLOCK, len: BLOCK }, i)?;
        }
        self.wait(|o| o.keys.contains(&key))
    }

    /// Writes single pages of all blocks.
    fn scatter(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        (0..MAX_WRITES).try_for_each(|i| self.touch(op, key, i % self.world.succession.blocks, i))
    }

    /// Writes one page of a block; each write of an operation has different pages.
    fn touch(&mut self, op: &Op, key: Key, block: u64, i: u64) -> Result<(), Violation> {
        let page = Rng::new(mix(&[op.draws[2], i])).below(256 / MAX_WRITES) * MAX_WRITES + i;
        self.write_one(op, key, Place { offset: block * BLOCK + page * PAGE, len: PAGE }, i)
    }

    fn write_one(&mut self, op: &Op, key: Key, place: Place, i: u64) -> Result<(), Violation> {
        if self.known.model.get(key).is_none() {
            return Ok(());
        }
        let mut one = op.write_of(i);
        // All of them are durable at once, or none.
        one.draws[3] = op.draws[3];
        self.write(&one, key, place.within(self.size(key)), AllowedFailure::Nothing)
    }

    /// The heir releases a block just before that is gathered for its clone, or at any time, and the clone is
    /// written there.
    fn give_up(&mut self, op: &Op, rng: &mut Rng) -> Result<(), Violation> {
        let offset = self.world.succession.block * BLOCK;
        self.by(Who::Next, |run, key| {
            run.begin_gathering(op, key);
            Ok(())
        })?;
        if rng.one_in(4) {
            self.let_go_on(rng)?;
        } else {
            self.until_gathered(offset.saturating_sub(BLOCK))?;
        }
        let kind = if rng.one_in(4) { Kind::Zero } else { Kind::Discard };
        let is_deleted = rng.one_in(8);
        self.by(Who::Heir, |run, key| match run.size(key) >= offset + BLOCK {
            _ if is_deleted => run.remove(key),
            true => run.clear(key, kind, offset, BLOCK),
            false => Ok(()),
        })?;
        if rng.one_in(2) {
            self.until_gathered(offset + BLOCK)?;
        }
        self.write_given_up(op, rng)
    }

    /// Runs steps until a gathering call has reached this byte, or none is left.
    fn until_gathered(&mut self, to: u64) -> Result<(), Violation> {
        while self.world.gathers.to.get() < to && self.inflight.values().any(|o| o.text.starts_with("gather")) {
            self.step()?;
        }
        Ok(())
    }

    /// Writes single pages in sequence.
    fn write_given_up(&mut self, op: &Op, rng: &mut Rng) -> Result<(), Violation> {
        let block = self.world.succession.block;
        for i in 0..MAX_WRITES {
            self.let_go_on(rng)?;
            self.by(Who::Next, |run, key| run.touch(op, key, block, i))?;
        }
        Ok(())
    }

    /// Runs some steps, few more often than many.
    fn let_go_on(&mut self, rng: &mut Rng) -> Result<(), Violation> {
        let most = 4 << rng.below(4);
        for _ in 0..rng.below(most) {
            self.step()?;
        }
        Ok(())
    }
}
