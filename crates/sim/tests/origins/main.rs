//! Origins in numbers: the cost of a write, a read and a deletion, and what is refused. Requests are counted
//! on the pool's disk and the origin's.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod lab;
mod meanwhile;
mod order;
mod recognised;
mod rollback;
mod soon;

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;

use forkdisk::{Buf, CreateOptions, DiffClass, ErrorKind, OpenOptions, OriginFull, OriginPlace, Pool, ProtectOptions};
use forkdisk_sim::disk::{Config, Crash, Medium, SimDisk, Volatile};

use lab::{CHAINED, CHUNK, MIB, PATIENCE_STEPS, at_step, options, restarted, run, run_seeded, run_with};

#[test]
fn a_sequential_write_costs_one_read_and_two_writes_and_few_flushes() {
    run(64 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        // What was written since the open is known.
        w.write("org", 0, 32 * MIB, 1).await;
        w.snapshot("s", CHAINED).await;
        let bytes = 32 * MIB;
        let (pool, origin) = w
            .counts(async {
                for at in (0..bytes).step_by(64 << 10) {
                    w.write("org", at, 64 << 10, 2).await;
                }
            })
            .await;
        assert_eq!((origin.bytes_read, origin.bytes_written), (bytes, bytes));
        assert!(pool.bytes_written < bytes + bytes / 50, "{pool:?}: copies, and little beside");
        assert!(pool.bytes_read < 64 << 10, "{pool:?}: counts only");
        // 8 MiB at a time once it runs: one flush of the pool for each batch, none of the origin.
        assert!(pool.flushes <= 14 && origin.flushes == 0, "{pool:?} {origin:?}");
        assert_eq!(w.byte("org@s", 4096, MIB).await, 1);
        assert_eq!(w.byte("org", 4096, MIB).await, 2);
    });
}

/// Runs all of them, each begun behind the one before it.
async fn in_order<const N: usize>(work: [impl Future<Output = ()>; N]) {
    let mut left: Vec<_> = work.into_iter().map(Box::pin).collect();
    poll_fn(|cx| {
        left.retain_mut(|one| one.as_mut().poll(cx).is_pending());
        if left.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[test]
fn who_comes_while_a_copy_is_under_way_shares_its_commit() {
    run(64 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        w.write("org", 0, 32 * MIB, 1).await;
        w.snapshot("s", CHAINED).await;
        w.write("org", 30 * MIB, 4096, 1).await;
        // As a file system writes a file: nearly of maximum size, and not aligned to chunks.
        let lengths = [MIB, MIB / 3 / 4096 * 4096, MIB, MIB, MIB - 4096, MIB, MIB, MIB];
        let (pool, origin) = w
            .counts(async {
                let mut at = 0;
                let writes = lengths.map(|len| {
                    at += len;
                    w.write("org", at - len, len, 2)
                });
                in_order(writes).await;
            })
            .await;
        let bytes = lengths.iter().sum::<u64>();
        assert_eq!(pool.flushes, 1, "{pool:?}");
        assert_eq!((origin.bytes_read, origin.bytes_written), (bytes.next_multiple_of(CHUNK), bytes));
        assert_eq!((w.byte("org@s", 0, 8 * MIB).await, w.byte("org", 0, bytes).await), (1, 2));
    });
}

#[test]
fn writers_at_random_places_share_commits() {
    const WRITERS: usize = 16;
    const ROUNDS: u64 = 8;
    run(64 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        w.write("org", 0, 32 * MIB, 1).await;
        w.snapshot("s", CHAINED).await;
        w.write("org", 31 * MIB, 4096, 1).await;
        let (pool, origin) = w
            .counts(async {
                // Each chunk once, never two that are neighbours in a row.
                let writers: [_; WRITERS] = std::array::from_fn(|i| {
                    let w = &w;
                    async move {
                        for round in 0..ROUNDS {
                            let chunk = (round * WRITERS as u64 + i as u64) * 77 % 256;
                            w.write("org", chunk * 2 * CHUNK % (30 * MIB), 4096, 2).await;
                        }
                    }
                });
                in_order(writers).await;
            })
            .await;
        let copies = origin.bytes_read / CHUNK;
        assert!(copies >= 100, "{copies}");
        assert!(pool.flushes * 8 <= copies, "{copies} copies, {pool:?}");
        assert_eq!(w.byte("org@s", 0, 8 * MIB).await, 1);
    });
}

#[test]
fn the_first_write_behind_a_snapshot_reads_nothing_of_the_pool() {
    run(256 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        // Beside the first: all space that is known to be free is allocated.
        for i in 0..40u32 {
            w.snapshot(&format!("s{i}"), CHAINED).await;
            let (pool, _) = w.counts(w.write("org", u64::from(i) * MIB / 2, CHUNK, 1)).await;
            assert_eq!(pool.reads, 0, "{i}: {pool:?}");
        }
    });
}

