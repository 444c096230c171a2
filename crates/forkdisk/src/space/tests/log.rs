//! Counts that are kept by a log.

use crate::space::{alloc, contiguous, count_images, tree, view_counts};

use super::*;

/// A space that keeps a log, and the state of its device.
struct Logging {
    space: Space,
    pages: BTreeMap<u64, Vec<u8>>,
    counted: WrittenCounts,
}

impl Logging {
    fn new(mib: u64) -> Logging {
        let layout = Layout::new(mib << 20);
        let counted = WrittenCounts { roots: vec![CountEntry::default()], log: CountLog::default(), large: false };
        let mut space = Space::new(layout, [1; 16], counted.roots.clone());
        tree::use_log(&mut space, counted.log, &[]).expect("none yet");
        Logging { space, pages: BTreeMap::new(), counted }
    }

    /// Repeats the call until nothing is missing.
    fn ask<T>(&mut self, call: impl Fn(&mut Space) -> Result<T, Miss>) -> T {
        loop {
            match call(&mut self.space) {
                Ok(found) => return found,
                Err(miss) => {
                    let Miss::Count { node, page, .. } = miss;
                    let bytes = &self.pages[&page.0];
                    tree::loaded(&mut self.space, miss, CountPage::from_bytes(node.level, bytes).expect("valid"))
                        .expect("it makes sense");
                }
            }
        }
    }

    /// Writes a checkpoint; returns the number of pages it wrote.
    fn checkpoint(&mut self) -> usize {
        count_images::freeze(&mut self.space);
        self.write()
    }

    fn write(&mut self) -> usize {
        self.write_until(|space| {
            let freed = count_images::finish(space);
            count_images::release(space, freed);
        })
    }

    fn write_until(&mut self, end: impl FnOnce(&mut Space)) -> usize {
        let mut written = 0;
        loop {
            match self.ask(|space| count_images::checkpoint_step(space, 8)) {
                Step::Write(pages) => {
                    written += pages.len();
                    self.pages.extend(pages.into_iter().map(|(at, bytes)| (at.0, bytes.to_vec())));
                }
                Step::Done(counted) => {
                    self.counted = counted;
                    break;
                }
            }
        }
        end(&mut self.space);
        written
    }

    fn reopen(&mut self) {
        let layout = self.space.layout();
        // With the smallest possible memory.
        self.space = Space::with_cache(layout, [1; 16], self.counted.roots.clone(), 0);
        self.space.set_large_counts(self.counted.large);
        let log = (0..self.counted.log.pages).flat_map(|i| self.pages[&count_log_page(i).0].clone());
        tree::use_log(&mut self.space, self.counted.log, &log.collect::<Vec<u8>>()).expect("what was written");
    }

    fn counts(&mut self, block: Block) -> Counts {
        self.ask(|space| space.block_counts(block))
    }
}

/// Adds more references than 16 bits count to some pages of a block, or removes all but one.
fn flood(space: &mut Space, model: &mut BTreeMap<u64, u32>, block: Block, draw: &mut impl FnMut(u64) -> u64) {
    let (first, n) = (draw(200) as usize, 1 + draw(50) as usize);
    for index in first..first + n {
        let count = model.entry(block.page(index).0).or_default();
        let by = if *count > 65_000 { 1 - *count as i32 } else { 65_530 + draw(10) as i32 };
        space.current.change(block, index..index + 1, by);
        *count = count.wrapping_add_signed(by);
    }
}

/// Makes scattered changes, some of whole blocks and of whole leaves.
fn stir(space: &mut Space, model: &mut BTreeMap<u64, u32>, blocks: u64, draw: &mut impl FnMut(u64) -> u64) {
    for _ in 0..1 + draw(12) {
        let block = Block(2 + draw(blocks - 2));
        let (first, n) = (draw(200), 1 + draw(50));
        for page in (first..first + n).map(|i| PageAddr(block.first_page().0 + i)) {
            let count = model.entry(page.0).or_default();
            match draw(3) {
                0 if *count > 0 => {
                    space.decr_page(page, 0);
                    *count -= 1;
                }
                _ => {
                    space.incr_page(page);
                    *count += 1;
                }
            }
        }
    }
}

