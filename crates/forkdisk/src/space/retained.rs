//! Free pages that are not discarded yet: the host file system of a pool in a sparse file still has them allocated.
//!
//! Owns which pages these are, in two ages, and takes them out of the allocator while they are discarded. It does no
//! I/O. A page is retained only while it is free and untouched: one that is allocated is retained no longer. After an
//! open nothing is retained.

use std::collections::{BTreeMap, BTreeSet};

use crate::planted::correct;
use crate::types::{ALL, Bitmap, Block, PageAddr, bit, mask, pages_in, rows};

use super::delta::by_block;
use super::{Runs, Space, alloc, push_run, tree};

/// Most blocks with retained pages, unless the limit in bytes allows more whole ones: 2 MiB of memory.
const MAX_BLOCKS: usize = 16_384;
/// Most pages that are taken out of the allocator at a time.
const STEP_PAGES: u64 = 16 << 10;
/// Part of the available pages that is taken out at a time: one page of this many.
const STEP_PART: u64 = 8;
/// Most runs of them.
const STEP_RUNS_COUNT: usize = 64;
/// Blocks that are examined for a place.
const MAX_LOOKUPS: usize = 64;

/// The retained pages of a block: those retained since the last call of [`age`], and earlier ones.
#[derive(Clone, Copy, Default)]
struct Ages {
    new: Bitmap,
    old: Bitmap,
}

impl Ages {
    fn all(&self) -> Bitmap {
        std::array::from_fn(|i| self.new[i] | self.old[i])
    }
}

/// See the module.
#[derive(Default)]
pub struct Retained {
    /// Most pages; 0: none is retained.
    limit: u64,
    blocks: BTreeMap<Block, Ages>,
    /// The blocks of which every page is retained.
    whole: BTreeSet<Block>,
    pages: u64,
    /// Pages that are being discarded: neither retained nor available.
    outgoing: BTreeMap<Block, Bitmap>,
    outgoing_pages: u64,
}

impl Retained {
    /// Returns the number of retained pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the number of pages that are being discarded.
    pub fn outgoing_pages(&self) -> u64 {
        self.outgoing_pages
    }

    /// Returns the pages of a block that are being discarded.
    pub(super) fn outgoing(&self, block: Block) -> Bitmap {
        self.outgoing.get(&block).copied().unwrap_or_default()
    }
}

/// Sets how many pages may be retained.
pub fn set_limit(space: &mut Space, pages: u64) {
    space.retained.limit = pages;
}

/// Splits pages that are about to be released into those that are to be retained and those that are to be discarded
/// before.
pub fn split(space: &Space, freed: &Runs) -> (Runs, Runs) {
    let retained = &space.retained;
    let mut room = retained.limit.saturating_sub(retained.pages);
    let max_blocks = MAX_BLOCKS.max((retained.limit / u64::from(u8::MAX)) as usize);
    let mut more_blocks = max_blocks.saturating_sub(retained.blocks.len());
    let (mut kept, mut rest) = (Runs::new(), Runs::new());
    for (block, pages) in freed.iter().flat_map(|&(first, n)| by_block(first, n)) {
        let (first, n) = (block.page(pages.start), pages.len() as u64);
        if n <= room && more_blocks > 0 {
            room -= n;
            more_blocks -= 1;
            push_run(&mut kept, first, n);
        } else {
            push_run(&mut rest, first, n);
        }
    }
    (kept, rest)
}

/// Retains those of these pages that are free: call it once they are released.
pub fn retain(space: &mut Space, runs: &Runs) {
    for (block, pages) in runs.iter().flat_map(|&(first, n)| by_block(first, n)) {
        let free = space.untouched(block, mask(pages));
        add(space, block, free);
    }
}

/// Retains a page that was allocated and is free again without having been used.
pub(super) fn retain_unused(space: &mut Space, page: PageAddr) {
    if space.retained.limit > 0 {
        add(space, page.block(), mask(page.index()..page.index() + 1));
    }
}

fn add(space: &mut Space, block: Block, bits: Bitmap) {
    if bits == [0; 4] {
        return;
    }
    let retained = &mut space.retained;
    let ages = retained.blocks.entry(block).or_default();
    let before = pages_in(&ages.all());
    (0..4).for_each(|i| ages.new[i] |= bits[i] & !ages.old[i]);
    retained.pages += pages_in(&ages.all()) - before;
    if ages.all() == ALL {
        retained.whole.insert(block);
    }
}

/// Pages of a block are retained no longer.
pub(super) fn forget(space: &mut Space, block: Block, bits: Bitmap) {
    let retained = &mut space.retained;
    let Some(ages) = retained.blocks.get_mut(&block) else { return };
    let before = pages_in(&ages.all());
    let without = |ages: Bitmap| std::array::from_fn(|i| ages[i] & !bits[i]);
    *ages = Ages { new: without(ages.new), old: without(ages.old) };
    let after = pages_in(&ages.all());
    retained.pages -= before - after;
    if after < before {
        retained.whole.remove(&block);
    }
    if after == 0 {
        retained.blocks.remove(&block);
    }
}

