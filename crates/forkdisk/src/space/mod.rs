//! Free space: the reference count of every page, and where the next write goes.
//!
//! Counts change in memory as *deltas* and are applied to the count pages by checkpoints; until then the
//! pages on the device and their copies here hold the counts of the last checkpoint. A page that was
//! *touched* since (allocated, or its count changed) is never allocated before the checkpoint that contains
//! it is durable and its space has been released: freed space is not reused as long as a crash could bring
//! its old owner back.
//!
//! A checkpoint that changes little writes no count pages: it adds the changes to a log, until that is full.

pub mod accounts;
mod affinity;
pub mod alloc;
pub mod claims;
pub mod contiguous;
pub mod count_images;
pub mod delta;
pub mod folders;
pub mod retained;
pub mod tree;
pub mod view_counts;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::format::{BlockCounts, CountEntry, CountNode, CountPage, Layout, PINNED};
use crate::planted::correct;
use crate::types::Bitmap;
use crate::types::{BLOCK_PAGES, Block, Epoch, PAGE_SIZE, PageAddr, VirtualPage, VolumeId};

use affinity::Affinity;
use delta::{Deltas, by_block, pieces};
use retained::Retained;
use tree::CountLogState;
use view_counts::ViewImages;

pub use accounts::{Accounts, Credits, Reserve, credit};
pub use alloc::{Need, Reservation};
pub use count_images::{Step, WrittenCounts};

/// A count page that is needed and not in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// Load `page`, verify it, and pass it to [`Space::loaded`].
    Count { node: CountNode, page: PageAddr, checksum: u32 },
}

/// Why a call returns no answer or no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A count page must be loaded first.
    Miss(Miss),
    /// No page is free.
    NoSpace,
}

impl From<Miss> for Refusal {
    fn from(miss: Miss) -> Refusal {
        Refusal::Miss(miss)
    }
}

/// A request for space.
#[derive(Clone, Debug)]
pub struct AllocRequest {
    /// The writer.
    pub volume: VolumeId,
    /// The first page to be mapped.
    pub at: VirtualPage,
    /// Number of pages, within one virtual block.
    pub pages: u64,
    /// Pages of the volume's chunk.
    pub chunk_pages: u64,
    /// When the volume was last shared.
    pub shared_at: Epoch,
    /// All pages of the write that this is part of.
    pub write: Range<u64>,
    /// Where the first page would lie next to what is written with it, or to what its chunk holds already.
    pub beside: Option<PageAddr>,
}

/// Contiguous pages: the first and how many.
pub type Runs = Vec<(PageAddr, u64)>;

/// All counts of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Returns the references to the block as a whole.
    pub whole: u32,
    /// References to each of its pages by itself.
    pub pages: Box<[u32; 256]>,
}

impl Default for Counts {
    fn default() -> Counts {
        Counts { whole: 0, pages: Box::new([0; 256]) }
    }
}

impl Counts {
    fn of(block: BlockCounts<'_>) -> Counts {
        let mut pages = Box::new([0; 256]);
        pages.iter_mut().enumerate().for_each(|(i, n)| *n = block.page(i));
        Counts { whole: block.whole(), pages }
    }

    fn change(&mut self, by: &delta::Delta) {
        self.whole = sum(self.whole, by.whole);
        let unpinned = self.pages.iter_mut().enumerate().filter(|(_, n)| **n != PINNED);
        unpinned.for_each(|(i, n)| *n = sum(*n, by.of(i)));
    }
}

/// The counts of one block, for queries about many of its pages.
pub struct InBlock<'a> {
    page: Option<BlockCounts<'a>>,
    /// The common count: references noted above the leaf, which every block of it has.
    common: u32,
    deltas: [Option<&'a delta::Delta>; 2],
}

