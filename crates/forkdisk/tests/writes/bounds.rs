//! Bounds: how far a volume may diverge from what it was when its bound was set. Every test ends with a check, which
//! finds the new pages again by the accounts in the entries that map them, and compares.

use std::rc::Rc;

use forkdisk::{
    BreakPolicy, Changes, CreateOptions, ErrorKind, ExtensionChanges, ForkOptions, OpenOptions, Pool, Result,
};

use crate::lab::{Disk, Lab, stamp};

const PAGE: u64 = 4096;

fn diverge(pages: u64) -> Changes {
    Changes::default().with_extension(ExtensionChanges::default().with_diverge(pages * PAGE))
}

/// A pool with a volume `base` of 200 pages, and a fork `fork` that may diverge by 20.
async fn with_fork(lab: &Lab) -> (Disk, Disk) {
    let base = lab.volume("base", 64).await;
    write(&base, 0, 200).await.expect("there is space");
    lab.pool.fork("base", &["fork"], &ForkOptions::new(0).with_changes(diverge(20))).await.expect("a fork");
    (base, lab.pool.volume("fork").expect("just made"))
}

async fn write(volume: &Disk, at: u64, pages: usize) -> Result<()> {
    volume.write(at * PAGE, stamp(at, pages), false).await.0
}

#[track_caller]
fn assert_refused(result: Result<()>) {
    let error = result.expect_err("beyond the bound");
    assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("diverged"), "{error}");
}

fn diverged(lab: &Lab, name: &str) -> u64 {
    lab.pool.find(name).expect("there").diverged / PAGE
}

async fn assert_exact(lab: &Lab) {
    let report = lab.pool.check().await.expect("a check");
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

#[test]
fn overwriting_what_is_shared_counts_and_in_place_does_not() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (base, fork) = with_fork(&lab).await;
        assert_eq!((lab.pool.find("fork").expect("there").diverge, diverged(&lab, "fork")), (20 * PAGE, 0));
        write(&fork, 0, 10).await.expect("breaks within the bound");
        write(&fork, 500, 8).await.expect("new pages within the bound");
        assert_refused(write(&fork, 100, 3).await);
        assert_eq!(lab.stamps(&fork, 100, 3).await, [Some(100), Some(101), Some(102)], "all of it or nothing");
        write(&fork, 100, 2).await.expect("up to the bound");
        assert_refused(fork.write(600 * PAGE + 5, forkdisk::device::Buf::zeroed(1), false).await.0);
        assert_eq!(diverged(&lab, "fork"), 20);
        for _ in 0..3 {
            write(&fork, 0, 10).await.expect("in place");
            fork.flush().await.expect("flushed");
            fork.write(2 * PAGE + 7, forkdisk::device::Buf::zeroed(9000), false).await.0.expect("in place, ragged");
        }
        write(&base, 0, 200).await.expect("others are not bounded");
        assert_eq!(lab.stamps(&fork, 50, 1).await, [Some(50)]);
        fork.discard(0, 10 * PAGE).await.expect("trimmed");
        assert_eq!(diverged(&lab, "fork"), 10);
        fork.discard(100 * PAGE, 400 * PAGE).await.expect("what it shares gives nothing back but its own pages");
        assert_eq!(diverged(&lab, "fork"), 8);
        write(&fork, 0, 12).await.expect("what was trimmed is there again");
        assert_refused(write(&fork, 300, 1).await);
        assert_exact(&lab).await;
    });
}

#[test]
fn snapshots_of_a_volume_are_charged_to_it_until_they_are_freed() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        for (name, policy) in [("split", BreakPolicy::Split), ("copy", BreakPolicy::Copy)] {
            let volume = lab.volume(name, 64).await;
            lab.pool.set(name, &diverge(64)).await.expect("set");
            lab.pool.set_break_policy(name, policy).await.expect("set");
            write(&volume, 0, 32).await.expect("within the bound");
            lab.pool.snapshot(&[(name, "a")], 0).await.expect("a snapshot");
            for at in 0..32 {
                write(&volume, at, 1).await.expect("within the bound");
            }
            lab.pool.snapshot(&[(name, "b")], 0).await.expect("a snapshot");
            assert_refused(write(&volume, 0, 1).await);
            assert_eq!(diverged(&lab, name), 64);
            lab.pool.delete(&[&format!("{name}@a")]).await.expect("deleted");
            // It waits until what was deleted before is free.
            write(&volume, 0, 32).await.expect("the snapshot's pages are there again");
            assert_refused(write(&volume, 0, 33).await);
            let volumes = [&format!("{name}@b")[..]];
            lab.pool.delete(&volumes).await.expect("deleted");
            lab.pool.wait_freed().await.expect("freed");
            assert_eq!(diverged(&lab, name), 32);
            lab.pool.snapshot(&[(name, "c")], 0).await.expect("a snapshot");
            volume.discard(0, volume.size()).await.expect("trimmed");
            lab.pool.rollback(name, "c").await.expect_err("it is in use");
            drop(volume);
            lab.pool.rollback(name, "c").await.expect("rolled back");
            lab.pool.wait_freed().await.expect("freed");
            assert_eq!(diverged(&lab, name), 32);
            assert_exact(&lab).await;
        }
    });
}