#[test]
fn a_write_behind_a_copy_does_not_wait_for_the_one_before_it_to_be_made() {
    run(64 * MIB, 8 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        w.snapshot("s", CHAINED).await;
        // They share a chunk, and the first is slow.
        w.disks[1].slow_down(4096..8192);
        let order = RefCell::new(Vec::new());
        let write = async |start: u64, end: u64| {
            w.write("org", start, end - start, 2).await;
            order.borrow_mut().push(start);
        };
        let writes = [write(4096, MIB + 4096), write(MIB + 4096, 2 * MIB)];
        in_order(writes).await;
        assert_eq!(order.into_inner(), [MIB + 4096, 4096]);
        assert_eq!(w.byte("org@s", 0, 2 * MIB).await, 0);
    });
}

#[test]
fn a_thousand_chained_snapshots_cost_a_write_what_one_does() {
    let cost = |snapshots: u32| {
        let sum = Rc::new(std::cell::Cell::new((0, 0, 0)));
        let out = Rc::clone(&sum);
        run(128 * MIB, 8 * MIB, options(0, OriginFull::Error), move |w| async move {
            w.write("org", 0, 8 * MIB, 3).await;
            for i in 0..snapshots {
                w.snapshot(&format!("s{i}"), CHAINED).await;
                w.write("org", u64::from(i % 64) * CHUNK, 512, 1).await;
            }
            w.snapshot("last", CHAINED).await;
            w.pool.checkpoint().await.unwrap();
            let (pool, origin) = w
                .counts(async {
                    for i in 0..32 {
                        w.write("org", i * 3 % 128 * CHUNK, 4096, 2).await;
                    }
                })
                .await;
            out.set((pool.bytes_written, pool.flushes, origin.bytes_read + origin.bytes_written));
        });
        sum.get()
    };
    let (one, thousand) = (cost(1), cost(1000));
    assert_eq!((one.1, one.2), (thousand.1, thousand.2));
    assert!(thousand.0 * 100 <= one.0 * 103, "{one:?} {thousand:?}");
}

#[test]
fn independent_snapshots_have_a_copy_each() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        let independent = CHAINED.with_independent(true);
        for i in 0..4 {
            w.snapshot(&format!("s{i}"), independent).await;
        }
        let (pool, origin) = w.counts(w.write("org", 0, CHUNK, 9)).await;
        assert!((4 * CHUNK..5 * CHUNK).contains(&pool.bytes_written), "{pool:?}");
        assert_eq!((origin.bytes_read, origin.bytes_written), (CHUNK, CHUNK));
        w.pool.delete(&["org@s1", "org@s3"]).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        assert_eq!((w.byte("org@s0", 0, CHUNK).await, w.byte("org@s2", 0, CHUNK).await), (0, 0));
    });
}

#[test]
fn deleting_costs_what_the_snapshot_alone_holds_and_moves_no_data() {
    run(128 * MIB, 32 * MIB, options(0, OriginFull::Error), |w| async move {
        for (name, chunks) in [("many", 400), ("few", 2), ("none", 0)] {
            w.snapshot(name, CHAINED).await;
            for i in 0..chunks {
                w.write("org", i * CHUNK, 4096, 1).await;
            }
        }
        w.pool.checkpoint().await.unwrap();
        let (few, origin) = w
            .counts(async {
                w.pool.delete(&["org@few"]).await.unwrap();
                w.pool.wait_freed().await.unwrap();
            })
            .await;
        assert!(few.bytes_written < 300 << 10, "{few:?}");
        assert_eq!((origin.bytes_read, origin.bytes_written), (0, 0));
        assert_eq!(w.byte("org@many", 0, 32 * MIB).await, 0);
        assert_eq!(w.byte("org@none", 0, 4096).await, 1);
    });
}

