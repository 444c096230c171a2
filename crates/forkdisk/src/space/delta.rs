//! Changes of counts that are not in a count page yet.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::format::{CountNode, LEAF_BLOCKS};
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{ALL, Bitmap, bit, mask};

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
    marks: Option<Box<Marks>>,
}

/// What is known of pages that are given up.
#[derive(Default)]
struct Marks {
    /// They held metadata: what is durable may point to them whatever the journal says.
    tables: Bitmap,
    /// They are discarded on the device already.
    discarded: Bitmap,
}

impl Delta {
    /// Whether it changes the count of the block as a whole and no other.
    pub fn is_whole(&self) -> bool {
        self.all == 0 && self.pages.iter().all(|&(_, n)| n == 0)
    }

    /// Pages that are marked.
    pub fn marked(&self) -> Bitmap {
        self.marks.as_ref().map_or([0; 4], |marks| std::array::from_fn(|i| marks.tables[i] | marks.discarded[i]))
    }

    /// Change of one page's count.
    pub fn of(&self, index: usize) -> i32 {
        let own = self.pages.binary_search_by_key(&(index as u8), |&(i, _)| i).map_or(0, |at| self.pages[at].1);
        self.all + own
    }

    /// Changes the counts of some pages; returns how many entries that added.
    fn change(&mut self, indices: Range<usize>, by: i32) -> usize {
        self.touched_from(indices.start, indices.len());
        let before = self.pages.len();
        if indices.len() == 1 {
            self.change_one(indices.start as u8, by);
            return self.pages.len() - before;
        }
        let at = self.pages.partition_point(|&(i, _)| usize::from(i) < indices.start);
        match self.pages.get(at) {
            Some(&(next, _)) if usize::from(next) < indices.end => {
                indices.for_each(|index| self.change_one(index as u8, by));
            }
            // None of them has an entry.
            _ => drop(self.pages.splice(at..at, indices.map(|index| (index as u8, by)))),
        }
        self.pages.len() - before
    }

    fn change_one(&mut self, index: u8, by: i32) {
        match self.pages.binary_search_by_key(&index, |&(i, _)| i) {
            Ok(at) => self.pages[at].1 += by,
            Err(at) => self.pages.insert(at, (index, by)),
        }
    }

    fn touched_from(&mut self, first: usize, n: usize) {
        set(&mut self.touched, first..first + n);
    }
}

fn set(bits: &mut Bitmap, indices: Range<usize>) {
    bits.iter_mut().zip(mask(indices)).for_each(|(bits, more)| *bits |= more);
}

/// A run of pages block by block: which of its pages belong to the run.
fn by_block(first: PageAddr, n: u64) -> impl Iterator<Item = (Block, Range<usize>)> {
    let (mut page, end) = (first.0, first.0 + n);
    std::iter::from_fn(move || {
        let here = PageAddr(page);
        let left = (BLOCK_PAGES - here.index() as u64).min(end - page);
        page += left;
        (left > 0).then(|| (here.block(), here.index()..here.index() + left as usize))
    })
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
    /// One reference more to each of `n` pages.
    pub fn gain(&mut self, first: PageAddr, n: u64) {
        for (block, indices) in by_block(first, n) {
            self.entries += self.blocks.entry(block).or_default().change(indices, 1);
        }
    }

    /// One reference less to each of `n` pages, which is durable once the journal is up to `until`.
    pub fn lose(&mut self, first: PageAddr, n: u64, until: u64) {
        for (block, indices) in by_block(first, n) {
            let delta = self.blocks.entry(block).or_default();
            self.entries += delta.change(indices, -1);
            delta.lost_until = delta.lost_until.max(until);
        }
        self.lost += n;
    }

    /// One reference less to a block as a whole.
    pub fn lose_whole(&mut self, block: Block, until: u64) {
        self.whole(block, -1, 0);
        self.lost += BLOCK_PAGES;
        let delta = self.blocks.entry(block).or_default();
        delta.lost_until = delta.lost_until.max(until);
    }

    /// This page, given up, held metadata.
    pub fn mark_table(&mut self, page: PageAddr) {
        set(&mut self.marks(page).tables, page.index()..page.index() + 1);
    }

    /// This page is discarded.
    pub fn mark_discarded(&mut self, page: PageAddr) {
        set(&mut self.marks(page).discarded, page.index()..page.index() + 1);
    }

    fn marks(&mut self, page: PageAddr) -> &mut Marks {
        self.blocks.entry(page.block()).or_default().marks.get_or_insert_default()
    }

    /// Blocks with changes from `from` on.
    pub fn blocks_from(&self, from: Block) -> impl Iterator<Item = Block> {
        self.blocks.range(from..).map(|(&block, _)| block)
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

    /// The `n` pages from `first` on, all of one block, were handed out.
    pub fn touch(&mut self, first: PageAddr, n: u64) {
        let block = first.block();
        let delta = self.blocks.entry(block).or_default();
        delta.touched_from(first.index(), n as usize);
        if !std::mem::replace(&mut delta.handed_out, true) {
            let from = CountNode::leaf_of(block).0.first_block();
            let mut leaf = self.blocks.range(from..Block(from.0 + LEAF_BLOCKS as u64));
            self.leaves += usize::from(!leaf.any(|(&other, delta)| other != block && delta.handed_out));
        }
    }

    /// Forgets that a page was handed out; false if there is more to know about it.
    pub fn untouch(&mut self, page: PageAddr) -> bool {
        let Some(delta) = self.blocks.get_mut(&page.block()) else { return false };
        let i = page.index();
        if delta.whole != 0 || delta.all != 0 || delta.of(i) != 0 || bit(&delta.marked(), i) || !bit(&delta.touched, i)
        {
            return false;
        }
        delta.touched[i / 64] &= !(1 << (i % 64));
        true
    }

    /// The next checkpoint brings back `n` pages that nothing refers to.
    pub fn abandon(&mut self, n: u64) {
        self.lost += n;
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
