//! Gathering: scattered pages are contiguous again, and no volume has more or less data than before.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{
    ErrorKind, GatherPolicy, GatherReport, OpenOptions, PAGE_SIZE, Pool, Runtime as _, Usage, VolatileLog,
    VolatileMemory,
};

use crate::lab::{Disk, Lab, stamp};
use forkdisk::testing::Inline;

/// Pages of the volumes here.
const PAGES: u64 = 1024;

/// Creates a volume whose page i has the number i.
async fn full(lab: &Lab, name: &str) -> Disk {
    let volume = lab.volume(name, PAGES / 256).await;
    for block in 0..PAGES / 256 {
        volume.write(block << 20, stamp(block * 256, 256), false).await.0.expect("there is space");
    }
    volume
}

/// Writes every `step`th page, in a pseudo-random order, with its number plus `plus`.
async fn scatter(volume: &Disk, step: u64, plus: u64) {
    let count = PAGES / step;
    for i in 0..count {
        let page = (i * 389 % count) * step;
        volume.write(page * PAGE_SIZE as u64, stamp(page + plus, 1), false).await.0.expect("there is space");
    }
}

/// Creates "clone" of "base", of which every `step`th page was written since.
async fn scattered_clone(lab: &Lab, step: u64) -> Disk {
    drop(full(lab, "base").await);
    lab.pool.clone_volume("base", "clone", 0).await.expect("a clone");
    let clone = lab.pool.volume("clone").expect("just made");
    scatter(&clone, step, 100_000).await;
    clone
}

async fn expect(lab: &Lab, volume: &Disk, step: u64, plus: u64) {
    let found = lab.stamps(volume, 0, PAGES as usize).await;
    for (page, found) in (0..).zip(found) {
        let plus = if page % step == 0 { plus } else { 0 };
        assert_eq!(found, Some(page + plus), "page {page} of {}", volume.name());
    }
}

async fn gather(lab: &Lab, name: &str) -> GatherReport {
    let report = lab.pool.gather(name, |_, _| true).await.expect("it is gathered");
    let checked = lab.pool.check().await.expect("it is checked");
    assert!(checked.damage.is_empty() && checked.leaked == 0, "{checked:?}");
    report
}

async fn settle(lab: &Lab) {
    lab.pool.wait_freed().await.expect("it settles");
}

async fn usage(lab: &Lab, name: &str) -> Usage {
    lab.pool.usage(name).await.expect("it is there")
}

fn fragmentation(lab: &Lab, name: &str) -> f64 {
    lab.pool.find(name).expect("it is there").fragmentation()
}

#[test]
fn what_is_left_of_a_clone_goes_home() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let clone = scattered_clone(&lab, 4).await;
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        settle(&lab).await;
        let before = fragmentation(&lab, "clone");
        assert!((25.0..=51.0).contains(&before), "{before}");
        let report = gather(&lab, "clone").await;
        assert_eq!((report.before, report.after, report.left), (before, 0.0, 0));
        assert_eq!(report.moved, PAGES / 4 * PAGE_SIZE as u64, "only those that were elsewhere");
        expect(&lab, &clone, 4, 100_000).await;
        let again = gather(&lab, "clone").await;
        assert_eq!((again.moved, again.blocks), (0, 0));
    });
}

#[test]
fn blocks_that_lie_far_from_each_other_are_moved_to_a_row() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (volume, other) = (lab.volume("volume", PAGES / 256).await, lab.volume("other", PAGES / 256).await);
        for block in 0..PAGES / 256 {
            for (volume, plus) in [(&volume, 0), (&other, 50_000)] {
                volume.write(block << 20, stamp(block * 256 + plus, 256), false).await.0.expect("there is space");
            }
        }
        lab.pool.snapshot(&[("volume", "then")], 0).await.expect("a snapshot");
        assert_eq!(fragmentation(&lab, "volume"), 0.0, "each lies in one piece");
        settle(&lab).await;
        lab.tape.take();
        let report = gather(&lab, "volume").await;
        assert_eq!((report.moved, report.left), (PAGES * PAGE_SIZE as u64, 0));
        let (mut pages, _) = lab.tape.take();
        pages.sort_by_key(|page| page.stamp);
        let follows = |pair: &[crate::lab::Page]| pair[1].at == pair[0].at + 1 && pair[1].stamp == pair[0].stamp + 1;
        assert!(pages.len() as u64 == PAGES && pages.windows(2).all(follows), "in a row, in order");
        settle(&lab).await;
        expect(&lab, &volume, 1, 0).await;
        expect(&lab, &lab.pool.volume("volume@then").expect("it is there"), 1, 0).await;
        assert_eq!(usage(&lab, "volume").await.exclusive, 0, "still shared");
        let again = gather(&lab, "volume").await;
        assert_eq!((again.moved, again.blocks), (0, 0));
    });
}

