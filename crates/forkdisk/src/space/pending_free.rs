//! Pending free data: pages released since the last checkpoint, which hold nothing of use but are not free
//! yet.
//!
//! Released tables are not reported: until the next checkpoint is durable, the last one points to them.

use crate::bits::{Bitmap, bit};
use crate::planted::correct;
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Miss, Runs, Space, push};

/// Blocks examined in a step: their counts have to be in memory at once.
const BLOCKS_PER_STEP: usize = 16;

/// Removes one reference to a table or another page of metadata; `until` as for
/// [`decr_page`](Self::decr_page).
pub fn decr_table(space: &mut Space, page: PageAddr, until: u64) {
    space.decr_page(page, until);
    mark_table(space, page);
}

/// Notes that a page that is about to be released holds metadata.
pub fn mark_table(space: &mut Space, page: PageAddr) {
    correct!(space.current.mark_table(page), Bug::DeadTablesDiscarded => ());
}

/// Returns pages with released data in the next few blocks from `from` on that were not reported before,
/// and where to continue. Some of them may have been allocated and not be published yet.
pub fn pending_free_runs(space: &mut Space, from: Block) -> Result<(Runs, Option<Block>), Miss> {
    let mut blocks: Vec<Block> = space.current.blocks_from(from).take(BLOCKS_PER_STEP).collect();
    blocks.extend(space.frozen.blocks_from(from).take(BLOCKS_PER_STEP));
    blocks.sort_unstable();
    blocks.dedup();
    blocks.truncate(BLOCKS_PER_STEP);
    let next = blocks.get(BLOCKS_PER_STEP - 1).map(|last| Block(last.0 + 1));
    let mut runs = Runs::new();
    for block in blocks {
        let dead = pending_free_in(space, block)?;
        (0..BLOCK_PAGES as usize).filter(|&i| bit(&dead, i)).for_each(|i| push(&mut runs, block.page(i)));
    }
    Ok((runs, next))
}

/// Returns those of the pages reported by [`pending_free_runs`](Self::pending_free_runs) that still hold
/// nothing of use, as runs within blocks.
pub fn still_pending(space: &mut Space, told: &Runs) -> Result<Runs, Miss> {
    let mut runs = Runs::new();
    for page in told.iter().flat_map(|&(first, n)| (first.0..first.0 + n).map(PageAddr)) {
        if bit(&marked_in(space, page.block()), page.index()) {
            continue;
        }
        let counts = space.in_block(page.block())?;
        if counts.page(page.index()) == 0 && counts.whole() == 0 {
            match page.index() {
                0 => runs.push((page, 1)),
                _ => push(&mut runs, page),
            }
        }
    }
    Ok(runs)
}

/// Notes that these pages are discarded on the device.
pub fn mark_discarded(space: &mut Space, runs: &Runs) {
    for page in runs.iter().flat_map(|&(first, n)| (first.0..first.0 + n).map(PageAddr)) {
        // The mark must go when the page may be allocated again.
        let until = if space.current.is_touched(page) { &mut space.current } else { &mut space.frozen };
        until.mark_discarded(page);
    }
}

fn marked_in(space: &Space, block: Block) -> Bitmap {
    let marked = [&space.current, &space.frozen].map(|deltas| deltas.get(block).map_or([0; 4], |d| d.marked()));
    std::array::from_fn(|i| marked[0][i] | marked[1][i])
}

fn pending_free_in(space: &mut Space, block: Block) -> Result<Bitmap, Miss> {
    let (a, b, marked) = (space.current.touched(block), space.frozen.touched(block), marked_in(space, block));
    let mut dead: Bitmap = std::array::from_fn(|i| (a[i] | b[i]) & !marked[i]);
    if dead == [0; 4] {
        return Ok(dead);
    }
    let counts = space.block_counts(block)?;
    if counts.whole > 0 {
        return Ok([0; 4]);
    }
    let in_use = counts.pages.iter().enumerate().filter(|&(_, &count)| count > 0);
    in_use.for_each(|(i, _)| dead[i / 64] &= !(1 << (i % 64)));
    Ok(dead)
}
