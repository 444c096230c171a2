//! Changes of counts that are not in a count page yet, and *pending free* data: pages released since the last
//! checkpoint, which hold nothing of use but are not free yet.
//!
//! Released tables are not reported: until the next checkpoint is durable, the last one points to them.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

use crate::format::{CountNode, LEAF_BLOCKS};
use crate::planted::correct;
use crate::types::{ALL, BLOCK_PAGES, Bitmap, Block, PageAddr, bit, mask, replace};

use super::{Miss, Runs, Space};

/// Changes of one block's counts.
#[derive(Default)]
pub struct Delta {
    pub whole: i32,
    /// Applies to all 256 pages.
    all: i32,
    /// In ascending order, disjoint.
    pages: Vec<Change>,
    pub touched: Bitmap,
    /// Pages of the block were allocated.
    handed_out: bool,
    /// The losses are durable once the journal is up to this sequence number.
    pub lost_until: u64,
    marks: Option<Box<Marks>>,
}

/// A change of the counts of some contiguous pages, not 0.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    first: u8,
    last: u8,
    by: i32,
}

impl Change {
    fn start(&self) -> usize {
        self.first.into()
    }

    fn end(&self) -> usize {
        usize::from(self.last) + 1
    }
}

/// Adds a change of `pages`, if it is not 0; extends the last change if both are alike.
fn push(changes: &mut SmallVec<[Change; 5]>, pages: Range<usize>, by: i32) {
    if pages.is_empty() || by == 0 {
        return;
    }
    let last = (pages.end - 1) as u8;
    match changes.last_mut() {
        Some(before) if before.end() == pages.start && before.by == by => before.last = last,
        _ => changes.push(Change { first: pages.start as u8, last, by }),
    }
}

/// Properties of pages that are released.
#[derive(Default)]
struct Marks {
    /// They held metadata: the durable state may point to them, whatever the journal contains.
    tables: Bitmap,
    /// They are already discarded on the device.
    discarded: Bitmap,
}

impl Delta {
    /// Whether the delta changes only the count of the block as a whole.
    pub fn is_whole(&self) -> bool {
        self.all == 0 && self.pages.is_empty()
    }

    /// Returns the marked pages.
    pub fn marked(&self) -> Bitmap {
        self.marks.as_ref().map_or([0; 4], |marks| std::array::from_fn(|i| marks.tables[i] | marks.discarded[i]))
    }

    /// Returns the pages whose counts change.
    pub fn changed(&self) -> Bitmap {
        if self.all != 0 {
            return ALL;
        }
        let mut changed = Bitmap::default();
        self.pages.iter().for_each(|change| set(&mut changed, change.start()..change.end()));
        changed
    }

    /// Returns the change of one page's count.
    pub fn of(&self, index: usize) -> i32 {
        let at = self.pages.partition_point(|change| change.end() <= index);
        self.all + self.pages.get(at).filter(|change| change.start() <= index).map_or(0, |change| change.by)
    }

    /// Changes the counts of some pages.
    fn change(&mut self, pages: Range<usize>, by: i32) {
        self.touched_from(pages.start, pages.len());
        // The changes that it touches.
        let from = self.pages.partition_point(|change| change.end() < pages.start);
        let to = from + self.pages[from..].iter().take_while(|change| change.start() <= pages.end).count();
        if from == to {
            self.pages.insert(from, Change { first: pages.start as u8, last: (pages.end - 1) as u8, by });
            return;
        }
        let mut now: SmallVec<[Change; 5]> = SmallVec::new();
        let mut at = pages.start;
        for change in &self.pages[from..to] {
            let (first, end) = (change.start(), change.end());
            push(&mut now, at..first.min(pages.end), by);
            push(&mut now, first..end.min(pages.start), change.by);
            push(&mut now, first.max(pages.start)..end.min(pages.end), change.by + by);
            push(&mut now, first.max(pages.end)..end, change.by);
            at = at.max(end.min(pages.end));
        }
        push(&mut now, at..pages.end, by);
        replace(&mut self.pages, from..to, &now);
    }

    fn touched_from(&mut self, first: usize, n: usize) {
        set(&mut self.touched, first..first + n);
    }
}