#[test]
fn where_there_is_no_room_in_a_row_scattered_blocks_go_elsewhere_one_by_one() {
    Lab::run(12, OpenOptions::default(), |lab| async move {
        let (volume, other) = (lab.volume("volume", PAGES / 256).await, lab.volume("other", PAGES / 256).await);
        for block in 0..PAGES / 256 {
            for (volume, plus) in [(&volume, 0), (&other, 50_000)] {
                volume.write(block << 20, stamp(block * 256 + plus, 256), false).await.0.expect("there is space");
            }
        }
        settle(&lab).await;
        let report = gather(&lab, "volume").await;
        assert_eq!((report.moved, report.left), (0, 0), "none is scattered");
        expect(&lab, &volume, 1, 0).await;
    });
}

#[test]
fn what_is_shared_stays_shared() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = full(&lab, "volume").await;
        lab.pool.snapshot(&[("volume", "then")], 0).await.expect("a snapshot");
        scatter(&volume, 8, 100_000).await;
        lab.pool.clone_volume("volume@then", "clone", 0).await.expect("a clone");
        settle(&lab).await;
        let names = ["volume", "volume@then", "clone"];
        let (used, mut before) = (lab.pool.info().used, Vec::new());
        for name in names {
            before.push(usage(&lab, name).await);
        }
        let report = gather(&lab, "volume").await;
        assert_eq!((report.after, report.left, report.blocks), (0.0, 0, PAGES / 256));
        settle(&lab).await;
        for (name, before) in names.into_iter().zip(before) {
            let now = usage(&lab, name).await;
            assert_eq!(now.referenced, before.referenced, "{name}");
            let tables = 8 * PAGE_SIZE as u64;
            assert!(now.exclusive.abs_diff(before.exclusive) <= tables, "{name}: {before:?} {now:?}");
        }
        assert!(lab.pool.info().used <= used + 16 * PAGE_SIZE as u64, "{used} {}", lab.pool.info().used);
        expect(&lab, &volume, 8, 100_000).await;
        for name in ["volume@then", "clone"] {
            expect(&lab, &lab.pool.volume(name).expect("it is there"), 1, 0).await;
        }
        // Only exclusive pages are written.
        scatter(&lab.pool.volume("clone").expect("it is there"), 16, 200_000).await;
        scatter(&volume, 8, 300_000).await;
        expect(&lab, &volume, 8, 300_000).await;
        expect(&lab, &lab.pool.volume("volume@then").expect("it is there"), 1, 0).await;
        expect(&lab, &lab.pool.volume("clone").expect("it is there"), 16, 200_000).await;
        drop(volume);
        lab.pool.delete(&["volume", "volume@then", "clone"]).await.expect("they are deleted");
        settle(&lab).await;
        assert_eq!(lab.pool.check().await.expect("it is checked").leaked, 0);
    });
}

#[test]
fn by_policy_nobody_is_gathered_at_the_expense_of_another_volume() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = full(&lab, "volume").await;
        lab.pool.clone_volume("volume", "clone", 0).await.expect("a clone");
        scatter(&volume, 8, 100_000).await;
        for name in ["volume", "clone"] {
            lab.pool.set_gather(name, GatherPolicy::Idle).await.expect("it is set");
        }
        let before = fragmentation(&lab, "volume");
        lab.pool.wait_gathered().await;
        assert_eq!((fragmentation(&lab, "volume"), fragmentation(&lab, "clone")), (before, 0.0));
        // A snapshot must be deleted first.
        lab.pool.delete(&["clone"]).await.expect("it is deleted");
        lab.pool.snapshot(&[("volume", "then")], 0).await.expect("a snapshot");
        scatter(&volume, 8, 200_000).await;
        settle(&lab).await;
        lab.pool.wait_gathered().await;
        assert_eq!(fragmentation(&lab, "volume"), 0.0);
        expect(&lab, &volume, 8, 200_000).await;
        expect(&lab, &lab.pool.volume("volume@then").expect("it is there"), 8, 100_000).await;
    });
}

