//! The ordered map compared with the standard library's, with checkpoints, loads and evictions in between.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::format::ordered::PAIRS_PER_LEAF;
use crate::format::{CountEntry, Layout};
use crate::map::{Editor, Entries, Stop};
use crate::space::{Space, Step, alloc, count_images};
use crate::types::{Epoch, PageAddr};

use super::*;

/// Somewhat more than the memory of a page, in bytes.
const PAGE_IN_MEMORY: usize = 4800;

/// A map in a pool of 64 MiB whose device is a table of pages.
struct World {
    tables: Tables,
    space: Space,
    root: TreeRoot,
    device: BTreeMap<PageAddr, Entries>,
    loads: usize,
}

impl World {
    fn new(cached: usize) -> World {
        let none = CountEntry { slot: None, checksum: 0, used: 0, common: 0 };
        let space = Space::new(Layout::new(64 << 20), [1; 16], vec![none]);
        World {
            tables: Tables::new(cached * PAGE_IN_MEMORY),
            space,
            root: TreeRoot::default(),
            device: BTreeMap::new(),
            loads: 0,
        }
    }

    fn run<T>(&mut self, mut f: impl FnMut(&mut Editor<'_>, &mut TreeRoot) -> Result<T, Stop>) -> T {
        loop {
            let (epoch, until, confirmed) = (Epoch(1), 0, 0);
            let mut editor = Editor {
                tables: &mut self.tables,
                space: &mut self.space,
                epoch,
                until,
                confirmed,
                account: crate::types::NO_ACCOUNT,
            };
            match f(&mut editor, &mut self.root) {
                Ok(value) => return value,
                Err(Stop::Table(miss)) => {
                    let page = miss.entry.table_ref().page().expect("what is not in memory has an address");
                    self.tables.insert_clean(&miss, self.device[&page].clone());
                    self.tables.evict();
                    self.loads += 1;
                }
                Err(stop) => panic!("{stop:?}"),
            }
        }
    }

    fn change(&mut self, batch: &Batch) {
        self.run(|e, root| {
            let prepared = e.tree_prepare(root, batch.clone())?;
            e.tree_apply(root, prepared);
            Ok(())
        });
    }

    /// Evicts every clean page.
    fn cool(&mut self) {
        self.tables.set_limit(0);
        self.tables.set_limit(1000 * PAGE_IN_MEMORY);
    }

    fn insert(&mut self, key: u128, value: u128) -> Option<u128> {
        let old = self.run(|e, root| Ok(get(e.tables, root, key)?));
        let mut batch = Batch::default();
        batch.set(key, value);
        self.change(&batch);
        old
    }

    fn remove(&mut self, key: u128) -> Option<u128> {
        let old = self.run(|e, root| Ok(get(e.tables, root, key)?));
        let mut batch = Batch::default();
        batch.remove(key);
        self.change(&batch);
        old
    }

    fn lower_bound(&mut self, key: u128) -> Option<Pair> {
        self.run(|e, root| Ok(lower_bound(e.tables, root, key)?))
    }

    fn all(&mut self) -> Vec<Pair> {
        let (mut out, mut from) = (Vec::new(), 0);
        loop {
            let pairs = self.run(|e, root| Ok(scan(e.tables, root, from, u128::MAX, 1000)?));
            let Some(&(last, _)) = pairs.last() else { return out };
            out.extend(pairs);
            from = last + 1;
        }
    }

    fn freeze(&mut self) -> Vec<crate::map::Placed> {
        let need = self.tables.dirty() as u64;
        alloc::ensure_known(&mut self.space, need).expect("room");
        let runs = alloc::alloc_meta(&mut self.space, need).expect("room");
        let mut places = runs.into_iter().flat_map(|(first, n)| (first.0..first.0 + n).map(PageAddr));
        let placed = self.tables.freeze(|| places.next().expect("as many as asked for"));
        placed.iter().for_each(|p| self.space.incr_page(p.at));
        count_images::freeze(&mut self.space);
        placed
    }

    fn finish(&mut self, placed: Vec<crate::map::Placed>) {
        for p in placed {
            let entries = self.tables.on_disk_entries(p.node);
            self.tables.written(p.node, &entries, 7);
            self.device.insert(p.at, entries);
        }
        while let Step::Write(_) = count_images::checkpoint_step(&mut self.space, 8).expect("all in memory") {}
        let freed = count_images::finish(&mut self.space);
        count_images::release(&mut self.space, freed);
        self.tables.finish();
        self.root.entry = self.tables.resolve_addr(self.root.entry);
        self.tables.evict();
    }

    /// Counts the pages of the map on the device by walking it.
    fn pages(&mut self) -> u64 {
        let mut todo = vec![(self.root.entry, self.root.height)];
        let mut n = 0;
        while let Some((entry, height)) = todo.pop() {
            if height == 0 {
                continue;
            }
            n += 1;
            let level = root_level(height);
            let below = self.run(|e, _| {
                let id = e.tables.get(entry, level)?;
                let page = e.tables.node(id).slots();
                assert!((1..ordered::pairs(page)).all(|i| ordered::key(page, i - 1) < ordered::key(page, i)));
                Ok(children(e.tables.node(id).slots(), level))
            });
            todo.extend(below.into_iter().map(|e| (e, height - 1)));
        }
        n
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u16, u64),
    /// This many ascending keys.
    Append(u16, u8),
    Remove(u16),
    RemoveRange(u16, u8),
    LowerBound(u16),
    Checkpoint,
    Freeze,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4000u16, any::<u64>()).prop_map(|(k, v)| Op::Insert(k, v)),
        4 => (0..4000u16, 1..200u8).prop_map(|(k, n)| Op::Append(k, n)),
        3 => (0..4000u16).prop_map(Op::Remove),
        3 => (0..4000u16, 1..200u8).prop_map(|(k, n)| Op::RemoveRange(k, n)),
        3 => (0..4400u16).prop_map(Op::LowerBound),
        1 => Just(Op::Checkpoint),
        1 => Just(Op::Freeze),
    ]
}

