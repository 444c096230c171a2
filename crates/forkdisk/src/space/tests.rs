//! The life of a page: allocated, counted, released, and free again only after a checkpoint.

mod log;

use crate::format::{CountLog, count_log_page};
use crate::space::{alloc, count_images, view_counts};
use crate::types::*;

use super::alloc::ABANDONED_PART;
use super::*;

fn space() -> Space {
    let layout = Layout::new(16 << 20);
    Space::new(layout, [1; 16], vec![CountEntry::default()])
}

fn checkpoint(space: &mut Space) {
    count_images::freeze(space);
    while let Step::Write(_) = count_images::checkpoint_step(space, 8).expect("all count pages are new") {}
    let freed = count_images::finish(space);
    count_images::release(space, freed);
}

/// Writes a checkpoint; returns the number of count pages it wrote.
fn pages_written(space: &mut Space) -> usize {
    count_images::freeze(space);
    let mut written = 0;
    while let Step::Write(pages) = count_images::checkpoint_step(space, 8).expect("all count pages are in memory") {
        written += pages.len();
    }
    let freed = count_images::finish(space);
    count_images::release(space, freed);
    written
}

fn want(at: u64, pages: u64) -> AllocRequest {
    shared(at, pages, 0)
}

fn shared(at: u64, pages: u64, shared_at: u64) -> AllocRequest {
    let (volume, at, write) = (VolumeId(1), VirtualPage(at), at..at + pages);
    AllocRequest { volume, at, pages, chunk_pages: 16, shared_at: Epoch(shared_at), write, beside: None }
}

#[test]
fn every_page_is_handed_out_once() {
    let mut space = space();
    let mut seen = BTreeSet::new();
    let all = space.available();
    let mut at = 1;
    while space.available() > 0 {
        let (first, n) = alloc::alloc_data(&mut space, want(at, 3), &Reservation::unchecked()).expect("there is space");
        at += 37;
        assert!((first.0..first.0 + n).all(|p| seen.insert(p)), "{first:?} twice");
    }
    assert_eq!(seen.len() as u64, all);
    assert_eq!(alloc::alloc_data(&mut space, want(0, 1), &Reservation::unchecked()), Err(Refusal::NoSpace));
}

#[test]
fn a_page_given_up_is_free_after_the_checkpoint_only() {
    let mut space = space();
    let all = space.available();
    let (page, _) = alloc::alloc_data(&mut space, want(0, 1), &Reservation::unchecked()).expect("space");
    space.incr_page(page);
    checkpoint(&mut space);
    assert_eq!((space.page_count(page), space.available()), (Ok(1), all - 1));
    space.decr_page(page, 0);
    assert_eq!((space.page_count(page), space.available()), (Ok(0), all - 1), "not yet");
    checkpoint(&mut space);
    assert_eq!(space.available(), all);
}

#[test]
fn counts_are_right_while_freed_space_is_being_released() {
    let mut space = space();
    let (page, _) = alloc::alloc_data(&mut space, want(0, 1), &Reservation::unchecked()).expect("space");
    space.incr_page(page);
    count_images::freeze(&mut space);
    while let Step::Write(_) = count_images::checkpoint_step(&mut space, 8).expect("all count pages are new") {}
    assert_eq!(space.page_count(page), Ok(1));
    let freed = count_images::finish(&mut space);
    assert_eq!(space.page_count(page), Ok(1), "counted once, not in the page and again as a change");
    count_images::release(&mut space, freed);
    assert_eq!(space.page_count(page), Ok(1));
}

#[test]
fn what_a_checkpoint_brings_back_is_pending_until_it_can_be_handed_out() {
    let mut space = space();
    let (page, _) = alloc::alloc_data(&mut space, want(0, 1), &Reservation::unchecked()).expect("space");
    space.incr_page(page);
    checkpoint(&mut space);
    space.decr_page(page, 0);
    assert_eq!(space.pending(), 1);
    count_images::freeze(&mut space);
    while let Step::Write(_) = count_images::checkpoint_step(&mut space, 8).expect("all count pages are in memory") {}
    let freed = count_images::finish(&mut space);
    assert!(freed.contains(&(page, 1)) && space.pending() >= 1, "it is being discarded: whoever wants it waits");
    count_images::release(&mut space, freed);
    assert_eq!(space.pending(), 0);
}