/// Most of a block has been rewritten, so the rest could follow: in total there would be fewer seams. But the
/// clone's source has the rest, too, and may be deleted soon.
#[test]
fn by_policy_pages_of_another_volume_stay_even_if_both_together_gain() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        drop(scattered_clone(&lab, 16).await);
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        lab.pool.clone_volume("clone", "next", 0).await.expect("a clone");
        let next = lab.pool.volume("next").expect("just made");
        for page in (0..PAGES).filter(|page| page % 4 != 0) {
            next.write(page * PAGE_SIZE as u64, stamp(page + 200_000, 1), false).await.0.expect("there is space");
        }
        settle(&lab).await;
        let (before, clone) = (fragmentation(&lab, "next"), fragmentation(&lab, "clone"));
        assert!(before > 2.0 * clone && clone > 5.0, "{before} {clone}");
        for policy in [GatherPolicy::Auto, GatherPolicy::Idle, GatherPolicy::Above(1)] {
            lab.pool.set_gather("next", policy).await.expect("it is set");
            lab.pool.wait_gathered().await;
            assert_eq!((fragmentation(&lab, "next"), fragmentation(&lab, "clone")), (before, clone), "{policy:?}");
        }
        lab.pool.set_gather("next", GatherPolicy::Auto).await.expect("it is set");
        lab.pool.delete(&["clone"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.pool.wait_gathered().await;
        assert_eq!(fragmentation(&lab, "next"), 0.0, "nobody else has any of it");
    });
}

/// Exclusive pages are gathered all the same, by `auto` only if that is most of the work.
#[test]
fn by_policy_own_pages_are_gathered_beside_those_that_have_to_stay() {
    // Of every `shared` pages one is still shared, of every `moved` one lies elsewhere than the others.
    for (shared, moved, auto, idle) in [(4, 8, 60.0..=64.0, 45.0..=50.0), (16, 4, 10.0..=13.0, 10.0..=13.0)] {
        Lab::run(64, OpenOptions::default(), move |lab| async move {
            drop(full(&lab, "base").await);
            lab.pool.clone_volume("base", "next", 0).await.expect("a clone");
            let next = lab.pool.volume("next").expect("just made");
            let write = async |plus: u64, is_meant: &dyn Fn(u64) -> bool| {
                for page in (0..PAGES).filter(|&page| is_meant(page)) {
                    next.write(page * PAGE_SIZE as u64, stamp(page + plus, 1), false).await.0.expect("there is space");
                }
            };
            write(100_000, &|page| page % shared != 0).await;
            lab.pool.clone_volume("next", "then", 0).await.expect("a clone");
            write(200_000, &|page| page % moved == 1).await;
            lab.pool.delete(&["then"]).await.expect("it is deleted");
            settle(&lab).await;
            for (policy, expected) in [(GatherPolicy::Auto, auto), (GatherPolicy::Idle, idle)] {
                lab.pool.set_gather("next", policy).await.expect("it is set");
                lab.pool.wait_gathered().await;
                let (now, base) = (fragmentation(&lab, "next"), fragmentation(&lab, "base"));
                assert!(expected.contains(&now) && base == 0.0, "{shared} {moved} {policy:?}: {now} {base}");
            }
            for (page, found) in (0..).zip(lab.stamps(&next, 0, PAGES as usize).await) {
                let plus = if page % moved == 1 { 200_000 } else { u64::from(page % shared != 0) * 100_000 };
                assert_eq!(found, Some(page + plus), "page {page}");
            }
            expect(&lab, &lab.pool.volume("base").expect("it is there"), 1, 0).await;
        });
    }
}

#[test]
fn above_a_threshold_only_and_when_it_is_idle() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = full(&lab, "volume").await;
        lab.pool.set_gather("volume", GatherPolicy::Above(40)).await.expect("it is set");
        lab.pool.snapshot(&[("volume", "a")], 0).await.expect("a snapshot");
        scatter(&volume, 8, 100_000).await;
        lab.pool.delete(&["volume@a"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.pool.wait_gathered().await;
        let some = fragmentation(&lab, "volume");
        assert!((12.0..40.0).contains(&some), "{some}");
        lab.pool.set_gather("volume", GatherPolicy::Above(5)).await.expect("it is set");
        lab.pool.wait_gathered().await;
        assert_eq!(fragmentation(&lab, "volume"), 0.0);
        expect(&lab, &volume, 8, 100_000).await;
        assert_eq!(lab.pool.find("volume").expect("it is there").gather, GatherPolicy::Above(5));
    });
}

