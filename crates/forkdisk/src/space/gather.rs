//! Places for pages that are brought together.

use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Miss, Space, bit};

/// Part of the pool that gathering leaves free.
const KEPT_PART: u64 = 64;

impl Space {
    /// Whether a page is known to be free.
    pub fn is_known_free(&self, page: PageAddr) -> bool {
        self.free.get(&page.block()).is_some_and(|bits| bit(bits, page.index()))
    }

    /// Takes `n` pages from `first` on. False: not all of them were free; those that were are taken.
    pub fn take_exactly(&mut self, first: PageAddr, n: u64) -> bool {
        self.take(first.block(), first.index(), n).is_some_and(|(_, taken)| taken == n)
    }

    /// Whether `pages` can be taken for gathering and `kept` as well, and some are left to others.
    pub fn has_room_to_gather(&self, pages: u64, kept: u64) -> bool {
        self.available >= pages + kept + self.layout.pages() / KEPT_PART
    }

    /// A block of which every page is free, for a virtual block of many pages.
    pub fn block_to_gather(&mut self) -> Result<Option<Block>, Miss> {
        self.empty_block(None)
    }

    /// `n` pages in one piece (at most a block), one such run behind the other; taken.
    pub fn run_to_gather(&mut self, n: u64) -> Result<Option<PageAddr>, Miss> {
        debug_assert!(n <= BLOCK_PAGES);
        if let Some(next) = self.affinity.gathered {
            let is_free = (0..n).all(|i| self.is_known_free(PageAddr(next.0 + i)));
            if next.index() as u64 + n <= BLOCK_PAGES && is_free && self.take_exactly(next, n) {
                self.affinity.gathered = Some(PageAddr(next.0 + n)).filter(|p| p.index() != 0);
                return Ok(Some(next));
            }
        }
        let Some(block) = self.empty_block(None)? else { return Ok(None) };
        let first = block.first_page();
        let taken = self.take_exactly(first, n);
        debug_assert!(taken, "an empty block has every page");
        self.affinity.gathered = Some(PageAddr(first.0 + n)).filter(|p| p.index() != 0);
        Ok(Some(first))
    }
}
