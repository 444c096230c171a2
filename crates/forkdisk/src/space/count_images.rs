//! Applying deltas to count pages: leaves first, then upwards, each to its other slot. Or, where that is
//! less, writing a segment of the log that lists the changes of the leaves.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::format::{
    BlockChange, CountEntry, CountLog, CountNode, CountPage, LEAF_BLOCKS, LeafChange, PINNED, Seed, Slot,
    count_log_page, encode_count_segment, page_checksum,
};
use crate::planted::correct;
use crate::space::{tree, view_counts};
use crate::types::{BLOCK_PAGES, Block, PAGE_SIZE, PageAddr};
use crate::types::{Bitmap, mask, pages_in, rows};

use super::delta::by_block;
use super::tree::free_in;
use super::tree::{changes, pages_of, parts};
use super::{Miss, Runs, Space, push_run};

/// Level in the checksum seed of count pages: this plus their level.
pub const COUNT_SEED: u8 = 0xe0;

/// Pages examined in a step, per page that may be written in it.
const LOOKUPS_PER_PAGE: usize = 8;

/// A page to be written, and its address.
type Image = (PageAddr, Box<[u8; PAGE_SIZE]>);

/// A step of a checkpoint.
pub enum Step {
    /// Write these pages.
    Write(Vec<Image>),
    /// All pages are written; the superblock must record this.
    Done(WrittenCounts),
}

/// Where the counts of a checkpoint are.
#[derive(Clone)]
pub struct WrittenCounts {
    /// Entries of the top-level pages.
    pub roots: Vec<CountEntry>,
    /// The log that must be applied to the pages.
    pub log: CountLog,
    /// There are counts of 65,535 or more, or there were.
    pub large: bool,
}

/// How a checkpoint writes counts.
enum CountsTarget {
    /// Into their pages.
    Pages,
    /// As a segment of the log.
    Log(Segment),
}

/// A segment that is being built.
#[derive(Default)]
struct Segment {
    changes: Vec<LeafChange>,
    /// Lower limit of its length in bytes.
    bytes: usize,
    /// See [`parts`].
    parts: usize,
}

/// Progress of a checkpoint.
pub struct CheckpointWork {
    way: CountsTarget,
    level: u8,
    todo: Vec<CountNode>,
    /// The new entries of the pages written so far.
    new: BTreeMap<CountNode, CountEntry>,
    /// The contents of these pages, as many as the cache may hold.
    images: BTreeMap<CountNode, CountPage>,
    /// Pages written whose contents are not in `images`.
    outdated: Vec<CountNode>,
    /// Pages that will be free.
    freed: Runs,
    done: WrittenCounts,
}

/// Levels above the leaves.
const UPPER_LEVELS: u32 = 3;
/// Fewest bytes of a leaf in a segment, of one of its blocks, and of a set of pages.
const LEAF_BYTES: usize = 4;
const BLOCK_BYTES: usize = 1;
const SET_BYTES: usize = 4;

impl CheckpointWork {
    /// Keeps a page in its new state, if the cache has space for it.
    fn keep(&mut self, node: CountNode, page: CountPage, limit: usize) {
        // Pages above leaves are needed more often.
        let room = if node.level == 0 { limit / 2 } else { limit };
        if self.images.len() < room {
            self.images.insert(node, page);
        } else {
            self.outdated.push(node);
        }
    }
}

fn and(a: Bitmap, b: Bitmap) -> Bitmap {
    std::array::from_fn(|word| a[word] & b[word])
}

/// Freezes the deltas so far: they belong to a checkpoint from now on.
pub fn freeze(space: &mut Space) {
    assert!(space.frozen.is_empty() && space.work.is_none(), "one checkpoint at a time");
    space.frozen = std::mem::take(&mut space.current);
    space.handed_out = 0;
    let to_log = space.logged.free_pages() > 0 && !space.logged.retiring;
    let way = if to_log { CountsTarget::Log(Segment::default()) } else { CountsTarget::Pages };
    begin_work(space, way);
}

