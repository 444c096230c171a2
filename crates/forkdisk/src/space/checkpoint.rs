//! Applying deltas to count pages: leaves first, then upwards, each to its other slot.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::format::{CountEntry, CountNode, CountPage, LEAF_BLOCKS, Seed, Slot, page_checksum};
use crate::planted::{Bug, planted};
use crate::types::{BLOCK_PAGES, Block, PAGE_SIZE, PageAddr};

use super::delta::by_block;
use super::tree::free_in;
use super::{Bitmap, Miss, PINNED, Runs, Space, mask, pages_in, push_run, rows};

/// Level in the checksum seed of count pages: this plus their level.
pub const COUNT_SEED: u8 = 0xe0;

/// Pages looked at in a step, per page that may be written in it.
const STEPS: usize = 8;

/// A page to be written, and where.
type Image = (PageAddr, Box<[u8; PAGE_SIZE]>);

/// A step of a checkpoint.
pub enum Step {
    /// Write these pages.
    Write(Vec<Image>),
    /// All are written; these are the superblock's new entries.
    Done(Vec<CountEntry>),
}

/// How far a checkpoint has come.
pub struct Work {
    level: u8,
    todo: Vec<CountNode>,
    /// What will be known of the pages written so far.
    new: BTreeMap<CountNode, CountEntry>,
    /// Their contents, of as many as the cache may hold.
    images: BTreeMap<CountNode, CountPage>,
    /// Written, and not among these.
    outdated: Vec<CountNode>,
    /// Pages that will be free.
    freed: Runs,
    roots: Vec<CountEntry>,
}

impl Space {
    /// The deltas so far belong to a checkpoint from now on.
    pub fn freeze(&mut self) {
        assert!(self.frozen.is_empty() && self.work.is_none(), "one checkpoint at a time");
        self.frozen = std::mem::take(&mut self.current);
        self.handed_out = 0;
        let leaves: BTreeSet<CountNode> = self.frozen.iter().map(|(b, _)| CountNode::leaf_of(b).0).collect();
        let todo = leaves.into_iter().rev().collect();
        let (new, images, outdated, freed) = Default::default();
        self.work = Some(Work { level: 0, todo, new, images, outdated, freed, roots: self.roots.clone() });
    }

    /// The next pages to write, at most `max`. There may be none in a step.
    pub fn checkpoint_step(&mut self, max: usize) -> Result<Step, Miss> {
        let (mut out, mut steps) = (Vec::new(), 0);
        while out.len() < max && steps < STEPS * max {
            steps += 1;
            let work = self.work.as_ref().expect("between freeze and finish");
            match work.todo.last().copied() {
                Some(node) => {
                    // What this step has made is kept in `work` even if the next page is missing.
                    match self.next_image(node) {
                        Ok(image) => out.extend(image),
                        Err(miss) if out.is_empty() => return Err(miss),
                        Err(_) => break,
                    }
                }
                None if work.level == 3 => break,
                None => self.next_level(),
            }
        }
        let work = self.work.as_ref().expect("between freeze and finish");
        match out.is_empty() && work.todo.is_empty() && work.level == 3 {
            true => Ok(Step::Done(work.roots.clone())),
            false => Ok(Step::Write(out)),
        }
    }

    fn next_level(&mut self) {
        let work = self.work.as_mut().expect("between freeze and finish");
        let parents: BTreeSet<CountNode> =
            work.new.keys().filter(|n| n.level == work.level).filter_map(|n| n.parent()).map(|(p, _)| p).collect();
        work.level += 1;
        work.todo = parents.into_iter().rev().collect();
    }

    fn next_image(&mut self, node: CountNode) -> Result<Option<Image>, Miss> {
        let old = self.entry(node)?;
        self.keep_common(node, &old);
        if let Some(common) = self.notes_above(node, &old) {
            let used = self.layout.initially_free_under(node);
            let work = self.work.as_mut().expect("between freeze and finish");
            work.todo.pop();
            work.new.insert(node, CountEntry { common, used, ..old });
            return Ok(None);
        }
        let page = self.page(node)?.cloned();
        if node.level == 0 {
            self.keep_image(node, page.as_ref());
        }
        let (mut page, mut freed) = (page.unwrap_or_default(), Runs::new());
        let used = match node.level {
            0 => self.apply(node, old.common, &mut page, &mut freed),
            _ => self.point(node, &mut page, old.used),
        };
        let other = if planted(Bug::CountSlotOverwritten) { |slot| slot } else { Slot::other };
        let slot = old.slot.map_or(Slot::A, other);
        let at = node.page(slot);
        let seed = Seed { pool: self.uuid, page: at, level: COUNT_SEED + node.level, birth: 0 };
        let entry = CountEntry { slot: Some(slot), checksum: page_checksum(&seed, page.bytes()), used, common: 0 };
        let bytes = Box::new(*page.bytes());
        let work = self.work.as_mut().expect("between freeze and finish");
        work.todo.pop();
        if node.level == 3 {
            work.roots[node.index as usize] = entry;
        }
        work.freed.append(&mut freed);
        work.new.insert(node, entry);
        // Pages above leaves are asked for more often.
        let room = if node.level == 0 { self.cache_limit / 2 } else { self.cache_limit };
        if work.images.len() < room {
            work.images.insert(node, page);
        } else {
            work.outdated.push(node);
        }
        Ok(Some((at, bytes)))
    }