#[test]
fn what_is_written_meanwhile_stays_what_was_written() {
    for delay in 0..40 {
        Lab::run(64, OpenOptions::default(), move |lab| async move {
            let clone = scattered_clone(&lab, 4).await;
            let (pool, other) = (lab.pool.clone(), clone.clone());
            let gathering = lab.tasks.start(async move { pool.gather("clone", |_, _| true).await });
            let tasks = lab.tasks.clone();
            let writing = lab.tasks.start(async move {
                forkdisk::Runtime::sleep(&tasks, std::time::Duration::from_micros(150 * delay)).await;
                for page in (0..256).step_by(4) {
                    let at = page * PAGE_SIZE as u64;
                    other.write(at, stamp(page + 200_000, 1), false).await.0.expect("there is space");
                }
            });
            writing.await;
            gathering.await.expect("it is gathered");
            let found = lab.stamps(&clone, 0, PAGES as usize).await;
            for (page, found) in (0..).zip(found) {
                let plus = match page {
                    _ if page % 4 != 0 => 0,
                    0..256 => 200_000,
                    _ => 100_000,
                };
                assert_eq!(found, Some(page + plus), "page {page}, written after {delay} steps");
            }
            expect(&lab, &lab.pool.volume("base").expect("it is there"), 1, 0).await;
        });
    }
}

#[test]
fn a_volume_is_gathered_for_one_at_a_time() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let clone = scattered_clone(&lab, 4).await;
        let (pool, other) = (lab.pool.clone(), lab.pool.clone());
        let first = lab.tasks.start(async move { pool.gather("clone", |_, _| true).await });
        let second = lab.tasks.start(async move { other.gather("clone", |_, _| true).await });
        let base = gather(&lab, "base").await;
        assert_eq!(base.moved, 0, "another volume may be gathered at the same time");
        let refused = second.await.expect_err("it is gathered already");
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        assert_eq!(first.await.expect("it is gathered").moved, PAGES * PAGE_SIZE as u64);
        // The next call has nothing to do; one that is cancelled leaves the work to others.
        let pool = lab.pool.clone();
        scatter(&clone, 4, 100_000).await;
        let broken_off = pool.gather("clone", |_, _| false).await.expect("it ends early");
        assert_eq!(broken_off.moved, 0);
        assert_eq!(gather(&lab, "clone").await.moved, 0);
        expect(&lab, &clone, 4, 100_000).await;
    });
}

#[test]
fn a_volume_that_is_deleted_is_not_gathered_any_more() {
    for delay in 0..40 {
        Lab::run(64, OpenOptions::default(), move |lab| async move {
            drop(scattered_clone(&lab, 4).await);
            let pool = lab.pool.clone();
            let gathering = lab.tasks.start(async move { pool.gather("clone", |_, _| true).await });
            lab.tasks.sleep(Duration::from_micros(10 * delay)).await;
            lab.pool.delete(&["clone"]).await.expect("it is deleted");
            if let Err(error) = gathering.await {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            }
            settle(&lab).await;
            expect(&lab, &lab.pool.volume("base").expect("it is there"), 1, 0).await;
            let checked = lab.pool.check().await.expect("it is checked");
            assert!(checked.damage.is_empty() && checked.leaked == 0, "{checked:?}");
        });
    }
}

#[test]
fn auto_moves_little_for_what_it_brings_and_whole_blocks_for_nothing() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let clone = scattered_clone(&lab, 16).await;
        lab.pool.set_gather("clone", GatherPolicy::Auto).await.expect("it is set");
        settle(&lab).await;
        lab.tape.take();
        lab.pool.wait_gathered().await;
        let (pages, _) = lab.tape.take();
        assert!(pages.is_empty(), "as long as others are where it would go, all of each block had to be moved");
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.pool.wait_gathered().await;
        let (pages, _) = lab.tape.take();
        // A checkpoint may cut one block's copy short: that is repeated.
        let moved: BTreeSet<(u64, u64)> = pages.iter().map(|page| (page.at, page.stamp)).collect();
        assert_eq!(moved.len() as u64, PAGES / 16, "each goes home");
        assert!(pages.len() <= moved.len() + 256 / 16, "{} pages were written", pages.len());
        assert_eq!(fragmentation(&lab, "clone"), 0.0);
        expect(&lab, &clone, 16, 100_000).await;
        // A few scattered pages are not worth it.
        lab.pool.clone_volume("clone", "next", 0).await.expect("a clone");
        let next = lab.pool.volume("next").expect("just made");
        next.write(7 << 20 >> 4, stamp(900_000, 1), false).await.0.expect("there is space");
        drop(clone);
        lab.pool.delete(&["clone"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.tape.take();
        lab.pool.wait_gathered().await;
        assert!(lab.tape.take().0.is_empty() && fragmentation(&lab, "next") > 0.0);
        assert_eq!(
            lab.pool.find("next").expect("it is there").gather,
            GatherPolicy::Auto,
            "as what it was cloned from"
        );
    });
}