#[test]
fn what_somebody_else_still_refers_to_is_not_pending() {
    let mut space = space();
    let (first, n) = alloc::alloc_data(&mut space, want(0, 16), &Reservation::unchecked()).expect("space");
    assert_eq!(n, 16);
    (0..2).for_each(|_| space.incr_pages(first, 16));
    checkpoint(&mut space);
    space.decr_pages(first, 16, 0);
    assert_eq!(space.pending(), 0, "one reference of two");
    space.decr_pages(first, 4, 0);
    assert_eq!(space.pending(), 4);
    // The state that the running checkpoint will record counts, too.
    count_images::freeze(&mut space);
    space.decr_pages(PageAddr(first.0 + 4), 2, 0);
    assert_eq!(space.pending(), 6);
    while let Step::Write(_) = count_images::checkpoint_step(&mut space, 8).expect("all count pages are in memory") {}
    let freed = count_images::finish(&mut space);
    count_images::release(&mut space, freed);
    assert_eq!(space.pending(), 2, "what came after the freeze");
    checkpoint(&mut space);
    assert_eq!((space.pending(), space.used_by_checkpoint()), (0, 10));
}

#[test]
fn of_a_block_that_is_given_up_the_pages_that_are_referred_to_are_not_pending() {
    let mut space = space();
    let (first, n) = alloc::alloc_data(&mut space, want(0, 256), &Reservation::unchecked()).expect("space");
    assert_eq!((n, first.index()), (256, 0));
    let block = first.block();
    (0..2).for_each(|_| space.incr_block(block));
    space.incr_pages(first, 3);
    checkpoint(&mut space);
    space.decr_block(block, 0);
    assert_eq!(space.pending(), 0, "one reference of two");
    space.decr_pages(first, 1, 0);
    assert_eq!(space.pending(), 0, "a page of a block that is in use");
    space.decr_block(block, 0);
    assert_eq!(space.pending(), 254, "all but the two that are referred to");
    space.decr_pages(PageAddr(first.0 + 1), 2, 0);
    assert_eq!(space.pending(), 256);
    checkpoint(&mut space);
    assert_eq!((space.pending(), space.used_by_checkpoint()), (0, 0));
}

/// Returns the next number of a pseudo-random sequence, below `below`.
fn next(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % below
}

#[test]
fn pending_is_what_nothing_refers_to_whatever_comes_and_goes() {
    let mut space = space();
    let blocks: Vec<Block> = (0..6)
        .map(|i| alloc::alloc_data(&mut space, want(i * 256, 256), &Reservation::unchecked()).expect("space").0.block())
        .collect();
    // References to each block as a whole and to its pages.
    let mut model = [(1_u32, [0_u32; 256]); 6];
    blocks.iter().for_each(|&block| space.incr_block(block));
    checkpoint(&mut space);
    let (mut state, mut running) = (1, false);
    let mut freed = 0;
    let unused = |model: &[(u32, [u32; 256])]| {
        model.iter().filter(|m| m.0 == 0).map(|m| m.1.iter().filter(|&&n| n == 0).count() as u64).sum::<u64>()
    };
    for step in 0..4000 {
        let i = next(&mut state, 6) as usize;
        let (block, (whole, pages)) = (blocks[i], &mut model[i]);
        let start = next(&mut state, 256) as usize;
        let range = start..start + 1 + next(&mut state, 256 - start as u64) as usize;
        let (first, n) = (block.page(start), range.len() as u64);
        match next(&mut state, 8) {
            // Only what has references is shared.
            0 if *whole > 0 => {
                space.incr_block(block);
                *whole += 1;
            }
            1 if *whole > 0 || pages[range.clone()].iter().all(|&n| n > 0) => {
                space.incr_pages(first, n);
                pages[range].iter_mut().for_each(|n| *n += 1);
            }
            2 | 3 if pages[range.clone()].iter().all(|&n| n > 0) => {
                space.decr_pages(first, n, 0);
                pages[range].iter_mut().for_each(|n| *n -= 1);
            }
            4 if *whole > 0 => {
                space.decr_block(block, 0);
                *whole -= 1;
            }
            5 if *whole > 0 => {
                space.demote(block);
                *whole -= 1;
                pages.iter_mut().for_each(|n| *n += 1);
            }
            6 if pages.iter().all(|&n| n > 0) => {
                space.promote(block);
                *whole += 1;
                pages.iter_mut().for_each(|n| *n -= 1);
            }
            7 if step % 5 == 0 => {
                running = !running;
                if running {
                    count_images::freeze(&mut space);
                } else {
                    while let Step::Write(_) =
                        count_images::checkpoint_step(&mut space, 8).expect("all count pages are in memory")
                    {
                    }
                    let runs = count_images::finish(&mut space);
                    freed += runs.iter().map(|&(_, n)| n).sum::<u64>();
                    count_images::release(&mut space, runs);
                }
            }
            _ => {}
        }
        assert_eq!(space.pending(), unused(&model) - freed, "after step {step}");
    }
    assert!(freed > 300, "{freed} pages came back");
}

