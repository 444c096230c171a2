//! The modification time of a volume costs no additional request.

use std::time::Duration;

use forkdisk::{OpenOptions, Runtime as _};

use super::lab::{Disk, Lab};

const INTERVAL: Duration = Duration::from_secs(5);

fn options(clock: bool) -> OpenOptions {
    let clock = clock.then_some((|| 77) as fn() -> i64);
    OpenOptions::default().with_clock(clock).with_commit_interval(INTERVAL)
}

fn modified(volume: &Disk) -> Option<i64> {
    volume.info().attributes.map(|a| a.modified)
}

/// Returns the requests, their bytes and the flushes that reach the device, for first writes, breaks and
/// writes in place.
fn costs(clock: bool) -> (u64, u64, u64) {
    Lab::run(64, options(clock), move |lab| async move {
        let volume = lab.volume("v", 4).await;
        for round in 0..6 {
            for page in 0..50 {
                lab.write(&volume, 2 * page, 1, page).await.expect("there is space");
                volume.flush().await.expect("it is durable");
            }
            if round == 3 {
                lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
            }
        }
        assert_eq!(modified(&volume), clock.then_some(77));
        let statistics = lab.pool.statistics();
        (statistics.journal.count, statistics.journal.bytes, statistics.flushes)
    })
}

#[test]
fn times_cost_no_request_no_flush_and_no_byte_of_the_journal() {
    assert_eq!(costs(true), costs(false));
}

#[test]
fn the_time_of_a_write_in_place_is_recorded_after_the_commit_interval_and_once() {
    Lab::run(64, options(true), |lab| async move {
        let volume = lab.volume("v", 4).await;
        lab.write(&volume, 7, 1, 1).await.expect("there is space");
        for number in 2..4 {
            volume.flush().await.expect("it is durable");
            lab.write(&volume, 7, 1, number).await.expect("there is space");
        }
        volume.flush().await.expect("it is durable");
        let records = || lab.pool.statistics().journal.count;
        let before = records();
        lab.tasks.sleep(3 * INTERVAL).await;
        assert_eq!(records() - before, 1, "one commit says when it was changed");
        lab.tasks.sleep(10 * INTERVAL).await;
        assert_eq!(records() - before, 1, "a pool in which nothing changes does nothing");
    });
}

#[test]
fn what_is_set_counts_whatever_was_written_before() {
    Lab::run(64, options(true), |lab| async move {
        let volume = lab.volume("v", 4).await;
        lab.write(&volume, 7, 1, 1).await.expect("there is space");
        let known = volume.info().attributes.expect("a time");
        assert_eq!((known.modified, known.changed, known.uid), (77, 77, forkdisk::Attributes::NOT_SET));
        lab.write(&volume, 7, 1, 2).await.expect("there is space");
        let set = forkdisk::Attributes { modified: 5, ..known };
        lab.pool.set_attributes(volume.id(), set).expect("it is set");
        volume.flush().await.expect("it is durable");
        assert_eq!(modified(&volume), Some(5));
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        lab.write(&volume, 7, 1, 3).await.expect("there is space");
        assert_eq!(modified(&volume), Some(77));
        let snapshot = lab.pool.volume("v@s").expect("just taken");
        assert_eq!(modified(&snapshot), Some(5), "a snapshot has the time of what it shows");
    });
}

/// The state of the time outlived the volume, and recording it failed the process.
#[test]
fn the_time_of_a_volume_that_is_removed_is_not_recorded() {
    Lab::run(64, options(true), |lab| async move {
        for take in [false, true] {
            let volume = lab.volume("v", 4).await;
            lab.write(&volume, 7, 1, 1).await.expect("there is space");
            if take {
                assert_eq!(modified(&volume), Some(77));
            }
            lab.pool.remove_file("v").expect("it is removed");
            drop(volume);
            lab.pool.wait_freed().await.expect("its space is free");
            lab.pool.flush().await.expect("it is durable");
            lab.tasks.sleep(3 * INTERVAL).await;
        }
    });
}
