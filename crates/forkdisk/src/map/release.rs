//! Removing mappings: holes, and the walk that frees the space of a dead volume.

use crate::format::{Kind, MapEntry, TableRef, VolumeRecord};
use crate::space::Credits;
use crate::types::{BLOCK_PAGES, Block, PageAddr, TABLE_FANOUT, VirtualPage, entry_span, table_span};

use super::charges::NO_PAGES;
use super::edit::count_seams;
use super::edit::{Editor, Path, Stop};
use super::store::NodeId;

/// What a part of a map held.
pub(super) struct ReleasedPages {
    pub pages: u64,
    pub seams: u64,
}

/// The target of an entry of level 1, with everything needed to release it.
pub(super) enum Leaf {
    Absent,
    Block(Block, Credits),
    /// A table that other entries point to as well.
    Shared(NodeId, TableRef),
    /// A table that only this entry points to.
    Own(NodeId, TableRef, Credits),
}

impl Editor<'_> {
    /// Looks up the target of an entry of level 1, which is to be released while `kept` get a reference more; changes
    /// nothing.
    pub(super) fn find_leaf(&mut self, entry: MapEntry, kept: (PageAddr, u64)) -> Result<Leaf, Stop> {
        match entry.kind() {
            Kind::Absent => Ok(Leaf::Absent),
            Kind::Block => Ok(Leaf::Block(entry.addr().block(), self.freed_with_block(entry, kept)?)),
            Kind::Table => {
                let (leaf, at) = (self.tables.get(entry, 0)?, entry.table_ref());
                if self.table_count(at)? > 1 {
                    return Ok(Leaf::Shared(leaf, at));
                }
                let freed = self.freed_in(leaf, 0..TABLE_FANOUT, kept)?;
                Ok(Leaf::Own(leaf, at, freed))
            }
            Kind::Page | Kind::Unknown(_) => unreachable!("not in a table of level 1"),
        }
    }

    /// Removes one reference from the target of an entry of level 1; returns what was mapped.
    pub(super) fn drop_leaf(&mut self, leaf: Leaf) -> ReleasedPages {
        let (leaf, at, freed) = match leaf {
            Leaf::Absent => return ReleasedPages { pages: 0, seams: 0 },
            Leaf::Block(block, freed) => {
                self.space.accounts.credit(freed);
                self.space.decr_block(block, self.until);
                return ReleasedPages { pages: BLOCK_PAGES, seams: 0 };
            }
            Leaf::Shared(leaf, at) => (leaf, at, None),
            Leaf::Own(leaf, at, freed) => (leaf, at, Some(freed)),
        };
        self.tables.follow_from(leaf);
        let entries = self.tables.node(leaf).entries();
        let held = ReleasedPages { pages: entries.mapped(), seams: entries.seams() };
        match freed {
            None => self.unshare_table(at),
            Some(freed) => {
                self.give_up_pages(leaf, 0..TABLE_FANOUT, freed);
                self.free_table(leaf, at);
            }
        }
        held
    }

    /// Makes a hole of the pages from `at` to `end`, at most up to the end of a virtual block, and
    /// returns the first page not yet done.
    pub fn unmap_step(
        &mut self,
        volume: &mut VolumeRecord,
        at: VirtualPage,
        end: VirtualPage,
    ) -> Result<VirtualPage, Stop> {
        let hole = super::lookup(self.tables, volume, at, end.0 - at.0)?;
        if hole.data.is_none() {
            return Ok(VirtualPage(at.0 + hole.len));
        }
        let stop = end.0.min((at.block() + 1) * BLOCK_PAGES);
        if stop - at.0 == BLOCK_PAGES {
            let mut path = self.writable(volume, at, 1)?;
            let &(id, slot) = path.last().expect("a path has a table");
            let old = self.find_leaf(self.tables.node(id).entry(slot), NO_PAGES)?;
            let gone = self.drop_leaf(old);
            volume.referenced -= gone.pages;
            count_seams(volume, 0, gone.seams);
            self.tables.set(id, slot, MapEntry::ABSENT);
            self.prune(volume, &mut path);
            return Ok(VirtualPage(stop));
        }
        let mut path = self.writable(volume, at, 0)?;
        let &(leaf, first) = path.last().expect("a path has a table");
        let slots = first..first + (stop - at.0) as usize;
        let freed = self.freed_in(leaf, slots.clone(), NO_PAGES)?;
        count_seams(volume, 0, self.tables.node(leaf).entries().seams_in(slots.clone()));
        volume.referenced -= self.give_up_pages(leaf, slots.clone(), freed);
        self.tables.set_run(leaf, slots, MapEntry::ABSENT);
        self.prune(volume, &mut path);
        Ok(VirtualPage(stop))
    }

    /// Removes tables at the end of a path that have become empty.
    pub(super) fn prune(&mut self, volume: &mut VolumeRecord, path: &mut Path) {
        while let Some((id, _)) = path.pop() {
            if self.tables.node(id).entries().runs(0..TABLE_FANOUT).any(|(_, entry)| !entry.is_absent()) {
                return;
            }
            self.tables.remove(id);
            match path.last() {
                None => volume.root = MapEntry::ABSENT,
                Some(&(parent, slot)) => drop(self.tables.set(parent, slot, MapEntry::ABSENT)),
            }
        }
    }

    /// Frees the next piece of a dead volume, advances its cursor, and returns whether that was the last
    /// piece.
    pub fn reap_step(&mut self, dead: &mut VolumeRecord) -> Result<bool, Stop> {
        let end = table_span(dead.level);
        if dead.root.is_absent() || dead.cursor >= end {
            return Ok(true);
        }
        // Down to the first table that is shared, or to a leaf: all tables above are exclusive to this
        // volume, and everything before the cursor in them has been released already.
        let at = VirtualPage(dead.cursor);
        let mut above = Vec::new();
        let (mut entry, mut level) = (dead.root, dead.level);
        let done = loop {
            let span = table_span(level);
            match entry.kind() {
                Kind::Table if self.table_count(entry.table_ref())? > 1 => {
                    self.unshare_table(entry.table_ref());
                    break span;
                }
                Kind::Table if level > 0 => {
                    let id = self.tables.get(entry, level)?;
                    above.push((id, entry, level));
                    entry = self.tables.node(id).entry(at.slot(level));
                    level -= 1;
                }
                _ => {
                    let leaf = self.find_leaf(entry, NO_PAGES)?;
                    self.drop_leaf(leaf);
                    break span;
                }
            }
        };
        dead.cursor = (dead.cursor / done + 1) * done;
        while let Some((id, entry, level)) = above.pop() {
            if !dead.cursor.is_multiple_of(table_span(level)) {
                break;
            }
            self.tables.follow_from(id);
            self.free_table(id, entry.table_ref());
        }
        debug_assert!(done >= entry_span(1));
        Ok(dead.cursor >= end)
    }
}
