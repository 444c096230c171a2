//! Rolling an origin back: what is moved, what stays, and what is durable when.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{Buf, CreateOptions, ErrorKind, OpenOptions, OriginFull, OriginPlace, Pool};
use forkdisk_sim::disk::{Crash, Fault, ReadDamage, Request, When};

use crate::lab::{CHAINED, CHUNK, MIB, PATIENCE_STEPS, at_step, options, restarted, run, run_with};

#[test]
fn a_rollback_moves_what_differs_and_no_more() {
    run(64 * MIB, 32 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, 8 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 2 * MIB, 4 * MIB, 2).await;
        w.snapshot("b", CHAINED).await;
        let changed = 4 * MIB;
        let (pool, origin) = w
            .counts(async {
                w.pool.rollback("org", "a").await.unwrap();
                w.pool.wait_rollback("org", |_, _| true).await.unwrap();
            })
            .await;
        assert_eq!(origin.bytes_written, changed, "what differs comes back");
        assert_eq!(origin.bytes_read, changed, "what newer snapshots need of it is kept");
        assert!((changed..changed + MIB).contains(&pool.bytes_written), "{pool:?}");
        assert!((changed..changed + MIB).contains(&pool.bytes_read), "{pool:?}");
        // The second time nothing needs to be copied out, and the written data equals what is there.
        assert_eq!(w.byte("org", 0, 8 * MIB).await, 1);
        w.pool.rollback("org", "b").await.unwrap();
        w.pool.wait_rollback("org", |_, _| true).await.unwrap();
        assert_eq!(w.byte("org", 2 * MIB, 4 * MIB).await, 2);
        assert_eq!(w.byte("org@a", 0, 8 * MIB).await, 1);
        assert_eq!(w.byte("org@b", 2 * MIB, 4 * MIB).await, 2);
    });
}

#[test]
fn writes_during_a_rollback_stay_and_the_next_rollback_ignores_them() {
    let protect = options(0, OriginFull::Error).with_chunk(4096);
    // Hardly any page of the map of exceptions stays in memory.
    let open = OpenOptions::default().with_cache(64 << 10).with_dirty(64 << 10);
    run_with(open, 128 * MIB, 32 * MIB, protect, |w| async move {
        w.write("org", 0, 32 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, 32 * MIB, 2).await;
        w.snapshot("b", CHAINED).await;
        let refused = |error: forkdisk::Error| error.kind() == ErrorKind::Busy;
        w.pool.checkpoint().await.unwrap();
        w.pool.check().await.unwrap();
        w.pool.rollback("org", "a").await.unwrap();
        assert!(w.pool.rollback("org", "b").await.is_err_and(refused), "one at a time");
        assert!(w.pool.snapshot(&[("org", "c")], 1).await.is_err_and(refused));
        assert!(w.pool.delete(&["org@a"]).await.is_err_and(refused));
        assert!(w.pool.unprotect("org", true).await.is_err_and(refused));
        assert_eq!(w.pool.origins()[0].rolling.as_deref(), Some("org@a"));
        // Chunks far from each other, so that lists of several kinds are created and removed, from the end
        // on.
        let places: Vec<u64> = (0..40).map(|i| (39 - i) * 200 * 4096).collect();
        for &at in &places {
            w.write("org", at, 512, 3).await;
            assert_eq!(w.byte("org", at, 512).await, 3);
            assert_eq!(w.byte("org", at + 512, 4096).await, 1);
        }
        w.pool.wait_rollback("org", |_, _| true).await.unwrap();
        assert_eq!(w.pool.origins()[0].rolling, None);
        for &at in &places {
            assert_eq!(w.byte("org", at, 512).await, 3);
            assert_eq!(w.byte("org", at + 512, 4096).await, 1);
        }
        w.pool.rollback("org", "b").await.unwrap();
        assert_eq!(w.byte("org", 0, 32 * MIB).await, 2, "at once");
        w.pool.wait_rollback("org", |_, _| true).await.unwrap();
        assert_eq!(w.byte("org", 0, 32 * MIB).await, 2);
        w.pool.unprotect("org", true).await.unwrap();
        w.pool.wait_freed().await.unwrap();
    });
}

#[test]
fn a_rollback_survives_closing_and_waits_for_room() {
    run(24 * MIB, 16 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, 8 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, 8 * MIB, 2).await;
        w.snapshot("b", CHAINED).await;
        // There is not enough space for what "b" needs beside this.
        w.pool.create("filler", &CreateOptions::new(8 * MIB, 1)).await.unwrap();
        w.write("filler", 0, 7 * MIB, 9).await;
        w.pool.rollback("org", "a").await.unwrap();
        let full = w.pool.wait_rollback("org", |_, _| true).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert_eq!(w.byte("org", 0, 8 * MIB).await, 1, "it shows the snapshot all the same");
        w.pool.detach_origin("org", || 5).await.unwrap();
        w.pool.attach_origin("org", w.disks[1].clone(), &OriginPlace::at("/dev/x", 5)).await.unwrap();
        assert_eq!(w.byte("org", 0, 8 * MIB).await, 1);
        w.pool.delete(&["filler"]).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        while w.pool.wait_rollback("org", |_, _| true).await.is_err() {}
        assert_eq!(w.byte("org", 0, 8 * MIB).await, 1);
        assert_eq!(w.byte("org@b", 0, 8 * MIB).await, 2);
    });
}