#[test]
fn used_space_is_what_is_kept_and_all_of_it_comes_back() {
    run(128 * MIB, 16 * MIB, options(0, OriginFull::Error), |w| async move {
        let empty = w.pool.info().used;
        w.snapshot("a", CHAINED).await;
        for i in 0..32 {
            w.write("org", i * CHUNK, 512, 1).await;
        }
        w.snapshot("b", CHAINED).await;
        for i in 0..8 {
            w.write("org", i * CHUNK, 512, 2).await;
        }
        assert_eq!(w.pool.find("org@a").unwrap().referenced, 32 * CHUNK);
        assert_eq!(w.pool.find("org@b").unwrap().referenced, 8 * CHUNK);
        assert_eq!(w.pool.usage("org@a").await.unwrap().exclusive, 32 * CHUNK);
        // Exceptions that only b needs are freed; the rest goes to a, which has all of it already.
        assert_eq!(w.pool.usage("org@b").await.unwrap().exclusive, 8 * CHUNK);
        w.write("org", 100 * CHUNK, 512, 3).await;
        assert_eq!(w.pool.usage("org@b").await.unwrap().exclusive, 8 * CHUNK, "a needs the last one");
        w.pool.delete(&["org@b"]).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        assert_eq!(w.pool.find("org@a").unwrap().referenced, 33 * CHUNK);
        assert_eq!(w.byte("org@a", 0, 16 * MIB).await, 0);
        w.pool.unprotect("org", true).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        assert!(w.pool.info().used <= empty, "{} {empty}", w.pool.info().used);
    });
}

#[test]
fn snapshots_compare_by_what_is_kept() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        w.snapshot("a", CHAINED).await;
        w.write("org", 5 * CHUNK, 4096, 1).await;
        w.snapshot("b", CHAINED).await;
        w.write("org", 9 * CHUNK, 4096, 1).await;
        let changed = |runs: Vec<forkdisk::DiffRun>| {
            let different = runs.into_iter().filter(|r| r.class != DiffClass::Same);
            different.map(|r| (r.offset / CHUNK, r.len / CHUNK)).collect::<Vec<_>>()
        };
        assert_eq!(changed(w.pool.diff("org@a", "org@b").await.unwrap()), [(5, 1)]);
        assert_eq!(changed(w.pool.diff("org@a", "org").await.unwrap()), [(5, 1), (9, 1)]);
        assert_eq!(changed(w.pool.diff("org@b", "org").await.unwrap()), [(9, 1)]);
        w.pool.clone_volume("org@a", "c", 1).await.unwrap();
        assert_eq!(changed(w.pool.diff("org@a", "c").await.unwrap()), []);
    });
}

#[test]
fn a_clone_falls_through_to_its_snapshot_and_holds_it() {
    run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), |w| async move {
        w.write("org", 0, 8 * MIB, 1).await;
        w.snapshot("s", CHAINED).await;
        w.pool.clone_volume("org@s", "c", 1).await.unwrap();
        w.write("org", 0, 8 * MIB, 2).await;
        w.write("c", 4096, 4096, 3).await;
        w.write("c", MIB + 100, 1000, 4).await;
        assert_eq!(w.byte("c", 0, 4096).await, 1);
        assert_eq!(w.byte("c", 4096, 4096).await, 3);
        assert_eq!(w.byte("c", 8192, 8192).await, 1);
        assert_eq!((w.byte("c", MIB, 100).await, w.byte("c", MIB + 100, 1000).await), (1, 4));
        assert_eq!(w.byte("c", MIB + 1100, 4000).await, 1);
        assert_eq!(w.byte("org@s", 0, 8 * MIB).await, 1);
        let held = w.pool.delete(&["org@s"]).await.unwrap_err();
        assert_eq!(held.kind(), ErrorKind::Busy);
        assert!(held.to_string().contains("\"c\""), "{held}");
        assert_eq!(w.pool.unprotect("org", true).await.unwrap_err().kind(), ErrorKind::Busy);
        w.pool.delete(&["c", "org@s"]).await.unwrap();
        assert_eq!(w.pool.clone_volume("org", "d", 1).await.unwrap_err().kind(), ErrorKind::Invalid);
    });
}

