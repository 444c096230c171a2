//! Admission and allocation of free pages (I9: a full pool still works).
//!
//! A change takes free pages only with a [`Reservation`]. It gets one only while the free pages cover its
//! data, the headroom of its kind and everything that the next checkpoint writes. The headroom pays for the
//! tables that the change copies and for verbs that free space. A reservation is used in the synchronous
//! section that made it, so no page is set aside: nothing else can take pages in between.
//!
//! Where the next write goes.
//!
//! A stream (large writes, or small contiguous ones) gets a separate block in which every page lies where it
//! lies in the virtual block, so that a filled block can be mapped as one. A random writer gets a chunk: its
//! pages lie in the chunk as they lie in the virtual chunk, and chunks are placed contiguously. A chunk that
//! begins a virtual block is placed at the beginning of a block: if it turns out to begin a stream, the rest
//! of the block belongs to it. If none of this is available, the write takes any free page.
//!
//! A chunk stays reserved until its volume is shared again: later writes begin new chunks, so that a volume
//! with many snapshots is written as fast as one with few. But a hole in a chunk whose other pages stay where
//! they are is filled there, if its place is still free. The unused pages of abandoned chunks are bounded:
//! beyond an eighth of the free space they are filled first, in ascending order.
//!
//! Metadata comes from the end of the pool, where no stream grows. The last blocks are left to it as long as
//! there is any other free page, so that a checkpoint writes its tables in few pieces however long chunks
//! have been begun.

use std::cmp::Reverse;
use std::ops::Range;

use crate::format::CountNode;
use crate::planted::correct;
use crate::types::{
    AccountId, BLOCK_PAGES, BLOCK_SIZE, Bitmap, Block, PageAddr, bit, first_unset, mask, pages_in, rows,
};

use super::affinity::{AbandonedChunk, Chunk};
use super::{AllocRequest, Miss, Refusal, Space, retained, tree};

/// Part of the free space that may lie unused in abandoned chunks: one page of this many.
pub(super) const ABANDONED_PART: u64 = 8;
/// Part of the pool's blocks, from the end, that data leaves to metadata; part of its leaves that is searched
/// for places for metadata; and the least number of these.
const META_PART: u64 = 64;
const MIN_META_LEAVES: u64 = 16;
/// Most blocks that data leaves to metadata: a checkpoint takes a sixteenth of it.
const MAX_META_BLOCKS: u64 = 1024;
/// Leaves from the end that are searched for the best places for metadata; beyond these, for any place.
const MAX_META_LEAVES: u64 = 1024;
/// Largest distance, in blocks, between places where a stripe and a block begin together, for streams to
/// begin there; also the number of empty blocks examined for that.
const MAX_STRIPE_BLOCKS: u64 = 32;
const MAX_LOOKUPS: usize = 64;
/// Free pages that a block in use must have to receive more metadata.
const MIN_META_FREE_PAGES: u64 = 64;

/// Whether `pages` free pages are contiguous, or as many as a block has.
fn has_free_run(pages: u64, bits: &Bitmap) -> bool {
    let wanted = pages.min(BLOCK_PAGES) as usize;
    rows(*bits).any(|row| row.len() >= wanted)
}

/// Returns where `pages` free pages are contiguous; else where the longest run begins.
fn free_run_start(pages: u64, bits: &Bitmap) -> usize {
    let wanted = usize::try_from(pages).unwrap_or(usize::MAX);
    let fits = rows(*bits).find(|row| row.len() >= wanted);
    let room = fits.or_else(|| rows(*bits).max_by_key(|row| (row.len(), Reverse(row.start))));
    room.expect("a block in the list has a free page").start
}

fn first_free(bits: &Bitmap) -> usize {
    let word = bits.iter().position(|&w| w != 0).expect("a block in the list has a free page");
    word * 64 + bits[word].trailing_zeros() as usize
}

