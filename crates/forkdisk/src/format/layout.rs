//! Where the fixed parts of a pool lie: superblock slots and count pages.
//!
//! Block 0 holds the two superblock slots. Behind it the pool is divided into *regions* of 868 blocks; the
//! first block of each holds the region's count pages, two slots each, and the upper count pages whose span
//! begins there.

use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::counts::{LEAF_BLOCKS, LEAVES_PER_REGION, Slot};

/// The two pages a superblock is written to.
pub const SUPERBLOCK_PAGES: [PageAddr; 2] = [PageAddr(0), PageAddr(128)];
/// Blocks in a region, its header block included.
const REGION_BLOCKS: u64 = LEAF_BLOCKS as u64 * LEAVES_PER_REGION as u64;
/// Children of an upper count page.
const UPPER_FANOUT: u64 = 256;
/// First page of the leaves' slots within a region's header block.
const FIRST_LEAF_PAGE: u64 = 8;

/// One page of the tree of reference counts. Level 0 is a leaf (seven blocks), level 1 a region,
/// level 2 holds 256 regions, level 3 holds 65,536; the superblock holds the entries of level 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CountNode {
    /// 0 (leaf) to 3.
    pub level: u8,
    /// Number among the pages of its level.
    pub index: u64,
}

impl CountNode {
    /// Returns the leaf that holds the counts of `block`, and the block's index in it.
    pub fn leaf_of(block: Block) -> (CountNode, usize) {
        debug_assert!(block.0 > 0, "the superblock's block has no counts");
        let n = block.0 - 1;
        (CountNode { level: 0, index: n / LEAF_BLOCKS as u64 }, (n % LEAF_BLOCKS as u64) as usize)
    }

    /// Returns the first block of a leaf.
    pub fn first_block(self) -> Block {
        debug_assert_eq!(self.level, 0);
        Block(1 + self.index * LEAF_BLOCKS as u64)
    }

    fn fanout(child_level: u8) -> u64 {
        if child_level == 0 { LEAVES_PER_REGION as u64 } else { UPPER_FANOUT }
    }

    /// Returns the page above and this page's entry in it; `None` for level 3, whose entry is in the
    /// superblock.
    pub fn parent(self) -> Option<(CountNode, usize)> {
        let fanout = CountNode::fanout(self.level);
        let parent = CountNode { level: self.level + 1, index: self.index / fanout };
        (self.level < 3).then_some((parent, (self.index % fanout) as usize))
    }

    /// Returns child number `entry` of an upper page.
    pub fn child(self, entry: usize) -> CountNode {
        let level = self.level - 1;
        CountNode { level, index: self.index * CountNode::fanout(level) + entry as u64 }
    }

    /// Returns the number of entries of an upper page.
    pub fn entries(self) -> usize {
        CountNode::fanout(self.level - 1) as usize
    }

    fn region(self) -> u64 {
        match self.level {
            0 => self.index / LEAVES_PER_REGION as u64,
            level => self.index << (8 * (u32::from(level) - 1)),
        }
    }

    /// Returns the page in which `slot` of this count page lies.
    pub fn page(self, slot: Slot) -> PageAddr {
        // Leaves that change together are adjacent: one request writes them.
        let within = match self.level {
            0 => FIRST_LEAF_PAGE + slot as u64 * LEAVES_PER_REGION as u64 + self.index % LEAVES_PER_REGION as u64,
            level => (u64::from(level) - 1) * 2 + slot as u64,
        };
        PageAddr(region_header(self.region()).first_page().0 + within)
    }
}

fn region_header(region: u64) -> Block {
    Block(1 + region * REGION_BLOCKS)
}

/// The size of a pool and what follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    blocks: u64,
}

impl Layout {
    /// Returns the layout of a pool of `bytes` bytes; a rest of less than a block is not used.
    pub fn new(bytes: u64) -> Layout {
        Layout { blocks: bytes / (BLOCK_PAGES * 4096) }
    }

