//! Commits that no request asked for: what they write and when the device is flushed.

use std::time::Duration;

use forkdisk::{EarlyGroups, OpenOptions, Runtime as _};

use super::lab::{Disk, Lab, stamp};

/// Flushes and writes of the journal so far.
fn counts(lab: &Lab) -> (u64, u64) {
    let statistics = lab.pool.statistics();
    (statistics.flushes, statistics.journal.count)
}

/// A new volume of `mib` MiB in a pool that is marked as open.
async fn volume(lab: &Lab, mib: u64) -> Disk {
    let volume = lab.volume("v", mib).await;
    volume.write((mib << 20) - 4096, stamp(0, 1), false).await.0.expect("there is space");
    volume.flush().await.expect("it is durable");
    volume
}

/// Writes `kib` KiB to as many distinct places of a volume of `mib` MiB, 8 at once and never in a row; returns the
/// flushes and the writes of the journal while that ran, and those of the flush after it.
fn stream(mib: u64, kib: u64, options: OpenOptions) -> [(u64, u64); 2] {
    Lab::run(4 * mib, options, move |lab| async move {
        let volume = volume(&lab, 2 * mib).await;
        let (places, pages) = (mib * 1024 / kib, kib / 4);
        let before = counts(&lab);
        let written = volume.clone();
        lab.at_depth(8, places, move |lab, i| lab.write(&written, i * 389 % places * pages, pages as usize, i)).await;
        lab.tasks.sleep(Duration::from_millis(1)).await;
        let between = counts(&lab);
        volume.flush().await.expect("it is durable");
        let after = counts(&lab);
        [(between.0 - before.0, between.1 - before.1), (after.0 - between.0, after.1 - between.1)]
    })
}

#[test]
fn a_stream_of_first_writes_is_flushed_once_for_each_commit_that_orders_data() {
    // More pages than one commit has checksums for: the data is flushed before the records are written.
    let plain = || OpenOptions::default().with_early_groups(EarlyGroups::Never);
    assert_eq!(stream(128, 4, plain()), [(3, 3), (2, 1)]);
    // Large writes have few records.
    assert_eq!(stream(128, 1024, plain()), [(0, 0), (2, 1)]);
}

#[test]
fn a_stream_whose_data_has_checksums_is_hardly_flushed() {
    let often = OpenOptions::default().with_background_commit(8 << 10);
    let [(flushes, writes), last] = stream(64, 4, often);
    assert!(writes > 40, "{writes}");
    // Recovery would have to read what is not flushed: a flush follows each 16 MiB, and one more says so on the device.
    assert!((2..=8).contains(&flushes), "{flushes} flushes");
    assert!(last.0 == 1 && last.1 <= 1, "{last:?}");
}

#[test]
fn a_page_in_an_unflushed_group_moves_once_and_then_stays() {
    let at_once = OpenOptions::default().with_background_commit(1);
    Lab::run(64, at_once, |lab| async move {
        let volume = volume(&lab, 4).await;
        let (mut places, mut costs) = (Vec::new(), Vec::new());
        for number in 1..=4 {
            let before = counts(&lab);
            lab.tape.take();
            lab.write(&volume, 7, 1, number).await.expect("there is space");
            lab.tasks.sleep(Duration::from_millis(1)).await;
            places.push(lab.tape.take().0[0].at);
            let after = counts(&lab);
            costs.push((after.0 - before.0, after.1 - before.1));
        }
        assert!(places[0] != places[1], "recovery may verify the first");
        assert!(places[1..].iter().all(|&at| at == places[1]), "in place: {places:?}");
        assert_eq!(costs, [(0, 1), (1, 1), (0, 0), (0, 0)], "flushes and writes of the journal");
        let before = counts(&lab);
        volume.flush().await.expect("it is durable");
        let after = counts(&lab);
        assert_eq!((after.0 - before.0, after.1 - before.1), (1, 0), "one flush for data and records");
    });
}

#[test]
fn the_commit_interval_goes_on_behind_an_unflushed_group() {
    let at_once = OpenOptions::default().with_background_commit(1).with_commit_interval(Duration::from_secs(1));
    Lab::run(64, at_once, |lab| async move {
        let volume = volume(&lab, 4).await;
        let before = counts(&lab);
        lab.write(&volume, 7, 1, 1).await.expect("there is space");
        lab.tasks.sleep(Duration::from_millis(900)).await;
        assert_eq!(counts(&lab), (before.0, before.1 + 1), "written, not flushed");
        lab.tasks.sleep(Duration::from_millis(200)).await;
        assert_eq!(counts(&lab), (before.0 + 1, before.1 + 1), "flushed");
        lab.tasks.sleep(Duration::from_secs(5)).await;
        assert_eq!(counts(&lab), (before.0 + 1, before.1 + 1), "an idle pool does nothing");
    });
}

/// Whether a page is written in place after the other reference to it went in a group without a flush behind it; with
/// `flushes`, a flush follows.
fn is_in_place(flushes: bool) -> bool {
    let at_once = OpenOptions::default().with_background_commit(1);
    Lab::run(64, at_once, move |lab| async move {
        let volume = volume(&lab, 4).await;
        lab.write(&volume, 7, 1, 1).await.expect("there is space");
        let place = lab.tape.take().0.last().expect("it was written").at;
        lab.pool.clone_volume("v", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        lab.pool.checkpoint().await.expect("it succeeds");
        let before = counts(&lab);
        volume.discard(7 * 4096, 4096).await.expect("it succeeds");
        lab.tasks.sleep(Duration::from_millis(1)).await;
        assert_eq!(counts(&lab).1, before.1 + 1, "the group is written");
        if flushes {
            lab.pool.flush().await.expect("it is durable");
        }
        lab.tape.take();
        lab.write(&clone, 7, 1, 2).await.expect("there is space");
        lab.tape.take().0[0].at == place
    })
}

#[test]
fn a_page_that_an_unflushed_group_left_alone_is_not_written_in_place() {
    assert!(is_in_place(true), "no crash brings the other reference back");
    assert!(!is_in_place(false), "a crash may lose the group");
}