#[test]
fn what_is_not_in_memory_is_taken_for_pending() {
    let mut space = space();
    let (first, _) = alloc::alloc_data(&mut space, want(0, 16), &Reservation::unchecked()).expect("space");
    (0..2).for_each(|_| space.incr_pages(first, 16));
    checkpoint(&mut space);
    count_images::retire_log(&mut space, 100);
    checkpoint(&mut space);
    let roots = space.roots.clone();
    assert_eq!(space.used_by_checkpoint(), 16);
    let mut again = Space::new(space.layout(), [1; 16], roots);
    again.decr_pages(first, 16, 0);
    assert_eq!(again.pending(), 16, "whoever finds no space waits for it once in vain, and never too little");
}

#[test]
fn a_stream_lies_in_one_piece_and_in_place() {
    let mut space = space();
    let (first, _) = alloc::alloc_data(&mut space, want(0, 4), &Reservation::unchecked()).expect("space");
    assert_eq!(first.index(), 0);
    for at in (4..256).step_by(4) {
        assert_eq!(
            alloc::alloc_data(&mut space, want(at, 4), &Reservation::unchecked()),
            Ok((PageAddr(first.0 + at), 4))
        );
    }
    assert_eq!(
        alloc::alloc_data(&mut space, want(256, 4), &Reservation::unchecked()),
        Ok((PageAddr(first.0 + 256), 4)),
        "the next block follows"
    );
}

#[test]
fn what_all_blocks_of_a_leaf_gain_is_noted_above_it() {
    let mut space = Space::new(Layout::new(64 << 20), [1; 16], vec![CountEntry::default()]);
    // Block 8 is the first of leaf 1.
    let blocks = || (8..15).map(Block);
    let whole = |space: &mut Space| blocks().map(|b| space.in_block(b).expect("in memory").whole()).collect::<Vec<_>>();
    let before = space.available();
    blocks().for_each(|b| alloc::mark_allocated(&mut space, b.page(0), BLOCK_PAGES).expect("in memory"));
    blocks().for_each(|b| space.incr_block(b));
    assert_eq!(pages_written(&mut space), 3, "none but those above it");
    assert_eq!((whole(&mut space), space.available()), (vec![1; 7], before - 7 * BLOCK_PAGES));
    blocks().for_each(|b| space.incr_block(b));
    assert_eq!(pages_written(&mut space), 3);
    assert_eq!(whole(&mut space), [2; 7]);
    blocks().for_each(|b| space.decr_block(b, 0));
    assert_eq!(pages_written(&mut space), 3, "one is left");
    assert_eq!(whole(&mut space), [1; 7]);
    // One block is used in pages now: the leaf is written and takes over the common count.
    space.demote(Block(9));
    space.decr_page(Block(9).page(5), 0);
    assert_eq!(pages_written(&mut space), 4);
    assert_eq!(whole(&mut space), [1, 0, 1, 1, 1, 1, 1]);
    assert_eq!(space.page_count(Block(9).page(4)), Ok(1));
    assert_eq!(space.available(), before - 7 * BLOCK_PAGES + 1);
    blocks().filter(|&b| b != Block(9)).for_each(|b| space.decr_block(b, 0));
    (0..256).filter(|&p| p != 5).for_each(|p| space.decr_page(Block(9).page(p), 0));
    assert_eq!(pages_written(&mut space), 4);
    assert_eq!(space.available(), before);
}