impl InBlock<'_> {
    /// Returns the references to the block as a whole.
    pub fn whole(&self) -> u32 {
        let base = self.page.map_or(0, |counts| counts.whole()) + self.common;
        self.deltas.iter().flatten().fold(base, |n, delta| sum(n, delta.whole))
    }

    /// Returns how many of `pages` have no reference.
    fn unreferenced(&self, pages: Range<usize>) -> usize {
        if self.whole() > 0 {
            return 0;
        }
        let [a, b] = self.deltas;
        let both = pieces(a, pages).flat_map(|(pages, a)| pieces(b, pages).map(move |(pages, b)| (pages, a + b)));
        let is_none = |base: u32, by| base != PINNED && sum(base, by) == 0;
        let none = |(pages, by): (Range<usize>, i32)| match self.page {
            Some(counts) => pages.filter(|&i| is_none(counts.page(i), by)).count(),
            None => pages.len() * usize::from(is_none(0, by)),
        };
        both.map(none).sum()
    }

    /// Returns the references to one of its pages.
    pub fn page(&self, index: usize) -> u32 {
        match self.page.map_or(0, |counts| counts.page(index)) {
            PINNED => PINNED,
            base => {
                let changes = self.deltas.iter().flatten().map(|delta| delta.of(index)).sum();
                sum(base, changes)
            }
        }
    }
}

/// Returns a count after a change.
fn sum(count: u32, by: i32) -> u32 {
    u32::try_from(count as i32 + by).unwrap_or(0)
}

/// See the module.
pub struct Space {
    layout: Layout,
    uuid: [u8; 16],
    roots: Vec<CountEntry>,
    logged: CountLogState,
    /// There are counts of 65,535 or more, or there were.
    large_counts: bool,
    cache: BTreeMap<CountNode, CountPage>,
    cache_limit: usize,
    /// Number of changes under way that need many count pages at once: while there are any, no page is
    /// evicted.
    held: u32,
    current: Deltas,
    frozen: Deltas,
    work: Option<count_images::CheckpointWork>,
    /// Free pages that are known and not touched, by block; `empty` are the blocks of which every page is.
    free: BTreeMap<Block, Bitmap>,
    empty: BTreeSet<Block>,
    known: u64,
    /// The leaves not yet searched for free pages: from `scan` up to, not including, `scan_end`.
    scan: u64,
    scan_end: u64,
    available: u64,
    handed_out: u64,
    affinity: Affinity,
    kept: ViewImages,
    /// Pages that a finished checkpoint has freed and that cannot be allocated yet: they are being discarded.
    returning: u64,
    retained: Retained,
    /// A stream begins at a multiple of this many blocks if it can.
    begin_at: u64,
    /// What is charged to volumes.
    pub accounts: Accounts,
    /// Damaged count pages of a pool that is only read: their counts are unknown.
    lost: BTreeSet<CountNode>,
}

impl Space {
    /// Creates the space of a pool whose superblock holds `roots`.
    pub fn new(layout: Layout, uuid: [u8; 16], roots: Vec<CountEntry>) -> Space {
        Space::with_cache(layout, uuid, roots, 8 << 20)
    }

    /// As [`new`](Self::new), keeping at most about `bytes` bytes of count pages in memory.
    pub fn with_cache(layout: Layout, uuid: [u8; 16], roots: Vec<CountEntry>, bytes: usize) -> Space {
        let mut space = Space {
            layout,
            uuid,
            roots,
            logged: CountLogState::default(),
            large_counts: false,
            cache: BTreeMap::new(),
            // A cache of 1 byte to two pages is for tests in which every lookup must miss; 0 gives the
            // smallest other.
            cache_limit: if (1..2 * PAGE_SIZE).contains(&bytes) { 2 } else { (bytes / 4200).max(64) },
            held: 0,
            current: Deltas::default(),
            frozen: Deltas::default(),
            work: None,
            free: BTreeMap::new(),
            empty: BTreeSet::new(),
            known: 0,
            scan: 0,
            scan_end: layout.count_nodes(0),
            available: 0,
            handed_out: 0,
            affinity: Affinity::default(),
            kept: ViewImages::default(),
            returning: 0,
            retained: Retained::default(),
            begin_at: 1,
            accounts: Accounts::default(),
            lost: BTreeSet::new(),
        };
        space.available = space.free_by_roots();
        space
    }

    /// Sets whether the pool has, or had, counts of 65,535 or more, according to its superblock.
    pub fn set_large_counts(&mut self, has: bool) {
        self.large_counts = has;
    }

    /// Keeps count pages beyond the limit until each `hold(true)` has had its `hold(false)`.
    pub fn hold(&mut self, held: bool) {
        self.held = if held { self.held + 1 } else { self.held - 1 };
    }

    /// Returns the pool's layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the number of pages that can be allocated now.
    pub fn available(&self) -> u64 {
        self.available
    }

    /// Returns the number of free pages: the available ones, and those that are available again once they are
    /// discarded.
    pub fn free(&self) -> u64 {
        self.available + self.retained.outgoing_pages()
    }

