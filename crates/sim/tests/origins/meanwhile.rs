//! Changes while a verb waits: state that was copied before a wait is not used after it.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{Buf, ErrorKind, OpenOptions, OriginFull, OriginPlace, Pool};
use forkdisk_sim::disk::{Crash, Fault, ReadDamage, Request, When};
use forkdisk_sim::planted::{self, Bug};

use crate::in_order;
use crate::lab::{CHAINED, CHUNK, MIB, PATIENCE_STEPS, World, at_step, options, restarted, run, run_seeded};

/// Steps of the executor after which the second operation begins.
fn steps() -> impl Iterator<Item = u64> {
    (0..50).chain((50..600).step_by(20))
}

/// Runs both on a new world, the second `step` steps after the first began.
fn both(step: u64, first: impl AsyncFn(&World) + 'static, second: impl AsyncFn(&World) + 'static) {
    run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), move |w| async move {
        w.write("org", 0, MIB, 1).await;
        let (w, start) = (&w, w.exec.steps());
        let (first, second) = (&first, &second);
        let one = async |is_first: bool| {
            if is_first {
                return first(w).await;
            }
            at_step(&w.exec, start + step).await;
            second(w).await;
        };
        in_order([one(true), one(false)]).await;
    });
}

#[test]
fn an_origin_that_is_opened_while_it_is_detached_stays_attached_or_is_refused() {
    let outcomes = Rc::new(Cell::new((0, 0)));
    for step in steps() {
        let detach = async |w: &World| match w.pool.detach_origin("org", || 77).await {
            Ok(()) => assert!(w.pool.volume("org").is_err(), "it is detached and open"),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Busy),
        };
        let count = outcomes.clone();
        let open = async move |w: &World| {
            let Ok(volume) = w.pool.volume("org") else { return count.set((count.get().0 + 1, count.get().1)) };
            volume.write(MIB, Buf::copy_of(&[2; 4096]), false).await.0.unwrap();
            // A snapshot of an open origin finds its device.
            w.pool.snapshot(&[("org", "s")], 1).await.unwrap();
            assert!(!w.pool.origins()[0].clean, "written, and called as it was left");
            count.set((count.get().0, count.get().1 + 1));
        };
        both(step, detach, open);
    }
    let (late, early) = outcomes.get();
    assert!(late > 0 && early > 1, "{late} came too late, {early} in time");
}

#[test]
fn of_two_devices_brought_for_an_origin_at_once_one_is_taken() {
    for step in steps() {
        let taken = Rc::new(Cell::new(0));
        let attach = |taken: Rc<Cell<u32>>| {
            async move |w: &World| match w
                .pool
                .attach_origin("org", w.disks[1].clone(), &OriginPlace::at("/dev/y", 77))
                .await
            {
                Ok(()) => taken.set(taken.get() + 1),
                Err(e) => assert_eq!(e.kind(), ErrorKind::Busy),
            }
        };
        let (first, second) = (attach(taken.clone()), attach(taken.clone()));
        run(64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), move |w| async move {
            w.write("org", 0, MIB, 1).await;
            w.pool.detach_origin("org", || 77).await.unwrap();
            let (w, start) = (&w, w.exec.steps());
            let one = async |is_first: bool| {
                if is_first {
                    return first(w).await;
                }
                at_step(&w.exec, start + step).await;
                second(w).await;
            };
            in_order([one(true), one(false)]).await;
            w.write("org", 0, MIB, 2).await;
        });
        assert_eq!(taken.get(), 1);
    }
}

#[test]
fn an_origin_that_is_opened_while_it_is_unprotected_stays_or_is_gone() {
    for step in steps() {
        let unprotect = async |w: &World| match w.pool.unprotect("org", true).await {
            Ok(()) => assert!(w.pool.find("org").is_err()),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Busy),
        };
        let open = async |w: &World| {
            let Ok(volume) = w.pool.volume("org") else { return };
            volume.write(0, Buf::copy_of(&[2; 4096]), false).await.0.unwrap();
            w.pool.find("org").expect("it is open");
        };
        both(step, unprotect, open);
    }
}

#[test]
fn a_pool_that_grew_further_meanwhile_is_not_made_smaller() {
    for step in steps() {
        let more = async |w: &World| w.pool.grow(96 * MIB).await.unwrap();
        let less = async |w: &World| {
            if let Err(e) = w.pool.grow(80 * MIB).await {
                assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
            }
            assert!(w.pool.info().size >= 80 * MIB);
        };
        both(step, less, more);
    }
}