#[test]
fn with_a_log_counts_are_what_they_are_without() {
    for seed in 1..40_u64 {
        let mut state = seed;
        let mut draw = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut lab, mut model, mut ways) = (Logging::new(60), BTreeMap::new(), [0, 0]);
        for round in 0..60 {
            stir(&mut lab.space, &mut model, 60, &mut draw);
            if seed % 2 == 1 && draw(8) == 0 {
                let block = Block(2 + draw(58));
                flood(&mut lab.space, &mut model, block, &mut draw);
            }
            if draw(4) == 0 {
                // All blocks of a leaf alike: that is noted as a common count above it.
                let leaf = CountNode { level: 0, index: 1 + draw(7) };
                let first = leaf.first_block().0;
                (first..first + 7).for_each(|block| lab.space.incr_block(Block(block)));
                lab.checkpoint();
                if draw(2) == 0 {
                    lab.reopen();
                }
                assert!((first..first + 7).all(|block| lab.counts(Block(block)).whole == 1), "seed {seed}");
                (first..first + 7).for_each(|block| lab.space.decr_block(Block(block), 0));
            }
            lab.checkpoint();
            ways[usize::from(lab.counted.log.pages == 0)] += 1;
            if draw(3) == 0 {
                lab.reopen();
            }
            let used = model.values().filter(|&&count| count > 0).count() as u64;
            let all = lab.space.layout().pages() - lab.space.layout().reserved_pages();
            assert_eq!(lab.space.available(), all - used, "seed {seed}, round {round}");
            for block in (2..60).map(Block) {
                let counts = lab.counts(block);
                assert_eq!(counts.whole, 0);
                let same = (0..256).all(|i| {
                    let page = block.page(i).0;
                    counts.pages[i] == model.get(&page).copied().unwrap_or_default()
                });
                assert!(same, "seed {seed}, round {round}, {block:?}");
                let one_by_one = |space: &mut Space| {
                    let counts = space.in_block(block)?;
                    Ok(((0..256).map(|i| counts.page(i)).collect::<Vec<_>>(), counts.whole()))
                };
                assert_eq!(lab.ask(one_by_one), (counts.pages.to_vec(), counts.whole), "seed {seed}, {block:?}");
            }
        }
        assert!(ways.iter().all(|&n| n > 0), "seed {seed}: {ways:?} times with a log and without");
    }
}

#[test]
fn what_changes_little_in_many_places_takes_one_unit() {
    let mut lab = Logging::new(1000);
    let one_in_each = |lab: &mut Logging| {
        for block in (2..860).map(Block) {
            lab.space.incr_page(block.page(17));
        }
    };
    one_in_each(&mut lab);
    assert_eq!((lab.checkpoint(), lab.counted.log.pages), (4, 4), "not 123 leaves and three above");
    let mut written = Vec::new();
    for _ in 0..200 {
        one_in_each(&mut lab);
        written.push((lab.checkpoint(), lab.counted.log.pages));
    }
    let full = written.iter().position(|&(_, pages)| pages == 0).expect("one that empties the log");
    assert!(full == 30 && written[full].0 == 126, "{written:?}");
    assert_eq!(written[full + 1], (4, 4));
}

#[test]
fn a_log_that_is_to_end_is_in_its_pages_with_the_next_checkpoint() {
    let mut lab = Logging::new(100);
    let one_in_each = |lab: &mut Logging| (2..37).for_each(|block| lab.space.incr_page(Block(block).page(3)));
    assert!(!count_images::retire_log(&mut lab.space, 1000), "there is none");
    one_in_each(&mut lab);
    lab.checkpoint();
    let leaves = lab.counted.log.pages as u64 + 1;
    assert!(lab.counted.log.pages > 0 && leaves < 6, "a segment is less than the leaves");
    assert!(!count_images::retire_log(&mut lab.space, 4), "five leaves are more than that");
    lab.space.incr_page(Block(2).page(4));
    lab.checkpoint();
    assert!(lab.counted.log.pages > 0 && count_images::retire_log(&mut lab.space, 6));
    assert_eq!((lab.checkpoint(), lab.counted.log.pages), (6 + 3, 0), "six leaves and those above them");
    assert_eq!(
        (lab.counts(Block(2)).pages[3], lab.counts(Block(2)).pages[4], lab.counts(Block(36)).pages[3]),
        (1, 1, 1)
    );
    // Once.
    lab.space.incr_page(Block(9).page(9));
    assert_eq!((lab.checkpoint(), lab.counted.log.pages), (4, 4));
}