#[test]
fn writes_at_once_do_not_take_it_beyond_its_bound_together() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (_base, fork) = with_fork(&lab).await;
        for step in [1, 100] {
            fork.discard(0, fork.size()).await.expect("trimmed");
            let writes: Vec<_> = (0..40).map(|i| lab.write(&fork, i * step, 1, i)).collect();
            let mut refused = 0;
            for write in writes {
                refused += u64::from(write.await.is_err_and(|error| error.kind() == ErrorKind::NoSpace));
            }
            assert_eq!((refused, diverged(&lab, "fork")), (20, 20), "{step}");
        }
        assert_exact(&lab).await;
    });
}

#[test]
fn a_bound_and_what_is_charged_to_it_last() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (_base, fork) = with_fork(&lab).await;
        write(&fork, 0, 5).await.expect("within the bound");
        lab.pool.snapshot(&[("fork", "s")], 0).await.expect("a snapshot");
        write(&fork, 0, 2).await.expect("within the bound");
        fork.flush().await.expect("flushed");
        for checkpoint in [false, true] {
            if checkpoint {
                lab.pool.checkpoint().await.expect("a checkpoint");
            }
            // As after a kill: from the journal, then from the directory.
            let again = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default());
            let again = again.await.expect("it opens");
            let info = again.find("fork").expect("there");
            assert_eq!((info.diverge, info.diverged), (20 * PAGE, 7 * PAGE));
            let volume = again.volume("fork").expect("there");
            assert!(volume.write(300 * PAGE, stamp(0, 14), false).await.0.is_err());
            let report = again.check().await.expect("a check");
            assert!(report.damage.is_empty(), "{report:?}");
        }
    });
}

#[test]
fn a_bound_counts_from_when_it_is_set_and_can_be_changed() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 64).await;
        write(&volume, 0, 100).await.expect("without a bound");
        lab.pool.set("v", &diverge(10)).await.expect("set");
        write(&volume, 0, 100).await.expect("in place: what was there is not counted");
        assert_eq!(diverged(&lab, "v"), 0);
        write(&volume, 200, 10).await.expect("up to the bound");
        assert_refused(write(&volume, 300, 1).await);
        let labels = [("k".to_string(), Some("v".to_string()))].into();
        let labelled = Changes::default().with_extension(ExtensionChanges::default().with_labels(labels));
        lab.pool.set("v", &labelled).await.expect("set");
        assert_eq!(diverged(&lab, "v"), 10, "another property changes nothing");
        lab.pool.set("v", &diverge(12)).await.expect("raised");
        write(&volume, 300, 2).await.expect("up to the bound");
        lab.pool.set("v", &diverge(3)).await.expect("lowered");
        write(&volume, 200, 10).await.expect("what is there stays, and can be written");
        assert_refused(write(&volume, 400, 1).await);
        lab.pool.set("v", &diverge(0)).await.expect("none");
        write(&volume, 400, 30).await.expect("no bound");
        assert_eq!((lab.pool.find("v").expect("there").diverge, diverged(&lab, "v")), (0, 0));
        lab.pool.set("v", &diverge(4)).await.expect("set again");
        volume.discard(0, volume.size()).await.expect("what was charged before is not credited");
        assert_eq!(diverged(&lab, "v"), 0);
        write(&volume, 0, 4).await.expect("up to the bound");
        assert_refused(write(&volume, 4, 1).await);
        for bad in [1, 4095, (1 << 50) + 1] {
            let changes = Changes::default().with_extension(ExtensionChanges::default().with_diverge(bad));
            assert_eq!(
                lab.pool.set("v", &changes).await.expect_err("out of range").kind(),
                ErrorKind::Invalid,
                "{bad}"
            );
        }
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        assert_eq!(lab.pool.set("v@s", &diverge(4)).await.expect_err("a snapshot").kind(), ErrorKind::Invalid);
        assert_exact(&lab).await;
    });
}