/// Makes the next checkpoint move the log to the pages, if that takes at most `most` pages; returns
/// whether it will.
pub fn retire_log(space: &mut Space, most: u64) -> bool {
    space.logged.retiring = (1..=most).contains(&(space.logged.leaves() as u64));
    space.logged.retiring
}

/// Begins to move the log to the pages, as a checkpoint of nothing else.
pub fn begin_log_flush(space: &mut Space) {
    assert!(space.frozen.is_empty() && space.work.is_none(), "no checkpoint meanwhile");
    begin_work(space, CountsTarget::Pages);
}

/// Notes that the pages and what refers to them are durable. Free space does not change: of the pages
/// that the last checkpoint freed, some may have come into use since.
pub fn end_log_flush(space: &mut Space) {
    let freed = take_over(space);
    assert!(freed.is_empty(), "nothing changes");
}

/// Aborts a log flush: nothing refers to what was written, and the state is as before.
pub fn abort_log_flush(space: &mut Space) {
    space.work = None;
}

/// Switches the running checkpoint to writing pages.
pub(super) fn write_pages_instead_of_log(space: &mut Space) {
    begin_work(space, CountsTarget::Pages);
}

fn begin_work(space: &mut Space, way: CountsTarget) {
    let mut leaves: BTreeSet<CountNode> = space.frozen.iter().map(|(b, _)| CountNode::leaf_of(b).0).collect();
    // The pool may have grown since the freeze: the superblock holds the size at the freeze.
    let roots = space.work.as_ref().map_or(&space.roots, |given_up| &given_up.done.roots).clone();
    let mut done = WrittenCounts { roots, log: space.logged.end, large: space.large_counts };
    if matches!(way, CountsTarget::Pages) {
        leaves.extend(space.logged.nodes());
        correct!(done.log = CountLog::default(), Bug::CountLogOutlivesPages => ());
    }
    let todo = leaves.into_iter().rev().collect();
    let (new, images, outdated, freed) = Default::default();
    space.work = Some(CheckpointWork { way, level: 0, todo, new, images, outdated, freed, done });
}

/// Returns the next pages to write: at most `max`, or a segment of the log. A step may have none.
pub fn checkpoint_step(space: &mut Space, max: usize) -> Result<Step, Miss> {
    let (mut out, mut steps) = (Vec::new(), 0);
    while out.len() < max && steps < LOOKUPS_PER_PAGE * max {
        steps += 1;
        let work = space.work.as_ref().expect("between freeze and finish");
        match work.todo.last().copied() {
            Some(node) if matches!(work.way, CountsTarget::Log(_)) => log_leaf(space, node)?,
            None if matches!(work.way, CountsTarget::Log(_)) && work.level < 3 => out.extend(next_segment(space)),
            Some(node) => {
                // What this step has made is kept in `work` even if the next page is missing.
                match next_image(space, node) {
                    Ok(image) => out.extend(image),
                    Err(miss) if out.is_empty() => return Err(miss),
                    Err(_) => break,
                }
            }
            None if work.level == 3 => break,
            None => next_level(space),
        }
    }
    let work = space.work.as_ref().expect("between freeze and finish");
    match out.is_empty() && work.todo.is_empty() && work.level == 3 {
        true => Ok(Step::Done(work.done.clone())),
        false => Ok(Step::Write(out)),
    }
}

fn next_level(space: &mut Space) {
    let work = space.work.as_mut().expect("between freeze and finish");
    let parents: BTreeSet<CountNode> =
        work.new.keys().filter(|n| n.level == work.level).filter_map(|n| n.parent()).map(|(p, _)| p).collect();
    work.level += 1;
    work.todo = parents.into_iter().rev().collect();
}

