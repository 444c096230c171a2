//! Bounds of folders: how far all volumes below a folder may diverge together, and how much they may refer to. Every
//! test ends with a check, which finds the charged pages again and adds up what is below each folder by its names.

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::{
    Attributes, Changes, CreateOptions, ErrorKind, ExtensionChanges, ForkOptions, OpenOptions, Pool, Result,
};

use crate::lab::{Disk, Lab, stamp};

const PAGE: u64 = 4096;

fn diverge(pages: u64) -> Changes {
    Changes::default().with_extension(ExtensionChanges::default().with_diverge(pages * PAGE))
}

fn quota(pages: u64) -> Changes {
    Changes::default().with_quota(pages * PAGE)
}

/// A pool with a volume `base` of 200 pages and forks of it.
async fn with_forks<const N: usize>(lab: &Lab, names: [&str; N]) -> [Disk; N] {
    let base = lab.volume("base", 64).await;
    write(&base, 0, 200).await.expect("there is space");
    lab.pool.fork("base", &names, &ForkOptions::new(0)).await.expect("forks");
    names.map(|name| lab.pool.volume(name).expect("just made"))
}

async fn write(volume: &Disk, at: u64, pages: usize) -> Result<()> {
    volume.write(at * PAGE, stamp(at, pages), false).await.0
}

#[track_caller]
fn assert_refused(result: Result<()>, folder: &str) {
    let error = result.expect_err("beyond the bound");
    assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains(&format!("{folder:?}")), "{error}");
}

/// What a folder counts: pages charged below it, and pages that volumes below it refer to.
fn counts(lab: &Lab, folder: &str) -> (u64, u64) {
    let info = lab.pool.find_folder(folder).expect("there");
    (info.diverged / PAGE, info.referenced / PAGE)
}

fn diverged(lab: &Lab, folder: &str) -> u64 {
    counts(lab, folder).0
}

async fn assert_exact(lab: &Lab) {
    let report = lab.pool.check().await.expect("a check");
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

#[test]
fn all_volumes_below_a_folder_reach_its_bound_together() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b, c, out] = with_forks(&lab, ["kids/a", "kids/b", "kids/deep/down/c", "out"]).await;
        lab.pool.set("kids", &diverge(20)).await.expect("a folder without a record gets one");
        assert_eq!((lab.pool.find_folder("kids").expect("there").diverge, diverged(&lab, "kids")), (20 * PAGE, 0));
        assert_eq!(lab.pool.folders_with_properties().len(), 1);
        write(&a, 0, 8).await.expect("breaks");
        write(&b, 500, 8).await.expect("new pages");
        write(&c, 3, 3).await.expect("in a folder in the folder");
        assert_eq!(diverged(&lab, "kids"), 19);
        assert_refused(write(&c, 100, 2).await, "kids");
        assert_eq!(lab.stamps(&c, 100, 2).await, [Some(100), Some(101)], "all of it or nothing");
        write(&b, 600, 1).await.expect("up to the bound");
        assert_refused(a.write(700 * PAGE + 5, Buf::zeroed(1), false).await.0, "kids");
        write(&out, 0, 100).await.expect("others are not bounded");
        write(&a, 0, 8).await.expect("in place");
        lab.pool.fork("kids/a", &["kids/new", "else/new"], &ForkOptions::new(0)).await.expect("forks");
        let [new, other] = ["kids/new", "else/new"].map(|name| lab.pool.volume(name).expect("just made"));
        assert_refused(write(&new, 0, 1).await, "kids");
        write(&other, 0, 50).await.expect("outside");
        b.discard(500 * PAGE, 8 * PAGE).await.expect("trimmed");
        write(&new, 0, 8).await.expect("what one gives back another one can take");
        assert_refused(write(&b, 0, 1).await, "kids");
        drop((a, new));
        lab.pool.delete(&["kids/new"]).await.expect("deleted");
        write(&c, 100, 8).await.expect("it waits until the space is free");
        assert_exact(&lab).await;
        lab.pool.set("kids", &diverge(0)).await.expect("none");
        write(&c, 0, 200).await.expect("no bound");
        assert!(lab.pool.folders_with_properties().is_empty());
        assert_exact(&lab).await;
    });
}