#[test]
fn auto_leaves_blocks_with_holes_and_the_end_of_a_volume_is_none() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        drop(full(&lab, "base").await);
        lab.pool.resize("base", (PAGES - 128) * PAGE_SIZE as u64).await.expect("it is shorter");
        let base = lab.pool.volume("base").expect("it is there");
        base.discard(5 * PAGE_SIZE as u64, PAGE_SIZE as u64).await.expect("it is given up");
        drop(base);
        settle(&lab).await;
        lab.pool.clone_volume("base", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        for page in (0..PAGES - 128).step_by(16) {
            clone.write(page * PAGE_SIZE as u64, stamp(page + 100_000, 1), false).await.0.expect("there is space");
        }
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        settle(&lab).await;
        let seams = || lab.pool.find("clone").expect("it is there").scattered / PAGE_SIZE as u64;
        let before = seams();
        lab.pool.set_gather("clone", GatherPolicy::Auto).await.expect("it is set");
        assert_eq!(seams(), before, "nothing before it has been quiet for a while");
        lab.pool.wait_gathered().await;
        assert_eq!(seams(), 31, "those of the first block, which has a hole");
        lab.pool.set_gather("clone", GatherPolicy::Idle).await.expect("it is set");
        lab.pool.wait_gathered().await;
        assert_eq!(seams(), 0);
        let found = lab.stamps(&clone, 0, (PAGES - 128) as usize).await;
        assert_eq!((found[0], found[5], found[6], found[880]), (Some(100_000), None, Some(6), Some(100_880)));
    });
}

/// Freeing space takes a checkpoint, which must not run only for gathering while writes are running.
#[test]
fn auto_does_nothing_while_somebody_writes_and_holds_up_nobody_who_closes() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let clone = scattered_clone(&lab, 16).await;
        lab.pool.set_gather("clone", GatherPolicy::Auto).await.expect("it is set");
        lab.pool.wait_gathered().await;
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        let seen = || (lab.pool.info().generation, lab.pool.statistics().gathered_bytes);
        let before = seen();
        for i in 0..20 {
            clone.write(0, stamp(i, 1), false).await.0.expect("there is space");
            lab.tasks.sleep(Duration::from_millis(150)).await;
            assert_eq!(seen(), before, "neither a checkpoint nor a move");
        }
        // It would begin 200 ms from now.
        clone.write(0, stamp(100_000, 1), false).await.0.expect("there is space");
        let (at, checkpoints) = (lab.tasks.now(), before.0);
        drop(clone);
        lab.pool.close().await.expect("it is closed");
        assert!(lab.tasks.now() - at < Duration::from_millis(100), "it waited {:?}", lab.tasks.now() - at);
        let pool = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default()).await;
        let lab = Lab { pool: pool.expect("it opens"), ..lab };
        assert!(lab.pool.info().generation > checkpoints);
        lab.pool.wait_gathered().await;
        assert_eq!(fragmentation(&lab, "clone"), 0.0, "it goes on behind the next open");
        expect(&lab, &lab.pool.volume("clone").expect("it is there"), 16, 100_000).await;
    });
}