    /// If all that changes in a leaf is that each of its blocks gains or loses the same number of references
    /// as a whole, and keeps one of those noted above: what is to be noted there instead of writing the leaf.
    /// Then all its pages are in use.
    fn notes_above(&self, node: CountNode, old: &CountEntry) -> Option<u16> {
        if node.level > 0 {
            return None;
        }
        let first = node.first_block().0;
        // Blocks that a longer pool will have one day have no references.
        if first + LEAF_BLOCKS as u64 > self.layout.blocks() {
            return None;
        }
        let mut blocks = (first..first + LEAF_BLOCKS as u64).map(Block).filter(|&b| !self.layout.is_reserved(b));
        let by = self.frozen.get(blocks.clone().next()?)?.whole;
        let alike = blocks.all(|b| self.frozen.get(b).is_some_and(|delta| delta.is_whole() && delta.whole == by));
        let common = u16::try_from(i32::from(old.common) + by).ok()?;
        (alike && common > 0).then_some(common)
    }

    /// Applies the frozen deltas to a leaf; returns the pages in use, and adds to `freed` those of which
    /// nothing is left. The leaf takes over what was noted above it.
    fn apply(&self, node: CountNode, common: u16, page: &mut CountPage, freed: &mut Runs) -> u64 {
        let common = if planted(Bug::CommonCountsLost) { 0 } else { u32::from(common) };
        let mut used = 0;
        for i in 0..LEAF_BLOCKS {
            let block = Block(node.first_block().0 + i as u64);
            if self.layout.is_reserved(block) {
                continue;
            }
            let delta = self.frozen.get(block);
            let whole = (page.block(i).whole() + common) as i32 + delta.map_or(0, |delta| delta.whole);
            page.set_whole(i, u32::try_from(whole).expect("a block's count does not fall below zero"));
            if let Some(delta) = delta {
                for p in rows(and(delta.touched, delta.changed())).flatten() {
                    let before = u32::from(page.block(i).page(p));
                    if before == PINNED {
                        continue;
                    }
                    let count = before as i32 + delta.of(p);
                    assert!(count >= 0, "count {count} of {:?} is below zero", block.page(p));
                    page.set_page(i, p, count.min(PINNED as i32) as u16);
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
    fn point(&mut self, node: CountNode, page: &mut CountPage, mut used: u64) -> u64 {
        let work = self.work.as_ref().expect("between freeze and finish");
        for i in 0..node.entries() {
            let child = node.child(i);
            let Some(entry) = work.new.get(&child) else { continue };
            let before = page.entry(i, u64::MAX).map_or(0, |e| e.used);
            used = used + entry.used - before;
            page.set_entry(i, *entry);
        }
        used
    }

    /// The checkpoint is durable. Returns what it made free, as runs; [`release`](Self::release)
    /// makes that usable.
    pub fn finish(&mut self) -> Runs {
        let work = self.work.take().expect("between freeze and finish");
        self.frozen.applied();
        self.roots = work.roots;
        if self.cache.len() + work.images.len() > self.cache_limit {
            self.cache.clear();
        }
        if !planted(Bug::StaleCountsCached) {
            work.outdated.iter().for_each(|node| drop(self.cache.remove(node)));
            self.cache.extend(work.images);
        }
        let waiting: u64 = work.freed.iter().map(|&(_, n)| n).sum();
        self.available = self.free_by_roots() - self.handed_out - waiting - self.kept.pages();
        self.returning = waiting;
        work.freed
    }

    /// Of pages that a checkpoint made free, those that have not come into use since: ask once every
    /// plan made before the freeze has ended.
    pub fn still_free(&self, freed: Runs) -> Runs {
        let mut out = Runs::with_capacity(freed.len());
        for (block, pages) in freed.into_iter().flat_map(|(first, n)| by_block(first, n)) {
            let free = self.still_unused(block, pages);
            rows(free).for_each(|row| push_run(&mut out, block.page(row.start), row.len() as u64));
        }
        out
    }

    /// Nobody uses these pages any more: they may be handed out, unless they came into use after all.
    pub fn release(&mut self, freed: Runs) {
        (self.frozen, self.returning) = (Default::default(), 0);
        for (block, pages) in freed.into_iter().flat_map(|(first, n)| by_block(first, n)) {
            let free = self.still_unused(block, pages);
            self.give_back_all(block, free);
        }
    }

    /// Of some pages of a block those that have not come into use since the freeze.
    fn still_unused(&self, block: Block, pages: Range<usize>) -> Bitmap {
        and(mask(pages), self.current.touched(block).map(|word| !word))
    }
}

fn and(a: Bitmap, b: Bitmap) -> Bitmap {
    std::array::from_fn(|word| a[word] & b[word])
}