#[test]
fn one_instant_for_an_origin_and_a_volume_of_the_pool() {
    run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), |w| async move {
        w.pool.create("vol", &CreateOptions::new(MIB, 1)).await.unwrap();
        w.pool.snapshot(&[("org", "x"), ("vol", "x")], 1).await.unwrap();
        w.write("org", 0, 4096, 1).await;
        w.write("vol", 0, 4096, 1).await;
        assert_eq!((w.byte("org@x", 0, 4096).await, w.byte("vol@x", 0, 4096).await), (0, 0));
        let flags = CHAINED.with_independent(true);
        let refused = w.pool.snapshot_with(&[("vol", "y")], flags, 1).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn a_full_pool_stops_the_write_and_leaves_origin_and_snapshots_as_they_are() {
    run(9 * MIB, 16 * MIB, options(MIB, OriginFull::Error), |w| async move {
        w.snapshot("s", CHAINED).await;
        let volume = w.pool.volume("org").unwrap();
        let mut written = 0;
        let full = loop {
            match volume.write(written * CHUNK, Buf::copy_of(&vec![1; CHUNK as usize]), false).await.0 {
                Ok(()) => written += 1,
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert!(written > 16, "{written} chunks of {CHUNK}");
        assert_eq!(w.byte("org@s", 0, 16 * MIB).await, 0);
        assert_eq!(w.byte("org", written * CHUNK, CHUNK).await, 0, "nothing is written without its copy");
        // Chunks with exceptions can be written again.
        w.write("org", 0, written * CHUNK, 2).await;
        w.pool.delete(&["org@s"]).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        w.write("org", written * CHUNK, CHUNK, 3).await;
    });
}

#[test]
fn a_write_is_not_refused_for_tables_that_it_does_not_need() {
    let small = options(0, OriginFull::Error).with_chunk(4096);
    run(11 * MIB, 4 * MIB, small, |w| async move {
        let independent = CHAINED.with_independent(true);
        for name in ["a", "b", "c", "d", "e"] {
            w.snapshot(name, independent).await;
        }
        w.pool.create("v", &CreateOptions::new(8 * MIB, 1)).await.unwrap();
        let mut at = 0;
        while w.pool.info().unused > 5 * MIB {
            w.write("v", at, CHUNK, 1).await;
            at += CHUNK;
        }
        // 60 chunks with an exception of each of the five snapshots: 1.2 MiB.
        w.write("org", 2 * MIB, 240 << 10, 2).await;
        assert_eq!(w.byte("org@e", 2 * MIB, 240 << 10).await, 0);
    });
}

#[test]
fn the_oldest_snapshot_that_may_be_is_dropped_and_no_other() {
    run(9 * MIB, 16 * MIB, options(MIB, OriginFull::DropOldest), |w| async move {
        let droppable = CHAINED.with_droppable(true);
        w.snapshot("old", droppable).await;
        w.write("org", 0, 2 * MIB, 1).await;
        w.snapshot("keep", CHAINED).await;
        w.write("org", 0, MIB, 2).await;
        let volume = w.pool.volume("org").unwrap();
        let mut at = 2 * MIB;
        let full = loop {
            match volume.write(at, Buf::copy_of(&vec![3; CHUNK as usize]), false).await.0 {
                Ok(()) => at += CHUNK,
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert_eq!(w.pool.find("org@old").unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(w.byte("org@keep", 0, 2 * MIB).await, 1);
        assert_eq!(w.byte("org@keep", 2 * MIB, 8 * MIB).await, 0);
    });
}

#[test]
fn another_device_and_one_that_was_changed_are_refused() {
    run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), |w| async move {
        w.write("org", 0, MIB, 1).await;
        let volume = w.pool.volume("org").unwrap();
        assert_eq!(w.pool.detach_origin("org", || 0).await.unwrap_err().kind(), ErrorKind::Busy);
        drop(volume);
        w.pool.detach_origin("org", || 77).await.unwrap();
        assert_eq!(w.pool.volume("org").map(drop).unwrap_err().kind(), ErrorKind::Busy);
        let config = Config { sector: 512, cache: Volatile::Yes };
        let other = |len| SimDisk::new(Medium::blank(config, len), &w.exec, len);
        for (device, modified, what) in [
            (other(4 * MIB), 77, "bytes instead of"),
            (other(8 * MIB), 77, "contents have changed"),
            (w.disks[1].clone(), 78, "written since"),
        ] {
            let refused = w.pool.attach_origin("org", device, &OriginPlace::at("/dev/x", modified)).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy);
            assert!(refused.to_string().contains(what), "{refused}");
        }
        w.pool.attach_origin("org", w.disks[1].clone(), &OriginPlace::at("/dev/y", 77)).await.unwrap();
        assert_eq!(w.pool.origins()[0].path, "/dev/y");
        assert_eq!(w.byte("org", 0, MIB).await, 1);
    });
}

#[test]
fn bad_options_change_nothing() {
    run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), |w| async move {
        let bad = |change: fn(&mut ProtectOptions)| {
            let mut bad = options(MIB, OriginFull::Error);
            change(&mut bad);
            bad
        };
        for options in [
            bad(|o| o.chunk = 2048),
            bad(|o| o.chunk = 2 << 20),
            bad(|o| o.copy_ahead = 2 << 30),
            bad(|o| o.place.path = "x".repeat(400)),
        ] {
            let refused = w.pool.protect("other", w.disks[1].clone(), &options).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        }
        let taken = w.pool.protect("org", w.disks[1].clone(), &options(MIB, OriginFull::Error)).await.unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::Exists);
        for refused in [
            w.pool.delete(&["org"]).await.unwrap_err(),
            w.pool.resize("org", MIB).await.unwrap_err(),
            w.pool.set_chunk("org", 4096).await.unwrap_err(),
        ] {
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        }
    });
}

