//! Operations, and the histories made of them.
//!
//! An operation is resolved only when it starts ("volume 7 of those that exist"), so that a history stays
//! meaningful when the shrinker removes operations.

use super::world::World;
use super::{Run, Violation};
use crate::rng::{Rng, mix};

/// A kind of operation: a row of the table of a world.
pub struct Operation<W: World> {
    pub name: &'static str,
    /// Returns how often it comes in the histories of a focus.
    pub weight: fn(W::Focus) -> u64,
    /// Starts it, or does nothing if there is nothing that it can work on.
    pub launch: fn(&mut Run<W>, &Op) -> Result<(), Violation>,
}

/// One operation of a history, not yet resolved.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// The name of the operation.
    pub name: &'static str,
    /// Its number in the whole history, from 1; also the mark of what it writes.
    pub number: u32,
    /// Executor steps between the operation before it and this one.
    pub gap: u32,
    /// Raw random draws.
    pub draws: [u64; 5],
}

/// Most writes that one operation makes.
pub const MAX_WRITES: u64 = 8;

impl Op {
    /// Returns one that is a part of another operation.
    pub fn part(number: u32, draws: [u64; 5]) -> Op {
        Op { name: "write", number, gap: 0, draws }
    }

    /// Returns one of the writes of an operation that makes several, with a number that no operation has.
    pub fn write_of(&self, i: u64) -> Op {
        debug_assert!(i < MAX_WRITES);
        let number = 2_000_000 + (self.number % 250_000) * MAX_WRITES as u32 + i as u32;
        Op::part(number, std::array::from_fn(|d| mix(&[self.draws[d], i])))
    }
}

/// Returns the operations of the histories of a focus with their weights, in the order in which they are drawn.
pub fn weights<W: World>(focus: W::Focus) -> Vec<(&'static str, u64)> {
    let all = W::operations().iter().map(|operation| (operation.name, (operation.weight)(focus)));
    let mut all: Vec<_> = all.filter(|(_, weight)| *weight > 0).collect();
    for (_, name, before) in W::drawn_after().iter().filter(|(of, ..)| *of == focus) {
        let at = |all: &[(&str, u64)], name: &str| all.iter().position(|(other, _)| *other == name);
        if let Some(from) = at(&all, name) {
            let row = all.remove(from);
            let to = at(&all, before).map_or(from, |before| before + 1);
            all.insert(to, row);
        }
    }
    all
}

/// Returns the first `n` operations of a history, with so many draws each. `has_gaps`: steps pass between them.
pub fn operations(seed: u64, weights: &[(&'static str, u64)], draws: usize, has_gaps: bool, n: usize) -> Vec<Op> {
    let mut rng = Rng::new(seed);
    let total: u64 = weights.iter().map(|w| w.1).sum();
    (1..=n as u32)
        .map(|number| {
            let mut at = rng.below(total);
            let is_here = |&&(_, weight): &&(&str, u64)| {
                let is_here = at < weight;
                at = at.saturating_sub(weight);
                is_here
            };
            let name = weights.iter().find(is_here).map_or("", |w| w.0);
            let gap = if has_gaps { rng.below(12) as u32 } else { 0 };
            Op { name, number, gap, draws: std::array::from_fn(|i| if i < draws { rng.next() } else { 0 }) }
        })
        .collect()
}

impl<W: World> Run<W> {
    /// Starts an operation of a history.
    pub fn launch(&mut self, op: &Op) -> Result<(), Violation> {
        let operation = W::operations().iter().find(|operation| operation.name == op.name);
        operation.map_or(Ok(()), |operation| (operation.launch)(self, op))
    }
}