/// Splits some pages of a block into pieces whose counts change alike, each with its change.
pub(super) fn pieces(delta: Option<&Delta>, pages: Range<usize>) -> impl Iterator<Item = (Range<usize>, i32)> {
    let (all, changes) = delta.map_or((0, [].as_slice()), |delta| (delta.all, delta.pages.as_slice()));
    let mut left = &changes[changes.partition_point(|change| change.end() <= pages.start)..];
    let mut at = pages.start;
    std::iter::from_fn(move || {
        let start = at;
        if start == pages.end {
            return None;
        }
        match left.split_first() {
            Some((change, rest)) if change.start() <= start => {
                (at, left) = (change.end().min(pages.end), rest);
                Some((start..at, all + change.by))
            }
            next => {
                at = next.map_or(pages.end, |(change, _)| change.start().min(pages.end));
                Some((start..at, all))
            }
        }
    })
}

fn set(bits: &mut Bitmap, indices: Range<usize>) {
    bits.iter_mut().zip(mask(indices)).for_each(|(bits, more)| *bits |= more);
}

/// Splits a run of pages by block; yields the pages of each block that belong to the run.
pub(super) fn by_block(first: PageAddr, n: u64) -> impl Iterator<Item = (Block, Range<usize>)> {
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
    /// See [`note_gone`](Self::note_gone).
    gone: u64,
    /// Number of leaves of counts that have allocated pages.
    leaves: usize,
}

impl Deltas {
    /// Adds one reference to each of `n` pages.
    pub fn gain(&mut self, first: PageAddr, n: u64) {
        for (block, indices) in by_block(first, n) {
            self.change(block, indices, 1);
        }
    }

    /// Removes one reference from each of some pages of a block; durable once the journal is up to `until`.
    pub fn lose(&mut self, block: Block, pages: Range<usize>, until: u64) {
        let delta = self.change(block, pages, -1);
        delta.lost_until = delta.lost_until.max(until);
    }

    /// Changes the counts of some pages of a block.
    pub fn change(&mut self, block: Block, pages: Range<usize>, by: i32) -> &mut Delta {
        let delta = self.blocks.entry(block).or_default();
        self.entries -= delta.pages.len();
        delta.change(pages, by);
        self.entries += delta.pages.len();
        delta
    }

    /// Removes one reference from a block as a whole.
    pub fn lose_whole(&mut self, block: Block, until: u64) {
        self.whole(block, -1, 0);
        let delta = self.blocks.entry(block).or_default();
        delta.lost_until = delta.lost_until.max(until);
    }

    /// Notes that the losses of a block, of which all pages are touched, are durable once the journal is up
    /// to `until`.
    pub fn note_lost(&mut self, block: Block, until: u64) {
        let delta = self.blocks.entry(block).or_default();
        debug_assert!(delta.touched == ALL);
        delta.lost_until = delta.lost_until.max(until);
    }

    /// Notes that this released page held metadata.
    pub fn mark_table(&mut self, page: PageAddr) {
        set(&mut self.marks(page).tables, page.index()..page.index() + 1);
    }

    /// Notes that this page is discarded.
    pub fn mark_discarded(&mut self, page: PageAddr) {
        set(&mut self.marks(page).discarded, page.index()..page.index() + 1);
    }

    fn marks(&mut self, page: PageAddr) -> &mut Marks {
        self.blocks.entry(page.block()).or_default().marks.get_or_insert_default()
    }

    /// Iterates over the blocks with changes from `from` on.
    pub fn blocks_from(&self, from: Block) -> impl Iterator<Item = Block> {
        self.blocks.range(from..).map(|(&block, _)| block)
    }

    pub fn whole(&mut self, block: Block, whole: i32, all: i32) {
        let delta = self.blocks.entry(block).or_default();
        delta.whole += whole;
        delta.all += all;
        delta.touched = ALL;
        if delta.all == -1 && delta.pages == [Change { first: 0, last: u8::MAX, by: 1 }] {
            // A block that was filled page by page and promoted.
            self.entries -= delta.pages.len();
            (delta.all, delta.pages) = (0, Vec::new());
        }
    }

    /// Notes that the `n` pages from `first` on, all of one block, were allocated.
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

    /// Forgets that a page was allocated; returns false if there is more to know about it.
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

    /// Notes that `n` pages have no reference any more: the next checkpoint frees them.
    pub fn note_gone(&mut self, n: u64) {
        self.gone += n;
    }

    /// Returns the number of leaves of counts that have allocated pages: replay reads them to do the same.
    pub fn leaves(&self) -> usize {
        self.leaves
    }