#[test]
fn nothing_is_noted_for_blocks_that_the_pool_has_not_got_yet() {
    let mut space = Space::new(Layout::new(12 << 20), [1; 16], vec![CountEntry::default()]);
    let all = space.available();
    (8..12).map(Block).for_each(|b| space.incr_block(b));
    assert_eq!(pages_written(&mut space), 4);
    space.grow(Layout::new(64 << 20));
    assert_eq!(space.in_block(Block(12)).map(|counts| counts.whole()), Ok(0));
    assert_eq!(space.available(), all - 4 * BLOCK_PAGES + 52 * BLOCK_PAGES);
}

#[test]
fn tables_lie_where_no_stream_grows() {
    let mut space = Space::new(Layout::new(256 << 20), [1; 16], vec![CountEntry::default()]);
    let mut next = None;
    for block in 0..64 {
        for at in (block * 256..(block + 1) * 256).step_by(64) {
            let (first, n) = alloc::alloc_data(&mut space, want(at, 64), &Reservation::unchecked()).expect("space");
            assert!(n == 64 && next.is_none_or(|next| next == first), "{first:?} does not go on at {next:?}");
            next = Some(PageAddr(first.0 + n));
        }
        alloc::prepare_meta(&mut space, 100).expect("no count page has been written");
        alloc::alloc_meta(&mut space, 100).expect("space");
    }
}

#[test]
fn metadata_lies_in_one_piece_where_there_is_room_for_that() {
    let mut space = space();
    alloc::prepare_meta(&mut space, 64).expect("no count page has been written");
    let taken = alloc::alloc_meta(&mut space, 40).expect("they are known");
    let [(first, 40)] = taken[..] else { panic!("{taken:?}") };
    let page = |i: u64| PageAddr(first.0 + i);
    space.incr_pages(first, 40);
    checkpoint(&mut space);
    // Holes of 1, 3 and 2 pages, and everything behind the 40.
    [(2, 1), (10, 3), (20, 2)].into_iter().for_each(|(at, n)| space.decr_pages(page(at), n, 0));
    checkpoint(&mut space);
    alloc::ensure_known(&mut space, 260).expect("there are more");
    let mut next = |n| alloc::alloc_meta(&mut space, n).expect("they are known");
    assert_eq!(next(2), [(page(10), 2)], "the first that is long enough");
    assert_eq!(next(2), [(page(20), 2)]);
    assert_eq!(next(5), [(page(40), 5)]);
    assert_eq!(next(1), [(page(2), 1)]);
    // A request that no free run is long enough for begins with the longest.
    let rest: Vec<u64> = next(250).iter().map(|&(_, n)| n).collect();
    assert!(rest.iter().sum::<u64>() == 250 && rest[0] >= 200, "{rest:?}");
}

#[test]
fn the_last_empty_blocks_are_left_to_metadata_as_long_as_any_other_page_is_free() {
    let mut space = Space::new(Layout::new(256 << 20), [1; 16], vec![CountEntry::default()]);
    let mut at = 0;
    let last = loop {
        let (first, n) = alloc::alloc_data(&mut space, want(at, 256), &Reservation::unchecked()).expect("space");
        space.incr_pages(first, n);
        at += 256;
        // 1/64 of the pool.
        if first.block() >= Block(252) {
            break first.block();
        }
    };
    checkpoint(&mut space);
    let page = Block(100).page(7);
    space.decr_page(page, 0);
    checkpoint(&mut space);
    assert_eq!(
        alloc::alloc_data(&mut space, want(at, 64), &Reservation::unchecked()),
        Ok((page, 1)),
        "a block beyond {last:?} was taken"
    );
    let (first, n) =
        alloc::alloc_data(&mut space, want(at + 256, 64), &Reservation::unchecked()).expect("there are some");
    assert!(first.block() > last && n == 64, "nothing else is left, and {first:?} was taken");
}

