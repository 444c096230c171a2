//! Count pages in memory: lookups, misses, cache.

use crate::bits::{ALL, Bitmap, mask, pages_in};
use crate::format::{CountEntry, CountNode, CountPage, LEAF_BLOCKS};
use crate::planted::correct;
use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Miss, Space};

/// Returns the free pages of the leaf's block number `i`.
pub(super) fn free_in(page: &CountPage, i: usize) -> Bitmap {
    page.block(i).free()
}

/// Takes over a missed count page, once it is loaded and verified. If a checkpoint has replaced it
/// meanwhile, the newer one stays.
pub fn loaded(space: &mut Space, miss: Miss, mut counts: CountPage) -> Result<(), String> {
    let Miss::Count { node, .. } = miss;
    if !matches!(page(space, node), Err(still) if still == miss) {
        return Ok(());
    }
    if node.level > 0 {
        for i in 0..node.entries() {
            let free = space.layout.initially_free_under(node.child(i));
            let entry = counts.entry(i, free).ok_or_else(|| format!("entry {i} makes no sense"))?;
            if space.logged.is_flawed(node.child(i), entry, free) {
                return Err(format!("entry {i} makes no sense with the log of counts"));
            }
        }
    }
    space.logged.put_into(node, &mut counts)?;
    cache_page(space, node, counts);
    Ok(())
}

fn cache_page(space: &mut Space, node: CountNode, page: CountPage) {
    if space.cache.len() >= space.cache_limit && space.held == 0 {
        space.cache.clear();
    }
    space.cache.insert(node, page);
}

/// Notes that a missed count page is damaged: from now on it is treated as if it had never been written.
pub fn lose(space: &mut Space, miss: Miss) {
    let Miss::Count { node, .. } = miss;
    space.lost.insert(node);
}

/// Whether a block's counts are unknown.
pub fn is_lost(space: &Space, block: Block) -> bool {
    let above = |node: &CountNode| node.parent().map(|(parent, _)| parent);
    let mut nodes = std::iter::successors(Some(CountNode::leaf_of(block).0), above);
    !space.lost.is_empty() && nodes.any(|node| space.lost.contains(&node))
}

/// Returns the entry of a count page from the page above it and the log.
pub(super) fn entry(space: &mut Space, node: CountNode) -> Result<CountEntry, Miss> {
    let entry = entry_on_device(space, node)?;
    Ok(space.logged.on_top_of(node, entry))
}

/// Returns the entry of a count page from the page above it.
pub(super) fn entry_on_device(space: &mut Space, node: CountNode) -> Result<CountEntry, Miss> {
    let Some((parent, i)) = node.parent() else {
        return Ok(space.roots[node.index as usize]);
    };
    let free = space.layout.initially_free_under(node);
    match page(space, parent)? {
        None => Ok(CountEntry::default()),
        Some(page) => Ok(page.entry(i, free).expect("checked when it was loaded")),
    }
}

/// Returns a count page with the log applied; `None`: neither was ever written.
pub(super) fn page(space: &mut Space, node: CountNode) -> Result<Option<&CountPage>, Miss> {
    if space.cache.contains_key(&node) {
        return Ok(space.cache.get(&node));
    }
    let mut entry = entry_on_device(space, node)?;
    if space.lost.contains(&node) {
        entry.slot = None;
    }
    match entry.slot {
        None if space.logged.changes(node) => {
            let mut page = CountPage::default();
            // Where the log would make a count negative, `check` finds other counts than there are
            // references.
            let _ = space.logged.put_into(node, &mut page);
            cache_page(space, node, page);
            Ok(space.cache.get(&node))
        }
        None => Ok(None),
        Some(slot) => {
            let page = node.page(correct!(slot, Bug::OrphanedCountSlotTaken => slot.other()));
            Err(Miss::Count { node, page, checksum: entry.checksum })
        }
    }
}

/// Returns the free pages of a block according to its leaf.
pub(super) fn free_by_leaf(space: &mut Space, block: Block) -> Result<Bitmap, Miss> {
    if space.layout.is_reserved(block) {
        return Ok([0; 4]);
    }
    let (node, i) = CountNode::leaf_of(block);
    if entry(space, node)?.common > 0 {
        return Ok([0; 4]);
    }
    Ok(page(space, node)?.map_or(ALL, |page| free_in(page, i)))
}

/// Searches the next leaf for free pages; returns false when all have been searched.
pub(super) fn scan_leaf(space: &mut Space) -> Result<bool, Miss> {
    if space.scan >= space.scan_end {
        return Ok(false);
    }
    let node = CountNode { level: 0, index: space.scan };
    let (parent, first) = node.parent().expect("a leaf has a parent");
    if first == 0 && is_full(space, parent)? {
        space.scan += parent.entries() as u64;
        return Ok(true);
    }
    search(space, node)?;
    space.scan += 1;
    Ok(true)
}

/// As [`scan_leaf`](Self::scan_leaf), from the other end, down to leaf `limit`.
pub(super) fn scan_leaf_from_the_end(space: &mut Space, limit: u64) -> Result<bool, Miss> {
    if space.scan_end <= space.scan.max(limit) {
        return Ok(false);
    }
    search(space, CountNode { level: 0, index: space.scan_end - 1 })?;
    space.scan_end -= 1;
    Ok(true)
}

fn is_full(space: &mut Space, node: CountNode) -> Result<bool, Miss> {
    Ok(entry(space, node)?.used >= space.layout.initially_free_under(node))
}

fn search(space: &mut Space, leaf: CountNode) -> Result<(), Miss> {
    if is_full(space, leaf)? {
        return Ok(());
    }
    for i in 0..LEAF_BLOCKS as u64 {
        search_block(space, Block(leaf.first_block().0 + i))?;
    }
    Ok(())
}

/// Makes the free pages of a block known; pages known already stay known.
pub(super) fn search_block(space: &mut Space, block: Block) -> Result<(), Miss> {
    let bits = free_by_leaf(space, block)?;
    let bits = correct!(space.untouched(block, bits), Bug::SearchFindsTaken => bits);
    add_free(space, block, bits);
    Ok(())
}

/// Makes pages of a block known as free.
pub(super) fn add_free(space: &mut Space, block: Block, bits: Bitmap) {
    if bits == [0; 4] {
        return;
    }
    let known = space.free.entry(block).or_default();
    let before = pages_in(known);
    (0..4).for_each(|i| known[i] |= bits[i]);
    let after = pages_in(known);
    space.known += after - before;
    if after == BLOCK_PAGES {
        space.empty.insert(block);
    }
}

/// Makes a page available for allocation.
pub(super) fn give_back(space: &mut Space, page: PageAddr) {
    give_back_all(space, page.block(), mask(page.index()..page.index() + 1));
}

/// As [`give_back`](Self::give_back), for some pages of a block.
pub(super) fn give_back_all(space: &mut Space, block: Block, pages: Bitmap) {
    space.available += pages_in(&pages);
    if is_scanned(space, block) {
        add_free(space, block, pages);
    }
}

/// Whether the search has passed a block.
pub(super) fn is_scanned(space: &Space, block: Block) -> bool {
    !(space.scan..space.scan_end).contains(&CountNode::leaf_of(block).0.index)
}
