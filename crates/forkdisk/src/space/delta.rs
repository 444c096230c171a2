//! Changes of counts that are not in a count page yet.

use std::collections::BTreeMap;

use crate::format::{CountNode, LEAF_BLOCKS};
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{ALL, Bitmap, bit};

/// Changes of one block's counts.
#[derive(Default)]
pub struct Delta {
    pub whole: i32,
    /// Applies to all 256 pages.
    all: i32,
    pages: Vec<(u8, i32)>,
    pub touched: Bitmap,
    /// Pages of it were handed out.
    handed_out: bool,
    /// The losses are durable once the journal is up to this sequence number.
    pub lost_until: u64,
}

impl Delta {
    /// Whether it changes the count of the block as a whole and no other.
    pub fn is_whole(&self) -> bool {
        self.all == 0 && self.pages.iter().all(|&(_, n)| n == 0)
    }

    /// Change of one page's count.
    pub fn of(&self, index: usize) -> i32 {
        let own = self.pages.binary_search_by_key(&(index as u8), |&(i, _)| i).map_or(0, |at| self.pages[at].1);
        self.all + own
    }
}

/// Changes of many blocks.
#[derive(Default)]
pub struct Deltas {
    blocks: BTreeMap<Block, Delta>,
    entries: usize,
    lost: u64,
    /// Leaves of counts that have pages which were handed out.
    leaves: usize,
}

impl Deltas {
    /// One reference more to a page.
    pub fn gain(&mut self, page: PageAddr) {
        self.page(page, 1);
    }

    /// One reference less, which is durable once the journal is up to `until`.
    pub fn lose(&mut self, page: PageAddr, until: u64) {
        self.page(page, -1);
        self.lost += 1;
        self.unsure(page.block(), until);
    }

    /// One reference less to a block as a whole.
    pub fn lose_whole(&mut self, block: Block, until: u64) {
        self.whole(block, -1, 0);
        self.lost += BLOCK_PAGES;
        self.unsure(block, until);
    }

    fn unsure(&mut self, block: Block, until: u64) {
        let delta = self.blocks.entry(block).or_default();
        delta.lost_until = delta.lost_until.max(until);
    }

    fn page(&mut self, page: PageAddr, by: i32) {
        let delta = self.blocks.entry(page.block()).or_default();
        let index = page.index() as u8;
        match delta.pages.binary_search_by_key(&index, |&(i, _)| i) {
            Ok(at) => delta.pages[at].1 += by,
            Err(at) => {
                delta.pages.insert(at, (index, by));
                self.entries += 1;
            }
        }
        delta.touched[page.index() / 64] |= 1 << (page.index() % 64);
    }

    pub fn whole(&mut self, block: Block, whole: i32, all: i32) {
        let delta = self.blocks.entry(block).or_default();
        delta.whole += whole;
        delta.all += all;
        delta.touched = ALL;
        if delta.all == -1 && delta.pages.len() == 256 && delta.pages.iter().all(|&(_, n)| n == 1) {
            // A block that was filled page by page and promoted.
            self.entries -= delta.pages.len();
            (delta.all, delta.pages) = (0, Vec::new());
        }
    }

    /// The page was handed out.
    pub fn touch(&mut self, page: PageAddr) {
        let delta = self.blocks.entry(page.block()).or_default();
        delta.touched[page.index() / 64] |= 1 << (page.index() % 64);
        if !delta.handed_out {
            let first = CountNode::leaf_of(page.block()).0.first_block();
            let mut leaf = self.blocks.range(first..Block(first.0 + LEAF_BLOCKS as u64));
            self.leaves += usize::from(!leaf.any(|(_, delta)| delta.handed_out));
            self.blocks.entry(page.block()).or_default().handed_out = true;
        }
    }

    /// Leaves of counts that have pages which were handed out: what replay reads to do the same.
    pub fn leaves(&self) -> usize {
        self.leaves
    }

    /// The changes are in the count pages; which pages were touched stays known.
    pub fn applied(&mut self) {
        for delta in self.blocks.values_mut() {
            (delta.whole, delta.all, delta.pages, delta.lost_until) = (0, 0, Vec::new(), 0);
        }
        (self.entries, self.lost) = (0, 0);
    }

    pub fn of_page(&self, page: PageAddr) -> i32 {
        self.blocks.get(&page.block()).map_or(0, |d| d.of(page.index()))
    }

    pub fn of_whole(&self, block: Block) -> i32 {
        self.blocks.get(&block).map_or(0, |d| d.whole)
    }

    pub fn lost_until(&self, block: Block) -> u64 {
        self.blocks.get(&block).map_or(0, |d| d.lost_until)
    }

    pub fn is_touched(&self, page: PageAddr) -> bool {
        bit(&self.touched(page.block()), page.index())
    }

    pub fn touched(&self, block: Block) -> Bitmap {
        self.blocks.get(&block).map_or([0; 4], |d| d.touched)
    }

    pub fn iter(&self) -> impl Iterator<Item = (Block, &Delta)> {
        self.blocks.iter().map(|(&b, d)| (b, d))
    }

    pub fn get(&self, block: Block) -> Option<&Delta> {
        self.blocks.get(&block)
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Page references given up.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Memory, roughly: a node of the tree is three quarters full, a list of pages up to half empty.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * 160 + self.entries * 12
    }
}