/// Takes a snapshot and writes a checkpoint concurrently, with the origin's `nth` flush failing. Returns
/// whether the snapshot was acknowledged, and whether it is there after a power cut.
fn snapshot_beside_a_failed_flush(seed: u64, nth: u64, step: u64) -> (bool, bool) {
    let outcome = Rc::new(Cell::new((false, false)));
    let out = outcome.clone();
    run_seeded(seed, OpenOptions::default(), 64 * MIB, 8 * MIB, options(MIB, OriginFull::Error), move |w| async move {
        w.snapshot("old", CHAINED).await;
        w.write("org", 0, MIB, 1).await;
        w.disks[1].arm(Fault { on: Request::Flush, harm: ReadDamage::Eio, when: When::Once(nth), within: None });
        let (pool, clock, start) = (&w.pool, &w.exec, w.exec.steps());
        let acknowledged = Cell::new(false);
        let work = async |is_snapshot: bool| match is_snapshot {
            true => acknowledged.set(pool.snapshot(&[("org", "new")], 2).await.is_ok()),
            false => {
                at_step(clock, start + step).await;
                let _ = pool.checkpoint().await;
            }
        };
        in_order([work(true), work(false)]).await;
        let _ = pool.checkpoint().await;
        let media = w.disks.each_ref().map(|disk| disk.freeze(Crash::Power).crash(0));
        let (exec, [device, _], runtime) = restarted(media, step);
        let found = exec.run(PATIENCE_STEPS, async move {
            let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
            pool.find("org@new").is_ok()
        });
        out.set((acknowledged.get(), found.unwrap()));
        exec.halt();
        w.disks[1].disarm();
    });
    outcome.get()
}

/// Returns how many acknowledged snapshots a failed flush reverted, and how many were acknowledged beside
/// one.
fn taken_back() -> (u32, u32) {
    let (mut lost, mut acknowledged) = (0, 0);
    for (seed, nth) in (0..8).flat_map(|seed| (2..5).map(move |nth| (seed, nth))) {
        for step in (0..60).step_by(2) {
            let (was_told, is_there) = snapshot_beside_a_failed_flush(seed, nth, step);
            acknowledged += u32::from(was_told);
            lost += u32::from(was_told && !is_there);
        }
    }
    println!("{lost} of {acknowledged} are lost");
    (lost, acknowledged)
}

#[test]
fn an_acknowledged_snapshot_stays_when_another_flush_of_its_origin_fails() {
    let (lost, acknowledged) = taken_back();
    assert!(acknowledged > 20, "{acknowledged}");
    assert_eq!(lost, 0, "of {acknowledged}");
    // With the historical bug it is found.
    planted::set(Some(Bug::SettledFromCopy));
    let (lost, _) = taken_back();
    planted::set(None);
    assert!(lost > 0, "the test does not see what it is for");
}

/// Returns the sectors that snapshots of an origin show wrongly after one between them was deleted with
/// nothing in the cache.
fn lost_by_a_cold_deletion(seed: u64) -> u64 {
    let wrong = Rc::new(Cell::new(0));
    let out = wrong.clone();
    let protect = options(0, OriginFull::Error).with_chunk(4096);
    let small = OpenOptions::default().with_cache(16 << 10);
    run_seeded(seed, small, 64 * MIB, 4 * MIB, protect, move |w| async move {
        w.write("org", 0, 4 * MIB, 1).await;
        // Pieces of the first snapshot lie between those of the second, in the order of chunks: leaves of the
        // map of exceptions lose their pairs when the second is deleted.
        w.snapshot("old", CHAINED).await;
        for at in (0..1024).filter(|at| (at + seed).is_multiple_of(3)) {
            w.write("org", at * 4096, 4096, 2).await;
        }
        w.snapshot("mid", CHAINED).await;
        for at in 0..1024 {
            w.write("org", at * 4096, 4096, 3).await;
        }
        w.snapshot("new", CHAINED).await;
        w.pool.checkpoint().await.unwrap();
        w.pool.delete(&["org@mid"]).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        let volume = w.pool.volume("org@old").unwrap();
        let (result, buf) = volume.read(0, Buf::zeroed(4 << 20)).await;
        result.unwrap();
        out.set(buf.chunks(512).filter(|sector| sector.iter().any(|&b| b != 1)).count() as u64);
        // `check` at the end would find what was lost with them.
        if out.get() > 0 {
            w.pool.unprotect("org", true).await.map(drop).unwrap_or_default();
        }
    });
    wrong.get()
}

#[test]
fn an_older_snapshot_keeps_what_a_deleted_one_kept_for_it_however_cold_the_cache() {
    assert!((0..3).all(|seed| lost_by_a_cold_deletion(seed) == 0));
    assert_eq!(CHUNK % 4096, 0);
}