#[test]
fn a_clone_has_no_bound_and_keeps_what_its_source_is_charged_for() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (_base, fork) = with_fork(&lab).await;
        write(&fork, 0, 8).await.expect("within the bound");
        lab.pool.clone_volume("fork", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("there");
        assert_eq!((lab.pool.find("clone").expect("there").diverge, diverged(&lab, "clone")), (0, 0));
        write(&clone, 0, 4).await.expect("no bound");
        write(&fork, 0, 8).await.expect("breaks");
        assert_eq!(diverged(&lab, "fork"), 16 - 4, "the clone has four of the old ones");
        drop(clone);
        lab.pool.delete(&["clone"]).await.expect("deleted");
        lab.pool.wait_freed().await.expect("freed");
        assert_eq!(diverged(&lab, "fork"), 8);
        assert_exact(&lab).await;
    });
}

#[test]
fn sharing_ranges_costs_nothing_and_whoever_frees_a_page_credits_its_writer() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (base, fork) = with_fork(&lab).await;
        write(&fork, 300, 12).await.expect("within the bound");
        // Within the volume, so that a page is there twice; then to another one, at another offset.
        fork.clone_range(&fork, 300 * PAGE, 400 * PAGE, 12 * PAGE).await.expect("cloned");
        base.clone_range(&fork, 300 * PAGE, 701 * PAGE, 12 * PAGE).await.expect("cloned");
        fork.clone_range(&base, 0, 256 * PAGE, 4 * PAGE).await.expect("cloned");
        assert_eq!((diverged(&lab, "fork"), diverged(&lab, "base")), (12, 0));
        fork.discard(300 * PAGE, 12 * PAGE).await.expect("trimmed");
        fork.discard(256 * PAGE, 4 * PAGE).await.expect("trimmed");
        fork.discard(400 * PAGE, 6 * PAGE).await.expect("trimmed");
        assert_eq!(diverged(&lab, "fork"), 12, "the other volume has them");
        write(&base, 701, 12).await.expect("in new places");
        assert_eq!(diverged(&lab, "fork"), 6);
        // A page that is replaced by itself stays.
        fork.clone_range(&fork, 406 * PAGE, 800 * PAGE, 6 * PAGE).await.expect("cloned");
        fork.clone_range(&fork, 800 * PAGE, 406 * PAGE, 6 * PAGE).await.expect("cloned");
        fork.discard(800 * PAGE, 6 * PAGE).await.expect("trimmed");
        assert_eq!(diverged(&lab, "fork"), 6);
        assert_exact(&lab).await;
    });
}

#[test]
fn whole_blocks_and_gathered_pages_stay_charged() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let base = lab.volume("base", 16).await;
        lab.fill(&base).await;
        lab.pool.fork("base", &["fork"], &ForkOptions::new(0).with_changes(diverge(1024))).await.expect("a fork");
        let fork = lab.pool.volume("fork").expect("there");
        write(&fork, 256, 256).await.expect("a whole block");
        assert_eq!(diverged(&lab, "fork"), 256);
        lab.pool.snapshot(&[("fork", "s")], 0).await.expect("a snapshot");
        for at in (0..256).step_by(3) {
            write(&fork, 256 + at, 1).await.expect("scattered");
            write(&fork, 1024 + at, 1).await.expect("scattered");
        }
        let before = diverged(&lab, "fork");
        assert_eq!(before, 256 + 2 * 86);
        assert_exact(&lab).await;
        let moved = lab.pool.gather("fork", |_, _| true).await.expect("gathered");
        assert!(moved.moved > 0);
        lab.pool.wait_freed().await.expect("freed");
        assert_eq!(diverged(&lab, "fork"), before);
        assert_exact(&lab).await;
        lab.pool.delete(&["fork@s"]).await.expect("deleted");
        lab.pool.wait_freed().await.expect("freed");
        assert_eq!(diverged(&lab, "fork"), 256 + 86);
        fork.discard(256 * PAGE, 256 * PAGE).await.expect("trimmed");
        assert_eq!(diverged(&lab, "fork"), 86);
        assert_exact(&lab).await;
    });
}

#[test]
fn a_full_pool_with_many_bounds_still_frees_space() {
    Lab::run(16, OpenOptions::default(), |lab| async move {
        let names: Vec<String> = (0..40).map(|i| format!("v{i}")).collect();
        let names: Vec<&str> = names.iter().map(|name| &name[..]).collect();
        let options = CreateOptions::new(4 << 20, 0).with_extension(ExtensionChanges::default().with_diverge(4 << 20));
        lab.pool.create_all(&names, &options).await.expect("created");
        for round in 0..3 {
            for name in &names {
                let volume = lab.pool.volume(name).expect("there");
                let mut at = 0;
                while at < 1024 && write(&volume, at, 8).await.is_ok() {
                    at += 8;
                }
            }
            assert!(write(&lab.pool.volume("v39").expect("there"), 1000, 24).await.is_err(), "the pool is full");
            for name in names.iter().skip(round).step_by(2) {
                lab.pool.volume(name).expect("there").discard(0, 4 << 20).await.expect("trimmed");
                assert_eq!(diverged(&lab, name), 0);
            }
            lab.pool.checkpoint().await.expect("a checkpoint");
            assert_exact(&lab).await;
        }
        lab.pool.delete(&names).await.expect("deleted");
        lab.pool.wait_freed().await.expect("freed");
        assert_exact(&lab).await;
    });
}