/// Where the search for free space has not come yet, as in a pool that was opened a moment ago, pages go home
/// all the same.
#[test]
fn auto_takes_pages_home_in_a_pool_that_was_opened_anew() {
    Lab::run(256, OpenOptions::default(), |lab| async move {
        let (first, second) = (full(&lab, "first").await, full(&lab, "second").await);
        for page in (0..PAGES).step_by(2) {
            first.discard(page * PAGE_SIZE as u64, PAGE_SIZE as u64).await.expect("it is given up");
        }
        drop((first, second));
        settle(&lab).await;
        lab.pool.clone_volume("second", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        scatter(&clone, 16, 100_000).await;
        drop(clone);
        lab.pool.delete(&["second"]).await.expect("it is deleted");
        lab.pool.close().await.expect("it is closed");
        let pool = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default()).await;
        let lab = Lab { pool: pool.expect("it opens"), ..lab };
        assert!(fragmentation(&lab, "clone") > 5.0);
        lab.pool.set_gather("clone", GatherPolicy::Auto).await.expect("it is set");
        lab.pool.wait_gathered().await;
        assert_eq!(fragmentation(&lab, "clone"), 0.0);
        let clone = lab.pool.volume("clone").expect("it is there");
        expect(&lab, &clone, 16, 100_000).await;
        // Space that became known as free is allocated once, also when the search comes there.
        let rest = full(&lab, "rest").await;
        scatter(&clone, 8, 200_000).await;
        expect(&lab, &rest, 1, 0).await;
        expect(&lab, &clone, 8, 200_000).await;
        let checked = lab.pool.check().await.expect("it is checked");
        assert!(checked.damage.is_empty() && checked.leaked == 0, "{checked:?}");
    });
}

/// A block that has become whole, whose pages another volume has released, which is not durable yet: the old
/// bytes stay.
#[test]
fn what_a_crash_would_share_again_is_not_written_in_place_once_it_is_in_one_piece() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let base = full(&lab, "base").await;
        let places: BTreeMap<u64, u64> = lab.tape.take().0.iter().map(|page| (page.stamp, page.at)).collect();
        lab.pool.clone_volume("base", "other", 0).await.expect("a clone");
        let other = lab.pool.volume("other").expect("just made");
        scatter(&other, 16, 100_000).await;
        drop(base);
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.pool.clone_volume("other", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        // From here on each has separate tables above the leaves, which they share.
        clone.write((PAGES - 1) * PAGE_SIZE as u64, stamp(300_000, 1), false).await.0.expect("there is space");
        settle(&lab).await;
        lab.tape.take();
        let (tasks, writer) = (lab.tasks.clone(), clone.clone());
        let report = lab.pool.gather("clone", move |at, _| {
            let (other, writer) = (other.clone(), writer.clone());
            match at >> 20 {
                1 => tasks.spawn(Box::pin(async move {
                    other.discard(2 << 20, 1 << 20).await.expect("it is given up");
                })),
                3 => tasks.spawn(Box::pin(async move {
                    let page = 2 * 256 + 5;
                    writer.write(page * PAGE_SIZE as u64, stamp(400_000, 1), false).await.0.expect("there is space");
                })),
                _ => {}
            }
            true
        });
        let report = report.await.expect("it is gathered");
        assert!(report.blocks == 4 && report.left <= 1, "{report:?}");
        let written = lab.tape.take().0.into_iter().find(|page| page.stamp == 400_000).expect("it was written");
        assert_ne!(written.at, places[&(2 * 256 + 5)], "the other one has that again after a crash");
        assert_eq!(lab.stamps(&clone, 2 * 256 + 4, 3).await, [Some(516), Some(400_000), Some(518)]);
    });
}

#[test]
fn what_can_go_home_does_and_the_rest_stays() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let clone = scattered_clone(&lab, 16).await;
        // A snapshot refers to the first of the overwritten pages, and to nothing else.
        lab.pool.snapshot(&[("base", "then")], 0).await.expect("a snapshot");
        let base = lab.pool.volume("base").expect("it is there");
        base.write_zeroes(PAGE_SIZE as u64, (PAGES - 1) * PAGE_SIZE as u64, false).await.expect("there is space");
        drop(base);
        lab.pool.clone_volume("base", "rest", 0).await.expect("a clone");
        lab.pool.delete(&["base@then"]).await.expect("it is deleted");
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.pool.set_gather("clone", GatherPolicy::Auto).await.expect("it is set");
        lab.pool.wait_gathered().await;
        let seams = lab.pool.find("clone").expect("it is there").scattered / PAGE_SIZE as u64;
        assert_eq!(seams, 1, "the first page is elsewhere still");
        expect(&lab, &clone, 16, 100_000).await;
    });
}