    /// Notes that the changes are in the count pages; which pages were touched stays known.
    pub fn applied(&mut self) {
        for delta in self.blocks.values_mut() {
            (delta.whole, delta.all, delta.pages, delta.lost_until) = (0, 0, Vec::new(), 0);
        }
        (self.entries, self.gone) = (0, 0);
    }

    pub fn of_page(&self, page: PageAddr) -> i32 {
        self.blocks.get(&page.block()).map_or(0, |d| d.of(page.index()))
    }

    pub fn lost_until(&self, block: Block) -> u64 {
        self.blocks.get(&block).map_or(0, |d| d.lost_until)
    }

    /// As for its block, unless nothing is known of the page.
    pub fn page_lost_until(&self, page: PageAddr) -> u64 {
        if self.is_touched(page) { self.lost_until(page.block()) } else { 0 }
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

    /// Returns the number of pages without references.
    pub fn gone(&self) -> u64 {
        self.gone
    }

    /// Returns the approximate memory in bytes: a node of the tree is three quarters full, a list of pages up
    /// to half empty.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * 160 + self.entries * 12
    }
}

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
        (0..BLOCK_PAGES as usize).filter(|&i| bit(&dead, i)).for_each(|i| super::push(&mut runs, block.page(i)));
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
                _ => super::push(&mut runs, page),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_changes_say_what_an_array_would_say() {
        let (mut delta, mut array) = (Delta::default(), [0; 256]);
        for i in 0..4000_usize {
            let (first, len) = (i * 89 % 256, 1 + if i % 3 == 0 { 0 } else { i * 31 % 97 });
            let (pages, by) = (first..(first + len).min(256), if i * 7 % 5 < 2 { 1 } else { -1 });
            delta.change(pages.clone(), by);
            array[pages].iter_mut().for_each(|n| *n += by);
            assert!((0..256).all(|page| delta.of(page) == array[page]), "after {i}");
            let asked = i * 53 % 256..256 - i * 11 % (256 - i * 53 % 256);
            let mut at = asked.start;
            for (piece, by) in pieces(Some(&delta), asked.clone()) {
                assert!(piece.start == at && !piece.is_empty() && array[piece.clone()].iter().all(|&n| n == by));
                at = piece.end;
            }
            assert_eq!(at, asked.end, "after {i}");
            let meet = |pair: &[Change]| {
                pair[0].end() > pair[1].start() || pair[0].end() == pair[1].start() && pair[0].by == pair[1].by
            };
            assert!(!delta.pages.windows(2).any(meet) && delta.pages.iter().all(|c| c.by != 0), "after {i}");
        }
    }

    #[test]
    fn what_is_lost_in_a_block_says_nothing_of_pages_that_never_lost_anything() {
        let mut deltas = Deltas::default();
        deltas.lose(Block(1), 44..46, 7);
        let found = |deltas: &Deltas, page| deltas.page_lost_until(PageAddr(page));
        assert_eq!([299, 300, 301, 302].map(|page| found(&deltas, page)), [0, 7, 7, 0]);
        // A reference gained as well does not undo it.
        deltas.gain(PageAddr(300), 1);
        assert_eq!(found(&deltas, 300), 7);
        deltas.lose_whole(Block(1), 9);
        assert_eq!([256, 300, 511, 512].map(|page| found(&deltas, page)), [9, 9, 9, 0]);
    }

    #[test]
    fn what_comes_and_goes_leaves_nothing() {
        let mut deltas = Deltas::default();
        deltas.gain(PageAddr(10), 100);
        deltas.gain(PageAddr(110), 1);
        let one = deltas.bytes();
        deltas.lose(Block(0), 30..31, 7);
        assert!(deltas.bytes() > one);
        deltas.lose(Block(0), 10..30, 8);
        deltas.lose(Block(0), 31..111, 9);
        let delta = deltas.get(Block(0)).unwrap();
        assert!(delta.is_whole() && delta.lost_until == 9 && deltas.bytes() < one);
    }

    #[test]
    fn a_block_that_was_filled_and_promoted_has_no_pages_of_its_own() {
        let mut deltas = Deltas::default();
        (0..256).map(|i| i * 89 % 256).for_each(|page| deltas.gain(PageAddr(512 + page), 1));
        deltas.whole(Block(2), 1, -1);
        let delta = deltas.get(Block(2)).unwrap();
        assert!(delta.is_whole() && delta.whole == 1 && (0..256).all(|page| delta.of(page) == 0));
    }
}