#[test]
fn writes_to_several_volumes_at_once_do_not_exceed_the_bound_together() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let disks = with_forks(&lab, ["kids/a", "kids/b", "kids/x/c", "kids/x/d"]).await;
        lab.pool.set("kids", &diverge(20)).await.expect("set");
        lab.pool.set("kids/x", &diverge(15)).await.expect("set");
        for step in [1, 100] {
            let writes = (0..40)
                .flat_map(|i| disks.iter().map(move |disk| (disk, i)))
                .map(|(disk, i)| lab.write(disk, i * step, 1, i));
            let mut refused = 0;
            for write in writes.collect::<Vec<_>>() {
                refused += u64::from(write.await.is_err_and(|error| error.kind() == ErrorKind::NoSpace));
            }
            assert_eq!((refused, diverged(&lab, "kids")), (140, 20), "{step}");
            assert!(diverged(&lab, "kids/x") <= 15);
            for disk in &disks {
                disk.discard(0, disk.size()).await.expect("trimmed");
            }
        }
        assert_exact(&lab).await;
    });
}

#[test]
fn volumes_and_folders_with_bounds_of_their_own_count_in_those_above() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b, c] = with_forks(&lab, ["kids/a", "kids/x/b", "kids/x/c"]).await;
        lab.pool.set("kids", &diverge(20)).await.expect("set");
        lab.pool.set("kids/x", &diverge(12)).await.expect("set");
        lab.pool.set("kids/x/b", &diverge(5)).await.expect("set");
        write(&b, 0, 5).await.expect("up to its bound");
        assert!(write(&b, 10, 1).await.expect_err("its own bound").to_string().contains("the volume has diverged"));
        write(&c, 0, 7).await.expect("up to the bound of the inner folder");
        assert_refused(write(&c, 10, 1).await, "kids/x");
        write(&a, 0, 8).await.expect("up to the bound of the outer folder");
        assert_refused(write(&a, 20, 1).await, "kids");
        assert_eq!((diverged(&lab, "kids"), diverged(&lab, "kids/x")), (20, 12));
        assert_exact(&lab).await;
        lab.pool.set("kids/x", &diverge(0)).await.expect("none");
        lab.pool.set("kids/x/b", &diverge(0)).await.expect("none");
        assert_refused(write(&c, 10, 1).await, "kids");
        lab.pool.set("kids", &diverge(23)).await.expect("raised");
        write(&c, 10, 2).await.expect("no bound of the inner folder");
        write(&b, 20, 1).await.expect("no bound of its own");
        assert_refused(write(&b, 30, 1).await, "kids");
        assert_exact(&lab).await;
    });
}

#[test]
fn what_is_moved_takes_along_what_is_charged_to_itself() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b, c] = with_forks(&lab, ["kids/a", "kids/b", "kids/x/c"]).await;
        lab.pool.set("kids", &diverge(40)).await.expect("set");
        lab.pool.set("kids/b", &diverge(30)).await.expect("set");
        lab.pool.create_folder("other", Attributes::of_no_owner(0), 0).expect("made");
        lab.pool.set("other", &diverge(10)).await.expect("set");
        for disk in [&a, &b, &c] {
            write(disk, 0, 6).await.expect("within all bounds");
        }
        lab.pool.rename("kids/a", "other/a").await.expect("moved");
        lab.pool.rename("kids/b", "other/b").await.expect("moved");
        assert_eq!((diverged(&lab, "kids"), diverged(&lab, "other")), (12, 6));
        assert_exact(&lab).await;
        write(&a, 10, 4).await.expect("up to the bound of where it is");
        assert_refused(write(&b, 10, 1).await, "other");
        a.discard(0, 200 * PAGE).await.expect("trimmed");
        assert_eq!((diverged(&lab, "kids"), diverged(&lab, "other")), (6, 6), "each page where it was written");
        lab.pool.rename_folder("kids/x", "other/x").expect("moved");
        write(&c, 20, 4).await.expect("within the other bound");
        assert_refused(write(&c, 30, 1).await, "other");
        lab.pool.swap("other", "kids").await.expect("swapped");
        assert_eq!((diverged(&lab, "kids"), diverged(&lab, "other")), (10, 6), "bounds go with their folders");
        assert_exact(&lab).await;
        lab.pool.swap("kids/b", "other").await.expect("a folder and a volume");
        assert_eq!((diverged(&lab, "kids"), diverged(&lab, "kids/b")), (6 + 4, 6), "the volume is in neither");
        assert_exact(&lab).await;
    });
}