#[test]
fn many_volumes_with_a_gather_policy_are_searched_now_and_then_and_gathered() {
    Lab::run(128, OpenOptions::default(), |lab| async move {
        drop(full(&lab, "base").await);
        lab.pool.set_gather("base", GatherPolicy::Auto).await.expect("it is set");
        for i in 0..80 {
            lab.pool.clone_volume("base", &format!("clone{i}"), 0).await.expect("a clone");
        }
        lab.pool.wait_gathered().await;
        let clone = lab.pool.volume("clone79").expect("it is there");
        scatter(&clone, 4, 100_000).await;
        let names: Vec<String> = (0..79).map(|i| format!("clone{i}")).chain(["base".to_string()]).collect();
        lab.pool.delete(&names.iter().map(String::as_str).collect::<Vec<_>>()).await.expect("they are deleted");
        settle(&lab).await;
        lab.pool.wait_gathered().await;
        assert_eq!(fragmentation(&lab, "clone79"), 0.0);
        expect(&lab, &clone, 4, 100_000).await;
    });
}

#[test]
fn where_there_is_less_room_in_a_row_several_rows_are_made() {
    Lab::run(200, OpenOptions::default(), |lab| async move {
        let blocks = 48;
        let (volume, other) = (lab.volume("volume", blocks).await, lab.volume("other", blocks).await);
        for block in 0..blocks {
            for (volume, plus) in [(&volume, 0), (&other, 50_000)] {
                volume.write(block << 20, stamp(block * 256 + plus, 256), false).await.0.expect("there is space");
            }
        }
        // The free space is in rows of about twenty blocks.
        let mut fill = Vec::new();
        for i in 0..90 {
            let volume = lab.volume(&format!("fill{i}"), 1).await;
            if volume.write(0, stamp((1 << 32) + i * 256, 256), false).await.0.is_err() {
                break;
            }
            fill.push(format!("fill{i}"));
        }
        drop(other);
        let gone: Vec<&str> =
            fill.iter().enumerate().filter(|(i, _)| i % 24 > 2).map(|(_, name)| name.as_str()).collect();
        lab.pool.delete(&gone).await.expect("they are deleted");
        settle(&lab).await;
        let mut told = Vec::new();
        let gathered = lab.pool.gather("volume", |done, _| {
            told.push(done);
            true
        });
        let report = gathered.await.expect("it is gathered");
        assert!(report.moved >= (blocks - 4) << 20, "{report:?}");
        assert!(report.blocks <= blocks && report.left == 0 && told.is_sorted(), "{report:?} {told:?}");
        expect_all(&lab, &volume, blocks * 256).await;
    });
}

async fn expect_all(lab: &Lab, volume: &Disk, pages: u64) {
    let found = lab.stamps(volume, 0, pages as usize).await;
    assert!((0..).zip(found).all(|(page, found)| found == Some(page)));
}

#[test]
fn a_pool_that_takes_over_a_volatile_log_gathers_only_once_it_is_open() {
    let log = VolatileLog::new(VolatileMemory::new(vec![0; 1 << 20]), [1; 32]);
    let options = OpenOptions::default().with_volatile(Some(log));
    let tape = Lab::run(64, options.clone(), |lab| async move {
        drop(scattered_clone(&lab, 4).await);
        let new = lab.volume("new", 1).await;
        lab.pool.set_gather("clone", GatherPolicy::Off).await.expect("it is set");
        lab.pool.delete(&["base"]).await.expect("it is deleted");
        settle(&lab).await;
        lab.pool.set_gather("clone", GatherPolicy::Above(1)).await.expect("it is set");
        // The process dies: its tasks are not run any more.
        new.write(0, stamp(200_000, 1), false).await.0.expect("there is space");
        lab.tape
    });
    let tasks = Inline::default();
    let tape = tape.on(&tasks, Duration::from_micros(1));
    tasks.clone().run(async move {
        let pool = Pool::open(tape.clone(), Rc::new(tasks.clone()), options).await.expect("it opens");
        assert!(pool.recovery().volatile > 0, "{:?}", pool.recovery());
        assert_eq!(tape.take().0, [], "pages moved before the log was taken over");
        pool.wait_gathered().await;
        let lab = Lab { tasks, tape, pool };
        assert_eq!(fragmentation(&lab, "clone"), 0.0);
        expect(&lab, &lab.pool.volume("clone").expect("it is there"), 4, 100_000).await;
        assert_eq!(lab.stamps(&lab.pool.volume("new").expect("it is there"), 0, 1).await, [Some(200_000)]);
    });
}