/// Allocates one or more contiguous pages for a write, at most as many as wanted.
pub fn alloc_data(space: &mut Space, want: AllocRequest, _: &Reservation) -> Result<(PageAddr, u64), Refusal> {
    let AllocRequest { volume, at, pages, chunk_pages, .. } = want;
    let (index, virtual_block) = (at.index(), at.block());
    let stream = space.affinity.is_stream(volume, &want.write) || chunk_pages >= BLOCK_PAGES;
    if let Some(block) = space.affinity.owned(volume, virtual_block)
        && let Some(run) = take(space, block, index, pages)
    {
        return Ok(run);
    }
    if !stream && let Some(run) = take_beside(space, &want) {
        return Ok(run);
    }
    if !stream && let Some(run) = take_in_chunk(space, &want)? {
        return Ok(run);
    }
    if let Some(block) = begun_by_a_chunk(space, &want)
        && let Some(run) = take(space, block, index, pages)
    {
        space.affinity.own(volume, virtual_block, block);
        return Ok(run);
    }
    let before = virtual_block.checked_sub(1).and_then(|b| space.affinity.owned(volume, b));
    if let Some(block) = block_for_stream(space, before)? {
        space.affinity.own(volume, virtual_block, block);
        return Ok(take(space, block, index, pages).expect("an empty block has every page"));
    }
    if let Some((block, index)) = retained::first_page(space) {
        return Ok(take(space, block, index, pages).expect("it is free"));
    }
    loop {
        let first = space.free.iter().next().map(|(&block, bits)| (block, first_free(bits)));
        match first.filter(|&(block, _)| is_for_data(space, block)) {
            Some((block, index)) => return Ok(take(space, block, index, pages).expect("it is free")),
            None if tree::scan_leaf(space)? => {}
            None => return Err(Refusal::NoSpace),
        }
    }
}

/// Allocates these pages, if they are free: the ones left out when the chunk was begun.
fn take_beside(space: &mut Space, want: &AllocRequest) -> Option<(PageAddr, u64)> {
    let (beside, within) = (want.beside?, want.at.0 % want.chunk_pages);
    let is_in_line = beside.0 % want.chunk_pages == within;
    let max = want.pages.min(want.chunk_pages - within);
    if is_in_line { take(space, beside.block(), beside.index(), max) } else { None }
}

fn take_in_chunk(space: &mut Space, want: &AllocRequest) -> Result<Option<(PageAddr, u64)>, Miss> {
    let (chunk, within) = (want.at.0 / want.chunk_pages, want.at.0 % want.chunk_pages);
    let max = want.pages.min(want.chunk_pages - within);
    let mut left = None;
    if let Some(kept) = space.affinity.chunk(want.volume, chunk) {
        let page = PageAddr(kept.first.0 + within);
        if kept.shared_at != want.shared_at || kept.pages != want.chunk_pages {
            // A write that fills its chunk must be contiguous.
            if 2 * max <= want.chunk_pages
                && let Some(run) = take_abandoned(space, max)
            {
                return Ok(Some(run));
            }
            left = Some(kept);
        } else if let Some(run) = take(space, page.block(), page.index(), max) {
            return Ok(Some(run));
        }
    }
    let room = place_for_chunk(space, want, chunk)?;
    // Only now: an attempt that misses a count page is repeated, and a chunk is abandoned once.
    if let Some(Chunk { first, pages, .. }) = left {
        let free = free_in_chunk(space, first, pages);
        space.affinity.abandon_chunk(AbandonedChunk { first, pages, free });
    }
    let Some((block, next)) = room else { return Ok(None) };
    let kept = Chunk { first: block.page(next as usize), pages: want.chunk_pages, shared_at: want.shared_at };
    space.affinity.keep_chunk(want.volume, chunk, kept);
    // Another writer may have taken the page under pressure.
    Ok(take(space, block, (next + within) as usize, max))
}

/// Returns a place for a chunk: behind the one before it; in an empty block if it begins a virtual block;
/// or in an open block.
fn place_for_chunk(space: &mut Space, want: &AllocRequest, chunk: u64) -> Result<Option<(Block, u64)>, Miss> {
    let pages = want.chunk_pages;
    let begins = (chunk * pages).is_multiple_of(BLOCK_PAGES);
    if !begins
        && let Some(before) = space.affinity.chunk(want.volume, chunk - 1).filter(|before| before.pages == pages)
        && space.affinity.open_chunk_at(PageAddr(before.first.0 + pages), pages)
    {
        return Ok(Some((before.first.block(), before.first.index() as u64 + pages)));
    }
    if !begins && let Some(room) = space.affinity.open_chunk(pages) {
        return Ok(Some(room));
    }
    if let Some(block) = empty_block(space, None)? {
        space.affinity.leave_open(block, pages);
        return Ok(Some((block, 0)));
    }
    Ok(space.affinity.open_chunk(pages))
}