    /// Returns the number of pending free pages: those that the running checkpoint and the next one free;
    /// those that a finished checkpoint is discarding; and those withheld for a view, which its end frees.
    /// Never too few; too many where the counts were not in memory when a reference was lost, and other
    /// references remain.
    pub fn pending(&self) -> u64 {
        self.current.gone() + self.frozen.gone() + self.returning + self.kept.pages
    }

    /// Returns the free pages that are not discarded yet.
    pub fn retained(&self) -> &Retained {
        &self.retained
    }

    /// Returns the number of pages withheld for a view.
    pub fn withheld(&self) -> u64 {
        self.kept.pages
    }

    /// Returns the memory of changes not yet in a finished checkpoint, in bytes.
    pub fn dirty_bytes(&self) -> usize {
        self.current.bytes() + self.frozen.bytes()
    }

    /// Returns the number of count pages that a replay of everything since the last finished checkpoint
    /// reads.
    pub fn read_by_replay(&self) -> usize {
        self.current.leaves() + self.frozen.leaves()
    }

    /// Adds one reference to a page.
    pub fn incr_page(&mut self, page: PageAddr) {
        self.incr_pages(page, 1);
    }

    /// Removes one reference, by a change that is durable once the journal is up to `until`.
    pub fn decr_page(&mut self, page: PageAddr, until: u64) {
        self.decr_pages(page, 1, until);
    }

    /// Adds one reference to each of `n` pages.
    pub fn incr_pages(&mut self, first: PageAddr, n: u64) {
        self.current.gain(first, n);
    }

    /// Removes one reference from each of `n` pages; `until` as for one page.
    pub fn decr_pages(&mut self, first: PageAddr, n: u64, until: u64) {
        for (block, pages) in by_block(first, n) {
            self.current.lose(block, pages.clone(), until);
            let gone = self.unreferenced(block, pages.clone());
            correct!(
                self.current.note_gone(gone),
                Bug::FreedSpaceReusedAtOnce => reuse_at_once(self, block, pages, gone)
            );
        }
    }

    /// Adds one reference to a block as a whole.
    pub fn incr_block(&mut self, block: Block) {
        self.current.whole(block, 1, 0);
    }

    /// Removes one reference from a block as a whole; `until` as for pages.
    pub fn decr_block(&mut self, block: Block, until: u64) {
        self.current.lose_whole(block, until);
        let gone = self.unreferenced(block, 0..BLOCK_PAGES as usize);
        self.current.note_gone(gone);
    }

    /// Returns how many of some pages of a block have no reference; if their counts are not in memory, all.
    fn unreferenced(&mut self, block: Block, pages: Range<usize>) -> u64 {
        match self.in_block(block) {
            Ok(counts) => counts.unreferenced(pages) as u64,
            Err(_) => pages.len() as u64,
        }
    }

    /// Sets all references to a block, in a space that has none yet.
    pub fn set_counts(&mut self, block: Block, counts: &Counts) {
        self.current.whole(block, counts.whole as i32, 0);
        let mut from = 0;
        for alike in counts.pages.chunk_by(|a, b| a == b) {
            let (pages, by) = (from..from + alike.len(), alike[0].min(i32::MAX as u32) as i32);
            from = pages.end;
            if by > 0 {
                self.current.change(block, pages, by);
            }
        }
    }

    /// Notes that references to a block have been lost without a change of its counts, with a table that
    /// referred to it: they stay lost once the journal is durable up to `until`.
    pub fn note_lost(&mut self, block: Block, until: u64) {
        self.current.note_lost(block, until);
    }

    /// Returns up to where the journal must be durable for the references lost in a block to stay lost after
    /// any crash (0: they do).
    pub fn lost_until(&self, block: Block) -> u64 {
        self.current.lost_until(block).max(self.frozen.lost_until(block))
    }

    /// The same for a page. Where another page of its block has lost references as well, it may be more than
    /// necessary.
    pub fn page_lost_until(&self, page: PageAddr) -> u64 {
        self.current.page_lost_until(page).max(self.frozen.page_lost_until(page))
    }

    /// Moves a reference from the block to each of its pages.
    pub fn demote(&mut self, block: Block) {
        self.current.whole(block, -1, 1);
    }

    /// Moves a reference from each of its pages to the block.
    pub fn promote(&mut self, block: Block) {
        self.current.whole(block, 1, -1);
    }

