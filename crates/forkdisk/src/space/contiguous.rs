//! Contiguous places for gathered pages.

use crate::bits::bit;
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Miss, Reservation, Space};

/// Leaves of counts from the first on that are searched for contiguous empty blocks, where there is one at
/// all.
const MAX_SEARCHED_LEAVES: u64 = 4096;
/// When this many times the wanted number of contiguous blocks is known to be empty, the search ends.
const AMPLE_FACTOR: u64 = 8;
/// Empty blocks among which contiguous ones are looked for.
const MAX_EXAMINED_BLOCKS: usize = 1 << 16;

impl Space {
    /// Whether a page is known to be free.
    pub fn is_known_free(&self, page: PageAddr) -> bool {
        self.free.get(&page.block()).is_some_and(|bits| bit(bits, page.index()))
    }

    /// Finds out which pages of a block are free, also where the search for free space has not come yet.
    pub fn learn_free(&mut self, block: Block) -> Result<(), Miss> {
        if self.is_scanned(block) { Ok(()) } else { self.search_block(block) }
    }

    /// Allocates all of these pages, or none if not all of them are known to be free.
    pub fn take_all(&mut self, pages: impl Iterator<Item = PageAddr> + Clone, _: &Reservation) -> bool {
        let all = pages.clone().all(|page| self.is_known_free(page));
        for page in pages.filter(|_| all) {
            self.take(page.block(), page.index(), 1).expect("looked up just now");
        }
        all
    }

    /// Returns a block of which every page is free, for a virtual block of many pages: the one behind
    /// `before`, where the virtual block before it lies; else the first of `wanted` contiguous blocks; else
    /// the first of the most there are.
    pub fn block_to_gather(&mut self, before: Option<Block>, wanted: u64) -> Result<Option<Block>, Miss> {
        if let Some(next) = before.map(|b| Block(b.0 + 1))
            && self.empty.contains(&next)
            && !self.is_for_metadata(next)
        {
            return Ok(Some(next));
        }
        loop {
            let (len, first) = self.longest_row(wanted);
            let is_enough =
                self.empty.len() as u64 >= AMPLE_FACTOR * wanted || self.scan >= MAX_SEARCHED_LEAVES && first.is_some();
            if len >= wanted || is_enough {
                return Ok(first);
            }
            // Several at a time: each batch is followed by a pass over everything known.
            for _ in 0..64 {
                if !self.scan_leaf()? {
                    return Ok(self.longest_row(wanted).1);
                }
            }
        }
    }

    /// Returns how many contiguous empty blocks there are, up to `wanted`.
    pub fn row_to_gather(&mut self, wanted: u64) -> Result<u64, Miss> {
        self.block_to_gather(None, wanted)?;
        Ok(self.longest_row(wanted).0)
    }

    /// Returns the first `wanted` contiguous empty blocks, or the longest row: their number, and where they
    /// begin.
    fn longest_row(&self, wanted: u64) -> (u64, Option<Block>) {
        let (mut longest, mut row): ((u64, Option<Block>), (u64, Block)) = ((0, None), (0, Block(0)));
        let is_for_data = |&&block: &&Block| self.is_for_data(block) && !self.is_for_metadata(block);
        for &block in self.empty.iter().take(MAX_EXAMINED_BLOCKS).take_while(is_for_data) {
            row = if block.0 == row.1.0 + row.0 && row.0 > 0 { (row.0 + 1, row.1) } else { (1, block) };
            if row.0 > longest.0 {
                longest = (row.0, Some(row.1));
            }
            if row.0 >= wanted {
                break;
            }
        }
        longest
    }

    /// Allocates `n` contiguous pages (at most a block); successive runs are placed contiguously.
    pub fn run_to_gather(&mut self, n: u64, reserved: &Reservation) -> Result<Option<PageAddr>, Miss> {
        debug_assert!(n <= BLOCK_PAGES);
        if let Some(next) = self.affinity.gathered
            && next.index() as u64 + n <= BLOCK_PAGES
            && self.take_all((next.0..next.0 + n).map(PageAddr), reserved)
        {
            self.affinity.gathered = Some(PageAddr(next.0 + n)).filter(|p| p.index() != 0);
            return Ok(Some(next));
        }
        let Some(block) = self.empty_block(None)? else { return Ok(None) };
        let first = block.first_page();
        let taken = self.take(block, 0, n);
        debug_assert_eq!(taken, Some((first, n)), "an empty block has every page");
        self.affinity.gathered = Some(PageAddr(first.0 + n)).filter(|p| p.index() != 0);
        Ok(Some(first))
    }
}
