//! The counts of the last checkpoint: count pages in memory (lookups, misses, cache), and the log of changes on top of
//! them.
//!
//! Count pages have fixed places, so changes spread over the pool take one page for every seven blocks,
//! however little changes in each. The log takes space only for what has changed. When it is full, or would
//! take more than the pages, a checkpoint writes all pages that it covers, and the log begins again. (OpenZFS
//! logs its space maps for the same reason.)

use std::collections::BTreeMap;

use crate::format::{
    BlockChange, CountEntry, CountLog, CountNode, CountPage, LEAF_BLOCKS, LeafChange, decode_count_log,
};
use crate::planted::correct;
use crate::types::{ALL, BLOCK_PAGES, Bitmap, Block, PAGE_SIZE, PageAddr, mask, pages_in, rows};

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

/// Most pages of a log that this program writes: those in front of the second superblock, so that each segment is one
/// request.
const MAX_LOG_PAGES: u32 = 124;

/// Memory of a part, in bytes, approximately.
const PART_BYTES: usize = 64;

/// See the module.
#[derive(Default)]
pub struct CountLogState {
    /// Most pages of the log; 0: no log is written.
    limit: u32,
    /// Most parts in memory, so that the log takes no more memory than the cache of count pages.
    max_parts: usize,
    parts: usize,
    /// The end of the log.
    pub end: CountLog,
    /// The next checkpoint must write pages, although the log has space.
    pub retiring: bool,
    /// Changes in leaves: by the number of the leaf, in the order of the blocks in it.
    leaves: BTreeMap<u64, Vec<(u8, BlockChange)>>,
    /// Changes in the entries of leaves and of the pages above them: pages in use, common count.
    entries: BTreeMap<CountNode, (i64, i64)>,
}

impl CountLogState {
    /// Returns the number of pages that may be added.
    pub fn free_pages(&self) -> u32 {
        self.limit.saturating_sub(self.end.pages)
    }

    /// Whether there is memory for this many more parts.
    pub fn fits_memory(&self, parts: usize) -> bool {
        self.parts + parts <= self.max_parts
    }

    /// Iterates over the leaves that differ in any way from their state on the device.
    pub fn nodes(&self) -> impl Iterator<Item = CountNode> {
        self.entries.keys().copied().filter(|node| node.level == 0)
    }

    /// Returns the number of leaves in which the log changes counts.
    pub fn leaves(&self) -> usize {
        self.leaves.len()
    }

    /// Whether the log changes counts in a page.
    pub fn changes(&self, node: CountNode) -> bool {
        node.level == 0 && self.leaves.contains_key(&node.index)
    }

    /// Returns an entry with everything logged applied to it.
    pub fn on_top_of(&self, node: CountNode, entry: CountEntry) -> CountEntry {
        let Some(&(used, common)) = self.entries.get(&node) else { return entry };
        let common = i64::from(entry.common) + common;
        CountEntry {
            used: entry.used.saturating_add_signed(used),
            common: common.clamp(0, i64::from(u16::MAX)) as u16,
            ..entry
        }
    }

    /// Whether an entry is invalid with everything logged applied, where `free` pages are free at first.
    pub fn is_flawed(&self, node: CountNode, entry: CountEntry, free: u64) -> bool {
        self.entries.get(&node).is_some_and(|&(used, common)| {
            let common = i64::from(entry.common) + common;
            let used = entry.used.checked_add_signed(used).filter(|&used| used <= free);
            used.is_none() || !(0..=i64::from(u16::MAX)).contains(&common)
        })
    }

    /// Applies the log to a page as it is on the device. Returns an error if a count would become negative.
    pub fn put_into(&self, node: CountNode, page: &mut CountPage) -> Result<(), String> {
        if node.level > 0 {
            return Ok(());
        }
        for (place, change) in self.leaves.get(&node.index).into_iter().flatten() {
            let place = usize::from(*place);
            let flaw = |n: i64| format!("with the log of counts, block {place} of it has a count of {n}");
            let whole = i64::from(page.block(place).whole()) + change.whole;
            page.set_whole(place, u32::try_from(whole).map_err(|_| flaw(whole))?);
            for (by, index) in change.pages.iter().flat_map(|&(by, bits)| rows(bits).flatten().map(move |i| (by, i))) {
                let count = i64::from(page.block(place).stored(index)) + i64::from(by);
                page.set_stored(place, index, u32::try_from(count).map_err(|_| flaw(count))?);
            }
        }
        Ok(())
    }