/// Returns the block at whose beginning the first chunk of this virtual block lies.
fn begun_by_a_chunk(space: &Space, want: &AllocRequest) -> Option<Block> {
    let chunk = want.at.block() * BLOCK_PAGES / want.chunk_pages;
    let first = space.affinity.chunk(want.volume, chunk).filter(|kept| kept.pages == want.chunk_pages)?.first;
    (first.index() == 0).then_some(first.block())
}

/// Allocates pages of the chunk abandoned first, if there are too many unused ones.
fn take_abandoned(space: &mut Space, max: u64) -> Option<(PageAddr, u64)> {
    while space.affinity.abandoned_pages() > space.available / ABANDONED_PART {
        let left = space.affinity.oldest_abandoned()?;
        let (block, from) = (left.first.block(), left.first.index());
        let free = free_in_chunk(space, left.first, left.pages);
        // A chunk in which space was freed since no longer matches the record.
        if free == 0 || free > left.free {
            space.affinity.remove_oldest_abandoned();
            continue;
        }
        let bits = &space.free[&block];
        let end = from + left.pages as usize;
        let index = (from..end).find(|&i| bit(bits, i)).expect("one is free");
        let run = take(space, block, index, max.min((end - index) as u64))?;
        space.affinity.use_abandoned(left.free - free + run.1);
        return Some(run);
    }
    None
}

fn free_in_chunk(space: &Space, first: PageAddr, pages: u64) -> u64 {
    let Some(bits) = space.free.get(&first.block()) else { return 0 };
    let chunk = mask(first.index()..first.index() + pages as usize);
    pages_in(&std::array::from_fn(|i| bits[i] & chunk[i]))
}

/// Returns a block of which every page is free: the one behind `before` if possible.
pub(super) fn empty_block(space: &mut Space, before: Option<Block>) -> Result<Option<Block>, Miss> {
    if let Some(next) = before.map(|b| Block(b.0 + 1))
        && space.empty.contains(&next)
        && !is_for_metadata(space, next)
    {
        return Ok(Some(next));
    }
    if let Some(block) = retained::empty_block(space) {
        return Ok(Some(block));
    }
    loop {
        let first = space.empty.first().filter(|&&block| is_for_data(space, block));
        if let Some(&block) = first.filter(|&&block| !is_for_metadata(space, block)) {
            return Ok(Some(block));
        }
        if !tree::scan_leaf(space)? {
            return Ok(None);
        }
    }
}

/// Sets the stripe of a device that wants whole stripes: streams begin at the beginning of one, if they
/// can.
pub fn set_stripe(space: &mut Space, bytes: u64) {
    let (mut a, mut b) = (BLOCK_SIZE, bytes);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    let blocks = bytes / a;
    space.begin_at = if blocks <= MAX_STRIPE_BLOCKS { blocks } else { 1 };
}

/// As [`empty_block`](Self::empty_block). If the device wants whole stripes, blocks in which stripes
/// begin and end are taken together or not at all, as long as there are such blocks near.
fn block_for_stream(space: &mut Space, before: Option<Block>) -> Result<Option<Block>, Miss> {
    if space.begin_at == 1 {
        return empty_block(space, before);
    }
    let next = before.map(|before| Block(before.0 + 1));
    if let Some(next) = next {
        search_up_to(space, Block(next.0 + space.begin_at))?;
        let is_empty = space.empty.contains(&next) && !is_for_metadata(space, next);
        if is_empty && (!next.0.is_multiple_of(space.begin_at) || is_empty_group(space, next)) {
            return Ok(Some(next));
        }
    }
    let Some(first) = empty_block(space, None)? else { return Ok(None) };
    search_up_to(space, Block(first.0 + 2 * space.begin_at))?;
    let near = |from: Block| {
        let mut near = space.empty.range(from..).take(MAX_LOOKUPS);
        let is_for_data = |last| is_for_data(space, last) && !is_for_metadata(space, last);
        near.find(|&&b| is_empty_group(space, b) && is_for_data(Block(b.0 + space.begin_at - 1))).copied()
    };
    Ok(next.and_then(near).or_else(|| near(first)).or(Some(first)))
}