fn key(k: u16) -> u128 {
    u128::from(k) << 20
}

fn value(v: u64) -> u128 {
    u128::from(v)
}

proptest! {
    #[test]
    fn it_is_what_a_sorted_map_is(ops in prop::collection::vec(op(), 1..150), cached in 12..24usize) {
        let mut world = World::new(cached);
        let mut model = BTreeMap::new();
        let empty = world.space.available();
        let mut frozen = None;
        for op in ops {
            match op {
                Op::Insert(k, v) => {
                    prop_assert_eq!(world.insert(key(k), value(v)), model.insert(key(k), value(v)));
                }
                Op::Append(k, n) => for i in k..k + u16::from(n) {
                    prop_assert_eq!(world.insert(key(i), 1), model.insert(key(i), 1));
                },
                Op::Remove(k) => prop_assert_eq!(world.remove(key(k)), model.remove(&key(k))),
                Op::RemoveRange(k, n) => for i in k..k + u16::from(n) {
                    prop_assert_eq!(world.remove(key(i)), model.remove(&key(i)));
                },
                Op::LowerBound(k) => {
                    let wanted = model.range(key(k)..).next().map(|(&k, &v)| (k, v));
                    prop_assert_eq!(world.lower_bound(key(k)), wanted);
                }
                Op::Freeze => {
                    if let Some(placed) = frozen.take() {
                        world.finish(placed);
                    }
                    frozen = Some(world.freeze());
                }
                Op::Checkpoint => {
                    if let Some(placed) = frozen.take() {
                        world.finish(placed);
                    }
                    let placed = world.freeze();
                    world.finish(placed);
                }
            }
        }
        prop_assert_eq!(world.all(), model.iter().map(|(&k, &v)| (k, v)).collect::<Vec<_>>());
        if let Some(placed) = frozen.take() {
            world.finish(placed);
        }
        for _ in 0..2 {
            let placed = world.freeze();
            world.finish(placed);
        }
        // Nothing is lost and nothing is used twice.
        prop_assert_eq!(empty - world.space.available(), world.pages());
    }
}

#[test]
fn bounds_rise_when_keys_come_below_those_of_what_was_removed() {
    let mut world = World::new(1000);
    (0..60_000u128).for_each(|k| assert_eq!(world.insert(k * 4, 0), None));
    assert!(world.root.height >= 3);
    // Whole pages in the middle are removed; then their range fills again, in descending order.
    (20_000..40_000u128).for_each(|k| assert!(world.remove(k * 4).is_some()));
    (20_000..40_000u128).rev().for_each(|k| assert_eq!(world.insert(k * 4 + 1, 1), None));
    (20_000..40_000u128).for_each(|k| assert_eq!(world.insert(k * 4 + 2, 2), None));
    assert_eq!(world.all().len(), 80_000);
    world.pages();
}

#[test]
fn rising_keys_fill_their_pages() {
    let mut world = World::new(1000);
    (0..PAIRS_PER_LEAF as u128 * 100).for_each(|k| assert_eq!(world.insert(k, k), None));
    assert_eq!(world.root.height, 2);
    assert_eq!(world.pages(), 101);
}