#[test]
fn tables_of_a_checkpoint_lie_in_one_row_of_blocks() {
    let mut space = Space::new(Layout::new(256 << 20), [1; 16], vec![CountEntry::default()]);
    for n in [700, 9, 300, 250, 20, 1300] {
        alloc::prepare_meta(&mut space, n).expect("no count page has been written");
        let mut runs = alloc::alloc_meta(&mut space, n).expect("they are known").into_iter();
        let (first, mut len) = runs.next().expect("there is one");
        runs.for_each(|(next, n)| {
            assert_eq!(next, PageAddr(first.0 + len), "{n} pages lie elsewhere");
            len += n;
        });
        assert_eq!(len, n);
    }
}

#[test]
fn without_a_row_that_is_long_enough_the_longest_come_first() {
    let mut space = Space::new(Layout::new(64 << 20), [1; 16], vec![CountEntry::default()]);
    let free = space.available();
    alloc::ensure_known(&mut space, free).expect("no count page has been written");
    // What is left are runs of 3, 5 and 4 blocks, and single ones.
    let rows = [40..43, 45..50, 52..56];
    for block in 2..64 {
        let is_left = rows.iter().any(|row| row.contains(&block)) || block % 4 == 3 && block > 56;
        if !is_left {
            alloc::mark_allocated(&mut space, Block(block).page(0), BLOCK_PAGES)
                .expect("no count page has been written");
        }
    }
    alloc::prepare_meta(&mut space, 9 * BLOCK_PAGES).expect("no count page has been written");
    let runs = alloc::alloc_meta(&mut space, 9 * BLOCK_PAGES).expect("they are known");
    let blocks: Vec<u64> = runs.iter().map(|(first, _)| first.block().0).collect();
    assert_eq!(blocks, [45, 46, 47, 48, 49, 52, 53, 54, 55]);
}

#[test]
fn places_for_metadata_are_not_looked_for_through_all_the_end_of_a_large_pool() {
    let layout = Layout::new(1 << 40);
    let mut space = Space::new(layout, [1; 16], vec![CountEntry::default()]);
    // In the last 1/64 no two adjacent blocks are empty.
    let blocks = layout.blocks();
    for block in (blocks - blocks / 60..blocks).step_by(2) {
        alloc::mark_allocated(&mut space, Block(block).page(0), 1).expect("no count page has been written");
    }
    for _ in 0..3 {
        alloc::prepare_meta(&mut space, 300).expect("no count page has been written");
        assert_eq!(
            alloc::alloc_meta(&mut space, 300).expect("they are known").iter().map(|run| run.1).sum::<u64>(),
            300
        );
    }
    assert_eq!(layout.count_nodes(0) - space.scan_end, 1024);
}

#[test]
fn tables_take_what_is_left_of_a_full_pool() {
    let mut space = space();
    let mut taken = 0;
    while space.available() > 100 {
        let left = space.available() - 100;
        taken += alloc::alloc_data(&mut space, want(taken, 64.min(left)), &Reservation::unchecked()).expect("space").1;
    }
    alloc::prepare_meta(&mut space, 100).expect("no count page has been written");
    alloc::ensure_known(&mut space, 100).expect("there are as many");
    let runs = alloc::alloc_meta(&mut space, 100).expect("they are known");
    assert_eq!((runs.iter().map(|r| r.1).sum::<u64>(), space.available()), (100, 0));
}

#[test]
fn who_is_shared_again_begins_new_chunks_one_behind_the_other() {
    let mut space = space();
    let mut place = |chunk: u64, epoch| {
        alloc::alloc_data(&mut space, shared(chunk * 16 + epoch, 1, epoch), &Reservation::unchecked()).expect("space").0
    };
    let first: Vec<PageAddr> = [9, 3, 6].map(|chunk| place(chunk, 0)).to_vec();
    let again: Vec<PageAddr> = [3, 9, 6].map(|chunk| place(chunk, 1)).to_vec();
    let chunks = |pages: &[PageAddr]| pages.iter().map(|p| p.0 / 16).collect::<Vec<_>>();
    let (first, again) = (chunks(&first), chunks(&again));
    assert_eq!(first, (first[0]..first[0] + 3).collect::<Vec<_>>());
    assert_eq!(again, (first[0] + 3..first[0] + 6).collect::<Vec<_>>());
}

