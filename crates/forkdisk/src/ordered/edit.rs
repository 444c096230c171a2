//! Changing an ordered map: insertion with splits, removal with merges.
//!
//! All pages that a change will touch are looked up first; from then on nothing can be missed. Several
//! changes that belong together are made ready first ([`Editor::tree_ready`]): then none of them misses
//! anything, and all of them happen or none.

use crate::format::ordered::{self, ORDERED_LEAF, PAIRS, Slots};
use crate::format::{Entry, TreeRoot};
use crate::map::{Editor, Entries, NodeId, Stop};
use crate::types::FANOUT;

use super::{Path, descend, root_level};

/// A page with fewer pairs looks for a neighbour to be merged with.
const FEW: usize = PAIRS / 4;
/// Most pairs of a page that two were merged into.
const MERGED: usize = PAIRS * 3 / 4;

/// What becomes of a page from which a pair is taken.
enum Shrunk {
    /// It stays.
    Stays,
    /// It has become empty.
    Goes,
    /// It is merged with its neighbour: the left of the two is child `left` of the page above.
    Merges { left: usize },
}

impl Editor<'_> {
    /// Sets the value of `key`; returns the one it had.
    pub fn tree_insert(&mut self, root: &mut TreeRoot, key: u128, value: u128) -> Result<Option<u128>, Stop> {
        let value = Entry::from_bits(value);
        if root.height == 0 {
            let mut page = Box::new([Entry::ABSENT; FANOUT]);
            ordered::insert(&mut page, 0, key, value);
            *root = TreeRoot { entry: self.tables.create(ORDERED_LEAF, self.epoch, Entries::whole(page)).1, height: 1 };
            return Ok(None);
        }
        let path = descend(self.tables, root, key)?;
        let path = self.own_path(root, &path);
        // Once its neighbour on the left is gone a page gets keys below its first bound.
        for &(id, at) in path.iter().take(path.len() - 1) {
            let page = self.tables.slots_mut(id);
            if at == 0 && key < ordered::key(page, 0) {
                ordered::set_key(page, 0, key);
            }
        }
        let &(leaf, at) = path.last().expect("the map is not empty");
        let page = self.tables.slots_mut(leaf);
        if at < ordered::pairs(page) && ordered::key(page, at) == key {
            let old = ordered::value(page, at);
            ordered::set_value(page, at, value);
            return Ok(Some(old.bits()));
        }
        self.add_pair(root, &path, key, value);
        Ok(None)
    }

    /// Puts a pair into the leaf at the end of `path`; full pages are split, up to the root.
    fn add_pair(&mut self, root: &mut TreeRoot, path: &Path, mut key: u128, mut value: Entry) {
        for (depth, &(id, at)) in path.iter().enumerate().rev() {
            // In a leaf `at` is where the pair goes, above it is the child that was split.
            let at = if depth + 1 == path.len() { at } else { at + 1 };
            let page = self.tables.slots_mut(id);
            if ordered::pairs(page) < PAIRS {
                return ordered::insert(page, at, key, value);
            }
            // Whoever appends leaves full pages behind.
            let middle = if at == PAIRS { PAIRS } else { PAIRS / 2 };
            let mut right = ordered::split(page, middle);
            match at < middle {
                true => ordered::insert(page, at, key, value),
                false => ordered::insert(&mut right, at - middle, key, value),
            }
            key = ordered::key(&right, 0);
            value = self.tables.create(root_level(root.height) - depth as u8, self.epoch, Entries::whole(right)).1;
        }
        let mut top = Box::new([Entry::ABSENT; FANOUT]);
        ordered::insert(&mut top, 0, 0, root.entry);
        ordered::insert(&mut top, 1, key, value);
        root.height += 1;
        root.entry = self.tables.create(root_level(root.height), self.epoch, Entries::whole(top)).1;
    }

    /// Takes `key` out; returns its value.
    pub fn tree_remove(&mut self, root: &mut TreeRoot, key: u128) -> Result<Option<u128>, Stop> {
        let path = descend(self.tables, root, key)?;
        let Some(&(leaf, at)) = path.last() else { return Ok(None) };
        let page = self.tables.node(leaf).slots();
        if at == ordered::pairs(page) || ordered::key(page, at) != key {
            return Ok(None);
        }
        let old = ordered::value(page, at);
        let plan = self.plan_removal(root, &path, false)?;
        let path = self.own_path(root, &path);
        let mut depth = path.len() - 1;
        ordered::remove(self.tables.slots_mut(leaf_of(&path)), at);
        for shrunk in plan {
            match shrunk {
                Shrunk::Stays => break,
                Shrunk::Goes => self.tables.remove(path[depth].0),
                Shrunk::Merges { left } => self.merge(root, &path, depth, left),
            }
            if depth == 0 {
                *root = TreeRoot::default();
                return Ok(Some(old.bits()));
            }
            depth -= 1;
            let (parent, child) = path[depth];
            let gone = if let Shrunk::Merges { left } = shrunk { left + 1 } else { child };
            ordered::remove(self.tables.slots_mut(parent), gone);
        }
        self.lower(root);
        Ok(Some(old.bits()))
    }

    /// Brings into memory what inserting or removing `key` touches, together with other changes that
    /// are made ready before any of them is done.
    pub fn tree_ready(&mut self, root: &TreeRoot, key: u128) -> Result<(), Stop> {
        let path = descend(self.tables, root, key)?;
        if !path.is_empty() {
            self.plan_removal(root, &path, true)?;
        }
        Ok(())
    }

    /// What becomes of the pages of `path`, from the leaf up, until one stays. A neighbour that is not
    /// in memory is called for, or else left alone.
    fn plan_removal(&mut self, root: &TreeRoot, path: &Path, call: bool) -> Result<Vec<Shrunk>, Stop> {
        let mut plan = Vec::new();
        for (depth, &(id, _)) in path.iter().enumerate().rev() {
            let left = ordered::pairs(self.tables.node(id).slots()) - 1;
            if left == 0 && !call {
                plan.push(Shrunk::Goes);
                continue;
            }
            match (depth, left < FEW) {
                (1.., true) => match self.neighbour(root, path, depth, left) {
                    Ok(Some(left)) => plan.push(Shrunk::Merges { left }),
                    Err(stop) if call => return Err(stop),
                    Ok(None) | Err(_) => break,
                },
                _ => break,
            }
        }
        plan.push(Shrunk::Stays);
        Ok(plan)
    }

    /// The neighbour that a page with `left` pairs is merged with, told by the left one of the two.
    fn neighbour(&mut self, root: &TreeRoot, path: &Path, depth: usize, left: usize) -> Result<Option<usize>, Stop> {
        let (parent, at) = path[depth - 1];
        let n = ordered::pairs(self.tables.node(parent).slots());
        let other = match at {
            _ if n < 2 => return Ok(None),
            at if at + 1 < n => at + 1,
            at => at - 1,
        };
        let entry = ordered::value(self.tables.node(parent).slots(), other);
        let id = self.tables.get(entry, root_level(root.height) - depth as u8)?;
        let fits = left + ordered::pairs(self.tables.node(id).slots()) <= MERGED;
        Ok(fits.then_some(at.min(other)))
    }

    /// Moves the pairs of child `left + 1` of the page above `depth` into child `left`.
    fn merge(&mut self, root: &TreeRoot, path: &Path, depth: usize, left: usize) {
        let (parent, _) = path[depth - 1];
        let level = root_level(root.height) - depth as u8;
        let page = self.tables.node(parent).slots();
        let (a, b) = (ordered::value(page, left), ordered::value(page, left + 1));
        let bound = ordered::key(page, left + 1);
        let (into, entry) = self.own_page(a, level);
        ordered::set_value(self.tables.slots_mut(parent), left, entry);
        let (from, _) = self.own_page(b, level);
        let right: Box<Slots> = Box::new(*self.tables.node(from).slots());
        let first = if level == ORDERED_LEAF { ordered::key(&right, 0) } else { bound };
        ordered::append(self.tables.slots_mut(into), &right, first);
        self.tables.remove(from);
    }

    /// A root with a single child gives way to it.
    fn lower(&mut self, root: &mut TreeRoot) {
        while root.height > 1 {
            let id = self.tables.get(root.entry, root_level(root.height)).expect("changed just now");
            let page = self.tables.node(id).slots();
            if ordered::pairs(page) > 1 {
                return;
            }
            *root = TreeRoot { entry: ordered::value(page, 0), height: root.height - 1 };
            self.tables.remove(id);
            // The child may be one that is not in memory: it stays as it is.
            if self.tables.get(root.entry, root_level(root.height)).is_err() {
                return;
            }
        }
    }

    /// The pages of `path`, all of which may be changed.
    fn own_path(&mut self, root: &mut TreeRoot, path: &Path) -> Path {
        let mut owned = Path::new();
        for (depth, &(_, at)) in path.iter().enumerate() {
            let entry = match owned.last() {
                None => root.entry,
                Some(&(parent, child)) => ordered::value(self.tables.node(parent).slots(), child),
            };
            let (id, new) = self.own_page(entry, root_level(root.height) - depth as u8);
            match owned.last() {
                None => root.entry = new,
                Some(&(parent, child)) => ordered::set_value(self.tables.slots_mut(parent), child, new),
            }
            owned.push((id, at));
        }
        owned
    }

    /// A page that may be changed in place of the one `entry` points to, which is in memory.
    fn own_page(&mut self, entry: Entry, level: u8) -> (NodeId, Entry) {
        let id = self.tables.get(entry, level).expect("looked up before");
        if self.tables.is_dirty(id) {
            return (id, entry);
        }
        let mut page = Box::new(*self.tables.node(id).slots());
        for slot in ordered::child_slots(level) {
            page[slot] = self.tables.settle_finished(page[slot]);
        }
        self.free_table(id, entry.table_ref());
        self.tables.create(level, self.epoch, Entries::whole(page))
    }
}

fn leaf_of(path: &Path) -> NodeId {
    path.last().expect("the map is not empty").0
}