#[test]
fn what_is_removed_gives_its_pages_back() {
    let mut world = World::new(1000);
    let n = 20_000u128;
    (0..n).for_each(|k| assert_eq!(world.insert((k * 7919) % n, k), None));
    assert_eq!(world.root.height, 3);
    // Of every 200 keys one stays: pages are merged in the process.
    (0..n).filter(|k| k % 200 != 0).for_each(|k| assert!(world.remove(k).is_some()));
    assert_eq!(world.all().len(), 100);
    assert!(world.pages() <= 10, "{} pages for 100 pairs", world.pages());
    (0..n).for_each(|k| assert_eq!(world.remove(k).is_some(), k % 200 == 0));
    assert_eq!((world.root, world.tables.dirty()), (TreeRoot::default(), 0));
}

#[test]
fn memory_is_bounded_by_the_cache() {
    let mut world = World::new(16);
    for k in 0..50_000u128 {
        world.insert(k * 3, k);
        if k % 5000 == 0 {
            let placed = world.freeze();
            world.finish(placed);
        }
    }
    let placed = world.freeze();
    world.finish(placed);
    assert!((0..50_000u128).step_by(97).all(|k| world.lower_bound(k * 3 - k.min(1)) == Some((k * 3, k))));
    assert!(world.loads > 300, "pages come and go");
    assert_eq!(world.tables.unwritten(), 0);
}

/// Returns a map with a leaf of one pair in the middle, of which nothing is in memory, and the key of that
/// pair.
fn with_a_lone_pair() -> (World, u128) {
    let mut world = World::new(1000);
    let n = 3 * PAIRS_PER_LEAF as u128;
    (0..n).for_each(|k| assert_eq!(world.insert(k * 10, k), None));
    let placed = world.freeze();
    world.finish(placed);
    // Its neighbours are not in memory when its pairs are removed, so it is merged with neither.
    let lone = (PAIRS_PER_LEAF as u128 + 5) * 10;
    for k in PAIRS_PER_LEAF as u128..2 * PAIRS_PER_LEAF as u128 {
        world.cool();
        if k * 10 != lone {
            world.run(|e, root| {
                let mut batch = Batch::default();
                batch.remove(k * 10);
                descend(e.tables, root, k * 10)?;
                let prepared = e.tree_prepare_without_neighbours(root, batch);
                e.tree_apply(root, prepared);
                Ok(())
            });
            let placed = world.freeze();
            world.finish(placed);
        }
    }
    world.cool();
    (world, lone)
}

#[test]
fn a_batch_that_empties_a_leaf_and_goes_on_in_its_neighbour_is_whole() {
    let (mut world, lone) = with_a_lone_pair();
    assert_eq!(world.all().len(), 2 * PAIRS_PER_LEAF + 1);
    world.cool();
    let mut batch = Batch::default();
    batch.remove(lone);
    batch.set(lone - 1, 77);
    world.change(&batch);
    let all = world.all();
    assert_eq!(all.len(), 2 * PAIRS_PER_LEAF + 1);
    assert!(all.contains(&(lone - 1, 77)) && !all.iter().any(|&(key, _)| key == lone));
    world.pages();
}

#[test]
fn the_same_in_two_steps_would_stop_between_them() {
    let (mut world, lone) = with_a_lone_pair();
    let mut batch = Batch::default();
    batch.remove(lone);
    batch.set(lone - 1, 77);
    let steps = world.run(|e, root| {
        // All pages on the paths to both keys are in memory.
        drop(e.tree_prepare(root, batch.clone())?);
        let mut removals = Batch::default();
        removals.remove(lone);
        let removals = e.tree_prepare(root, removals)?;
        e.tree_apply(root, removals);
        Ok(matches!(e.tree_prepare(root, batch.clone()), Err(Stop::Table(_))))
    });
    assert!(steps, "the left neighbour is not in memory");
}

proptest! {
    #[test]
    fn batches_are_whole_whatever_is_in_memory(
        moves in prop::collection::vec((0..3000u16, 1..40u16, any::<bool>()), 1..60),
        cached in 8..16usize,
    ) {
        let mut world = World::new(cached);
        let mut model = BTreeMap::new();
        for k in 0..3000u16 {
            world.insert(key(k), 1);
            model.insert(key(k), 1);
        }
        for (at, n, back) in moves {
            // Moves each key from between the keys to behind them, or back, as deletion of a snapshot
            // relabels copies.
            let (from, to) = if back { (1, 0) } else { (0, 1) };
            let mut batch = Batch::default();
            for k in at..(at + n).min(3000) {
                if let Some(value) = model.remove(&(key(k) + from)) {
                    model.insert(key(k) + to, value + 1);
                    batch.remove(key(k) + from);
                    batch.set(key(k) + to, value + 1);
                }
            }
            world.change(&batch);
            let placed = world.freeze();
            world.finish(placed);
        }
        prop_assert_eq!(world.all(), model.into_iter().collect::<Vec<_>>());
        world.pages();
    }
}