#[test]
fn a_log_that_would_be_longer_than_the_pages_is_not_written() {
    let mut lab = Logging::new(100);
    // Every page of two leaves has a separate count, none of them small.
    for (block, page) in (8..22).flat_map(|block| (0..256).map(move |page| (Block(block), page))) {
        (0..1 + page * 7 % 256).for_each(|_| lab.space.incr_page(block.page(page)));
    }
    (8..22).for_each(|block| (0..8200).for_each(|_| lab.space.incr_pages(Block(block).first_page(), BLOCK_PAGES)));
    let written = lab.checkpoint();
    assert_eq!(lab.counted.log.pages, 0);
    assert_eq!(written, 2 + 3, "two leaves and those above them");
}

#[test]
fn a_pool_may_grow_by_a_root_while_a_checkpoint_turns_from_the_log_to_pages() {
    // As large as one page of the top level allows.
    let mut lab = Logging::new(65_536 * 868);
    let before = lab.space.layout();
    lab.space.incr_page(Block(9).page(1));
    lab.checkpoint();
    assert!(lab.counted.log.pages > 0);
    lab.space.incr_page(Block(9).page(2));
    count_images::freeze(&mut lab.space);
    let after = Layout::new((before.blocks() + 868) << 20);
    assert_eq!((before.count_nodes(3), after.count_nodes(3)), (1, 2));
    lab.space.grow(after);
    count_images::write_pages_instead_of_log(&mut lab.space);
    let written = lab.write();
    assert_eq!((written, lab.counted.roots.len()), (4, 1), "it says what the pool was when it was frozen");
    assert_eq!(lab.counts(Block(9)).pages[1..3], [1, 1]);
    lab.space.incr_page(Block(before.blocks() + 5).page(3));
    lab.checkpoint();
    assert_eq!(lab.counted.roots.len(), 2);
    assert_eq!(lab.counts(Block(before.blocks() + 5)).pages[3], 1);
}

#[test]
fn a_view_shows_what_was_counted_when_it_began_though_the_log_is_emptied() {
    let mut lab = Logging::new(60);
    let leaf = |index| CountNode { level: 0, index };
    let blocks = |node: CountNode| (0..7).map(move |i| Block(node.first_block().0 + i));
    lab.space.incr_page(Block(2).page(1));
    blocks(leaf(3)).for_each(|block| lab.space.incr_block(block));
    lab.checkpoint();
    blocks(leaf(3)).for_each(|block| lab.space.incr_block(block));
    lab.checkpoint();
    view_counts::begin_view(&mut lab.space);
    // The common count above one leaf changes; the other leaf is only moved from the log to its page.
    blocks(leaf(3)).for_each(|block| lab.space.incr_block(block));
    lab.checkpoint();
    let mut n = 0;
    while lab.counted.log.pages > 0 {
        lab.space.incr_page(Block(30).page(n));
        lab.checkpoint();
        n += 1;
    }
    assert_eq!(lab.ask(|space| view_counts::view_counts(space, Block(2))).pages[1], 1);
    assert!(blocks(leaf(3)).all(|block| lab.ask(|space| view_counts::view_counts(space, block)).whole == 2));
    assert!(blocks(leaf(3)).all(|block| lab.counts(block).whole == 3));
    assert_eq!(lab.ask(|space| view_counts::view_counts(space, Block(30))).pages[0], 0);
}

#[test]
fn what_was_touched_and_is_as_it_was_is_not_logged() {
    let mut lab = Logging::new(60);
    lab.space.incr_page(Block(2).page(1));
    lab.checkpoint();
    lab.space.incr_page(Block(9).page(1));
    lab.space.decr_page(Block(9).page(1), 0);
    assert_eq!(lab.checkpoint(), 0);
}

