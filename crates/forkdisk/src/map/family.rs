//! Everything that refers to one virtual block: the tables on the paths from several volumes to it, each once
//! however many volumes share it, and what refers to each.
//!
//! A family is a snapshot of the maps at one moment. The counts tell whether it is complete: a table or a
//! page with more references than the family knows is used elsewhere, too.

use rustc_hash::FxHashMap;

use crate::format::{Kind, MapEntry};
use crate::types::{Epoch, VirtualPage, VolumeId, table_span};

use super::edit::{Editor, Stop};
use super::entries::Entries;
use super::store::NodeId;

/// A volume, or the rest of a deleted one.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    pub id: VolumeId,
    pub root: MapEntry,
    pub level: u8,
    pub shared_at: Epoch,
    /// How much the layout of its pages matters.
    pub weight: u64,
}

/// What refers to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Referrer {
    /// A member, by its index.
    Root(usize),
    /// The table of a part, by its index.
    Table(usize),
}

/// A table, or a block entry.
pub(super) struct SubMap {
    pub entry: MapEntry,
    pub level: u8,
    /// `None`: a block entry, found in tables of level 1.
    pub node: Option<NodeId>,
    pub by: Vec<Referrer>,
    /// For a leaf or block: the members that reach it.
    pub members: Vec<usize>,
}

/// See the module.
pub struct Family {
    pub members: Vec<Member>,
    /// The first page of the virtual block.
    pub at: VirtualPage,
    pub(super) parts: Vec<SubMap>,
}

impl Family {
    /// Iterates over the leaves and blocks.
    pub(super) fn leaves(&self) -> impl Iterator<Item = (usize, &SubMap)> {
        self.parts.iter().enumerate().filter(|(_, part)| part.level == 0)
    }

    /// Returns the leaf or block that a member reaches.
    pub(super) fn leaf_of(&self, id: VolumeId) -> Option<usize> {
        let member = self.members.iter().position(|m| m.id == id)?;
        self.leaves().find(|(_, part)| part.members.contains(&member)).map(|(i, _)| i)
    }

    /// Returns how much the layout of a leaf or block matters.
    pub(super) fn weight(&self, part: &SubMap) -> u64 {
        part.members.iter().map(|&m| self.members[m].weight).max().unwrap_or(0)
    }

    /// Returns the members whose leaf or block refers to pages in `moved`.
    pub fn affected(&self, leaves: &[usize]) -> Vec<VolumeId> {
        let all = leaves.iter().flat_map(|&i| &self.parts[i].members);
        let mut ids: Vec<VolumeId> = all.map(|&m| self.members[m].id).collect();
        ids.sort_unstable();
        ids
    }
}

impl Editor<'_> {
    /// Returns the family of `members` in the virtual block that begins at `at`.
    pub fn family(&mut self, members: Vec<Member>, at: VirtualPage) -> Result<Family, Stop> {
        let mut family = Family { members, at, parts: Vec::new() };
        let (mut tables, mut blocks) = (FxHashMap::default(), FxHashMap::default());
        for member in 0..family.members.len() {
            let Member { root, level, .. } = family.members[member];
            if at.0 >= table_span(level) {
                continue;
            }
            let (mut entry, mut level, mut by) = (root, level, Referrer::Root(member));
            while !entry.is_absent() {
                let (key, node) = match entry.kind() {
                    Kind::Table => {
                        let node = self.tables.get(entry, level)?;
                        (tables.entry(node).or_insert(usize::MAX), Some(node))
                    }
                    // What shares a block entry has the same entry.
                    _ => (blocks.entry((entry.addr(), entry.birth().0)).or_insert(usize::MAX), None),
                };
                let is_new = *key == usize::MAX;
                if is_new {
                    *key = family.parts.len();
                    family.parts.push(SubMap { entry, level, node, by: Vec::new(), members: Vec::new() });
                }
                let part = *key;
                // Another path into a table that was visited leads to parts that were visited.
                if !family.parts[part].by.contains(&by) {
                    family.parts[part].by.push(by);
                }
                let Some(node) = node.filter(|_| level > 0) else {
                    family.parts[part].members.push(member);
                    break;
                };
                entry = self.tables.node(node).entry(at.slot(level));
                by = Referrer::Table(part);
                level -= 1;
            }
        }
        Ok(family)
    }

    /// Returns the mapping of the pages of a leaf or block.
    pub(super) fn said(&self, part: &SubMap) -> Entries {
        match part.node {
            Some(node) => self.tables.node(node).entries().clone(),
            None => Entries::of_block(part.entry),
        }
    }

    /// Returns for each part whether the family knows all references to the tables on the path to it, itself
    /// included.
    pub(super) fn known_wholly(&mut self, family: &Family) -> Result<Vec<bool>, Stop> {
        let mut known = vec![false; family.parts.len()];
        for i in family.downwards() {
            let part = &family.parts[i];
            let itself = match part.node {
                Some(_) => self.table_count(part.entry.table_ref())? as usize == part.by.len(),
                // Block entries are counted with the pages.
                None => true,
            };
            known[i] = itself
                && part.by.iter().all(|by| match *by {
                    Referrer::Root(_) => true,
                    Referrer::Table(above) => known[above],
                });
        }
        Ok(known)
    }
}

impl Family {
    /// Returns the parts, those of higher levels first.
    pub(super) fn downwards(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.parts.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(self.parts[i].level));
        order
    }
}