#[test]
fn a_large_range_is_looked_through_once_however_small_the_cache_is() {
    // 8,192 exceptions: some 130 pages of the ordered map, of which the cache holds a dozen.
    let small = OpenOptions::default().with_cache(64 << 10);
    let mut protect = options(0, OriginFull::Error);
    protect.chunk = 4096;
    run_with(small, 128 * MIB, 32 * MIB, protect, |w| async move {
        w.snapshot("a", CHAINED).await;
        for at in (0..32 * MIB).step_by(2 * 4096) {
            w.write("org", at, 4096, 1).await;
        }
        w.snapshot("b", CHAINED).await;
        for at in (0..32 * MIB).step_by(4096) {
            w.write("org", at, 4096, 2).await;
        }
        w.pool.checkpoint().await.unwrap();
        let (kept, _) = w.counts(w.write("org", 0, 32 * MIB, 3)).await;
        assert!(kept.reads < 1000, "looking for what is not kept: {kept:?}");
        let (pool, name) = (w.pool.clone(), "org@b");
        let (counted, _) = w
            .counts(async move {
                // Every other chunk is a's as well.
                assert_eq!(pool.usage(name).await.unwrap().exclusive, 16 * MIB);
            })
            .await;
        assert!(counted.reads < 40_000, "counting what a deletion frees: {counted:?}");
        w.snapshot("c", CHAINED).await;
        let (fresh, origin) = w.counts(w.write("org", 0, 16 * MIB, 4)).await;
        assert!(fresh.reads < 1500, "counting what is to be kept: {fresh:?}");
        assert_eq!(origin.bytes_read, 16 * MIB);
        assert_eq!(w.byte("org@c", 0, 16 * MIB).await, 3);
    });
}