/// Whether a stripe begins with this block, and all blocks up to the next one with which a stripe begins
/// are empty.
fn is_empty_group(space: &Space, block: Block) -> bool {
    let group = block.0..block.0 + space.begin_at;
    block.0.is_multiple_of(space.begin_at)
        && space.empty.range(Block(group.start)..Block(group.end)).count() as u64 == space.begin_at
}

/// Searches the leaves of the blocks up to this one.
fn search_up_to(space: &mut Space, block: Block) -> Result<(), Miss> {
    while !is_for_data(space, block) && tree::scan_leaf(space)? {}
    Ok(())
}

/// Whether no leaf nearer to the beginning remains to be searched.
pub(super) fn is_for_data(space: &Space, block: Block) -> bool {
    space.scan >= space.scan_end || CountNode::leaf_of(block).0.index < space.scan
}

/// Allocates free pages of a block from `index` on: as many as are contiguous, at most `max`.
pub(super) fn take(space: &mut Space, block: Block, index: usize, max: u64) -> Option<(PageAddr, u64)> {
    let bits = space.free.get_mut(&block)?;
    let end = (index + max as usize).min(BLOCK_PAGES as usize);
    let n = first_unset(bits, index, end) - index;
    if n == 0 {
        return None;
    }
    bits.iter_mut().zip(mask(index..index + n)).for_each(|(bits, taken)| *bits &= !taken);
    if *bits == [0; 4] {
        space.free.remove(&block);
    }
    space.empty.remove(&block);
    let taken = mask(index..index + n);
    correct!(retained::forget(space, block, taken), Bug::RetainedOutlivesAllocation => ());
    let first = block.page(index);
    space.current.touch(first, n as u64);
    space.known -= n as u64;
    space.available -= n as u64;
    space.handed_out += n as u64;
    Some((first, n as u64))
}

/// Returns pages that were allocated and never written: they may be allocated again at once or after the
/// next checkpoint.
pub fn return_pages(space: &mut Space, first: PageAddr, n: u64) {
    for page in (first.0..first.0 + n).map(PageAddr) {
        if space.frozen.is_touched(page) || !space.current.untouch(page) {
            write_off(space, 1);
            continue;
        }
        space.handed_out -= 1;
        tree::give_back(space, page);
        retained::retain_unused(space, page);
    }
}

/// Notes that `n` pages that were allocated, and may have been written, are not mapped: the next
/// checkpoint frees them.
pub fn write_off(space: &mut Space, n: u64) {
    space.current.note_gone(n);
}

/// Allocates pages for metadata from space already known to be free, as contiguous as possible.
pub fn alloc_meta(space: &mut Space, n: u64) -> Option<Vec<(PageAddr, u64)>> {
    if space.known < n {
        return None;
    }
    let (mut out, mut left) = (Vec::new(), n);
    let mut row = 0..0;
    while left > 0 {
        if row.is_empty()
            && let Some((block, index)) = retained::place_for_meta(space, first_for_meta(space), left)
        {
            out.push(take(space, block, index, left).expect("it is free"));
            break;
        }
        if row.is_empty() {
            row = row_for_meta(space, left);
        }
        let block = row.next().map(Block).or_else(|| block_for_meta(space, left)).expect("as many pages are known");
        space.affinity.meta_block = Some(block);
        let run =
            take(space, block, free_run_start(left, &space.free[&block]), left).expect("a known block has a free page");
        left -= run.1;
        out.push(run);
    }
    Some(out)
}

/// Returns the block used last, an empty one from the end, or one that is little used, in which `pages`
/// pages are contiguous; else any.
fn block_for_meta(space: &Space, pages: u64) -> Option<Block> {
    let from = first_for_meta(space);
    let fits = |block: &Block| space.free.get(block).is_some_and(|bits| has_free_run(pages, bits));
    let used_last = || space.affinity.meta_block;
    let roomy =
        || space.free.range(from..).rev().filter(|(_, bits)| pages_in(bits) >= MIN_META_FREE_PAGES).map(|(b, _)| *b);
    // Only an empty block has a whole block of free pages.
    let fitting = || if pages < BLOCK_PAGES { roomy().find(fits) } else { None };
    used_last()
        .filter(fits)
        .or_else(|| space.empty.range(from..).next_back().copied())
        .or_else(fitting)
        .or_else(|| used_last().filter(|block| space.free.contains_key(block)))
        .or_else(|| roomy().next())
        .or_else(|| space.empty.last().copied())
        .or_else(|| space.free.keys().next_back().copied())
}

