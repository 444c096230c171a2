//! Sharing a range of one volume with another.

use crate::format::{Entry, Kind, VolumeRecord};
use crate::planted::{Bug, planted};
use crate::types::{BLOCK_PAGES, PageAddr, VirtualPage};

use super::edit::{Editor, Stop};
use super::lookup::{leaf_entry, lookup};

impl Editor<'_> {
    /// Shares pages of `source` from `from` with `target` at `to`, at most `len` and at most up to
    /// the end of a virtual block of either; returns how many it were. The target's pages there
    /// must be holes, and `shared_at` of both volumes must have been raised before.
    pub fn share_step(
        &mut self,
        source: &VolumeRecord,
        from: VirtualPage,
        target: &mut VolumeRecord,
        to: VirtualPage,
        len: u64,
    ) -> Result<u64, Stop> {
        let run = lookup(self.tables, source, from, len)?;
        let Some((addr, birth)) = run.data else { return Ok(run.len) };
        let birth = if planted(Bug::RangeCloneRejuvenates) { self.epoch } else { birth };
        if from.index() == 0 && to.index() == 0 && len >= BLOCK_PAGES {
            return self.share_block(source, from, target, to);
        }
        let n = run.len.min(BLOCK_PAGES - from.index() as u64).min(BLOCK_PAGES - to.index() as u64);
        let path = self.writable(target, to, 0)?;
        let &(leaf, first) = path.last().expect("a path has a table");
        for i in 0..n {
            self.tables.entries_mut(leaf)[first + i as usize] = Entry::page(PageAddr(addr.0 + i), birth);
        }
        self.space.incr_pages(addr, n);
        target.referenced += n;
        Ok(n)
    }

    /// The whole virtual block: its block entry or its leaf, as it is.
    fn share_block(
        &mut self,
        source: &VolumeRecord,
        from: VirtualPage,
        target: &mut VolumeRecord,
        to: VirtualPage,
    ) -> Result<u64, Stop> {
        let entry = leaf_entry(self.tables, source, from)?;
        let entry = self.tables.settle_finished(entry);
        let pages = match entry.kind() {
            Kind::Table => {
                let leaf = self.tables.get(entry, 0)?;
                self.tables.node(leaf).entries.iter().filter(|e| !e.is_absent()).count() as u64
            }
            _ => BLOCK_PAGES,
        };
        let path = self.writable(target, to, 1)?;
        let &(id, slot) = path.last().expect("a path has a table");
        self.share(entry);
        self.tables.entries_mut(id)[slot] = entry;
        target.referenced += pages;
        Ok(BLOCK_PAGES)
    }
}