#[test]
fn a_writable_snapshot_keeps_to_itself_what_is_written_to_it() {
    run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), |w| async move {
        let writable = CHAINED.with_writable(true);
        w.snapshot("old", CHAINED).await;
        w.snapshot("s", writable).await;
        w.write("org@s", 4096, 4096, 7).await;
        w.write("org@s", MIB + 100, 1000, 8).await;
        w.write("org", 0, 2 * MIB, 1).await;
        w.pool.clone_volume("org@s", "c", 1).await.unwrap();
        w.write("org@s", 4096, 4096, 9).await;
        assert_eq!((w.byte("org@s", 0, 4096).await, w.byte("org@s", 4096, 4096).await), (0, 9));
        assert_eq!((w.byte("org@s", MIB, 100).await, w.byte("org@s", MIB + 100, 1000).await), (0, 8));
        assert_eq!((w.byte("org@old", 0, 8 * MIB).await, w.byte("org", 0, 2 * MIB).await), (0, 1));
        assert_eq!(w.byte("c", 4096, 4096).await, 7, "as it was when it was cloned");
        // 2 MiB that were overwritten in the origin, and three pages: one of them written twice, once for the
        // clone.
        assert_eq!(w.pool.find("org@s").unwrap().referenced, 2 * MIB + 2 * 4096);
        assert_eq!(w.pool.find("c").unwrap().referenced, 2 * 4096);
        let fixed = w.pool.volume("org@old").unwrap();
        assert_eq!(fixed.write(0, Buf::zeroed(4096), false).await.0.unwrap_err().kind(), ErrorKind::ReadOnly);
        let handle = w.pool.volume("org@s").unwrap();
        assert_eq!(handle.set_size(16 * MIB).await.unwrap_err().kind(), ErrorKind::ReadOnly);
        drop((fixed, handle));
        w.pool.delete(&["c", "org@s"]).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        assert_eq!(w.byte("org@old", 0, 8 * MIB).await, 0, "what it needs was handed on");
        let plain = w.pool.create("v", &forkdisk::CreateOptions::new(MIB, 1)).await.unwrap();
        assert!(!plain.is_origin());
        let refused = w.pool.snapshot_with(&[("v", "x")], writable, 1).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn a_checkpoint_between_a_dead_snapshots_map_and_its_exceptions_leaves_a_whole_pool() {
    run(64 * MIB, 16 * MIB, options(0, OriginFull::Error), |w| async move {
        w.snapshot("s", CHAINED.with_writable(true)).await;
        for i in 0..200 {
            w.write("org", i * CHUNK, 4096, 1).await;
        }
        // Its map has tables that no checkpoint has placed when it is deleted.
        w.write("org@s", 0, 8192, 2).await;
        w.pool.delete(&["org@s"]).await.unwrap();
        // The first step of the reaper: it frees the map, and few of the exceptions.
        while w.pool.info().freeing < CHUNK {
            w.byte("org", 0, 4096).await;
        }
        assert!(w.pool.info().freeing < 100 * CHUNK, "the deletion has not ended");
        for round in 0..10 {
            w.pool.checkpoint().await.unwrap();
            let media = w.disks.each_ref().map(|disk| disk.freeze(Crash::Kill).crash(0));
            let (exec, [device, _], runtime) = restarted(media, round);
            let opened = exec.run(PATIENCE_STEPS, async move {
                let pool = Pool::open(device, runtime, OpenOptions::default()).await?;
                pool.wait_freed().await?;
                pool.check().await
            });
            let report = opened.unwrap().unwrap_or_else(|e| panic!("after {round} checkpoints: {e}"));
            assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
            exec.halt();
        }
    });
}

#[test]
fn a_large_read_of_a_snapshot_ends_however_small_the_cache_is() {
    let protect = options(0, OriginFull::Error).with_chunk(4096);
    let open = OpenOptions::default().with_cache(64 << 10).with_dirty(64 << 10);
    run_with(open, 128 * MIB, 32 * MIB, protect, |w| async move {
        w.write("org", 0, 32 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        for i in (0..8192).step_by(2) {
            w.write("org", i * 4096, 4096, 2).await;
        }
        w.pool.checkpoint().await.unwrap();
        assert_eq!(w.byte("org@a", 0, 32 * MIB).await, 1);
    });
}

#[test]
fn a_write_that_needs_what_a_checkpoint_is_bringing_back_waits_for_it() {
    for (seed, step) in (0..24).flat_map(|seed| (0..120).step_by(3).map(move |step| (seed, step))) {
        let open = OpenOptions::default();
        run_seeded(seed, open, 16 * MIB, 4 * MIB, options(MIB, OriginFull::Error), move |w| async move {
            w.snapshot("s", CHAINED).await;
            for name in ["fill", "small"] {
                w.pool.create(name, &CreateOptions::new(64 * MIB, 1)).await.unwrap();
            }
            w.pool.wait_freed().await.unwrap();
            let fill = w.pool.info().unused - 112 * 4096;
            w.write("fill", 0, fill, 1).await;
            w.pool.wait_freed().await.unwrap();
            w.pool.delete(&["fill"]).await.unwrap();
            while w.pool.info().freeing < fill {
                w.byte("org", 0, 4096).await;
            }
            let (pool, clock, start) = (&w.pool, &w.exec, w.exec.steps());
            let work = async |is_checkpoint: bool| match is_checkpoint {
                true => pool.checkpoint().await.unwrap(),
                false => {
                    at_step(clock, start + step).await;
                    // With something to commit.
                    w.write("small", 0, 4096, 1).await;
                    w.write("org", MIB, MIB, 2).await;
                }
            };
            in_order([work(true), work(false)]).await;
        });
    }
}