/// Adds the changes of a leaf to the segment.
fn log_leaf(space: &mut Space, node: CountNode) -> Result<(), Miss> {
    let old = tree::entry(space, node)?;
    view_counts::keep_common(space, node, &old);
    let mut change = LeafChange { leaf: node.index, ..LeafChange::default() };
    let entry = match notes_above(space, node, &old) {
        Some(common) => CountEntry { common, used: space.layout.initially_free_under(node), ..old },
        None => {
            let before = tree::page(space, node)?.cloned();
            view_counts::keep_image(space, node, before.as_ref());
            let before = before.unwrap_or_default();
            let (mut page, mut freed) = (before.clone(), Runs::new());
            let used = apply(space, node, old.common, &mut page, &mut freed);
            change.blocks = changes(&before, &page);
            let work = space.work.as_mut().expect("between freeze and finish");
            work.done.large |= page.has_upper_bits();
            work.freed.append(&mut freed);
            work.keep(node, page, space.cache_limit);
            CountEntry { used, common: 0, ..old }
        }
    };
    change.used = entry.used as i64 - old.used as i64;
    change.common = i32::from(entry.common) - i32::from(old.common);
    let work = space.work.as_mut().expect("between freeze and finish");
    work.todo.pop();
    let CountsTarget::Log(segment) = &mut work.way else { unreachable!("asked before") };
    // One that was touched and is unchanged needs no mention.
    if change.used == 0 && change.common == 0 && change.blocks.is_empty() {
        return Ok(());
    }
    let of_block = |(_, block): &(u8, BlockChange)| BLOCK_BYTES + SET_BYTES * block.pages.len();
    segment.bytes += LEAF_BYTES + change.blocks.iter().map(of_block).sum::<usize>();
    segment.parts += parts(&change);
    segment.changes.push(change);
    if pages_of(segment.bytes) > space.logged.free_pages() || !space.logged.fits_memory(segment.parts) {
        write_pages_instead_of_log(space);
    }
    Ok(())
}

/// Returns the segment, if it is worth writing.
fn next_segment(space: &mut Space) -> Vec<Image> {
    let work = space.work.as_ref().expect("between freeze and finish");
    let CountsTarget::Log(Segment { changes, .. }) = &work.way else { unreachable!("asked before") };
    // Without changes there is nothing to write.
    let bytes = if changes.is_empty() { Vec::new() } else { encode_count_segment(changes) };
    let pages = pages_of(bytes.len());
    if pages > space.logged.free_pages() || pages > leaves_without_log(space, changes) + UPPER_LEVELS {
        write_pages_instead_of_log(space);
        return Vec::new();
    }
    let first = correct!(space.logged.end.pages, Bug::CountLogOverwritten => 0);
    let log = space.logged.end.with(space.uuid, &bytes);
    let work = space.work.as_mut().expect("between freeze and finish");
    (work.level, work.done.log) = (3, log);
    let page = |bytes: &[u8]| Box::new(bytes.try_into().expect("whole pages"));
    bytes.chunks(PAGE_SIZE).zip(first..).map(|(bytes, i)| (count_log_page(i), page(bytes))).collect()
}

/// Returns the number of leaves that would have to be written instead of a segment with these changes.
fn leaves_without_log(space: &Space, changes: &[LeafChange]) -> u32 {
    let changed = changes.iter().filter(|change| !change.blocks.is_empty());
    let new = changed.filter(|change| !space.logged.changes(CountNode { level: 0, index: change.leaf }));
    (space.logged.leaves() + new.count()) as u32
}