#[test]
fn no_snapshot_is_dropped_because_the_origins_own_device_is_full() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::DropOldest), |w| async move {
        w.write("org", 0, MIB, 1).await;
        w.snapshot("old", CHAINED.with_droppable(true)).await;
        w.write("org", 0, MIB, 2).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, MIB, 3).await;
        w.disks[1].arm(Fault { on: Request::Write, harm: ReadDamage::Enospc, when: When::From(1), within: None });
        w.pool.rollback("org", "a").await.unwrap();
        for _ in 0..3 {
            let full = w.pool.wait_rollback("org", |_, _| true).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::NoSpace);
        }
        w.disks[1].disarm();
        while w.pool.wait_rollback("org", |_, _| true).await.is_err() {}
        for (name, byte) in [("org", 2), ("org@a", 2), ("org@old", 1)] {
            assert_eq!(w.byte(name, 0, MIB).await, byte, "{name}");
        }
    });
}

#[test]
fn nothing_is_brought_back_before_it_is_durable_that_the_rollback_has_begun() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, MIB, 2).await;
        w.pool.volume("org").unwrap().flush().await.unwrap();
        w.disks[0].slow_flushes();
        let (pool, writer) = (w.pool.clone(), w.clone());
        w.exec.spawn(Box::pin(async move { pool.rollback("org", "a").await.unwrap() }));
        for _ in 0..200 {
            w.byte("org@a", 0, 4096).await;
        }
        assert!(w.pool.origins()[0].rolling.is_some(), "it has begun");
        // A write to a chunk that must be restored first.
        w.exec.spawn(Box::pin(async move { writer.write("org", 0, 512, 3).await }));
        // Flushes do not end meanwhile.
        for _ in 0..200 {
            w.byte("org@a", 0, 4096).await;
        }
        for (pool_mask, origin_mask) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let frozen = w.disks.each_ref().map(|disk| disk.freeze(Crash::Power));
            let media = [frozen[0].crash(pool_mask), frozen[1].crash(origin_mask)];
            let (exec, [device, origin], runtime) = restarted(media, 2 * pool_mask + origin_mask);
            let expected = exec.run(PATIENCE_STEPS, async move {
                let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
                let expected = if pool.origins()[0].rolling.is_some() { 1 } else { 2 };
                pool.attach_origin("org", origin, &OriginPlace::at("/dev/x", 0)).await.unwrap();
                let volume = pool.volume("org").unwrap();
                let (result, buf) = volume.read(4096, Buf::zeroed(MIB as usize - 4096)).await;
                result.unwrap();
                buf.iter().all(|&byte| byte == expected)
            });
            assert!(expected.unwrap(), "{pool_mask} {origin_mask}");
            exec.halt();
        }
    });
}

#[test]
fn a_snapshot_is_not_written_before_it_is_durable_that_the_rollback_to_it_has_ended() {
    run(64 * MIB, 4 * CHUNK, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, 4 * CHUNK, 1).await;
        w.snapshot("a", CHAINED.with_writable(true)).await;
        // A separate page, which is written in place from now on.
        w.write("org@a", 0, 4096, 2).await;
        w.pool.volume("org@a").unwrap().flush().await.unwrap();
        w.pool.rollback("org", "a").await.unwrap();
        while w.pool.origins()[0].rolling.is_some() {
            at_step(&w.exec, w.exec.steps() + 1).await;
        }
        // Its end is not durable yet, and will not be while reads are running.
        w.disks[0].slow_flushes();
        let (done, writer) = (Rc::new(Cell::new(false)), w.clone());
        let noted = done.clone();
        w.exec.spawn(Box::pin(async move {
            writer.write("org@a", 0, 4096, 3).await;
            noted.set(true);
        }));
        for _ in 0..200 {
            w.byte("org@a", CHUNK, 4096).await;
        }
        let media = w.disks.each_ref().map(|disk| disk.freeze(Crash::Kill).crash(0));
        let (exec, [device, origin], runtime) = restarted(media, 1);
        let byte = exec.run(PATIENCE_STEPS, async move {
            let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
            pool.attach_origin("org", origin, &OriginPlace::at("/dev/x", 0)).await.unwrap();
            let (result, buf) = pool.volume("org").unwrap().read(0, Buf::zeroed(4096)).await;
            result.unwrap();
            buf[0]
        });
        assert_eq!((byte.unwrap(), done.get()), (2, false));
        exec.halt();
    });
}

#[test]
fn an_origin_whose_device_is_gone_is_unprotected_though_it_is_being_rolled_back() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, 8 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, 8 * MIB, 2).await;
        w.snapshot("b", CHAINED).await;
        w.pool.rollback("org", "a").await.unwrap();
        w.write("org", 7 * MIB, 512, 3).await;
        w.pool.detach_origin("org", || 5).await.unwrap();
        assert!(w.pool.origins()[0].rolling.is_some(), "it has not ended");
        let refused = w.pool.unprotect("org", false).await.unwrap_err();
        assert!(refused.to_string().contains("it has snapshots"), "{refused}");
        w.pool.unprotect("org", true).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        assert!(w.pool.list().is_empty());
    });
}
