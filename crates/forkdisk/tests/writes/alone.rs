//! A volume whose pages were shared writes in place as soon as the other references are durably gone.

use forkdisk::{OpenOptions, PAGE_SIZE};

use crate::lab::{Lab, Page, stamp};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages that are mapped, in two virtual blocks by tables and in two as whole blocks.
const PAGES: u64 = 1024;

/// Returns where pages lie, by the number in them.
fn places(mut pages: Vec<Page>) -> Vec<u64> {
    pages.sort_by_key(|page| page.stamp);
    pages.iter().map(|page| page.at).collect()
}

/// Releases that change other entries of the same table, or the block where the table lies, leave them alone.
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
        lab.pool.wait_freed().await.expect("it settles");
        lab.tape.take();
        // A hole in a table that exists, and one in a table that does not, so that those above it change.
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

/// Pages left out of a chunk go there as long as the rest stays there: they are contiguous from then on.
#[test]
fn a_hole_is_filled_beside_the_rest_of_its_chunk_unless_that_is_shared() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("volume", 4).await;
        for page in [40, 105, 170, 250, 300] {
            lab.write(&volume, page, 1, page).await.expect("there is space");
        }
        lab.pool.clone_volume("volume", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        drop(volume);
        lab.pool.delete(&["volume"]).await.expect("it is deleted");
        lab.pool.wait_freed().await.expect("it settles");
        // Together with one, behind it, before it, around it.
        for (page, pages) in [(40, 3), (104, 2), (168, 5)] {
            lab.tape.take();
            clone.write(page * PAGE, stamp(page, pages), false).await.0.expect("there is space");
            let (pages, requests) = lab.tape.take();
            assert_eq!(requests, 1, "from page {page} on");
            assert!(pages.windows(2).all(|w| w[0].at + 1 == w[1].at), "from page {page} on");
        }
        // Separately, some distance away first.
        for page in [247, 252, 249, 251, 248] {
            lab.write(&clone, page, 1, page).await.expect("there is space");
        }
        lab.tape.take();
        clone.write(247 * PAGE, stamp(247, 6), false).await.0.expect("there is space");
        assert_eq!(lab.tape.take().1, 1);
        // A new page does not go to its old chunk beside pages that are still shared.
        lab.pool.snapshot(&[("clone", "s")], 0).await.expect("a snapshot");
        lab.tape.take();
        for page in [299, 300] {
            lab.write(&clone, page, 1, page).await.expect("there is space");
        }
        let (pages, _) = lab.tape.take();
        assert_eq!(pages[0].at + 1, pages[1].at, "both lie elsewhere, in one piece");
    });
}