#[test]
fn a_log_is_emptied_beside_changes_that_belong_to_the_next_checkpoint() {
    let mut lab = Logging::new(100);
    while !tree::log_is_half_full(&lab.space) {
        (2..37).for_each(|block| lab.space.incr_page(Block(block).page(3)));
        lab.checkpoint();
    }
    let (pages, free) = (lab.counts(Block(9)).pages[3], lab.space.available());
    assert!(pages > 1 && lab.counted.log.pages > 0);
    lab.space.incr_page(Block(9).page(3));
    lab.space.decr_page(Block(10).page(3), 0);
    // The first attempt is aborted, as on a host that is full.
    count_images::begin_log_flush(&mut lab.space);
    assert!(matches!(lab.ask(|space| count_images::checkpoint_step(space, 2)), Step::Write(pages) if pages.len() == 2));
    count_images::abort_log_flush(&mut lab.space);
    assert_eq!((lab.counts(Block(9)).pages[3], lab.space.available()), (pages + 1, free));
    count_images::begin_log_flush(&mut lab.space);
    lab.space.incr_page(Block(9).page(4));
    let written = lab.write_until(count_images::end_log_flush);
    assert_eq!((written, lab.counted.log.pages), (6 + 3, 0), "six leaves and those above them");
    assert_eq!(lab.space.available(), free);
    assert_eq!((lab.counts(Block(9)).pages[3], lab.counts(Block(9)).pages[4]), (pages + 1, 1));
    // After a crash now there is only what was in the log.
    let mut crashed = Logging { space: Space::new(lab.space.layout(), [1; 16], vec![]), ..lab };
    crashed.reopen();
    assert_eq!((crashed.counts(Block(9)).pages[3], crashed.counts(Block(9)).pages[4]), (pages, 0));
    assert_eq!(crashed.counts(Block(10)).pages[3], pages);
}

#[test]
fn emptying_the_log_leaves_in_use_what_came_into_use_behind_the_last_freeze() {
    let mut lab = Logging::new(100);
    (2..37).for_each(|block| lab.space.incr_page(Block(block).page(3)));
    lab.checkpoint();
    assert!(lab.counted.log.pages > 0);
    // Allocated, and mapped only when the checkpoint has found that nothing refers to it.
    lab.ask(|space| contiguous::learn_free(space, Block(50)));
    assert!(contiguous::take_all(&mut lab.space, [Block(50).page(0)].into_iter(), &Reservation::unchecked()));
    count_images::freeze(&mut lab.space);
    let mut freed = None;
    lab.write_until(|space| freed = Some(count_images::finish(space)));
    lab.space.incr_page(Block(50).page(0));
    count_images::release(&mut lab.space, freed.expect("it is finished"));
    let free = lab.space.available();
    count_images::begin_log_flush(&mut lab.space);
    lab.write_until(count_images::end_log_flush);
    assert_eq!((lab.counted.log.pages, lab.space.available()), (0, free));
}

#[test]
fn any_number_of_references_is_counted_and_given_up() {
    for with_log in [false, true] {
        let mut lab = Logging::new(16);
        if !with_log {
            lab.space = space();
        }
        let all = lab.space.available();
        let (page, _) = alloc::alloc_data(&mut lab.space, want(0, 1), &Reservation::unchecked()).expect("space");
        for count in [65_534, 65_535, 65_536, 200_000_u64] {
            let before = u64::from(lab.ask(|space| space.page_count(page)));
            (before..count).for_each(|_| lab.space.incr_page(page));
            assert_eq!(lab.ask(|space| space.page_count(page)), count as u32, "before the checkpoint");
            lab.checkpoint();
            assert_eq!(lab.counted.large, count >= 65_535, "old builds are to refuse it");
            if with_log {
                lab.reopen();
            }
            assert_eq!((lab.ask(|space| space.page_count(page)), lab.space.available()), (count as u32, all - 1));
        }
        (0..199_999).for_each(|_| lab.space.decr_page(page, 0));
        lab.checkpoint();
        assert_eq!((lab.ask(|space| space.data_is_exclusive(page)), lab.space.available()), (true, all - 1));
        lab.space.decr_page(page, 0);
        lab.checkpoint();
        assert_eq!(lab.space.available(), all);
    }
}
