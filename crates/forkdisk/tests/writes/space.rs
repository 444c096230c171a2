//! Space under load: what random writers take, on an empty pool and on one that is nearly full.

use std::collections::BTreeSet;

use forkdisk::OpenOptions;

use crate::lab::{Disk, Lab, stamp};

/// Yields `count` different pages of `0..span`, in a pseudo-random order.
fn places(span: u64, count: u64) -> impl Iterator<Item = u64> {
    let step = (span / 2 + span / 8) | 1;
    (0..count).map(move |i| (i * step + span / 3) % span)
}

async fn used_by(lab: &Lab, volume: &Disk, span: u64, count: u64) -> f64 {
    lab.pool.checkpoint().await.expect("it succeeds");
    let before = lab.pool.info().unused;
    for at in places(span, count) {
        volume.write(at * 4096, stamp(at, 1), false).await.0.expect("there is space");
    }
    lab.pool.checkpoint().await.expect("it succeeds");
    (before - lab.pool.info().unused) as f64 / (count * 4096) as f64
}

async fn clone_of_a_full_volume(lab: &Lab, mib: u64) -> Disk {
    let base = lab.volume("base", mib).await;
    lab.fill(&base).await;
    lab.pool.clone_volume("base", "clone", 0).await.expect("a clone");
    lab.pool.volume("clone").expect("just made")
}

#[test]
fn random_writes_over_a_clone_take_little_more_space_than_they_write() {
    Lab::run(256, OpenOptions::default(), |lab| async move {
        let clone = clone_of_a_full_volume(&lab, 64).await;
        let used = used_by(&lab, &clone, 64 * 256, 2048).await;
        assert!(used <= 1.1, "{used} bytes for each byte written");
        let used = used_by(&lab, &clone, 64 * 256, 8192).await;
        assert!(used <= 1.1, "{used} bytes for each byte written");
    });
}

#[test]
fn in_a_pool_that_is_nearly_full_they_take_no_more() {
    Lab::run(96, OpenOptions::default(), |lab| async move {
        let clone = clone_of_a_full_volume(&lab, 64).await;
        let filler = lab.volume("filler", 64).await;
        // Leaves 12 MiB free, with something in every block.
        let mut at = 0;
        while lab.pool.info().unused > 12 << 20 {
            filler.write(at << 20, stamp(0, 128), false).await.0.expect("there is space");
            at += 1;
        }
        let free = lab.pool.info().unused / 4096;
        let count = free * 8 / 10;
        let used = used_by(&lab, &clone, 64 * 256, count).await;
        assert!(used <= 1.1, "{used} bytes for each byte written");
        for at in places(64 * 256, count) {
            assert_eq!(lab.stamps(&clone, at, 1).await, [Some(at)]);
        }
        let report = lab.pool.check().await.expect("a check");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    });
}

#[test]
fn what_was_kept_for_chunks_of_one_size_is_not_taken_for_chunks_of_another() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 64).await;
        // Chunks of 16 pages fill a block; the last one lies at its end.
        for chunk in (1..16).rev() {
            lab.write(&volume, chunk * 16, 1, chunk).await.expect("there is space");
        }
        lab.pool.set_chunk("v", 512 << 10).await.expect("set");
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        for chunk in 1..16 {
            lab.write(&volume, chunk * 128 + 5, 1, 100 + chunk).await.expect("there is space");
        }
        for chunk in 1..16 {
            assert_eq!(lab.stamps(&volume, chunk * 128 + 5, 1).await, [Some(100 + chunk)]);
        }
    });
}

#[test]
fn what_was_set_aside_for_one_writer_is_to_be_had_by_another() {
    Lab::run(32, OpenOptions::default(), |lab| async move {
        // A page in each of many blocks and chunks: most of the pool is reserved.
        let sparse = lab.volume("sparse", 1024).await;
        for at in 0..200 {
            sparse.write((at << 20) + 4096 * 100, stamp(at, 1), false).await.0.expect("there is space");
        }
        let streams = lab.volume("streams", 1024).await;
        for at in 0..8 {
            streams.write(at << 20, stamp(0, 64), false).await.0.expect("there is space");
        }
        lab.pool.checkpoint().await.expect("it succeeds");
        let free = lab.pool.info().unused;
        let greedy = lab.volume("greedy", 1024).await;
        let mut at = 0;
        while greedy.write(at << 16, stamp(at, 16), false).await.0.is_ok() {
            at += 1;
        }
        assert!(at << 16 >= free * 9 / 10, "{} of {free} bytes were to be had", at << 16);
    });
}