#[test]
fn bounds_of_folders_and_their_counts_last() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b] = with_forks(&lab, ["kids/a", "kids/x/b"]).await;
        lab.pool.set("kids", &diverge(20)).await.expect("set");
        lab.pool.set("kids/x", &quota(205)).await.expect("set");
        write(&a, 0, 5).await.expect("within the bound");
        write(&b, 300, 4).await.expect("within the bound");
        lab.pool.snapshot(&[("kids/a", "s")], 0).await.expect("a snapshot");
        write(&a, 0, 2).await.expect("within the bound");
        a.flush().await.expect("flushed");
        for checkpoint in [false, true] {
            if checkpoint {
                lab.pool.checkpoint().await.expect("a checkpoint");
            }
            // As after a kill: from the journal, then from the directory.
            let again = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default());
            let again = again.await.expect("it opens");
            let [kids, x] = ["kids", "kids/x"].map(|name| again.find_folder(name).expect("there"));
            assert_eq!(
                (kids.diverge, kids.diverged, x.quota, x.referenced),
                (20 * PAGE, 11 * PAGE, 205 * PAGE, 204 * PAGE)
            );
            let [a, b] = ["kids/a", "kids/x/b"].map(|name| again.volume(name).expect("there"));
            assert_refused(a.write(300 * PAGE, stamp(0, 10), false).await.0, "kids");
            assert_refused(b.write(400 * PAGE, stamp(0, 2), false).await.0, "kids/x");
            let report = again.check().await.expect("a check");
            assert!(report.damage.is_empty(), "{report:?}");
        }
    });
}

#[test]
fn a_quota_of_a_folder_counts_what_is_below_it() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b] = with_forks(&lab, ["kids/a", "kids/x/b"]).await;
        lab.pool.set("kids", &quota(420)).await.expect("set");
        assert_eq!(counts(&lab, "kids"), (0, 400));
        write(&a, 0, 200).await.expect("what is mapped can be overwritten");
        write(&a, 300, 15).await.expect("within the quota");
        assert_refused(write(&b, 300, 6).await, "kids");
        write(&b, 300, 5).await.expect("up to the quota");
        assert_refused(a.clone_range(&a, 0, 700 * PAGE, PAGE).await, "kids");
        a.discard(0, 10 * PAGE).await.expect("trimmed");
        assert_eq!(counts(&lab, "kids"), (0, 410));
        let writes: Vec<_> =
            (0..20).flat_map(|i| [lab.write(&a, 400 + i, 1, i), lab.write(&b, 400 + i, 1, i)]).collect();
        let mut refused = 0;
        for write in writes {
            refused += u64::from(write.await.is_err());
        }
        assert_eq!((refused, counts(&lab, "kids").1), (30, 420));
        lab.pool.rename("kids/a", "a").await.expect("moved");
        assert_eq!(counts(&lab, "kids").1 + lab.pool.find("a").expect("there").referenced / PAGE, 420);
        assert_exact(&lab).await;
        lab.pool.rename("a", "kids/a").await.expect("moved");
        drop(b);
        lab.pool.delete(&["kids/x/b"]).await.expect("deleted");
        write(&a, 600, 30).await.expect("there is room");
        assert_exact(&lab).await;
    });
}

#[test]
fn files_that_were_removed_while_open_count_until_they_are_closed() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b] = with_forks(&lab, ["kids/a", "kids/b"]).await;
        lab.pool.set("kids", &diverge(20)).await.expect("set");
        lab.pool.set("kids", &quota(410)).await.expect("set");
        write(&a, 0, 15).await.expect("within the bound");
        lab.pool.remove_file("kids/a").expect("removed");
        assert_eq!(counts(&lab, "kids"), (15, 400));
        write(&a, 20, 3).await.expect("within the bound");
        assert_refused(write(&b, 0, 3).await, "kids");
        assert_exact(&lab).await;
        drop(a);
        write(&b, 0, 20).await.expect("it waits until the space is free");
        assert_eq!(counts(&lab, "kids"), (20, 200));
        assert_exact(&lab).await;
    });
}

