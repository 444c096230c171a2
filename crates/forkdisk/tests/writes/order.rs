//! I5: writes to the same and neighbouring blocks reach the device in the order of acceptance, whatever one
//! of them waits for. Each page carries the number under which it was written.

use std::time::Duration;

use forkdisk::{ErrorKind, LocalFuture, OpenOptions, Result, WhenFull};

use crate::lab::{Disk, Lab, Page, stamp};

type Write = LocalFuture<Result<()>>;

/// Returns options that keep no unchanged metadata in memory.
fn forgetful() -> OpenOptions {
    OpenOptions::default().with_cache(16 * 4096)
}

async fn all(writes: Vec<Write>) {
    for write in writes {
        write.await.expect("it is written");
    }
}

/// Returns the number of pages that reached the device behind one with a higher number.
fn inversions(pages: &[Page]) -> usize {
    pages.windows(2).filter(|w| w[0].stamp > w[1].stamp).count()
}

fn assert_once_each(pages: &[Page], count: u64) {
    let mut stamps: Vec<u64> = pages.iter().map(|p| p.stamp).collect();
    stamps.sort_unstable();
    assert_eq!(stamps, (0..count).collect::<Vec<_>>(), "each page once");
}

/// Creates a volume of which every other page of each block has been written, so that every block has a
/// table, and none of them is in memory.
async fn scattered(lab: &Lab, name: &str, mib: u64) -> Disk {
    let volume = lab.volume(name, mib).await;
    for at in (0..mib * 256).step_by(2) {
        volume.write(at * 4096, stamp(1 << 40, 1), false).await.0.expect("there is space");
    }
    lab.pool.checkpoint().await.expect("it succeeds");
    // The tables of another volume, as large, evict those of this volume.
    let other = lab.volume(&format!("{name}-other"), 32).await;
    for at in (0..32 * 256).step_by(2) {
        other.write(at * 4096, stamp(1 << 40, 1), false).await.0.expect("there is space");
    }
    lab.pool.checkpoint().await.expect("it succeeds");
    lab.tape.take();
    volume
}

#[test]
fn nobody_overtakes_a_neighbour_that_waits_for_a_table() {
    Lab::run(256, forgetful(), |lab| async move {
        let volume = scattered(&lab, "v", 8).await;
        // The table of every other block is in memory.
        for at in (256..2048).step_by(512) {
            lab.stamps(&volume, at, 1).await;
        }
        let reads = lab.tape.reads();
        let writes = (0..2048).map(|i| lab.write(&volume, i, 1, i)).collect();
        all(writes).await;
        let (pages, _) = lab.tape.take();
        assert!(lab.tape.reads() >= reads + 4, "tables were read");
        assert_eq!(inversions(&pages), 0);
        assert_once_each(&pages, 2048);
        for at in (0..2048).step_by(256) {
            let expected: Vec<_> = (at..at + 256).map(Some).collect();
            assert_eq!(lab.stamps(&volume, at, 256).await, expected);
        }
    });
}

#[test]
fn what_waits_directly_behind_goes_along_in_one_request() {
    Lab::run(256, forgetful(), |lab| async move {
        let volume = scattered(&lab, "v", 8).await;
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        let writes = (0..256).map(|i| lab.write(&volume, 256 + i, 1, i)).collect();
        all(writes).await;
        let (pages, requests) = lab.tape.take();
        assert_eq!((inversions(&pages), pages.len()), (0, 256));
        assert!(requests <= 2, "{requests} requests for 256 writes that waited for one table");
        assert!(pages.windows(2).all(|w| w[0].at + 1 == w[1].at), "in one piece");
    });
}

#[test]
fn writes_in_place_stay_behind_a_neighbour_that_completes_its_page() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 8).await;
        lab.fill(&volume).await;
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        all((0..512).step_by(2).map(|i| lab.write(&volume, i, 1, 1 << 40)).collect()).await;
        lab.tape.take();
        // Odd pages are broken by half a page; the rest is read first.
        all((0..512).map(|i| lab.write_bytes(&volume, i, if i % 2 == 0 { 4096 } else { 1000 }, i)).collect()).await;
        let (pages, _) = lab.tape.take();
        assert_eq!(inversions(&pages), 0);
        assert_once_each(&pages, 512);
    });
}

