//! The life of a page: handed out, counted, given up, and free again only after a checkpoint.

use super::alloc::ABANDONED_PART;
use super::*;
use crate::bits::*;
use crate::format::{CountLog, count_log_page};

fn space() -> Space {
    let layout = Layout::new(16 << 20);
    Space::new(layout, [1; 16], vec![CountEntry::default()])
}

fn checkpoint(space: &mut Space) {
    space.freeze();
    while let Step::Write(_) = space.checkpoint_step(8).expect("all count pages are new") {}
    let freed = space.finish();
    space.release(freed);
}

/// Writes a checkpoint; returns how many pages of counts it wrote.
fn pages_written(space: &mut Space) -> usize {
    space.freeze();
    let mut written = 0;
    while let Step::Write(pages) = space.checkpoint_step(8).expect("all count pages are in memory") {
        written += pages.len();
    }
    let freed = space.finish();
    space.release(freed);
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
        let (first, n) = space.alloc_data(want(at, 3), &Reservation::unchecked()).expect("there is space");
        at += 37;
        assert!((first.0..first.0 + n).all(|p| seen.insert(p)), "{first:?} twice");
    }
    assert_eq!(seen.len() as u64, all);
    assert_eq!(space.alloc_data(want(0, 1), &Reservation::unchecked()), Err(Refusal::NoSpace));
}

#[test]
fn a_page_given_up_is_free_after_the_checkpoint_only() {
    let mut space = space();
    let all = space.available();
    let (page, _) = space.alloc_data(want(0, 1), &Reservation::unchecked()).expect("space");
    space.incr_page(page);
    checkpoint(&mut space);
    assert_eq!((space.page_count(page), space.available()), (Ok(1), all - 1));
    space.decr_page(page, 0);
    assert_eq!((space.page_count(page), space.available()), (Ok(0), all - 1), "not yet");
    checkpoint(&mut space);
    assert_eq!(space.available(), all);
}

