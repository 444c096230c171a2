//! Taking things out of a map: holes, and the walk that gives a dead volume's space back.

use crate::format::{Entry, Kind, VolumeRecord};
use crate::types::{BLOCK_PAGES, FANOUT, VirtualPage, entry_span, table_span};

use super::edit::{Editor, Path, Stop};

/// What a part of a map held.
pub(super) struct Held {
    pub pages: u64,
    pub seams: u64,
}

impl Editor<'_> {
    /// Gives up what an entry of level 1 stands for: nothing, a block, or a leaf. Returns what was mapped. A
    /// leaf must be in memory unless others share it.
    pub(super) fn drop_leaf_entry(&mut self, entry: Entry) -> Result<Held, Stop> {
        match entry.kind() {
            Kind::Absent => Ok(Held { pages: 0, seams: 0 }),
            Kind::Block => {
                self.space.decr_block(entry.addr().block(), self.until);
                Ok(Held { pages: BLOCK_PAGES, seams: 0 })
            }
            Kind::Table => {
                let leaf = self.tables.get(entry, 0)?;
                let count = self.table_count(entry.table_ref())?;
                self.tables.follow_from(leaf);
                let seams = self.tables.node(leaf).entries().seams();
                let pages = self.tables.node(leaf).entries().mapped();
                if count > 1 {
                    self.unshare_table(entry.table_ref());
                } else {
                    self.give_up_pages(leaf, 0..FANOUT);
                    self.free_table(leaf, entry.table_ref());
                }
                Ok(Held { pages, seams })
            }
            Kind::Page | Kind::Unknown(_) => unreachable!("not in a table of level 1"),
        }
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
            let old = self.tables.node(id).entry(slot);
            let gone = self.drop_leaf_entry(old)?;
            volume.referenced -= gone.pages;
            volume.count_seams(0, gone.seams);
            self.tables.set(id, slot, Entry::ABSENT);
            self.prune(volume, &mut path);
            return Ok(VirtualPage(stop));
        }
        let mut path = self.writable(volume, at, 0)?;
        let &(leaf, first) = path.last().expect("a path has a table");
        let slots = first..first + (stop - at.0) as usize;
        volume.count_seams(0, self.tables.node(leaf).entries().seams_in(slots.clone()));
        volume.referenced -= self.give_up_pages(leaf, slots.clone());
        self.tables.set_run(leaf, slots, Entry::ABSENT);
        self.prune(volume, &mut path);
        Ok(VirtualPage(stop))
    }

    /// Removes tables at the end of a path that have become empty.
    pub(super) fn prune(&mut self, volume: &mut VolumeRecord, path: &mut Path) {
        while let Some((id, _)) = path.pop() {
            if self.tables.node(id).entries().runs(0..FANOUT).any(|(_, entry)| !entry.is_absent()) {
                return;
            }
            self.tables.remove(id);
            match path.last() {
                None => volume.root = Entry::ABSENT,
                Some(&(parent, slot)) => drop(self.tables.set(parent, slot, Entry::ABSENT)),
            }
        }
    }

    /// Gives back the next piece of a dead volume, moves its cursor on, and says whether that was
    /// the last.
    pub fn reap_step(&mut self, dead: &mut VolumeRecord) -> Result<bool, Stop> {
        let end = table_span(dead.level);
        if dead.root.is_absent() || dead.cursor >= end {
            return Ok(true);
        }
        // Down to the first table that others share, or to a leaf: everything above is ours alone,
        // and what lies before the cursor in it has been given back already.
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
                    self.drop_leaf_entry(entry)?;
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