#[test]
fn order_holds_while_checkpoints_run_and_writers_wait_for_them() {
    let options = OpenOptions::default().with_dirty(64 << 10);
    Lab::run(512, options, |lab| async move {
        let volume = lab.volume("v", 64).await;
        lab.fill(&volume).await;
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        for i in 0..512 {
            lab.write(&volume, i * 32, 1, 1 << 40).await.expect("it is written");
        }
        lab.pool.checkpoint().await.expect("it succeeds");
        lab.tape.take();
        // Writes in place and breaks mixed, eight of each in every block: tables are soon dirty.
        lab.at_depth(32, 1024, move |lab, i| lab.write(&volume, i / 2 * 32 + i % 2, 1, i)).await;
        let (pages, _) = lab.tape.take();
        assert_eq!(inversions(&pages), 0);
        assert_once_each(&pages, 1024);
    });
}

#[test]
fn several_sequential_writers_are_each_in_one_piece() {
    Lab::run(512, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 64).await;
        lab.fill(&volume).await;
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        lab.tape.take();
        let mut writes = Vec::new();
        for i in 0..1024 {
            writes.extend((0..4).map(|writer| lab.write(&volume, writer * 4096 + i, 1, writer * 100_000 + i)));
        }
        all(writes).await;
        let (pages, requests) = lab.tape.take();
        assert_eq!((pages.len(), requests <= 4096), (4096, true));
        for writer in 0..4 {
            let own: Vec<Page> = pages.iter().copied().filter(|p| p.stamp / 100_000 == writer).collect();
            assert_eq!((inversions(&own), own.len()), (0, 1024));
            let seams = own.windows(2).filter(|w| w[0].at + 1 != w[1].at).count();
            assert!(seams <= 3, "{seams} seams in four blocks");
        }
    });
}

#[test]
fn unrelated_writes_do_not_wait_for_each_other() {
    Lab::run(256, forgetful(), |lab| async move {
        let volume = scattered(&lab, "v", 8).await;
        let other = lab.volume("w", 8).await;
        other.write(0, stamp(1 << 40, 1), false).await.0.expect("there is space");
        // Three blocks away, and in memory.
        volume.write(5 * 256 * 4096, stamp(1 << 40, 1), false).await.0.expect("there is space");
        lab.tape.take();
        let slow = lab.write(&volume, 0, 1, 1);
        let quick: Vec<Write> = vec![lab.write(&other, 0, 1, 2), lab.write(&volume, 5 * 256, 1, 3)];
        all(quick).await;
        assert_eq!(lab.tape.take().0.iter().map(|p| p.stamp).collect::<Vec<_>>(), [2, 3]);
        slow.await.expect("it is written");
    });
}

/// Creates two volumes, one to write in place and one that fills the pool up to the last available page.
async fn full(lab: &Lab) -> (Disk, Disk) {
    let volume = lab.volume("v", 8).await;
    all((0..512).map(|i| lab.write(&volume, i, 1, 1 << 40)).collect()).await;
    let filler = lab.volume("filler", 64).await;
    let mut at = 0;
    while filler.write(at * 4096, stamp(1 << 40, 16), false).await.0.is_ok() {
        at += 16;
    }
    while filler.write(at * 4096, stamp(1 << 40, 1), false).await.0.is_ok() {
        at += 1;
    }
    lab.tape.take();
    (volume, filler)
}

