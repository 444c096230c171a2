//! Count pages in memory: lookups, misses, cache.

use crate::bits::{ALL, Bitmap, mask, pages_in};
use crate::format::{CountEntry, CountNode, CountPage, LEAF_BLOCKS};
use crate::planted::{Bug, planted};
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Miss, Space};

impl Space {
    /// Takes over a missed count page, once it is loaded and verified. If a checkpoint has replaced it
    /// meanwhile, the newer one stays.
    pub fn loaded(&mut self, miss: Miss, mut page: CountPage) -> Result<(), String> {
        let Miss::Count { node, .. } = miss;
        if !matches!(self.page(node), Err(still) if still == miss) {
            return Ok(());
        }
        if node.level > 0 {
            for i in 0..node.entries() {
                let free = self.layout.initially_free_under(node.child(i));
                let entry = page.entry(i, free).ok_or_else(|| format!("entry {i} makes no sense"))?;
                if self.logged.is_flawed(node.child(i), entry, free) {
                    return Err(format!("entry {i} makes no sense with the log of counts"));
                }
            }
        }
        self.logged.put_into(node, &mut page)?;
        self.cache_page(node, page);
        Ok(())
    }

    fn cache_page(&mut self, node: CountNode, page: CountPage) {
        if self.cache.len() >= self.cache_limit && self.held == 0 {
            self.cache.clear();
        }
        self.cache.insert(node, page);
    }

    /// Notes that a missed count page is damaged: from now on it is treated as if it had never been written.
    pub fn lose(&mut self, miss: Miss) {
        let Miss::Count { node, .. } = miss;
        self.lost.insert(node);
    }

    /// Whether a block's counts are unknown.
    pub fn is_lost(&self, block: Block) -> bool {
        let above = |node: &CountNode| node.parent().map(|(parent, _)| parent);
        let mut nodes = std::iter::successors(Some(CountNode::leaf_of(block).0), above);
        !self.lost.is_empty() && nodes.any(|node| self.lost.contains(&node))
    }

    /// Returns the entry of a count page from the page above it and the log.
    pub(super) fn entry(&mut self, node: CountNode) -> Result<CountEntry, Miss> {
        let entry = self.entry_on_device(node)?;
        Ok(self.logged.on_top_of(node, entry))
    }

    /// Returns the entry of a count page from the page above it.
    pub(super) fn entry_on_device(&mut self, node: CountNode) -> Result<CountEntry, Miss> {
        let Some((parent, i)) = node.parent() else {
            return Ok(self.roots[node.index as usize]);
        };
        let free = self.layout.initially_free_under(node);
        match self.page(parent)? {
            None => Ok(CountEntry::default()),
            Some(page) => Ok(page.entry(i, free).expect("checked when it was loaded")),
        }
    }

    /// Returns a count page with the log applied; `None`: neither was ever written.
    pub(super) fn page(&mut self, node: CountNode) -> Result<Option<&CountPage>, Miss> {
        if self.cache.contains_key(&node) {
            return Ok(self.cache.get(&node));
        }
        let mut entry = self.entry_on_device(node)?;
        if self.lost.contains(&node) {
            entry.slot = None;
        }
        match entry.slot {
            None if self.logged.changes(node) => {
                let mut page = CountPage::default();
                // Where the log would make a count negative, `check` finds other counts than there are
                // references.
                let _ = self.logged.put_into(node, &mut page);
                self.cache_page(node, page);
                Ok(self.cache.get(&node))
            }
            None => Ok(None),
            Some(slot) if planted(Bug::OrphanedCountSlotTaken) => {
                Err(Miss::Count { node, page: node.page(slot.other()), checksum: entry.checksum })
            }
            Some(slot) => Err(Miss::Count { node, page: node.page(slot), checksum: entry.checksum }),
        }
    }

    /// Returns the free pages of a block according to its leaf.
    pub(super) fn free_by_leaf(&mut self, block: Block) -> Result<Bitmap, Miss> {
        if self.layout.is_reserved(block) {
            return Ok([0; 4]);
        }
        let (node, i) = CountNode::leaf_of(block);
        if self.entry(node)?.common > 0 {
            return Ok([0; 4]);
        }
        Ok(self.page(node)?.map_or(ALL, |page| free_in(page, i)))
    }

    /// Searches the next leaf for free pages; returns false when all have been searched.
    pub(super) fn scan_leaf(&mut self) -> Result<bool, Miss> {
        if self.scan >= self.scan_end {
            return Ok(false);
        }
        let node = CountNode { level: 0, index: self.scan };
        let (parent, first) = node.parent().expect("a leaf has a parent");
        if first == 0 && self.is_full(parent)? {
            self.scan += parent.entries() as u64;
            return Ok(true);
        }
        self.search(node)?;
        self.scan += 1;
        Ok(true)
    }

    /// As [`scan_leaf`](Self::scan_leaf), from the other end, down to leaf `limit`.
    pub(super) fn scan_leaf_from_the_end(&mut self, limit: u64) -> Result<bool, Miss> {
        if self.scan_end <= self.scan.max(limit) {
            return Ok(false);
        }
        self.search(CountNode { level: 0, index: self.scan_end - 1 })?;
        self.scan_end -= 1;
        Ok(true)
    }

    fn is_full(&mut self, node: CountNode) -> Result<bool, Miss> {
        Ok(self.entry(node)?.used >= self.layout.initially_free_under(node))
    }

    fn search(&mut self, leaf: CountNode) -> Result<(), Miss> {
        if self.is_full(leaf)? {
            return Ok(());
        }
        for i in 0..LEAF_BLOCKS as u64 {
            self.search_block(Block(leaf.first_block().0 + i))?;
        }
        Ok(())
    }

    /// Makes the free pages of a block known; pages known already stay known.
    pub(super) fn search_block(&mut self, block: Block) -> Result<(), Miss> {
        let bits = self.free_by_leaf(block)?;
        let bits = if planted(Bug::SearchFindsTaken) { bits } else { self.untouched(block, bits) };
        self.add_free(block, bits);
        Ok(())
    }

    /// Makes pages of a block known as free.
    pub(super) fn add_free(&mut self, block: Block, bits: Bitmap) {
        if bits == [0; 4] {
            return;
        }
        let known = self.free.entry(block).or_default();
        let before = pages_in(known);
        (0..4).for_each(|i| known[i] |= bits[i]);
        let after = pages_in(known);
        self.known += after - before;
        if after == BLOCK_PAGES {
            self.empty.insert(block);
        }
    }

    /// Makes a page available for allocation.
    pub(super) fn give_back(&mut self, page: PageAddr) {
        self.give_back_all(page.block(), mask(page.index()..page.index() + 1));
    }

    /// As [`give_back`](Self::give_back), for some pages of a block.
    pub(super) fn give_back_all(&mut self, block: Block, pages: Bitmap) {
        self.available += pages_in(&pages);
        if self.is_scanned(block) {
            self.add_free(block, pages);
        }
    }

    /// Whether the search has passed a block.
    pub(super) fn is_scanned(&self, block: Block) -> bool {
        !(self.scan..self.scan_end).contains(&CountNode::leaf_of(block).0.index)
    }
}

/// Returns the free pages of the leaf's block number `i`.
pub(super) fn free_in(page: &CountPage, i: usize) -> Bitmap {
    page.block(i).free()
}
