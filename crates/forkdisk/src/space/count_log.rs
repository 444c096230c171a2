//! Counts that checkpoints have changed without writing their pages: the log has the changes, and they are
//! added to every leaf that is loaded.
//!
//! Count pages have fixed places, so changes spread over the pool take one page for every seven blocks,
//! however little changes in each. The log takes space only for what has changed. When it is full, or would
//! take more than the pages, a checkpoint writes all pages that it covers, and the log begins again. (OpenZFS
//! logs its space maps for the same reason.)

use std::collections::BTreeMap;

use crate::bits::rows;
use crate::format::{
    BlockChange, CountEntry, CountLog, CountNode, CountPage, LEAF_BLOCKS, LeafChange, decode_count_log,
};
use crate::planted::correct;
use crate::types::{BLOCK_PAGES, PAGE_SIZE};

use super::Space;

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