/// Returns a row of empty blocks, nearest to the end, for the pages of metadata that no block has space
/// for; if no row is long enough, the longest.
fn row_for_meta(space: &Space, pages: u64) -> Range<u64> {
    let (blocks, mut longest) = (pages.div_ceil(BLOCK_PAGES), 0..0);
    if blocks < 2 {
        return longest;
    }
    let mut row = 0..0;
    for block in space.empty.range(first_for_meta(space)..).rev().map(|block| block.0) {
        row = if block + 1 == row.start { block..row.end } else { block..block + 1 };
        if row.end - row.start > longest.end - longest.start {
            longest = row.clone();
        }
        if longest.end - longest.start == blocks {
            break;
        }
    }
    longest
}

/// Whether there is a row of empty blocks for the pages of metadata that no block has space for.
fn has_row_for_meta(space: &Space, pages: u64) -> bool {
    let row = row_for_meta(space, pages);
    pages <= BLOCK_PAGES || (row.end - row.start) * BLOCK_PAGES >= pages
}

/// Whether an empty block is left to metadata, since data finds other places.
pub(super) fn is_for_metadata(space: &Space, block: Block) -> bool {
    let blocks = space.layout.blocks();
    let first = Block(blocks - blocks.div_ceil(META_PART).min(MAX_META_BLOCKS));
    block >= first && space.free.range(..first).next().is_some()
}

fn first_for_meta(space: &Space) -> Block {
    CountNode { level: 0, index: leaves_for_meta(space) }.first_block()
}

/// Returns the leaf from which on metadata is preferred.
fn leaves_for_meta(space: &Space) -> u64 {
    let leaves = space.layout.count_nodes(0);
    leaves - (leaves / META_PART).max(MIN_META_LEAVES).min(leaves / 2)
}

/// Searches from the end until space for `pages` pages of metadata is known there, or there is none, or
/// none that is worth loading more count pages.
pub fn prepare_meta(space: &mut Space, pages: u64) -> Result<(), Miss> {
    let limit = leaves_for_meta(space);
    loop {
        let begun = space.affinity.meta_block.and_then(|b| space.free.get(&b)).map_or(0, pages_in);
        let empty = space.empty.range(first_for_meta(space)..).count() as u64 * BLOCK_PAGES;
        let is_enough = begun + empty >= pages && has_row_for_meta(space, pages);
        let is_far = space.layout.count_nodes(0) - space.scan_end >= MAX_META_LEAVES && space.known >= pages;
        if is_enough || is_far || !tree::scan_leaf_from_the_end(space, limit)? {
            return Ok(());
        }
    }
}

/// Searches until at least `pages` free pages are known.
pub fn ensure_known(space: &mut Space, pages: u64) -> Result<(), Refusal> {
    while space.known < pages {
        if !tree::scan_leaf(space)? {
            return Err(Refusal::NoSpace);
        }
    }
    Ok(())
}

/// Replay: notes that these pages were allocated before the crash.
pub fn mark_allocated(space: &mut Space, first: PageAddr, n: u64) -> Result<(), Miss> {
    for page in (first.0..first.0 + n).map(PageAddr) {
        let free = bit(&tree::free_by_leaf(space, page.block())?, page.index());
        if space.is_touched(page) || !free {
            continue;
        }
        space.current.touch(page, 1);
        space.available -= 1;
        space.handed_out += 1;
        if let Some(bits) = space.free.get_mut(&page.block())
            && bit(bits, page.index())
        {
            bits[page.index() / 64] &= !(1 << (page.index() % 64));
            space.known -= 1;
            space.empty.remove(&page.block());
        }
    }
    Ok(())
}

/// What a change needs of the free space, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// One step of a verb, of a discard or of the reaper: tables only.
    Step,
    /// A verb that leads to free space: the tables that it changes are part of what the checkpoint writes.
    Release,
    /// First writes to this many pages.
    Write(u64),
    /// Old contents of an origin, and pages of the ordered map beyond the headroom.
    CopyOut { pages: u64, tables: u64 },
    /// Old contents of an origin that no write waits for: taken only where twice as much is free.
    CopyAhead { pages: u64, views: u64 },
    /// The record that chunks of an origin were rolled back.
    NoteRollback,
    /// Pages moved to a contiguous place, and tables that change. Leaves a part of the pool free.
    Move { pages: u64, tables: u64 },
    /// Tables that change when moved pages are mapped.
    PublishMove { tables: u64 },
}

