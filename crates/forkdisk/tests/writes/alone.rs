//! A volume whose pages others had, too, writes in place as soon as those are gone for good.

use forkdisk::{OpenOptions, PAGE_SIZE};

use crate::lab::{Lab, Page, stamp};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages that are mapped, in two virtual blocks by tables and in two as wholes.
const PAGES: u64 = 1024;

/// Where pages lie, by the number in them.
fn places(mut pages: Vec<Page>) -> Vec<u64> {
    pages.sort_by_key(|page| page.stamp);
    pages.iter().map(|page| page.at).collect()
}

/// What is given up to change something else in the same table, or in the block where the table lies, leaves them alone.
#[test]
fn a_page_provisioned_beside_others_does_not_break_them() {
    Lab::run(128, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("volume", 64).await;
        for block in 0..PAGES / 256 {
            let hole = if block < 2 { 1 } else { 0 };
            let pages = 256 - hole;
            volume.write(block << 20, stamp(block * 256, pages as usize), false).await.0.expect("there is space");
        }
        let (pages, _) = lab.tape.take();
        let fresh = places(pages);
        lab.pool.clone_volume("volume", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        drop(volume);
        lab.pool.delete(&["volume"]).await.expect("it is deleted");
        lab.pool.settle().await.expect("it settles");
        lab.tape.take();
        // A hole in a table that is there, and one in a table that is not, so that those above it change.
        for page in [255, 40 * 256 + 7] {
            clone.write(page * PAGE, stamp(1 << 20, 1), false).await.0.expect("there is space");
        }
        lab.tape.take();
        for page in (0..PAGES).filter(|&page| page != 255 && page != 511) {
            clone.write(page * PAGE, stamp(page, 1), false).await.0.expect("there is space");
        }
        let (pages, _) = lab.tape.take();
        let moved = places(pages).into_iter().zip(fresh).filter(|(now, before)| now != before).count();
        assert_eq!(moved, 0, "each is written where it was");
    });
}