    /// Returns the references to a page itself.
    pub fn page_count(&mut self, page: PageAddr) -> Result<u32, Miss> {
        let (node, i) = CountNode::leaf_of(page.block());
        let base = tree::page(self, node)?.map_or(0, |p| p.block(i).page(page.index()));
        if base == PINNED {
            return Ok(PINNED);
        }
        Ok(sum(base, self.current.of_page(page) + self.frozen.of_page(page)))
    }

    /// Returns the references to a block as a whole and to each of its pages.
    pub fn in_block(&mut self, block: Block) -> Result<InBlock<'_>, Miss> {
        let (node, i) = CountNode::leaf_of(block);
        let common = u32::from(tree::entry(self, node)?.common);
        // It is in memory, or was never written.
        tree::page(self, node)?;
        let page = self.cache.get(&node).map(|page| page.block(i));
        Ok(InBlock { page, common, deltas: [self.frozen.get(block), self.current.get(block)] })
    }

    /// Returns all counts of a block.
    pub fn block_counts(&mut self, block: Block) -> Result<Counts, Miss> {
        let (node, i) = CountNode::leaf_of(block);
        let common = u32::from(tree::entry(self, node)?.common);
        let mut counts = tree::page(self, node)?.map_or_else(Counts::default, |page| Counts::of(page.block(i)));
        counts.whole += common;
        for by in [&self.frozen, &self.current].into_iter().filter_map(|deltas| deltas.get(block)) {
            counts.change(by);
        }
        Ok(counts)
    }

    /// Whether a page of data has exactly one reference, its own or its block's.
    pub fn data_is_exclusive(&mut self, page: PageAddr) -> Result<bool, Miss> {
        let counts = self.in_block(page.block())?;
        Ok(counts.whole() + counts.page(page.index()) == 1)
    }

    /// Ends all reservations of a deleted volume.
    pub fn forget_reservations_of(&mut self, volume: VolumeId) {
        self.affinity.forget(volume);
    }

    /// Notes that the pool has become larger.
    pub fn grow(&mut self, layout: Layout) {
        let before: u64 = self.initially_free();
        let last_leaf = self.layout.count_nodes(0).saturating_sub(1);
        self.layout = layout;
        let none = CountEntry::default();
        self.roots.resize(layout.count_nodes(3) as usize, none);
        // What was searched from the end is searched again: that finds nothing twice.
        (self.scan, self.scan_end) = (self.scan.min(last_leaf), layout.count_nodes(0));
        self.available += self.initially_free() - before;
        tree::limit_log(self);
    }

    fn initially_free(&self) -> u64 {
        self.layout.pages() - self.layout.reserved_pages()
    }

    fn free_by_roots(&self) -> u64 {
        self.initially_free() - self.used_by_checkpoint()
    }

    /// Returns the pages in use as of the last checkpoint, without reserved ones.
    pub fn used_by_checkpoint(&self) -> u64 {
        let roots = (0..).zip(&self.roots);
        roots.map(|(index, &entry)| self.logged.on_top_of(CountNode { level: 3, index }, entry).used).sum()
    }

    /// Whether a page has been touched since the state on the device.
    fn is_touched(&self, page: PageAddr) -> bool {
        self.current.is_touched(page) || self.frozen.is_touched(page)
    }

    fn untouched(&self, block: Block, bits: Bitmap) -> Bitmap {
        let (a, b) = (self.current.touched(block), self.frozen.touched(block));
        let (c, d) = (self.kept.withheld(block), self.retained.outgoing(block));
        std::array::from_fn(|i| bits[i] & !a[i] & !b[i] & !c[i] & !d[i])
    }
}

/// Notes pages without references, and makes them allocatable.
#[cfg(feature = "planted")]
fn reuse_at_once(space: &mut Space, block: Block, pages: Range<usize>, gone: u64) {
    space.current.note_gone(gone);
    for page in pages.map(|index| block.page(index)) {
        if space.page_count(page) == Ok(0) {
            tree::give_back(space, page);
        }
    }
}

/// Adds a page behind those that are there.
fn push(runs: &mut Runs, page: PageAddr) {
    push_run(runs, page, 1);
}

/// Adds pages behind those that are there.
fn push_run(runs: &mut Runs, page: PageAddr, pages: u64) {
    match runs.last_mut() {
        Some((first, n)) if first.0 + *n == page.0 => *n += pages,
        _ => runs.push((page, pages)),
    }
}