/// Headroom of a step: the tables that it may copy.
const STEP_PAGES: u64 = 12;
/// Headroom of a first write.
const WRITE_PAGES: u64 = 48;
/// Headroom of copies of an origin.
const COPY_OUT_PAGES: u64 = 64;
/// Headroom of a rollback record: a path of the ordered map.
const NOTE_PAGES: u64 = 16;
/// Headroom of moves.
const MOVE_PAGES: u64 = 64;
/// Moves leave this part of the pool free: one page of this many.
const MOVE_POOL_PART: u64 = 64;

/// Permission to take free pages.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    /// Pages that have to be free, including those to be taken.
    pages: u64,
}

impl Space {
    /// Admits `need` of what is charged to `account` if the free pages cover it, the `checkpoint` pages that the next
    /// checkpoint writes, and what is kept free for others.
    pub fn reserve(&self, need: Need, checkpoint: u64, account: AccountId) -> Result<Reservation, Refusal> {
        let pages = self.pages_for(need, checkpoint);
        if self.available.saturating_sub(self.accounts.held_for_others(account)) < pages {
            Err(Refusal::NoSpace)
        } else {
            Ok(Reservation { pages })
        }
    }

    /// Returns the pages that have to be free to admit `need`.
    pub fn pages_for(&self, need: Need, checkpoint: u64) -> u64 {
        match need {
            Need::Step => checkpoint + STEP_PAGES,
            Need::Release => checkpoint,
            Need::Write(pages) => checkpoint + WRITE_PAGES + pages,
            Need::CopyOut { pages, tables } => checkpoint + COPY_OUT_PAGES + tables + pages,
            Need::CopyAhead { pages, views } => 2 * (checkpoint + COPY_OUT_PAGES + views * (pages + COPY_OUT_PAGES)),
            Need::NoteRollback => checkpoint + NOTE_PAGES,
            Need::Move { pages, tables } => {
                checkpoint + MOVE_PAGES + tables + pages + self.layout.pages() / MOVE_POOL_PART
            }
            Need::PublishMove { tables } => checkpoint + MOVE_PAGES + tables,
        }
    }

    /// Returns the free pages beyond what admits a first write of zero pages.
    pub fn unreserved(&self, checkpoint: u64) -> u64 {
        self.available.saturating_sub(checkpoint + WRITE_PAGES)
    }

    /// Searches the counts until all reserved pages are known to be free.
    pub fn find_reserved(&mut self, reservation: &Reservation) -> Result<(), Refusal> {
        ensure_known(self, reservation.pages)
    }
}

#[cfg(test)]
impl Reservation {
    /// Creates a reservation without a check, for tests of what takes pages.
    pub fn unchecked() -> Reservation {
        Reservation { pages: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Layout;
    use crate::types::NO_ACCOUNT;

    #[test]
    fn each_kind_is_admitted_down_to_its_headroom_and_no_further() {
        let layout = Layout::new(64 << 20);
        let mut space = Space::new(layout, [0; 16], Vec::new());
        let part = layout.pages() / MOVE_POOL_PART;
        let needs = [
            (Need::Step, 12),
            (Need::Release, 0),
            (Need::Write(5), 53),
            (Need::CopyOut { pages: 5, tables: 7 }, 76),
            (Need::CopyAhead { pages: 5, views: 2 }, 2 * (100 + 64 + 2 * 69) - 100),
            (Need::NoteRollback, 16),
            (Need::Move { pages: 5, tables: 7 }, 76 + part),
            (Need::PublishMove { tables: 7 }, 71),
        ];
        for (need, pages) in needs {
            space.available = pages + 100;
            assert_eq!(space.reserve(need, 100, NO_ACCOUNT).unwrap().pages, pages + 100, "{need:?}");
            space.available -= 1;
            assert!(matches!(space.reserve(need, 100, NO_ACCOUNT), Err(Refusal::NoSpace)), "{need:?}");
        }
    }
}