/// Makes all retained pages old.
pub fn age(space: &mut Space) {
    for ages in space.retained.blocks.values_mut() {
        *ages = Ages { new: [0; 4], old: ages.all() };
    }
}

/// Takes some retained pages out of the allocator, the old ones only or any: they can be discarded, until
/// [`end_discard`]. Returns them as runs, none if there are no more. Most of the available pages stay available.
pub fn begin_discard(space: &mut Space, old_only: bool) -> Runs {
    let most = (space.available / STEP_PART).clamp(1, STEP_PAGES);
    let (mut runs, mut left) = (Runs::new(), most);
    let blocks =
        space.retained.blocks.iter().map(|(&block, ages)| (block, if old_only { ages.old } else { ages.all() }));
    for (block, row) in blocks.flat_map(|(block, bits)| rows(bits).map(move |row| (block, row))) {
        let n = left.min(row.len() as u64);
        push_run(&mut runs, block.page(row.start), n);
        left -= n;
        if left == 0 || runs.len() >= STEP_RUNS_COUNT {
            break;
        }
    }
    for (block, pages) in runs.clone().into_iter().flat_map(|(first, n)| by_block(first, n)) {
        let bits = mask(pages);
        forget(space, block, bits);
        correct!(withdraw(space, block, bits), Bug::RetainedDiscardedUnguarded => ());
    }
    runs
}

fn withdraw(space: &mut Space, block: Block, bits: Bitmap) {
    let mut known = 0;
    if let Some(free) = space.free.get_mut(&block) {
        let before = pages_in(free);
        free.iter_mut().zip(bits).for_each(|(free, gone)| *free &= !gone);
        known = before - pages_in(free);
        if *free == [0; 4] {
            space.free.remove(&block);
        }
        space.empty.remove(&block);
    }
    space.known -= known;
    space.available -= pages_in(&bits);
    space.retained.outgoing_pages += pages_in(&bits);
    let outgoing = space.retained.outgoing.entry(block).or_default();
    outgoing.iter_mut().zip(bits).for_each(|(outgoing, more)| *outgoing |= more);
}

/// Makes the pages that [`begin_discard`] returned available again.
pub fn end_discard(space: &mut Space, runs: &Runs) {
    for (block, pages) in runs.iter().flat_map(|&(first, n)| by_block(first, n)) {
        let Some(outgoing) = space.retained.outgoing.get_mut(&block) else { continue };
        let wanted = mask(pages);
        let done: Bitmap = std::array::from_fn(|i| outgoing[i] & wanted[i]);
        outgoing.iter_mut().zip(done).for_each(|(outgoing, done)| *outgoing &= !done);
        if *outgoing == [0; 4] {
            space.retained.outgoing.remove(&block);
        }
        space.retained.outgoing_pages -= pages_in(&done);
        tree::give_back_all(space, block, done);
    }
}

/// Makes pages available without a look at what has become of them.
#[cfg(feature = "planted")]
pub fn return_again(space: &mut Space, runs: &Runs) {
    for (block, pages) in runs.iter().flat_map(|&(first, n)| by_block(first, n)) {
        tree::give_back_all(space, block, mask(pages));
    }
}

/// Returns a block of which every page is retained, for data.
pub(super) fn empty_block(space: &Space) -> Option<Block> {
    let mut whole = space.retained.whole.iter().take(MAX_LOOKUPS).copied();
    whole.find(|block| space.empty.contains(block) && !alloc::is_for_metadata(space, *block))
}

/// Returns a retained page, for data.
pub(super) fn first_page(space: &Space) -> Option<(Block, usize)> {
    let mut blocks = space.retained.blocks.iter().take(MAX_LOOKUPS);
    blocks.find_map(|(&block, ages)| {
        let index = rows(ages.all()).next()?.start;
        let is_known = space.free.get(&block).is_some_and(|free| bit(free, index));
        (is_known && !alloc::is_for_metadata(space, block)).then_some((block, index))
    })
}

/// Returns where `pages` retained pages are contiguous in a block from `from` on, nearest to the end.
pub(super) fn place_for_meta(space: &Space, from: Block, pages: u64) -> Option<(Block, usize)> {
    let mut blocks = space.retained.blocks.range(from..).rev().take(MAX_LOOKUPS);
    blocks.find_map(|(&block, ages)| {
        let row = rows(ages.all()).find(|row| row.len() as u64 >= pages)?;
        let is_known = space.free.get(&block).is_some_and(|free| row.clone().all(|index| bit(free, index)));
        is_known.then_some((block, row.start))
    })
}

#[cfg(test)]
mod tests;
