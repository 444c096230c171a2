//! The cost of a flush, and where the next write to the same page goes.

use std::rc::Rc;
use std::time::Duration;

use forkdisk::{CreateOptions, OpenOptions, Pool, Runtime as _, VolatileLog, VolatileMemory};

use super::lab::{Disk, Lab, stamp};
use forkdisk::testing::Inline;

const MIB: u64 = 1 << 20;

/// Writes a page, flushes, and returns where it went and how many device flushes that took.
async fn write_and_flush(lab: &Lab, volume: &Disk, page: u64, number: u64) -> (u64, u64) {
    lab.tape.take();
    let before = lab.pool.statistics().flushes;
    lab.write(volume, page, 1, number).await.expect("there is space");
    volume.flush().await.expect("it is durable");
    let (pages, _) = lab.tape.take();
    assert_eq!(pages.len(), 1, "written once");
    (pages[0].at, lab.pool.statistics().flushes - before)
}

#[test]
fn the_flush_after_a_first_write_is_one_flush_and_a_page_settles_down_in_place() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 4).await;
        // The first commit of a pool marks it as open.
        write_and_flush(&lab, &volume, 900, 0).await;
        let (first, flushes) = write_and_flush(&lab, &volume, 7, 1).await;
        assert_eq!(flushes, 1);
        let (second, flushes) = write_and_flush(&lab, &volume, 7, 2).await;
        assert!(second != first, "recovery may ask for the first");
        assert_eq!(flushes, 2, "it will not ask for this one");
        let (third, flushes) = write_and_flush(&lab, &volume, 7, 3).await;
        assert_eq!((third, flushes), (second, 1), "in place");
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        let (fourth, flushes) = write_and_flush(&lab, &volume, 7, 4).await;
        assert!(fourth != third && flushes == 1, "a break costs no flush more");
        assert_eq!(lab.stamps(&volume, 7, 1).await, [Some(4)]);
    });
}

#[test]
fn what_changes_before_its_commit_or_is_not_all_data_is_flushed_first() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 4).await;
        write_and_flush(&lab, &volume, 900, 0).await;
        lab.write(&volume, 7, 1, 1).await.expect("there is space");
        let (_, flushes) = write_and_flush(&lab, &volume, 7, 2).await;
        assert_eq!(flushes, 2, "in place, over what the record was to vouch for");
        lab.write(&volume, 8, 1, 3).await.expect("there is space");
        let before = lab.pool.statistics().flushes;
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        assert_eq!(lab.pool.statistics().flushes - before, 2, "it shows what is durable");
    });
}

#[test]
fn a_verb_flushes_once_unless_it_says_something_of_data_that_is_not_durable() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 4).await;
        write_and_flush(&lab, &volume, 7, 0).await;
        write_and_flush(&lab, &volume, 7, 1).await;
        let flushes = || lab.pool.statistics().flushes;
        let before = flushes();
        lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        assert_eq!(flushes() - before, 1, "all data is durable");
        write_and_flush(&lab, &volume, 7, 2).await;
        write_and_flush(&lab, &volume, 7, 3).await;
        // In place, and not flushed.
        for (verb, expected) in
            ["fork v@s", "create", "delete", "fork v", "rollback", "snapshot"].iter().zip([1, 1, 1, 2, 1, 2])
        {
            lab.write(&volume, 7, 1, 4).await.expect("it needs no space");
            let before = flushes();
            match *verb {
                "fork v@s" => drop(lab.pool.clone_all("v@s", &["a", "b"], 0).await.expect("forks")),
                "create" => drop(lab.pool.create("c", &CreateOptions::new(MIB, 0)).await.expect("a volume")),
                "delete" => lab.pool.delete(&["c"]).await.expect("deleted"),
                "fork v" => drop(lab.pool.clone_all("v", &["d"], 0).await.expect("a fork")),
                "rollback" => lab.pool.rollback_to("a", "v@s").await.expect("rolled back"),
                _ => drop(lab.pool.snapshot(&[("v", "t")], 0).await.expect("a snapshot")),
            }
            assert_eq!(flushes() - before, expected, "{verb}");
            // The write above is in place again.
            write_and_flush(&lab, &volume, 7, 5).await;
            write_and_flush(&lab, &volume, 7, 6).await;
        }
    });
}

#[test]
fn a_full_pool_takes_writes_in_place_to_what_was_just_committed() {
    Lab::run(16, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 32).await;
        let mut written = 0;
        while volume.write(written * 4096, stamp(written, 1), false).await.0.is_ok() {
            volume.flush().await.expect("it is durable");
            written += 1;
        }
        assert!(written > 1000, "{written} pages");
        for page in [written - 1, 0, written - 1] {
            lab.write(&volume, page, 1, 5000).await.expect("it needs no space");
            volume.flush().await.expect("it is durable");
        }
        assert_eq!(lab.stamps(&volume, written - 1, 1).await, [Some(5000)]);
    });
}