fn next_image(space: &mut Space, node: CountNode) -> Result<Option<Image>, Miss> {
    // The pages above leaves must hold what they hold without the log.
    let old = if node.level == 0 { tree::entry(space, node)? } else { tree::entry_on_device(space, node)? };
    // The counts of a leaf that is only moved here from the log do not change.
    let is_changed = node.level == 0 && (is_frozen(space, node) || view_counts::keeps(space, node));
    if is_changed {
        view_counts::keep_common(space, node, &old);
    }
    let noted = match notes_above(space, node, &old) {
        // The logged changes of the leaf have to be written.
        Some(_) if space.logged.changes(node) => None,
        Some(common) => Some(CountEntry { common, used: space.layout.initially_free_under(node), ..old }),
        // Only its common count was logged.
        None if node.level == 0 && !space.logged.changes(node) && !is_frozen(space, node) => Some(old),
        None => None,
    };
    if let Some(entry) = noted {
        let work = space.work.as_mut().expect("between freeze and finish");
        work.todo.pop();
        work.new.insert(node, entry);
        return Ok(None);
    }
    let page = tree::page(space, node)?.cloned();
    if is_changed {
        view_counts::keep_image(space, node, page.as_ref());
    }
    let (mut page, mut freed) = (page.unwrap_or_default(), Runs::new());
    let used = match node.level {
        0 => {
            let used = apply(space, node, old.common, &mut page, &mut freed);
            page.seal();
            used
        }
        _ => point(space, node, &mut page, old.used),
    };
    let slot = old.slot.map_or(Slot::A, |slot| correct!(slot.other(), Bug::CountSlotOverwritten => slot));
    let at = node.page(slot);
    let seed = Seed { pool: space.uuid, page: at, level: COUNT_SEED + node.level, birth: 0 };
    let entry = CountEntry { slot: Some(slot), checksum: page_checksum(&seed, page.bytes()), used, common: 0 };
    let bytes = Box::new(*page.bytes());
    let work = space.work.as_mut().expect("between freeze and finish");
    work.todo.pop();
    work.done.large |= page.has_upper_bits();
    if node.level == 3 {
        work.done.roots[node.index as usize] = entry;
    }
    work.freed.append(&mut freed);
    work.new.insert(node, entry);
    work.keep(node, page, space.cache_limit);
    Ok(Some((at, bytes)))
}

/// Whether anything changes in the blocks of a leaf.
fn is_frozen(space: &Space, leaf: CountNode) -> bool {
    let first = leaf.first_block().0;
    (first..first + LEAF_BLOCKS as u64).any(|block| space.frozen.get(Block(block)).is_some())
}

/// If every block of a leaf gains or loses the same number of references as a whole, nothing else changes
/// in it, and each block keeps one of the references of the common count: returns the new common count,
/// which is written above the leaf instead of the leaf. All its pages are in use then.
fn notes_above(space: &Space, node: CountNode, old: &CountEntry) -> Option<u16> {
    if node.level > 0 {
        return None;
    }
    let first = node.first_block().0;
    // Blocks beyond the end of the pool, which it may have once it has grown, have no references.
    if first + LEAF_BLOCKS as u64 > space.layout.blocks() {
        return None;
    }
    let mut blocks = (first..first + LEAF_BLOCKS as u64).map(Block).filter(|&b| !space.layout.is_reserved(b));
    let by = space.frozen.get(blocks.clone().next()?)?.whole;
    let alike = blocks.all(|b| space.frozen.get(b).is_some_and(|delta| delta.is_whole() && delta.whole == by));
    let common = u16::try_from(i32::from(old.common) + by).ok()?;
    (alike && common > 0).then_some(common)
}