    /// Returns the blocks of the pool, the superblock's included.
    pub fn blocks(self) -> u64 {
        self.blocks
    }

    /// Returns the pages of the pool.
    pub fn pages(self) -> u64 {
        self.blocks * BLOCK_PAGES
    }

    /// Whether `block` holds count pages.
    pub fn is_region_header(self, block: Block) -> bool {
        block.0 > 0 && (block.0 - 1).is_multiple_of(REGION_BLOCKS)
    }

    /// Whether `block` can never hold data: the superblock's, a region's header, or past the end.
    pub fn is_reserved(self, block: Block) -> bool {
        block.0 == 0 || block.0 >= self.blocks || self.is_region_header(block)
    }

    /// Returns the number of count pages of `level`.
    pub fn count_nodes(self, level: u8) -> u64 {
        let leaves = (self.blocks - 1).div_ceil(LEAF_BLOCKS as u64);
        (0..level).fold(leaves, |n, child| n.div_ceil(CountNode::fanout(child)))
    }

    /// Returns the pages that are reserved from the beginning (superblock and region headers).
    pub fn reserved_pages(self) -> u64 {
        (1 + (self.blocks - 1).div_ceil(REGION_BLOCKS)) * BLOCK_PAGES
    }

    /// Returns the free pages of `block` in a pool where nothing was ever allocated.
    #[cfg(test)]
    fn initially_free(self, block: Block) -> u64 {
        if self.is_reserved(block) { 0 } else { BLOCK_PAGES }
    }

    /// Returns the free pages under `node` in a pool where nothing was ever allocated.
    pub fn initially_free_under(self, node: CountNode) -> u64 {
        let span = (0..node.level).fold(LEAF_BLOCKS as u64, |n, child| n * CountNode::fanout(child));
        let first = 1 + node.index * span;
        let end = (first + span).min(self.blocks);
        if first >= end {
            return 0;
        }
        let headers = (end - 1).div_ceil(REGION_BLOCKS) - (first - 1).div_ceil(REGION_BLOCKS);
        (end - first - headers) * BLOCK_PAGES
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_count_pages_share_a_place() {
        let layout = Layout::new(3000 << 20);
        let mut seen = BTreeSet::new();
        for level in 0..4 {
            for index in 0..layout.count_nodes(level) {
                for slot in [Slot::A, Slot::B] {
                    let page = CountNode { level, index }.page(slot);
                    assert!(layout.is_region_header(page.block()), "{page:?}");
                    assert!(seen.insert(page), "{page:?} twice");
                }
            }
        }
    }

    #[test]
    fn leaves_of_a_region_lie_one_behind_the_other() {
        for slot in [Slot::A, Slot::B] {
            let pages: Vec<u64> = (124..248).map(|index| CountNode { level: 0, index }.page(slot).0).collect();
            assert!(pages.windows(2).all(|w| w[1] == w[0] + 1), "{pages:?}");
        }
    }

    #[test]
    fn parent_and_child_agree() {
        for block in [1, 7, 8, 868, 869, 868 * 256, 868 * 256 + 1, 868 * 65_536 * 3 + 5] {
            let (mut node, _) = CountNode::leaf_of(Block(block));
            while let Some((parent, entry)) = node.parent() {
                assert_eq!(parent.child(entry), node);
                node = parent;
            }
        }
    }

    #[test]
    fn free_space_adds_up() {
        for blocks in [8, 869, 870, 2000, 868 * 256 + 77] {
            let layout = Layout::new(blocks << 20);
            let by_block: u64 = (0..blocks).map(|b| layout.initially_free(Block(b))).sum();
            assert_eq!(by_block, layout.pages() - layout.reserved_pages());
            for level in 0..4 {
                let sum: u64 = (0..layout.count_nodes(level))
                    .map(|index| layout.initially_free_under(CountNode { level, index }))
                    .sum();
                assert_eq!(sum, by_block, "level {level} of {blocks} blocks");
            }
        }
    }
}
