//! Sharing a range of one volume with another.

use crate::format::{Entry, Kind, VolumeRecord};
use crate::planted::{Bug, planted};
use crate::types::{BLOCK_PAGES, PageAddr, VirtualPage};

use super::edit::{Editor, Stop};
use super::lookup::{leaf_entry, lookup};

impl Editor<'_> {
    /// Makes `target` at `to` show what `source` shows at `from`: pages are shared, holes become
    /// holes. Takes at most `len` pages and at most up to the end of a virtual block of either;
    /// returns how many it were. All of them change at once or, on a [`Stop`], none.
    ///
    /// `shared_at` of both volumes must have been raised before.
    pub fn share_step(
        &mut self,
        source: &VolumeRecord,
        from: VirtualPage,
        target: &mut VolumeRecord,
        to: VirtualPage,
        len: u64,
    ) -> Result<u64, Stop> {
        if from.index() == 0 && to.index() == 0 && len >= BLOCK_PAGES {
            return self.share_block(source, from, target, to);
        }
        let run = lookup(self.tables, source, from, len)?;
        let n = run.len.min(BLOCK_PAGES - from.index() as u64).min(BLOCK_PAGES - to.index() as u64);
        let Some((addr, birth)) = run.data else {
            return Ok(self.unmap_step(target, to, VirtualPage(to.0 + n))?.0 - to.0);
        };
        let birth = if planted(Bug::RangeCloneRejuvenates) { self.epoch } else { birth };
        let path = self.writable(target, to, 0)?;
        let &(leaf, first) = path.last().expect("a path has a table");
        for i in 0..n {
            let new = Entry::page(PageAddr(addr.0 + i), birth);
            let old = self.tables.set(leaf, first + i as usize, new);
            match old.is_absent() {
                true => target.referenced += 1,
                false => self.space.decr_page(old.addr(), self.until),
            }
        }
        self.space.incr_pages(addr, n);
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
            Kind::Absent => {
                // That may be a part of the block only: what is a hole already is passed over first.
                return Ok(self.unmap_step(target, to, VirtualPage(to.0 + BLOCK_PAGES))?.0 - to.0);
            }
            Kind::Table => {
                let leaf = self.tables.get(entry, 0)?;
                self.tables.node(leaf).entries().mapped()
            }
            _ => BLOCK_PAGES,
        };
        let path = self.writable(target, to, 1)?;
        let &(id, slot) = path.last().expect("a path has a table");
        let old = self.tables.node(id).entry(slot);
        // The new reference first: the old one may be to the same table.
        self.share(entry);
        let gone = match self.drop_leaf_entry(old) {
            Ok(gone) => gone,
            Err(stop) => {
                self.unshare(entry);
                return Err(stop);
            }
        };
        self.tables.set(id, slot, entry);
        target.referenced = target.referenced + pages - gone;
        Ok(BLOCK_PAGES)
    }
}