#[test]
fn all_groups_of_a_commit_are_one_request_and_nobody_waits_for_many() {
    Lab::run(256, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 128).await;
        // The first commit of a pool marks it as open.
        write_and_flush(&lab, &volume, 0, 0).await;
        let journal = || lab.pool.statistics().journal;
        let mut most = 0;
        for round in 0..3 {
            for i in 0..6000 {
                lab.write(&volume, 2 + 2 * (6000 * round + i) % 32_000, 1, i).await.expect("there is space");
            }
            let before = journal();
            volume.flush().await.expect("it is durable");
            let after = journal();
            assert!(after.count - before.count <= 1, "{before:?} {after:?}");
            most = most.max(after.bytes - before.bytes);
        }
        assert!((129 << 10..=264 << 10).contains(&most), "{most} bytes are more than a group, and few");
    });
}

#[test]
fn who_waits_for_a_commit_waits_for_one_request_wherever_in_the_journal_that_lies() {
    Lab::run(256, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 16).await;
        let journal = || lab.pool.statistics().journal;
        let length = lab.pool.info().journal_size;
        let (mut round, start) = (0, journal().bytes);
        while journal().bytes - start < 2 * length {
            // Everything is written elsewhere, and has a separate record.
            lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
            for i in 0..1000 + round % 300 {
                lab.write(&volume, 2 * (i * 389 % 2000), 1, i).await.expect("there is space");
            }
            let before = journal().count;
            volume.flush().await.expect("it is durable");
            assert!(journal().count - before <= 1, "round {round}");
            lab.pool.delete(&["v@s"]).await.expect("it is deleted");
            round += 1;
        }
        assert!(round > 20, "{length} bytes in {round} rounds");
    });
}

#[test]
fn what_a_flush_has_to_write_is_as_much_where_a_piece_of_the_journal_ends() {
    Lab::run(256, OpenOptions::default(), |lab| async move {
        let volume = lab.volume("v", 80).await;
        let journal = || lab.pool.statistics().journal;
        let (start, length) = (journal().bytes, lab.pool.info().journal_size);
        let mut at_flush = Vec::new();
        while journal().bytes - start < 6 * length {
            lab.pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
            // More records than start a background commit.
            for i in 0..9800 {
                lab.write(&volume, 2 * (i * 389 % 10000), 1, i).await.expect("there is space");
            }
            let before = journal().bytes;
            volume.flush().await.expect("it is durable");
            at_flush.push(journal().bytes - before);
            lab.pool.delete(&["v@s"]).await.expect("it is deleted");
        }
        let (first, most) = (at_flush[0], *at_flush.iter().max().expect("there are some"));
        assert!(most <= first + first / 20, "{at_flush:?}");
    });
}

/// A commit is written during a checkpoint whose start lies behind its records. When the checkpoint has
/// ended, pages covered by the commit's checksums may be written in place. Recovery still meets its group,
/// and the volatile log continues behind it.
#[test]
fn the_volatile_log_goes_on_behind_a_group_that_a_checkpoint_has_overtaken() {
    for delay in (0..600).step_by(20) {
        let log = VolatileLog::new(VolatileMemory::new(vec![0; 1 << 20]), [1; 32]);
        let options = OpenOptions::default().with_volatile(Some(log));
        let tape = Lab::run(64, options.clone(), move |lab| async move {
            let volume = lab.volume("v", 4).await;
            write_and_flush(&lab, &volume, 900, 0).await;
            lab.pool.checkpoint().await.expect("it succeeds");
            lab.write(&volume, 7, 1, 1).await.expect("there is space");
            let pool = lab.pool.clone();
            let checkpoint = lab.tasks.start(async move { pool.checkpoint().await });
            lab.tasks.sleep(Duration::from_micros(delay)).await;
            volume.flush().await.expect("it is durable");
            checkpoint.await.expect("it succeeds");
            // Both areas of the log now begin behind the group.
            volume.flush().await.expect("nothing is left to do");
            lab.write(&volume, 7, 1, 2).await.expect("there is space");
            lab.write(&volume, 8, 1, 3).await.expect("there is space");
            lab.tape
        });
        // The process has died, and the device has everything that it completed.
        let tasks = Inline::default();
        let tape = tape.on(&tasks, Duration::ZERO);
        tasks.clone().run(async move {
            let pool = Pool::open(tape.clone(), Rc::new(tasks.clone()), options).await.expect("it opens");
            let lab = Lab { tasks, tape, pool };
            let volume = lab.pool.volume("v").expect("it is there");
            assert_eq!(lab.stamps(&volume, 7, 2).await, [Some(2), Some(3)], "flush {delay} us into the checkpoint");
        });
    }
}
