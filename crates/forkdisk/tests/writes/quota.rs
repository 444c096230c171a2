//! Quotas: a limit of what a volume refers to, independent of the writer and of other volumes.

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::{BreakPolicy, CreateOptions, ErrorKind, OpenOptions, Pool, Result};

use crate::lab::{Disk, Lab, stamp};

const PAGE: u64 = 4096;

async fn with_quota(lab: &Lab, name: &str, pages: u64) -> Disk {
    let options = CreateOptions::new(64 << 20, 0).with_quota(pages * PAGE);
    assert_eq!(lab.pool.create(name, &options).await.expect("a new volume").quota, pages * PAGE);
    lab.pool.volume(name).expect("just made")
}

async fn write(volume: &Disk, at: u64, pages: usize) -> Result<()> {
    volume.write(at * PAGE, stamp(at, pages), false).await.0
}

#[track_caller]
fn assert_refused(result: Result<()>) {
    let error = result.expect_err("beyond the quota");
    assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("quota"), "{error}");
}

fn referenced(lab: &Lab, name: &str) -> u64 {
    lab.pool.find(name).expect("there").referenced / PAGE
}

#[test]
fn a_write_beyond_the_quota_fails_and_harms_nothing() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = with_quota(&lab, "v", 100).await;
        let other = lab.volume("other", 64).await;
        write(&volume, 0, 96).await.expect("within the quota");
        assert_refused(write(&volume, 96, 5).await);
        assert_refused(volume.write(96 * PAGE + 100, Buf::zeroed(5 * PAGE as usize), false).await.0);
        assert_eq!(lab.stamps(&volume, 96, 5).await, [None; 5], "a request is done as a whole or not at all");
        assert_eq!(referenced(&lab, "v"), 96);
        write(&volume, 96, 4).await.expect("up to the quota");
        assert_refused(volume.write(200 * PAGE, Buf::zeroed(1), false).await.0);
        write(&other, 0, 512).await.expect("others have their own bounds");
        write(&volume, 0, 100).await.expect("in place");
        volume.write(10 * PAGE + 7, Buf::zeroed(9000), false).await.0.expect("in place, ragged");
        volume.write_zeroes(20 * PAGE, 5 * PAGE, false).await.expect("zeroes take nothing");
        write(&volume, 300, 5).await.expect("what was zeroed is free again");
        volume.discard(0, 10 * PAGE).await.expect("trimmed");
        write(&volume, 400, 10).await.expect("what was trimmed is free again");
        assert_refused(write(&volume, 500, 1).await);
        let report = lab.pool.check().await.expect("a check");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    });
}

#[test]
fn at_the_quota_shared_data_can_be_overwritten() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        for (name, break_policy) in [("split", BreakPolicy::Split), ("copy", BreakPolicy::Copy)] {
            let volume = with_quota(&lab, name, 64).await;
            lab.pool.set_break_policy(name, break_policy).await.expect("set");
            write(&volume, 0, 60).await.expect("within the quota");
            lab.pool.snapshot(&[(name, "s")], 0).await.expect("a snapshot");
            for at in 0..60 {
                write(&volume, at, 1).await.expect("a break takes nothing of the quota");
            }
            lab.pool.snapshot(&[(name, "t")], 0).await.expect("a snapshot");
            assert_refused(write(&volume, 56, 16).await);
            write(&volume, 56, 8).await.expect("four broken, four new");
            assert_eq!(referenced(&lab, name), 64);
            assert_eq!(lab.pool.find(&format!("{name}@s")).expect("there").quota, 0);
        }
    });
}

#[test]
fn writes_at_once_do_not_take_it_beyond_its_quota_together() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = with_quota(&lab, "v", 50).await;
        // Adjacent, so that some are merged into others, and far apart, so that none are.
        for step in [1, 200] {
            volume.discard(0, volume.size()).await.expect("trimmed");
            let writes: Vec<_> = (0..80).map(|i| lab.write(&volume, i * step, 1, i)).collect();
            let (mut done, mut refused) = (0, 0);
            for write in writes {
                match write.await {
                    Ok(()) => done += 1,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::NoSpace);
                        refused += 1;
                    }
                }
            }
            assert_eq!((done, refused, referenced(&lab, "v")), (50, 30, 50), "{step}");
        }
    });
}