#[test]
fn what_is_left_of_chunks_is_used_before_it_is_an_eighth_of_the_free_space() {
    let mut space = Space::new(Layout::new(256 << 20), [1; 16], vec![CountEntry::default()]);
    let mut blocks = BTreeSet::new();
    // One page of every chunk of 64 MiB, shared again and again: 16 times as much if the rest of no chunk
    // were used.
    for epoch in 0..8 {
        for chunk in 0..1024 {
            let (page, _) =
                alloc::alloc_data(&mut space, shared(chunk * 16 + epoch, 1, epoch), &Reservation::unchecked())
                    .expect("space");
            blocks.insert(page.block());
        }
    }
    let bound = 64 + 256 / ABANDONED_PART as usize + 1;
    assert!((64..=bound).contains(&blocks.len()), "{} blocks are in use", blocks.len());
}

/// A space with `n` pages in use, as the last checkpoint left them.
fn with_pages(n: u64) -> (Space, Vec<PageAddr>) {
    let mut space = space();
    let pages: Vec<PageAddr> = (0..n)
        .map(|at| alloc::alloc_data(&mut space, want(at, 1), &Reservation::unchecked()).expect("space").0)
        .collect();
    pages.iter().for_each(|&page| space.incr_page(page));
    checkpoint(&mut space);
    (space, pages)
}

/// Runs a checkpoint after that of a view.
fn checkpoint_beside_view(space: &mut Space) {
    count_images::freeze(space);
    while let Step::Write(_) = count_images::checkpoint_step(space, 8).expect("all count pages are in memory") {}
    let freed = count_images::finish(space);
    let freed = count_images::still_free(space, freed);
    let freed = view_counts::withhold(space, freed);
    count_images::release(space, freed);
}

#[test]
fn a_view_shows_the_counts_it_began_with_whatever_checkpoints_follow() {
    let (mut space, pages) = with_pages(10);
    let block = pages[0].block();
    let before = space.block_counts(block).expect("in memory");
    let number = view_counts::begin_view(&mut space);
    for &page in &pages[..5] {
        space.decr_page(page, 0);
        space.incr_page(pages[9]);
        checkpoint_beside_view(&mut space);
        assert_eq!(
            (view_counts::view(&space), view_counts::view_counts(&mut space, block)),
            (Some(number), Ok(before.clone()))
        );
    }
    assert_eq!(space.page_count(pages[9]), Ok(6), "those who ask for no view see what is");
}

#[test]
fn what_is_freed_beside_a_view_is_handed_out_after_its_end_only() {
    let (mut space, pages) = with_pages(10);
    let available = space.available();
    view_counts::begin_view(&mut space);
    space.decr_page(pages[3], 0);
    checkpoint_beside_view(&mut space);
    checkpoint_beside_view(&mut space);
    assert_eq!((space.available(), space.withheld(), space.pending()), (available, 1, 1));
    let mut seen = BTreeSet::new();
    while space.available() > 0 {
        let (first, n) =
            alloc::alloc_data(&mut space, want(1 << 20, 3), &Reservation::unchecked()).expect("there is space");
        seen.extend(first.0..first.0 + n);
    }
    assert!(!seen.contains(&pages[3].0), "withheld");
    let withheld = view_counts::end_view(&mut space);
    assert_eq!((view_counts::view(&space), &withheld[..]), (None, &[(pages[3], 1)][..]));
    assert_eq!(space.available(), 0, "it is not discarded yet");
    view_counts::release_withheld(&mut space, withheld);
    assert_eq!(alloc::alloc_data(&mut space, want(1 << 21, 1), &Reservation::unchecked()), Ok((pages[3], 1)));
}

#[test]
fn what_is_freed_once_a_view_has_ended_is_free_at_once() {
    let (mut space, pages) = with_pages(2);
    let available = space.available();
    view_counts::begin_view(&mut space);
    assert_eq!(view_counts::end_view(&mut space), []);
    space.decr_page(pages[0], 0);
    checkpoint_beside_view(&mut space);
    assert_eq!((space.available(), space.withheld()), (available + 1, 0));
}