fn reserve(pages: u64) -> Changes {
    Changes::default().with_extension(ExtensionChanges::default().with_reserve(pages * PAGE))
}

/// Writes single pages to a volume, `step` pages apart, until the pool has no room; returns how many that was.
async fn fill(volume: &Disk, step: u64) -> u64 {
    for i in 0..volume.size() / PAGE / step {
        if let Err(error) = write(volume, i * step, 1).await {
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            return i;
        }
    }
    panic!("the volume is full before the pool is");
}

#[test]
fn what_is_reserved_can_be_written_whatever_others_take() {
    // In order, and so far apart that each page needs a table of its own.
    for step in [1, 300] {
        Lab::run(32, OpenOptions::default(), move |lab| async move {
            let volume = lab.volume("v", 2048).await;
            write(&volume, 0, 100).await.expect("written");
            lab.pool.snapshot(&[("v", "before")], 0).await.expect("a snapshot");
            lab.pool.set("v", &reserve(1000)).await.expect("there is room");
            assert_eq!(lab.pool.find("v").expect("there").reserve, 1000 * PAGE);
            let other = lab.volume("other", 2048).await;
            let mut taken = fill(&other, 1).await;
            assert_eq!(lab.pool.info().free, 0, "of what others can take");
            assert!(
                lab.pool.create("more", &CreateOptions::new(1 << 30, 0)).await.is_ok(),
                "verbs have their headroom"
            );
            for i in 0..1000 {
                write(&volume, i * step % (1 << 19), 1).await.unwrap_or_else(|error| panic!("{i}: {error}"));
                // What checkpoints return others may have, and nothing of what is reserved.
                while i % 100 == 0 && write(&other, taken, 1).await.is_ok() {
                    taken += 1;
                }
            }
            assert_eq!(diverged(&lab, "v"), 1000);
            other.discard(0, 100 * PAGE).await.expect("what frees space goes on");
            lab.pool.delete(&["v@before"]).await.expect("deleted");
            drop(other);
            lab.pool.delete(&["other"]).await.expect("deleted");
            lab.pool.wait_freed().await.expect("freed");
            assert_exact(&lab).await;
        });
    }
}

#[test]
fn a_reserve_is_refused_where_there_is_no_room_and_lasts_where_there_is() {
    Lab::run(32, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 64).await;
        let error = lab.pool.set("v", &reserve(9000)).await.expect_err("more than the pool has");
        assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("too few"), "{error}");
        let free = lab.pool.info().free;
        lab.pool.set("v", &reserve(3000)).await.expect("there is room");
        assert!(lab.pool.info().free <= free - 3000 * PAGE);
        let changes = reserve(2000);
        let twice = ForkOptions::new(0).with_changes(changes.clone());
        lab.pool.fork("v", &["a", "b"], &twice).await.expect_err("room for one");
        lab.pool.fork("v", &["a"], &ForkOptions::new(0).with_changes(changes)).await.expect("room for one");
        for checkpoint in [false, true] {
            if checkpoint {
                lab.pool.checkpoint().await.expect("a checkpoint");
            }
            volume.flush().await.expect("flushed");
            let again = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default());
            let again = again.await.expect("it opens");
            assert_eq!(again.find("a").expect("there").reserve, 2000 * PAGE);
            assert!(again.info().free <= free - 5000 * PAGE);
        }
        // What is written is no longer kept free, what is given back is again.
        let before = lab.pool.info().free;
        write(&volume, 0, 2500).await.expect("reserved");
        lab.pool.checkpoint().await.expect("a checkpoint");
        assert!(lab.pool.info().free + 200 * PAGE >= before);
        volume.discard(0, 2500 * PAGE).await.expect("trimmed");
        lab.pool.checkpoint().await.expect("a checkpoint");
        lab.pool.set("v", &reserve(0)).await.expect("none");
        drop(volume);
        lab.pool.delete(&["a"]).await.expect("deleted");
        lab.pool.wait_freed().await.expect("freed");
        assert!(lab.pool.info().free + 100 * PAGE >= free);
        assert_exact(&lab).await;
    });
}