#[test]
fn without_space_writes_in_place_pass_and_the_others_keep_their_order() {
    let patience = Duration::from_secs(60);
    let options = OpenOptions::default().with_when_full(WhenFull::Wait(patience));
    Lab::run(16, options, move |lab| async move {
        let (volume, filler) = full(&lab).await;
        let begun = lab.tasks.now();
        // New pages in the next block, and between them pages that exist already.
        let waiting: Vec<Write> = (0..64).map(|i| lab.write(&volume, 512 + i, 1, i)).collect();
        let overlapping = lab.write(&volume, 500, 16, 1000);
        all((0..64).map(|i| lab.write(&volume, 256 + i, 1, 2000 + i)).collect()).await;
        let (pages, _) = lab.tape.take();
        assert_eq!((pages.len(), pages[0].stamp, inversions(&pages)), (64, 2000, 0));
        filler.discard(0, 4 << 20).await.expect("space");
        all(waiting).await;
        overlapping.await.expect("it is written");
        let (pages, _) = lab.tape.take();
        let new: Vec<Page> = pages.iter().copied().filter(|p| p.stamp < 1000).collect();
        assert_eq!(inversions(&new), 0, "those who waited");
        assert_once_each(&new, 64);
        assert!(pages.iter().rposition(|p| p.stamp < 4) < pages.iter().position(|p| p.stamp >= 1000), "overlap");
        assert!(lab.tasks.now() - begun < patience);
    });
}

#[test]
fn all_who_find_no_space_give_up_after_the_same_time() {
    let patience = Duration::from_secs(60);
    let options = OpenOptions::default().with_when_full(WhenFull::Wait(patience));
    Lab::run(16, options, move |lab| async move {
        let (volume, _) = full(&lab).await;
        let begun = lab.tasks.now();
        let waiting: Vec<Write> = (0..32).map(|i| lab.write(&volume, 512 + i, 1, i)).collect();
        for write in waiting {
            assert_eq!(write.await.map_err(|e| e.kind()), Err(ErrorKind::NoSpace));
        }
        let took = lab.tasks.now() - begun;
        assert!(took >= patience && took < patience * 2, "{took:?}");
        assert_eq!(lab.tape.take().0, []);
    });
}

#[test]
fn order_holds_while_the_pool_runs_low() {
    Lab::run(16, OpenOptions::default(), |lab| async move {
        // Some of the space is freed only by a checkpoint.
        let (gone, volume) = (lab.volume("gone", 4).await, lab.volume("v", 64).await);
        lab.fill(&gone).await;
        gone.discard(0, 4 << 20).await.expect("it is discarded");
        // More than there is space for, large and small: a small one may fit where a large one does not.
        let sizes = (0..2048).map(|i| if i % 2 == 0 { 8 } else { 1 });
        let places = sizes.scan(0, |at, pages| Some((std::mem::replace(at, *at + pages as u64), pages)));
        let writes: Vec<Write> = places.map(|(at, pages)| lab.write(&volume, at, pages, at)).collect();
        let mut written = 0;
        for write in writes {
            match write.await {
                Ok(()) => written += 1,
                Err(e) => assert_eq!(e.kind(), ErrorKind::NoSpace),
            }
        }
        let (pages, _) = lab.tape.take();
        assert_eq!(inversions(&pages), 0);
        assert!(written > 500, "{written} were written");
    });
}

#[test]
fn a_write_with_ragged_ends_is_one_request_in_order() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 4).await;
        volume.write(0, stamp(5000, 1024), false).await.0.expect("there is space");
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        lab.tape.take();
        let reads = lab.tape.reads();
        // From the fourth sector of page 300 to the third of page 428.
        volume.write(300 * 4096 + 1536, stamp(0, 128), false).await.0.expect("there is space");
        let (pages, requests) = lab.tape.take();
        assert_eq!((pages.len(), requests, lab.tape.reads() - reads), (129, 1, 2));
        assert!(pages.windows(2).all(|w| w[1].at == w[0].at + 1), "one behind the other");
        let first: Vec<_> = lab.stamps(&volume, 299, 131).await.into_iter().flatten().collect();
        let expected: Vec<u64> = [5299, 5300].into_iter().chain(0..128).chain([5429]).collect();
        assert_eq!(first, expected);
    });
}
