//! Contiguous places for gathered pages.

use crate::space::{alloc, tree};
use crate::types::bit;
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Miss, Reservation, Space};

/// Leaves of counts from the first on that are searched for contiguous empty blocks, where there is one at
/// all.
const MAX_SEARCHED_LEAVES: u64 = 4096;
/// When this many times the wanted number of contiguous blocks is known to be empty, the search ends.
const AMPLE_FACTOR: u64 = 8;
/// Empty blocks among which contiguous ones are looked for.
const MAX_EXAMINED_BLOCKS: usize = 1 << 16;

/// Whether a page is known to be free.
pub fn is_known_free(space: &Space, page: PageAddr) -> bool {
    space.free.get(&page.block()).is_some_and(|bits| bit(bits, page.index()))
}

/// Finds out which pages of a block are free, also where the search for free space has not come yet.
pub fn learn_free(space: &mut Space, block: Block) -> Result<(), Miss> {
    if tree::is_scanned(space, block) { Ok(()) } else { tree::search_block(space, block) }
}

/// Allocates all of these pages, or none if not all of them are known to be free.
pub fn take_all(space: &mut Space, pages: impl Iterator<Item = PageAddr> + Clone, _: &Reservation) -> bool {
    let all = pages.clone().all(|page| is_known_free(space, page));
    for page in pages.filter(|_| all) {
        alloc::take(space, page.block(), page.index(), 1).expect("looked up just now");
    }
    all
}

/// Returns a block of which every page is free, for a virtual block of many pages: the one behind
/// `before`, where the virtual block before it lies; else the first of `wanted` contiguous blocks; else
/// the first of the most there are.
pub fn block_to_gather(space: &mut Space, before: Option<Block>, wanted: u64) -> Result<Option<Block>, Miss> {
    if let Some(next) = before.map(|b| Block(b.0 + 1))
        && space.empty.contains(&next)
        && !alloc::is_for_metadata(space, next)
    {
        return Ok(Some(next));
    }
    loop {
        let (len, first) = longest_row(space, wanted);
        let is_enough =
            space.empty.len() as u64 >= AMPLE_FACTOR * wanted || space.scan >= MAX_SEARCHED_LEAVES && first.is_some();
        if len >= wanted || is_enough {
            return Ok(first);
        }
        // Several at a time: each batch is followed by a pass over everything known.
        for _ in 0..64 {
            if !tree::scan_leaf(space)? {
                return Ok(longest_row(space, wanted).1);
            }
        }
    }
}

/// Returns how many contiguous empty blocks there are, up to `wanted`.
pub fn row_to_gather(space: &mut Space, wanted: u64) -> Result<u64, Miss> {
    block_to_gather(space, None, wanted)?;
    Ok(longest_row(space, wanted).0)
}

/// Returns the first `wanted` contiguous empty blocks, or the longest row: their number, and where they
/// begin.
fn longest_row(space: &Space, wanted: u64) -> (u64, Option<Block>) {
    let (mut longest, mut row): ((u64, Option<Block>), (u64, Block)) = ((0, None), (0, Block(0)));
    let is_for_data = |&&block: &&Block| alloc::is_for_data(space, block) && !alloc::is_for_metadata(space, block);
    for &block in space.empty.iter().take(MAX_EXAMINED_BLOCKS).take_while(is_for_data) {
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
pub fn run_to_gather(space: &mut Space, n: u64, reserved: &Reservation) -> Result<Option<PageAddr>, Miss> {
    debug_assert!(n <= BLOCK_PAGES);
    if let Some(next) = space.affinity.gathered
        && next.index() as u64 + n <= BLOCK_PAGES
        && take_all(space, (next.0..next.0 + n).map(PageAddr), reserved)
    {
        space.affinity.gathered = Some(PageAddr(next.0 + n)).filter(|p| p.index() != 0);
        return Ok(Some(next));
    }
    let Some(block) = alloc::empty_block(space, None)? else { return Ok(None) };
    let first = block.first_page();
    let taken = alloc::take(space, block, 0, n);
    debug_assert_eq!(taken, Some((first, n)), "an empty block has every page");
    space.affinity.gathered = Some(PageAddr(first.0 + n)).filter(|p| p.index() != 0);
    Ok(Some(first))
}