#[test]
fn a_write_that_fails_gives_its_claim_back() {
    Lab::run(8, OpenOptions::default(), |lab| async move {
        let volume = with_quota(&lab, "v", 16_000).await;
        let mut at = 0;
        while write(&volume, at, 16).await.is_ok() {
            at += 16;
        }
        // The pool was full long before the quota was reached.
        let had = referenced(&lab, "v");
        lab.pool.set_quota("v", (had + 1) * PAGE).await.expect("set");
        lab.pool.grow(64 << 20).await.expect("grown");
        write(&volume, at + 100, 1).await.expect("the last one");
        assert_refused(write(&volume, at + 200, 1).await);
    });
}

#[test]
fn a_quota_lasts_and_can_be_changed() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 64).await;
        write(&volume, 0, 10).await.expect("without a quota");
        drop(volume);
        lab.pool.rename("v", "w").await.expect("renamed");
        lab.pool.checkpoint().await.expect("a checkpoint");
        lab.pool.set_quota("w", 10 * PAGE).await.expect("set");
        for checkpoint in [false, true] {
            if checkpoint {
                lab.pool.checkpoint().await.expect("a checkpoint");
            }
            // As after a kill: from the journal, then from the directory.
            let again = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default());
            let again = again.await.expect("it opens");
            assert_eq!(again.find("w").expect("there").quota, 10 * PAGE);
            let volume = again.volume("w").expect("there");
            assert!(volume.write(20 * PAGE, stamp(0, 1), false).await.0.is_err());
        }
    });
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = with_quota(&lab, "v", 10).await;
        write(&volume, 0, 10).await.expect("up to the quota");
        lab.pool.set_quota("v", 20 * PAGE + 4095).await.expect("raised");
        assert_refused(write(&volume, 10, 11).await);
        write(&volume, 10, 10).await.expect("whole pages count");
        lab.pool.set_quota("v", 5 * PAGE).await.expect("lowered");
        write(&volume, 0, 20).await.expect("what is there stays, and can be written");
        assert_refused(write(&volume, 30, 1).await);
        volume.discard(0, 16 * PAGE).await.expect("trimmed");
        write(&volume, 30, 1).await.expect("there is room again");
        lab.pool.set_quota("v", 0).await.expect("none");
        write(&volume, 100, 100).await.expect("no bound");
        assert!(lab.pool.set_quota("v", (1 << 50) + 1).await.is_err());
    });
}

#[test]
fn a_clone_has_no_quota_and_a_rollback_leaves_it() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = with_quota(&lab, "v", 40).await;
        write(&volume, 0, 40).await.expect("up to the quota");
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        assert_eq!(lab.pool.clone_volume("v@s", "c", 0).await.expect("a clone").quota, 0);
        volume.discard(0, 40 * PAGE).await.expect("trimmed");
        drop(volume);
        lab.pool.set_quota("v", 4 * PAGE).await.expect("set");
        lab.pool.rollback("v", "s").await.expect("rolled back");
        let volume = lab.pool.volume("v").expect("there");
        assert_eq!((lab.pool.find("v").expect("there").quota, referenced(&lab, "v")), (4 * PAGE, 40));
        write(&volume, 0, 40).await.expect("what it refers to can be written");
        assert_refused(write(&volume, 40, 1).await);
    });
}

#[test]
fn a_range_clone_stays_within_the_quota() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let source = lab.volume("source", 64).await;
        write(&source, 0, 200).await.expect("written");
        let volume = with_quota(&lab, "v", 100).await;
        volume.clone_range(&source, 0, 0, 100 * PAGE).await.expect("within the quota");
        assert_refused(volume.clone_range(&source, 100 * PAGE, 100 * PAGE, PAGE).await);
        volume.clone_range(&source, 100 * PAGE, 0, 100 * PAGE).await.expect("in place of as much");
        volume.clone_range(&source, 300 * PAGE, 0, 50 * PAGE).await.expect("holes take nothing");
        volume.clone_range(&source, 0, 200 * PAGE, 50 * PAGE).await.expect("and leave room");
        assert_eq!(referenced(&lab, "v"), 100);
    });
}