#[test]
fn a_write_that_does_not_fit_leaves_the_room_to_one_that_does() {
    Lab::run(16, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("volume", 64).await;
        // Each takes parts of two blocks, and the last one finds space for its first part only.
        let mut at = 128;
        while volume.write(at * 4096, stamp(at, 256), false).await.0.is_ok() {
            at += 256;
        }
        lab.pool.checkpoint().await.expect("it succeeds");
        let free = lab.pool.info().unused;
        for _ in 0..20 {
            volume.write(at * 4096, stamp(at, 256), false).await.0.expect_err("it does not fit");
        }
        assert_eq!(lab.pool.info().unused, free, "nothing is kept for it");
    });
}

#[test]
fn a_pool_that_is_closed_just_behind_a_deletion_is_marked_clean() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("volume", 40).await;
        lab.fill(&volume).await;
        drop(volume);
        lab.pool.delete(&["volume"]).await.expect("it is deleted");
        lab.pool.close().await.expect("it is closed");
        assert!(lab.pool.info().clean);
        let options = OpenOptions::default();
        let pool = forkdisk::Pool::open(lab.tape.clone(), std::rc::Rc::new(lab.tasks.clone()), options).await;
        let pool = pool.expect("it opens");
        pool.wait_freed().await.expect("it settles");
        assert!(pool.info().used < 12 << 20, "the next open gave it back: {}", pool.info().used);
    });
}

#[test]
fn tables_and_the_directory_are_one_request_of_a_checkpoint() {
    Lab::run(256, OpenOptions::default(), |lab| async move {
        let clone = clone_of_a_full_volume(&lab, 64).await;
        for round in 0..3 {
            for at in places(64 * 256, 20) {
                clone.write(at * 4096, stamp(at, 1), false).await.0.expect("there is space");
            }
            lab.pool.clone_volume("clone", &round.to_string(), 0).await.expect("a clone");
            let before = lab.pool.statistics();
            lab.pool.checkpoint().await.expect("it succeeds");
            let after = lab.pool.statistics();
            let (written, was) = (after.metadata.write, before.metadata.write);
            // With the log of counts and two superblocks.
            assert_eq!((written.count - was.count, after.flushes - before.flushes), (4, 3), "{written:?} {was:?}");
            assert!(written.bytes - was.bytes > 8 * 4096, "{written:?} {was:?}");
        }
    });
}

#[test]
fn random_writes_of_several_chunks_lie_one_behind_the_other() {
    for (chunk, pages) in [(64 << 10, 32), (32 << 10, 16), (16 << 10, 8)] {
        Lab::run(256, OpenOptions::default(), move |lab| async move {
            let volume = lab.volume("v", 128).await;
            lab.pool.set_chunk("v", chunk).await.expect("set");
            lab.tape.take();
            let (mut blocks, mut reserved) = (BTreeSet::new(), BTreeSet::new());
            let aligned = chunk / 4096;
            for at in places((128 * 256 - 64) / aligned, 64).map(|place| place * aligned) {
                volume.write(at * 4096, stamp(at, pages), false).await.0.expect("there is space");
                blocks.extend(lab.tape.take().0.iter().map(|page| page.at / 256));
                reserved.extend((at..at + pages as u64).map(|page| page * 4096 / chunk));
            }
            let needed = reserved.len() as u64 * chunk / (1 << 20) + 1;
            assert!(blocks.len() as u64 <= needed + 2, "{} blocks of {needed} for {chunk}, {pages}", blocks.len());
        });
    }
}

#[test]
fn space_of_what_a_snapshot_still_has_is_neither_free_nor_about_to_be() {
    Lab::run(128, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("volume", 32).await;
        lab.fill(&volume).await;
        lab.pool.snapshot(&[("volume", "then")], 0).await.expect("a snapshot");
        lab.pool.checkpoint().await.expect("it succeeds");
        let before = lab.pool.info();
        for at in places(32 * 256, 2048) {
            volume.write(at * 4096, stamp(at, 1), false).await.0.expect("there is space");
        }
        let now = lab.pool.info();
        let (written, more) = (2048 * 4096, now.used - before.used);
        assert!(more >= written, "{written} bytes were written over what a snapshot has, and {more} more are in use");
        lab.pool.checkpoint().await.expect("it succeeds");
        let after = lab.pool.info();
        assert!(
            after.used.abs_diff(now.used) < 1 << 20,
            "{} bytes in use, {} after a checkpoint",
            now.used,
            after.used
        );
        // Exclusive pages are freed.
        volume.discard(0, 32 << 20).await.expect("it succeeds");
        let gone = lab.pool.info().freeing;
        assert!((written..written + (1 << 20)).contains(&gone), "{gone} bytes are given up, {written} were written");
    });
}