#[test]
fn a_chunk_kept_under_a_smaller_size_is_left_within_its_block() {
    let mut space = space();
    let mut place = |chunk: u64| {
        alloc::alloc_data(&mut space, shared(chunk * 16, 1, 0), &Reservation::unchecked()).expect("space").0
    };
    // None of these begins a virtual block or continues another, so they are placed contiguously.
    let mut chunks = (1..60).rev().filter(|chunk| chunk % 16 != 0);
    let chunk = chunks.find(|&chunk| place(chunk).index() / 16 == 15).expect("the last of a block");
    let want = AllocRequest { chunk_pages: 128, ..shared(chunk * 128, 1, 1) };
    assert!(alloc::alloc_data(&mut space, want, &Reservation::unchecked()).is_ok());
}

#[test]
fn a_volume_whose_chunk_has_changed_begins_new_chunks() {
    let mut space = space();
    let mut take = |chunk: u64, chunk_pages: u64, shared_at: u64| {
        let at = chunk * chunk_pages;
        // Far from each other: no stream.
        let write = at << 20..(at << 20) + 1;
        alloc::alloc_data(
            &mut space,
            AllocRequest { chunk_pages, write, ..shared(at, 1, shared_at) },
            &Reservation::unchecked(),
        )
    };
    // Chunks of four pages fill a block; then the same numbers stand for larger ones.
    let mut seen: BTreeSet<u64> = (0..64).map(|i| take(2 * i + 1, 4, 0).expect("space").0.0).collect();
    for (shared_at, pages) in [(1, 64), (1, 128), (1, 4)] {
        for i in 0..16 {
            let (first, n) = take(2 * i + 97, pages, shared_at).expect("space");
            assert!((first.0..first.0 + n).all(|p| seen.insert(p)), "{first:?} twice");
        }
    }
}

#[test]
fn bits_of_ranges() {
    for (from, to) in
        [(0, 0), (0, 1), (0, 64), (5, 5), (63, 65), (64, 128), (100, 256), (0, 256), (255, 256), (256, 256)]
    {
        let bits = mask(from..to);
        assert!((0..256).all(|i| bit(&bits, i) == (from..to).contains(&i)), "{from}..{to}");
        assert_eq!(first_unset(&bits, from, to), to, "all of {from}..{to} are set");
        assert_eq!(first_unset(&bits, from, 256), to, "none behind {to} is");
        assert_eq!(first_unset(&[0; 4], from, to), from, "none is set");
    }
}

/// Writes a volume in ascending order, a block at a time, until it has `count` blocks or there is no space.
fn stream(space: &mut Space, count: u64) -> Vec<Block> {
    let block = |at: u64| {
        alloc::alloc_data(
            space,
            AllocRequest { write: at..at + BLOCK_PAGES, ..shared(at, BLOCK_PAGES, 0) },
            &Reservation::unchecked(),
        )
    };
    let all = (0..count).map(|i| i * BLOCK_PAGES).map(block).map_while(Result::ok);
    all.map(|(first, n)| if n == BLOCK_PAGES { first.block() } else { panic!("{n} pages at {first:?}") }).collect()
}

#[test]
fn a_stream_lies_in_whole_stripes_of_an_array() {
    let layout = Layout::new(3 << 30);
    let mut space = Space::new(layout, [1; 16], vec![CountEntry::default(); layout.count_nodes(3) as usize]);
    alloc::set_stripe(&mut space, 3 << 19);
    let blocks = stream(&mut space, 1800);
    assert!(blocks.windows(2).all(|pair| pair[0] < pair[1]), "in order");
    let jumps = blocks.windows(2).filter(|pair| pair[0].0 + 1 != pair[1].0).count();
    assert_eq!(jumps, 2, "around what is reserved, and nothing else");
    let groups: BTreeSet<u64> = blocks.iter().map(|block| block.0 / 3).collect();
    assert_eq!(groups.len(), blocks.len() / 3, "of each stripe all or nothing");
}

#[test]
fn an_array_that_is_nearly_full_gives_what_there_is() {
    for stripe in [3 << 19, 7 << 18, 33 << 20, 1 << 18] {
        let mut space = Space::new(Layout::new(100 << 20), [1; 16], vec![CountEntry::default()]);
        alloc::set_stripe(&mut space, stripe);
        let all = space.available();
        assert_eq!(stream(&mut space, 1000).len() as u64 * BLOCK_PAGES, all, "stripes of {stripe}");
    }
}