    /// Notes that a segment with these changes is part of the log.
    pub fn add(&mut self, changes: Vec<LeafChange>) {
        for change in changes {
            let mut node = CountNode { level: 0, index: change.leaf };
            self.entries.entry(node).or_default().1 += i64::from(change.common);
            loop {
                self.entries.entry(node).or_default().0 += change.used;
                let Some((parent, _)) = node.parent() else { break };
                node = parent;
            }
            self.parts += parts(&change);
            if !change.blocks.is_empty() {
                self.leaves.entry(change.leaf).or_default().extend(change.blocks);
            }
        }
    }

    /// Clears the log: everything is in count pages.
    pub fn clear(&mut self) {
        *self = CountLogState { limit: self.limit, max_parts: self.max_parts, ..CountLogState::default() };
    }
}

/// Returns the changes from one state of a leaf to the next.
pub fn changes(before: &CountPage, after: &CountPage) -> Vec<(u8, BlockChange)> {
    let of = |place: usize| {
        let (before, after) = (before.block(place), after.block(place));
        if before.equals(&after) {
            return BlockChange::default();
        }
        let mut change =
            BlockChange { whole: i64::from(after.whole()) - i64::from(before.whole()), ..BlockChange::default() };
        for index in 0..BLOCK_PAGES as usize {
            let by = after.stored(index) as i32 - before.stored(index) as i32;
            if by != 0 {
                let at = change.pages.iter().position(|&(other, _)| other == by).unwrap_or_else(|| {
                    change.pages.push((by, [0; 4]));
                    change.pages.len() - 1
                });
                change.pages[at].1[index / 64] |= 1 << (index % 64);
            }
        }
        change.pages.shrink_to_fit();
        change
    };
    let all = (0..LEAF_BLOCKS as u8).map(|place| (place, of(place.into())));
    all.filter(|(_, change)| *change != BlockChange::default()).collect()
}

/// Returns the number of parts that take memory for a change: the leaf, its blocks, their sets of pages.
pub fn parts(change: &LeafChange) -> usize {
    1 + change.blocks.iter().map(|(_, block)| 1 + block.pages.len()).sum::<usize>()
}

/// Returns the number of pages that `bytes` bytes take.
pub fn pages_of(bytes: usize) -> u32 {
    bytes.div_ceil(PAGE_SIZE) as u32
}

/// Takes over the log that belongs to the roots; from now on checkpoints may write one.
pub fn use_log(space: &mut Space, end: CountLog, bytes: &[u8]) -> Result<(), String> {
    space.logged.max_parts = space.cache_limit * PAGE_SIZE / PART_BYTES;
    limit_log(space);
    if end.pages == 0 {
        return Ok(());
    }
    if !end.is(space.uuid, bytes) {
        return Err("its checksum does not match".into());
    }
    let changes = decode_count_log(bytes, space.layout.count_nodes(0)).ok_or("it makes no sense")?;
    correct!(space.logged.add(changes), Bug::CountLogForgotten => ());
    let mut roots = (0..).map(|index| CountNode { level: 3, index }).zip(&space.roots);
    if roots.any(|(node, &root)| space.logged.is_flawed(node, root, space.layout.initially_free_under(node))) {
        space.logged.clear();
        return Err("with it more is in use than there is, or less than nothing".into());
    }
    space.logged.end = end;
    space.available = space.free_by_roots();
    Ok(())
}

/// Whether at least half of the log is used.
pub fn log_is_half_full(space: &Space) -> bool {
    space.logged.end.pages > 0 && space.logged.end.pages >= space.logged.free_pages()
}

/// Returns the number of leaves in which the log changes counts.
pub fn logged_leaves(space: &Space) -> u64 {
    space.logged.leaves() as u64
}

/// Limits the log so that reading it is no more work than reading both slots of the pages that it
/// replaces.
pub(super) fn limit_log(space: &mut Space) {
    let pages: u64 = (0..4).map(|level| space.layout.count_nodes(level)).sum();
    space.logged.limit = u32::try_from(2 * pages).unwrap_or(u32::MAX).min(MAX_LOG_PAGES);
}