/// Applies the frozen deltas to a leaf; returns the pages in use, and adds to `freed` those without
/// references left. The leaf takes over its common count.
fn apply(space: &Space, node: CountNode, common: u16, page: &mut CountPage, freed: &mut Runs) -> u64 {
    let common = correct!(u32::from(common), Bug::CommonCountsLost => 0);
    let mut used = 0;
    for i in 0..LEAF_BLOCKS {
        let block = Block(node.first_block().0 + i as u64);
        if space.layout.is_reserved(block) {
            continue;
        }
        let delta = space.frozen.get(block);
        let whole = (page.block(i).whole() + common) as i32 + delta.map_or(0, |delta| delta.whole);
        page.set_whole(i, u32::try_from(whole).expect("a block's count does not fall below zero"));
        if let Some(delta) = delta {
            for p in rows(and(delta.touched, delta.changed())).flatten() {
                let before = page.block(i).page(p);
                if before == PINNED {
                    continue;
                }
                let count = before as i32 + delta.of(p);
                assert!(count >= 0, "count {count} of {:?} is below zero", block.page(p));
                page.set_page(i, p, count as u32);
            }
        }
        let free = free_in(page, i);
        used += BLOCK_PAGES - pages_in(&free);
        let gone = and(free, delta.map_or([0; 4], |delta| delta.touched));
        rows(gone).for_each(|row| push_run(freed, block.page(row.start), row.len() as u64));
    }
    used
}

/// Enters the new children into an upper page; returns the pages in use under it.
fn point(space: &mut Space, node: CountNode, page: &mut CountPage, mut used: u64) -> u64 {
    let work = space.work.as_ref().expect("between freeze and finish");
    for i in 0..node.entries() {
        let child = node.child(i);
        let Some(entry) = work.new.get(&child) else { continue };
        let before = page.entry(i, u64::MAX).map_or(0, |e| e.used);
        used = used + entry.used - before;
        page.set_entry(i, *entry);
    }
    used
}

/// Notes that the checkpoint is durable. Returns the pages that it freed, as runs;
/// [`release`](Self::release) makes them usable.
pub fn finish(space: &mut Space) -> Runs {
    space.frozen.applied();
    let freed = take_over(space);
    let waiting: u64 = freed.iter().map(|&(_, n)| n).sum();
    let withdrawn = space.kept.pages + space.retained.outgoing_pages();
    space.available = space.free_by_roots() - space.handed_out - waiting - withdrawn;
    space.returning = waiting;
    freed
}

/// Makes the written state the current one; returns the pages that it freed.
fn take_over(space: &mut Space) -> Runs {
    let work = space.work.take().expect("between freeze and finish");
    (space.roots, space.large_counts) = (work.done.roots, work.done.large);
    // The pool may have grown meanwhile.
    space.roots.resize(space.layout.count_nodes(3) as usize, CountEntry::default());
    match work.way {
        CountsTarget::Pages => space.logged.clear(),
        CountsTarget::Log(segment) => space.logged.add(segment.changes),
    }
    space.logged.end = work.done.log;
    if space.cache.len() + work.images.len() > space.cache_limit {
        space.cache.clear();
    }
    for node in &work.outdated {
        correct!(drop(space.cache.remove(node)), Bug::StaleCountsCached => ());
    }
    correct!(space.cache.extend(work.images), Bug::StaleCountsCached => ());
    work.freed
}

/// Returns those of the pages freed by a checkpoint that have not come into use since: call it once every
/// plan made before the freeze has ended.
pub fn still_free(space: &Space, freed: Runs) -> Runs {
    let mut out = Runs::with_capacity(freed.len());
    for (block, pages) in freed.into_iter().flat_map(|(first, n)| by_block(first, n)) {
        let free = still_unused(space, block, pages);
        rows(free).for_each(|row| push_run(&mut out, block.page(row.start), row.len() as u64));
    }
    out
}

/// Releases pages that are no longer used: they may be allocated, unless they came into use after all.
pub fn release(space: &mut Space, freed: Runs) {
    (space.frozen, space.returning) = (Default::default(), 0);
    for (block, pages) in freed.into_iter().flat_map(|(first, n)| by_block(first, n)) {
        let free = still_unused(space, block, pages);
        tree::give_back_all(space, block, free);
    }
}

/// Returns those of some pages of a block that have not come into use since the freeze.
fn still_unused(space: &Space, block: Block, pages: Range<usize>) -> Bitmap {
    and(mask(pages), space.current.touched(block).map(|word| !word))
}