#[test]
fn what_a_deleted_volume_or_folder_counted_counts_as_long_as_others_hold_it() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, d] = with_forks(&lab, ["kids/a", "kids/x/d"]).await;
        for (name, pages) in [("kids", 40), ("kids/x", 20), ("kids/a", 20)] {
            lab.pool.set(name, &diverge(pages)).await.expect("set");
        }
        write(&a, 0, 10).await.expect("within its bound");
        write(&d, 0, 5).await.expect("within the inner bound");
        d.flush().await.expect("flushed");
        let entries = lab.pool.space().entries;
        lab.pool.fork("kids/a", &["kids/b"], &ForkOptions::new(0)).await.expect("forked");
        lab.pool.rename("kids/x/d", "kids/d").await.expect("moved");
        drop(a);
        lab.pool.delete(&["kids/a"]).await.expect("deleted");
        lab.pool.remove_folder("kids/x").expect("removed");
        lab.pool.wait_freed().await.expect("freed");
        assert_eq!(diverged(&lab, "kids"), 15);
        assert_exact(&lab).await;
        lab.pool.flush().await.expect("flushed");
        for checkpoint in [false, true] {
            if checkpoint {
                lab.pool.checkpoint().await.expect("a checkpoint");
            }
            let again = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default());
            let again = again.await.expect("it opens");
            assert_eq!(again.find_folder("kids").expect("there").diverged, 15 * PAGE);
            let report = again.check().await.expect("a check");
            assert!(report.damage.is_empty(), "{report:?}");
        }
        let b = lab.pool.volume("kids/b").expect("there");
        b.discard(0, 7 * PAGE).await.expect("trimmed");
        write(&d, 0, 5).await.expect("in place");
        assert_eq!(diverged(&lab, "kids"), 8);
        assert_refused(write(&b, 100, 33).await, "kids");
        b.discard(0, 10 * PAGE).await.expect("trimmed");
        d.discard(0, 5 * PAGE).await.expect("trimmed");
        assert_eq!(diverged(&lab, "kids"), 0);
        lab.pool.checkpoint().await.expect("a checkpoint");
        lab.pool.wait_freed().await.expect("freed");
        assert_eq!(lab.pool.space().entries, entries - 1, "nothing is left of the deleted ones");
        assert_exact(&lab).await;
    });
}

#[test]
fn accounts_that_were_kept_end_with_the_bound_of_the_folder() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let [a, b] = with_forks(&lab, ["out/kids/a", "out/kids/b"]).await;
        for (name, pages) in [("out", 50), ("out/kids", 40), ("out/kids/a", 20)] {
            lab.pool.set(name, &diverge(pages)).await.expect("set");
        }
        write(&a, 0, 10).await.expect("within its bound");
        write(&b, 0, 3).await.expect("within the bound");
        let entries = lab.pool.space().entries;
        lab.pool.fork("out/kids/a", &["elsewhere"], &ForkOptions::new(0)).await.expect("forked");
        drop(a);
        lab.pool.delete(&["out/kids/a"]).await.expect("deleted");
        assert_eq!((diverged(&lab, "out"), diverged(&lab, "out/kids")), (13, 13), "not free yet");
        lab.pool.rename_folder("out/kids", "kids").expect("moved");
        assert_eq!((diverged(&lab, "out"), diverged(&lab, "kids")), (0, 13));
        lab.pool.rename_folder("kids", "out/kids").expect("moved");
        lab.pool.set("out/kids", &diverge(0)).await.expect("none");
        assert_eq!(diverged(&lab, "out"), 13);
        assert_exact(&lab).await;
        lab.pool.set("out", &diverge(0)).await.expect("none");
        lab.pool.wait_freed().await.expect("freed");
        assert_eq!(lab.pool.space().entries, entries);
        assert_exact(&lab).await;
    });
}

#[test]
fn a_folder_has_these_bounds_and_no_other_property() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let _disks = with_forks(&lab, ["kids/a"]).await;
        let reserve = Changes::default().with_extension(ExtensionChanges::default().with_reserve(PAGE));
        for bad in [Changes::default().with_chunk(8192), reserve] {
            let error = lab.pool.set("kids", &bad).await.expect_err("no property of a folder");
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("is a folder"), "{error}");
        }
        assert_eq!(lab.pool.set("kid", &diverge(9)).await.expect_err("nothing").kind(), ErrorKind::NotFound);
        assert_eq!(lab.pool.find_folder("kids").expect_err("no bound").kind(), ErrorKind::NotFound);
        lab.pool.set("kids", &diverge(9)).await.expect("set");
        lab.pool.create("kids/new", &CreateOptions::new(1 << 20, 0)).await.expect("made");
        lab.pool.delete(&["kids/new"]).await.expect("deleted");
        lab.pool.fork("kids", &["copy"], &ForkOptions::new(0)).await.expect("forked");
        assert_eq!(lab.pool.folders_with_properties().len(), 1, "a fork of a folder has no bound");
        assert_exact(&lab).await;
    });
}
