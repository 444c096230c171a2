use crate::format::{CountEntry, Layout};
use crate::space::{AllocRequest, Reservation, Step, count_images};
use crate::types::{BLOCK_PAGES, Epoch, VirtualPage, VolumeId};

use super::*;

fn space(limit: u64) -> Space {
    let mut space = Space::new(Layout::new(16 << 20), [1; 16], vec![CountEntry::default()]);
    set_limit(&mut space, limit);
    space
}

/// Allocates a virtual block of a volume that has nothing else.
fn alloc_block(space: &mut Space, volume: u64) -> Block {
    let request = AllocRequest {
        volume: VolumeId(volume),
        at: VirtualPage(0),
        pages: BLOCK_PAGES,
        chunk_pages: 16,
        shared_at: Epoch(0),
        write: 0..BLOCK_PAGES,
        beside: None,
    };
    let (first, n) = alloc::alloc_data(space, request, &Reservation::unchecked()).expect("there is space");
    assert_eq!((first.index(), n), (0, BLOCK_PAGES));
    space.incr_pages(first, n);
    first.block()
}

/// Writes a checkpoint as the store does, except that nothing is discarded.
fn checkpoint(space: &mut Space) {
    count_images::freeze(space);
    while let Step::Write(_) = count_images::checkpoint_step(space, 8).expect("all count pages are in memory") {}
    let freed = count_images::finish(space);
    let (kept, _) = split(space, &freed);
    count_images::release(space, freed);
    retain(space, &kept);
}

/// A space in which the second data block was freed and is retained.
fn with_a_freed_block(limit: u64) -> (Space, Block) {
    let mut space = space(limit);
    let blocks = [1, 2, 3].map(|volume| alloc_block(&mut space, volume));
    checkpoint(&mut space);
    space.decr_pages(blocks[1].first_page(), BLOCK_PAGES, 0);
    checkpoint(&mut space);
    (space, blocks[1])
}

#[test]
fn a_retained_block_is_allocated_before_one_that_was_never_used() {
    let mut space = space(1024);
    let blocks = [1, 2, 3].map(|volume| alloc_block(&mut space, volume));
    checkpoint(&mut space);
    // Free and not retained, with a lower address.
    space.decr_pages(blocks[0].first_page(), BLOCK_PAGES, 0);
    checkpoint(&mut space);
    forget(&mut space, blocks[0], ALL);
    space.decr_pages(blocks[2].first_page(), BLOCK_PAGES, 0);
    checkpoint(&mut space);
    assert_eq!(space.retained().pages(), BLOCK_PAGES);
    assert_eq!(alloc_block(&mut space, 4), blocks[2]);
    assert_eq!(space.retained().pages(), 0);
    assert_eq!(alloc_block(&mut space, 5), blocks[0]);
}

#[test]
fn no_more_than_the_limit_is_retained() {
    let (space, _) = with_a_freed_block(BLOCK_PAGES - 1);
    assert_eq!(space.retained().pages(), 0, "a block as a whole, or nothing of it");
    let (space, block) = with_a_freed_block(BLOCK_PAGES);
    assert_eq!(space.retained().pages(), BLOCK_PAGES);
    let one_more = vec![(block.page(0), 1)];
    assert_eq!(split(&space, &one_more), (Runs::new(), one_more));
}

#[test]
fn pages_that_are_being_discarded_are_free_and_cannot_be_allocated() {
    let (mut space, block) = with_a_freed_block(1024);
    let (free, mut runs) = (space.free(), Runs::new());
    loop {
        let more = begin_discard(&mut space, false);
        if more.is_empty() {
            break;
        }
        runs.extend(more);
    }
    assert_eq!(runs.iter().map(|&(_, n)| n).sum::<u64>(), BLOCK_PAGES);
    assert_eq!((space.free(), space.available()), (free, free - BLOCK_PAGES));
    // A checkpoint and another search for free pages change nothing.
    checkpoint(&mut space);
    assert_eq!((space.free(), space.available()), (free, free - BLOCK_PAGES));
    tree::search_block(&mut space, block).expect("its counts are in memory");
    let others = space.available() / BLOCK_PAGES;
    (0..others).for_each(|i| assert_ne!(alloc_block(&mut space, 10 + i), block));
    end_discard(&mut space, &runs);
    assert_eq!(space.available(), free - others * BLOCK_PAGES);
    assert_eq!(alloc_block(&mut space, 9), block);
    end_discard(&mut space, &runs);
    assert_eq!(space.available(), free - (others + 1) * BLOCK_PAGES, "once");
}

#[test]
fn only_what_was_retained_before_the_last_call_of_age_is_old() {
    let (mut space, block) = with_a_freed_block(1024);
    assert_eq!(begin_discard(&mut space, true), Runs::new());
    age(&mut space);
    let first = begin_discard(&mut space, true);
    assert_eq!(first[0].0, block.page(0));
    end_discard(&mut space, &first);
}

#[test]
fn a_page_that_was_allocated_and_never_written_is_retained_again() {
    let (mut space, block) = with_a_freed_block(1024);
    let (first, n) = alloc::take(&mut space, block, 7, 3).expect("it is free");
    assert_eq!(space.retained().pages(), BLOCK_PAGES - 3);
    alloc::return_pages(&mut space, first, n);
    assert_eq!(space.retained().pages(), BLOCK_PAGES);
}

#[test]
fn metadata_takes_contiguous_retained_pages_first() {
    let mut space = space(1024);
    alloc::prepare_meta(&mut space, 4).expect("its counts are in memory");
    let (first, n) = alloc::alloc_meta(&mut space, 4).expect("there is space")[0];
    space.incr_pages(first, n);
    checkpoint(&mut space);
    space.decr_pages(first, n, 0);
    checkpoint(&mut space);
    // The block of the last metadata is another one by now.
    space.affinity.meta_block = None;
    assert_eq!(alloc::alloc_meta(&mut space, 3), Some(vec![(first, 3)]));
    // One is left, and three are wanted in a row.
    let next = alloc::alloc_meta(&mut space, 3).expect("there is space");
    assert!(next.len() == 1 && next[0].1 == 3, "{next:?}");
}
