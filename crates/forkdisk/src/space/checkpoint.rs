//! Applying deltas to count pages: leaves first, then upwards, each to its other slot.

use std::collections::{BTreeMap, BTreeSet};

use crate::format::{CountEntry, CountNode, CountPage, LEAF_BLOCKS, Seed, Slot, page_checksum};
use crate::planted::{Bug, planted};
use crate::types::{BLOCK_PAGES, Block, PAGE_SIZE, PageAddr};

use super::tree::free_in;
use super::{Miss, PINNED, Space, bit, pages_in};

/// Level in the checksum seed of count pages: this plus their level.
pub const COUNT_SEED: u8 = 0xe0;

/// A step of a checkpoint.
pub enum Step {
    /// Write these pages.
    Write(Vec<(PageAddr, Box<[u8; PAGE_SIZE]>)>),
    /// All are written; these are the superblock's new entries.
    Done(Vec<CountEntry>),
}

/// New images of count pages.
pub struct Work {
    level: u8,
    todo: Vec<CountNode>,
    new: BTreeMap<CountNode, (CountPage, CountEntry)>,
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
        self.work = Some(Work { level: 0, todo, new: BTreeMap::new(), roots: self.roots.clone() });
    }

    /// The next pages to write, at most `max`.
    pub fn checkpoint_step(&mut self, max: usize) -> Result<Step, Miss> {
        let mut out = Vec::new();
        while out.len() < max {
            let work = self.work.as_ref().expect("between freeze and finish");
            match work.todo.last().copied() {
                Some(node) => {
                    // What this step has made is kept in `work` even if the next page is missing.
                    match self.next_image(node) {
                        Ok(image) => out.push(image),
                        Err(miss) if out.is_empty() => return Err(miss),
                        Err(_) => break,
                    }
                }
                None if work.level == 3 => break,
                None => self.next_level(),
            }
        }
        let work = self.work.as_ref().expect("between freeze and finish");
        match out.is_empty() {
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

    fn next_image(&mut self, node: CountNode) -> Result<(PageAddr, Box<[u8; PAGE_SIZE]>), Miss> {
        let old = self.entry(node)?;
        let page = self.page(node)?.cloned();
        if node.level == 0 {
            self.keep_image(node, page.as_ref());
        }
        let mut page = page.unwrap_or_default();
        let used = if node.level == 0 { self.apply(node, &mut page) } else { self.point(node, &mut page, old.used)? };
        let other = if planted(Bug::CountSlotOverwritten) { |slot| slot } else { Slot::other };
        let slot = old.slot.map_or(Slot::A, other);
        let at = node.page(slot);
        let seed = Seed { pool: self.uuid, page: at, level: COUNT_SEED + node.level, birth: 0 };
        let entry = CountEntry { slot: Some(slot), checksum: page_checksum(&seed, page.bytes()), used };
        let bytes = Box::new(*page.bytes());
        let work = self.work.as_mut().expect("between freeze and finish");
        work.todo.pop();
        if node.level == 3 {
            work.roots[node.index as usize] = entry;
        }
        work.new.insert(node, (page, entry));
        Ok((at, bytes))
    }

    /// Applies the frozen deltas to a leaf; returns the pages in use.
    fn apply(&self, node: CountNode, page: &mut CountPage) -> u64 {
        let mut used = 0;
        for i in 0..LEAF_BLOCKS {
            let block = Block(node.first_block().0 + i as u64);
            if self.layout.is_reserved(block) {
                continue;
            }
            if let Some(delta) = self.frozen.get(block) {
                let whole = page.block(i).whole() as i32 + delta.whole;
                page.set_whole(i, u32::try_from(whole).expect("a block's count does not fall below zero"));
                for p in (0..BLOCK_PAGES as usize).filter(|&p| bit(&delta.touched, p)) {
                    let before = u32::from(page.block(i).page(p));
                    if before == PINNED {
                        continue;
                    }
                    let count = before as i32 + delta.of(p);
                    assert!(count >= 0, "count {count} of {:?} is below zero", block.page(p));
                    page.set_page(i, p, count.min(PINNED as i32) as u16);
                }
            }
            used += BLOCK_PAGES - pages_in(&free_in(page, i));
        }
        used
    }

    /// Enters the new children into an upper page; returns the pages in use under it.
    fn point(&mut self, node: CountNode, page: &mut CountPage, mut used: u64) -> Result<u64, Miss> {
        let work = self.work.as_ref().expect("between freeze and finish");
        for i in 0..node.entries() {
            let child = node.child(i);
            let Some((_, entry)) = work.new.get(&child) else { continue };
            let before = page.entry(i, u64::MAX).map_or(0, |e| e.used);
            used = used + entry.used - before;
            page.set_entry(i, *entry);
        }
        Ok(used)
    }

    /// The checkpoint is durable. Returns what it made free, as runs; [`release`](Self::release)
    /// makes that usable.
    pub fn finish(&mut self) -> Vec<(PageAddr, u64)> {
        let work = self.work.take().expect("between freeze and finish");
        let mut freed: Vec<(PageAddr, u64)> = Vec::new();
        for (block, delta) in self.frozen.iter() {
            if self.layout.is_reserved(block) {
                continue;
            }
            let (node, i) = CountNode::leaf_of(block);
            let free = free_in(&work.new[&node].0, i);
            for p in (0..BLOCK_PAGES as usize).filter(|&p| bit(&delta.touched, p) && bit(&free, p)) {
                let page = block.page(p);
                match freed.last_mut() {
                    Some((first, n)) if first.0 + *n == page.0 => *n += 1,
                    _ => freed.push((page, 1)),
                }
            }
        }
        self.frozen.applied();
        self.roots = work.roots;
        if self.cache.len() + work.new.len() > self.cache_limit {
            self.cache.clear();
        }
        for (node, (page, _)) in work.new {
            if planted(Bug::StaleCountsCached) {
                continue;
            }
            if self.cache.len() < self.cache_limit {
                self.cache.insert(node, page);
            } else {
                self.cache.remove(&node);
            }
        }
        let waiting: u64 = freed.iter().map(|&(_, n)| n).sum();
        self.available = self.free_by_roots() - self.handed_out - waiting - self.kept.pages();
        freed
    }

    /// Of pages that a checkpoint made free, those that have not come into use since: ask once every
    /// plan made before the freeze has ended.
    pub fn still_free(&self, freed: Vec<(PageAddr, u64)>) -> Vec<(PageAddr, u64)> {
        let mut out: Vec<(PageAddr, u64)> = Vec::with_capacity(freed.len());
        for page in freed.into_iter().flat_map(|(first, n)| (first.0..first.0 + n).map(PageAddr)) {
            match out.last_mut() {
                _ if self.current.is_touched(page) => {}
                Some((first, n)) if first.0 + *n == page.0 => *n += 1,
                _ => out.push((page, 1)),
            }
        }
        out
    }

    /// Nobody uses these pages any more: they may be handed out, unless they came into use after all.
    pub fn release(&mut self, freed: Vec<(PageAddr, u64)>) {
        self.frozen = Default::default();
        for page in freed.into_iter().flat_map(|(first, n)| (first.0..first.0 + n).map(PageAddr)) {
            if self.current.is_touched(page) {
                continue;
            }
            self.give_back(page);
        }
    }
}