#[test]
fn any_number_of_references_is_counted_and_given_up() {
    for with_log in [false, true] {
        let mut lab = Logging::new(16);
        if !with_log {
            lab.space = space();
        }
        let all = lab.space.available();
        let (page, _) = lab.space.alloc_data(want(0, 1), &Reservation::unchecked()).expect("space");
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

#[test]
fn counts_are_right_while_freed_space_is_being_released() {
    let mut space = space();
    let (page, _) = space.alloc_data(want(0, 1), &Reservation::unchecked()).expect("space");
    space.incr_page(page);
    space.freeze();
    while let Step::Write(_) = space.checkpoint_step(8).expect("all count pages are new") {}
    assert_eq!(space.page_count(page), Ok(1));
    let freed = space.finish();
    assert_eq!(space.page_count(page), Ok(1), "counted once, not in the page and again as a change");
    space.release(freed);
    assert_eq!(space.page_count(page), Ok(1));
}

#[test]
fn what_a_checkpoint_brings_back_is_pending_until_it_can_be_handed_out() {
    let mut space = space();
    let (page, _) = space.alloc_data(want(0, 1), &Reservation::unchecked()).expect("space");
    space.incr_page(page);
    checkpoint(&mut space);
    space.decr_page(page, 0);
    assert_eq!(space.pending(), 1);
    space.freeze();
    while let Step::Write(_) = space.checkpoint_step(8).expect("all count pages are in memory") {}
    let freed = space.finish();
    assert!(freed.contains(&(page, 1)) && space.pending() >= 1, "it is being discarded: whoever wants it waits");
    space.release(freed);
    assert_eq!(space.pending(), 0);
}

#[test]
fn what_somebody_else_still_refers_to_is_not_pending() {
    let mut space = space();
    let (first, n) = space.alloc_data(want(0, 16), &Reservation::unchecked()).expect("space");
    assert_eq!(n, 16);
    (0..2).for_each(|_| space.incr_pages(first, 16));
    checkpoint(&mut space);
    space.decr_pages(first, 16, 0);
    assert_eq!(space.pending(), 0, "one reference of two");
    space.decr_pages(first, 4, 0);
    assert_eq!(space.pending(), 4);
    // What the running checkpoint will say counts, too.
    space.freeze();
    space.decr_pages(PageAddr(first.0 + 4), 2, 0);
    assert_eq!(space.pending(), 6);
    while let Step::Write(_) = space.checkpoint_step(8).expect("all count pages are in memory") {}
    let freed = space.finish();
    space.release(freed);
    assert_eq!(space.pending(), 2, "what came after the freeze");
    checkpoint(&mut space);
    assert_eq!((space.pending(), space.used_by_checkpoint()), (0, 10));
}

#[test]
fn of_a_block_that_is_given_up_the_pages_that_are_referred_to_are_not_pending() {
    let mut space = space();
    let (first, n) = space.alloc_data(want(0, 256), &Reservation::unchecked()).expect("space");
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

/// The next of a row of numbers that look random, below `below`.
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
        .map(|i| space.alloc_data(want(i * 256, 256), &Reservation::unchecked()).expect("space").0.block())
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
            // Only what is referred to is shared.
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
                    space.freeze();
                } else {
                    while let Step::Write(_) = space.checkpoint_step(8).expect("all count pages are in memory") {}
                    let runs = space.finish();
                    freed += runs.iter().map(|&(_, n)| n).sum::<u64>();
                    space.release(runs);
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
    let (first, _) = space.alloc_data(want(0, 16), &Reservation::unchecked()).expect("space");
    (0..2).for_each(|_| space.incr_pages(first, 16));
    checkpoint(&mut space);
    space.retire_log(100);
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
    let (first, _) = space.alloc_data(want(0, 4), &Reservation::unchecked()).expect("space");
    assert_eq!(first.index(), 0);
    for at in (4..256).step_by(4) {
        assert_eq!(space.alloc_data(want(at, 4), &Reservation::unchecked()), Ok((PageAddr(first.0 + at), 4)));
    }
    assert_eq!(
        space.alloc_data(want(256, 4), &Reservation::unchecked()),
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
    blocks().for_each(|b| space.mark_allocated(b.page(0), BLOCK_PAGES).expect("in memory"));
    blocks().for_each(|b| space.incr_block(b));
    assert_eq!(pages_written(&mut space), 3, "none but those above it");
    assert_eq!((whole(&mut space), space.available()), (vec![1; 7], before - 7 * BLOCK_PAGES));
    blocks().for_each(|b| space.incr_block(b));
    assert_eq!(pages_written(&mut space), 3);
    assert_eq!(whole(&mut space), [2; 7]);
    blocks().for_each(|b| space.decr_block(b, 0));
    assert_eq!(pages_written(&mut space), 3, "one is left");
    assert_eq!(whole(&mut space), [1; 7]);
    // One block is used in pages now: the leaf is written and takes over what was noted.
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
            let (first, n) = space.alloc_data(want(at, 64), &Reservation::unchecked()).expect("space");
            assert!(n == 64 && next.is_none_or(|next| next == first), "{first:?} does not go on at {next:?}");
            next = Some(PageAddr(first.0 + n));
        }
        space.prepare_meta(100).expect("no count page has been written");
        space.alloc_meta(100).expect("space");
    }
}

#[test]
fn metadata_lies_in_one_piece_where_there_is_room_for_that() {
    let mut space = space();
    space.prepare_meta(64).expect("no count page has been written");
    let taken = space.alloc_meta(40).expect("they are known");
    let [(first, 40)] = taken[..] else { panic!("{taken:?}") };
    let page = |i: u64| PageAddr(first.0 + i);
    space.incr_pages(first, 40);
    checkpoint(&mut space);
    // Holes of 1, 3 and 2 pages, and all that lies behind the 40.
    [(2, 1), (10, 3), (20, 2)].into_iter().for_each(|(at, n)| space.decr_pages(page(at), n, 0));
    checkpoint(&mut space);
    space.ensure_known(260).expect("there are more");
    let mut next = |n| space.alloc_meta(n).expect("they are known");
    assert_eq!(next(2), [(page(10), 2)], "the first that is long enough");
    assert_eq!(next(2), [(page(20), 2)]);
    assert_eq!(next(5), [(page(40), 5)]);
    assert_eq!(next(1), [(page(2), 1)]);
    // What no room is long enough for begins with the longest.
    let rest: Vec<u64> = next(250).iter().map(|&(_, n)| n).collect();
    assert!(rest.iter().sum::<u64>() == 250 && rest[0] >= 200, "{rest:?}");
}

#[test]
fn the_last_empty_blocks_are_left_to_metadata_as_long_as_any_other_page_is_free() {
    let mut space = Space::new(Layout::new(256 << 20), [1; 16], vec![CountEntry::default()]);
    let mut at = 0;
    let last = loop {
        let (first, n) = space.alloc_data(want(at, 256), &Reservation::unchecked()).expect("space");
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
        space.alloc_data(want(at, 64), &Reservation::unchecked()),
        Ok((page, 1)),
        "a block beyond {last:?} was taken"
    );
    let (first, n) = space.alloc_data(want(at + 256, 64), &Reservation::unchecked()).expect("there are some");
    assert!(first.block() > last && n == 64, "nothing else is left, and {first:?} was taken");
}

#[test]
fn tables_of_a_checkpoint_lie_in_one_row_of_blocks() {
    let mut space = Space::new(Layout::new(256 << 20), [1; 16], vec![CountEntry::default()]);
    for n in [700, 9, 300, 250, 20, 1300] {
        space.prepare_meta(n).expect("no count page has been written");
        let mut runs = space.alloc_meta(n).expect("they are known").into_iter();
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
    space.ensure_known(space.available()).expect("no count page has been written");
    // What is left are rows of 3, 5 and 4 blocks, and others by themselves.
    let rows = [40..43, 45..50, 52..56];
    for block in 2..64 {
        let is_left = rows.iter().any(|row| row.contains(&block)) || block % 4 == 3 && block > 56;
        if !is_left {
            space.mark_allocated(Block(block).page(0), BLOCK_PAGES).expect("no count page has been written");
        }
    }
    space.prepare_meta(9 * BLOCK_PAGES).expect("no count page has been written");
    let runs = space.alloc_meta(9 * BLOCK_PAGES).expect("they are known");
    let blocks: Vec<u64> = runs.iter().map(|(first, _)| first.block().0).collect();
    assert_eq!(blocks, [45, 46, 47, 48, 49, 52, 53, 54, 55]);
}

#[test]
fn places_for_metadata_are_not_looked_for_through_all_the_end_of_a_large_pool() {
    let layout = Layout::new(1 << 40);
    let mut space = Space::new(layout, [1; 16], vec![CountEntry::default()]);
    // Nowhere in the last 1/64 are two blocks empty one behind the other.
    let blocks = layout.blocks();
    for block in (blocks - blocks / 60..blocks).step_by(2) {
        space.mark_allocated(Block(block).page(0), 1).expect("no count page has been written");
    }
    for _ in 0..3 {
        space.prepare_meta(300).expect("no count page has been written");
        assert_eq!(space.alloc_meta(300).expect("they are known").iter().map(|run| run.1).sum::<u64>(), 300);
    }
    assert_eq!(layout.count_nodes(0) - space.scan_end, 1024);
}

#[test]
fn tables_take_what_is_left_of_a_full_pool() {
    let mut space = space();
    let mut taken = 0;
    while space.available() > 100 {
        taken +=
            space.alloc_data(want(taken, 64.min(space.available() - 100)), &Reservation::unchecked()).expect("space").1;
    }
    space.prepare_meta(100).expect("no count page has been written");
    space.ensure_known(100).expect("there are as many");
    let runs = space.alloc_meta(100).expect("they are known");
    assert_eq!((runs.iter().map(|r| r.1).sum::<u64>(), space.available()), (100, 0));
}

#[test]
fn who_is_shared_again_begins_new_chunks_one_behind_the_other() {
    let mut space = space();
    let mut place = |chunk: u64, epoch| {
        space.alloc_data(shared(chunk * 16 + epoch, 1, epoch), &Reservation::unchecked()).expect("space").0
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
    // One page of every chunk of 64 MiB, shared again and again: 16 times as much if no chunk's rest were used.
    for epoch in 0..8 {
        for chunk in 0..1024 {
            let (page, _) =
                space.alloc_data(shared(chunk * 16 + epoch, 1, epoch), &Reservation::unchecked()).expect("space");
            blocks.insert(page.block());
        }
    }
    let bound = 64 + 256 / ABANDONED_PART as usize + 1;
    assert!((64..=bound).contains(&blocks.len()), "{} blocks are in use", blocks.len());
}

/// Three volumes' worth of pages in use, as the last checkpoint left them.
fn with_pages(n: u64) -> (Space, Vec<PageAddr>) {
    let mut space = space();
    let pages: Vec<PageAddr> =
        (0..n).map(|at| space.alloc_data(want(at, 1), &Reservation::unchecked()).expect("space").0).collect();
    pages.iter().for_each(|&page| space.incr_page(page));
    checkpoint(&mut space);
    (space, pages)
}

/// A checkpoint after that of a view.
fn checkpoint_beside_view(space: &mut Space) {
    space.freeze();
    while let Step::Write(_) = space.checkpoint_step(8).expect("all count pages are in memory") {}
    let freed = space.finish();
    let freed = space.still_free(freed);
    let freed = space.withhold(freed);
    space.release(freed);
}

#[test]
fn a_view_shows_the_counts_it_began_with_whatever_checkpoints_follow() {
    let (mut space, pages) = with_pages(10);
    let block = pages[0].block();
    let before = space.block_counts(block).expect("in memory");
    let number = space.begin_view();
    for &page in &pages[..5] {
        space.decr_page(page, 0);
        space.incr_page(pages[9]);
        checkpoint_beside_view(&mut space);
        assert_eq!((space.view(), space.view_counts(block)), (Some(number), Ok(before.clone())));
    }
    assert_eq!(space.page_count(pages[9]), Ok(6), "those who ask for no view see what is");
}

#[test]
fn what_is_freed_beside_a_view_is_handed_out_after_its_end_only() {
    let (mut space, pages) = with_pages(10);
    let available = space.available();
    space.begin_view();
    space.decr_page(pages[3], 0);
    checkpoint_beside_view(&mut space);
    checkpoint_beside_view(&mut space);
    assert_eq!((space.available(), space.withheld(), space.pending()), (available, 1, 1));
    let mut seen = BTreeSet::new();
    while space.available() > 0 {
        let (first, n) = space.alloc_data(want(1 << 20, 3), &Reservation::unchecked()).expect("there is space");
        seen.extend(first.0..first.0 + n);
    }
    assert!(!seen.contains(&pages[3].0), "withheld");
    let withheld = space.end_view();
    assert_eq!((space.view(), &withheld[..]), (None, &[(pages[3], 1)][..]));
    assert_eq!(space.available(), 0, "it is not discarded yet");
    space.release_withheld(withheld);
    assert_eq!(space.alloc_data(want(1 << 21, 1), &Reservation::unchecked()), Ok((pages[3], 1)));
}

#[test]
fn what_is_freed_once_a_view_has_ended_is_free_at_once() {
    let (mut space, pages) = with_pages(2);
    let available = space.available();
    space.begin_view();
    assert_eq!(space.end_view(), []);
    space.decr_page(pages[0], 0);
    checkpoint_beside_view(&mut space);
    assert_eq!((space.available(), space.withheld()), (available + 1, 0));
}

#[test]
fn a_chunk_kept_under_a_smaller_size_is_left_within_its_block() {
    let mut space = space();
    let mut place =
        |chunk: u64| space.alloc_data(shared(chunk * 16, 1, 0), &Reservation::unchecked()).expect("space").0;
    // None of these begins a virtual block or goes on behind another: they lie one behind the other.
    let mut chunks = (1..60).rev().filter(|chunk| chunk % 16 != 0);
    let chunk = chunks.find(|&chunk| place(chunk).index() / 16 == 15).expect("the last of a block");
    let want = AllocRequest { chunk_pages: 128, ..shared(chunk * 128, 1, 1) };
    assert!(space.alloc_data(want, &Reservation::unchecked()).is_ok());
}

#[test]
fn a_volume_whose_chunk_has_changed_begins_new_chunks() {
    let mut space = space();
    let mut take = |chunk: u64, chunk_pages: u64, shared_at: u64| {
        let at = chunk * chunk_pages;
        // Far from each other: no stream.
        let write = at << 20..(at << 20) + 1;
        space.alloc_data(AllocRequest { chunk_pages, write, ..shared(at, 1, shared_at) }, &Reservation::unchecked())
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

/// A volume written in order, a block at a time, until it has `count` blocks or there is no space.
fn stream(space: &mut Space, count: u64) -> Vec<Block> {
    let block = |at: u64| {
        space.alloc_data(
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
    space.set_stripe(3 << 19);
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
        space.set_stripe(stripe);
        let all = space.available();
        assert_eq!(stream(&mut space, 1000).len() as u64 * BLOCK_PAGES, all, "stripes of {stripe}");
    }
}

/// A space that keeps a log, and what a device would have of it.
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
        space.use_log(counted.log, &[]).expect("none yet");
        Logging { space, pages: BTreeMap::new(), counted }
    }

    /// Calls until nothing is missing.
    fn ask<T>(&mut self, call: impl Fn(&mut Space) -> Result<T, Miss>) -> T {
        loop {
            match call(&mut self.space) {
                Ok(found) => return found,
                Err(miss) => {
                    let Miss::Count { node, page, .. } = miss;
                    let bytes = &self.pages[&page.0];
                    self.space
                        .loaded(miss, CountPage::from_bytes(node.level, bytes).expect("valid"))
                        .expect("it makes sense");
                }
            }
        }
    }

    /// How many pages it wrote.
    fn checkpoint(&mut self) -> usize {
        self.space.freeze();
        self.write()
    }

    fn write(&mut self) -> usize {
        self.write_until(|space| {
            let freed = space.finish();
            space.release(freed);
        })
    }

    fn write_until(&mut self, end: impl FnOnce(&mut Space)) -> usize {
        let mut written = 0;
        loop {
            match self.ask(|space| space.checkpoint_step(8)) {
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
        // With as little memory as there can be.
        self.space = Space::with_cache(layout, [1; 16], self.counted.roots.clone(), 0);
        self.space.set_large_counts(self.counted.large);
        let log = (0..self.counted.log.pages).flat_map(|i| self.pages[&count_log_page(i).0].clone());
        self.space.use_log(self.counted.log, &log.collect::<Vec<u8>>()).expect("what was written");
    }

    fn counts(&mut self, block: Block) -> Counts {
        self.ask(|space| space.block_counts(block))
    }
}

/// More references than 16 bits count, or all but one given up, of some pages of a block.
fn flood(space: &mut Space, model: &mut BTreeMap<u64, u32>, block: Block, draw: &mut impl FnMut(u64) -> u64) {
    let (first, n) = (draw(200) as usize, 1 + draw(50) as usize);
    for index in first..first + n {
        let count = model.entry(block.page(index).0).or_default();
        let by = if *count > 65_000 { 1 - *count as i32 } else { 65_530 + draw(10) as i32 };
        space.current.change(block, index..index + 1, by);
        *count = count.wrapping_add_signed(by);
    }
}

/// Changes here and there, some of whole blocks and of whole leaves.
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
                // All blocks of a leaf alike: that is noted above it.
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
    assert!(!lab.space.retire_log(1000), "there is none");
    one_in_each(&mut lab);
    lab.checkpoint();
    let leaves = lab.counted.log.pages as u64 + 1;
    assert!(lab.counted.log.pages > 0 && leaves < 6, "a segment is less than the leaves");
    assert!(!lab.space.retire_log(4), "five leaves are more than that");
    lab.space.incr_page(Block(2).page(4));
    lab.checkpoint();
    assert!(lab.counted.log.pages > 0 && lab.space.retire_log(6));
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
    // Every page of two leaves has a count of its own, and none a small one.
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
    // As large as one uppermost page allows.
    let mut lab = Logging::new(65_536 * 868);
    let before = lab.space.layout();
    lab.space.incr_page(Block(9).page(1));
    lab.checkpoint();
    assert!(lab.counted.log.pages > 0);
    lab.space.incr_page(Block(9).page(2));
    lab.space.freeze();
    let after = Layout::new((before.blocks() + 868) << 20);
    assert_eq!((before.count_nodes(3), after.count_nodes(3)), (1, 2));
    lab.space.grow(after);
    lab.space.write_pages_instead_of_log();
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
    lab.space.begin_view();
    // What is noted above the one changes; the other is only brought from the log to its page.
    blocks(leaf(3)).for_each(|block| lab.space.incr_block(block));
    lab.checkpoint();
    let mut n = 0;
    while lab.counted.log.pages > 0 {
        lab.space.incr_page(Block(30).page(n));
        lab.checkpoint();
        n += 1;
    }
    assert_eq!(lab.ask(|space| space.view_counts(Block(2))).pages[1], 1);
    assert!(blocks(leaf(3)).all(|block| lab.ask(|space| space.view_counts(block)).whole == 2));
    assert!(blocks(leaf(3)).all(|block| lab.counts(block).whole == 3));
    assert_eq!(lab.ask(|space| space.view_counts(Block(30))).pages[0], 0);
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
    while !lab.space.log_is_half_full() {
        (2..37).for_each(|block| lab.space.incr_page(Block(block).page(3)));
        lab.checkpoint();
    }
    let (pages, free) = (lab.counts(Block(9)).pages[3], lab.space.available());
    assert!(pages > 1 && lab.counted.log.pages > 0);
    lab.space.incr_page(Block(9).page(3));
    lab.space.decr_page(Block(10).page(3), 0);
    // Once in vain, as on a host that is full.
    lab.space.begin_log_flush();
    assert!(matches!(lab.ask(|space| space.checkpoint_step(2)), Step::Write(pages) if pages.len() == 2));
    lab.space.abort_log_flush();
    assert_eq!((lab.counts(Block(9)).pages[3], lab.space.available()), (pages + 1, free));
    lab.space.begin_log_flush();
    lab.space.incr_page(Block(9).page(4));
    let written = lab.write_until(Space::end_log_flush);
    assert_eq!((written, lab.counted.log.pages), (6 + 3, 0), "six leaves and those above them");
    assert_eq!(lab.space.available(), free);
    assert_eq!((lab.counts(Block(9)).pages[3], lab.counts(Block(9)).pages[4]), (pages + 1, 1));
    // A crash now has only what was in the log.
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
    // Handed out, and mapped only when the checkpoint has found that nothing refers to it.
    lab.ask(|space| space.learn_free(Block(50)));
    assert!(lab.space.take_all([Block(50).page(0)].into_iter(), &Reservation::unchecked()));
    lab.space.freeze();
    let mut freed = None;
    lab.write_until(|space| freed = Some(space.finish()));
    lab.space.incr_page(Block(50).page(0));
    lab.space.release(freed.expect("it is finished"));
    let free = lab.space.available();
    lab.space.begin_log_flush();
    lab.write_until(Space::end_log_flush);
    assert_eq!((lab.counted.log.pages, lab.space.available()), (0, free));
}
