//! The life of a page: handed out, counted, given up, and free again only after a checkpoint.

use super::*;

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

fn want(at: u64, pages: u64) -> Want {
    Want { volume: VolumeId(1), at: VirtualPage(at), pages, chunk_pages: 16, write: at..at + pages }
}

#[test]
fn every_page_is_handed_out_once() {
    let mut space = space();
    let mut seen = BTreeSet::new();
    let all = space.available();
    let mut at = 1;
    while space.available() > 0 {
        let (first, n) = space.alloc_data(want(at, 3)).expect("there is space");
        at += 37;
        assert!((first.0..first.0 + n).all(|p| seen.insert(p)), "{first:?} twice");
    }
    assert_eq!(seen.len() as u64, all);
    assert_eq!(space.alloc_data(want(0, 1)), Err(Refusal::NoSpace));
}

#[test]
fn a_page_given_up_is_free_after_the_checkpoint_only() {
    let mut space = space();
    let all = space.available();
    let (page, _) = space.alloc_data(want(0, 1)).expect("space");
    space.incr_page(page);
    checkpoint(&mut space);
    assert_eq!((space.page_count(page), space.available()), (Ok(1), all - 1));
    space.decr_page(page, 0);
    assert_eq!((space.page_count(page), space.available()), (Ok(0), all - 1), "not yet");
    checkpoint(&mut space);
    assert_eq!(space.available(), all);
}

#[test]
fn a_count_beyond_the_largest_stays_and_the_page_is_never_free_again() {
    let mut space = space();
    let (page, _) = space.alloc_data(want(0, 1)).expect("space");
    (0..70_000).for_each(|_| space.incr_page(page));
    checkpoint(&mut space);
    assert_eq!(space.page_count(page), Ok(PINNED));
    (0..70_000).for_each(|_| space.decr_page(page, 0));
    assert_eq!(space.page_count(page), Ok(PINNED), "before the checkpoint");
    let available = space.available();
    checkpoint(&mut space);
    assert_eq!((space.page_count(page), space.available()), (Ok(PINNED), available));
}

#[test]
fn counts_are_right_while_freed_space_is_being_released() {
    let mut space = space();
    let (page, _) = space.alloc_data(want(0, 1)).expect("space");
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
fn a_stream_lies_in_one_piece_and_in_place() {
    let mut space = space();
    let (first, _) = space.alloc_data(want(0, 4)).expect("space");
    assert_eq!(first.index(), 0);
    for at in (4..256).step_by(4) {
        assert_eq!(space.alloc_data(want(at, 4)), Ok((PageAddr(first.0 + at), 4)));
    }
    assert_eq!(space.alloc_data(want(256, 4)), Ok((PageAddr(first.0 + 256), 4)), "the next block follows");
}

#[test]
fn what_all_blocks_of_a_leaf_gain_is_noted_above_it() {
    let mut space = Space::new(Layout::new(64 << 20), [1; 16], vec![CountEntry::default()]);
    // Block 8 is the first of leaf 1.
    let blocks = || (8..15).map(Block);
    let whole = |space: &mut Space| blocks().map(|b| space.block_count(b).expect("in memory")).collect::<Vec<_>>();
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
    assert_eq!(space.block_count(Block(12)), Ok(0));
    assert_eq!(space.available(), all - 4 * BLOCK_PAGES + 52 * BLOCK_PAGES);
}
