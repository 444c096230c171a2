//! Records that are written together with their data, since a flush is expected.

use std::rc::Rc;
use std::time::Duration;

use forkdisk::{EarlyGroups, OpenOptions, Pool};

use super::lab::{Disk, Lab};

/// Fills a volume and clones it.
async fn clone(lab: &Lab) -> Disk {
    let volume = lab.volume("v", 4).await;
    lab.fill(&volume).await;
    lab.pool.clone_volume("v", "clone", 0).await.expect("a clone");
    lab.pool.volume("clone").expect("just made")
}

/// Writes a page and flushes; returns how long each took, and the writes of the journal and flushes meanwhile.
async fn turn(lab: &Lab, volume: &Disk, page: u64) -> [u64; 4] {
    let counts = || (lab.pool.statistics().journal.count, lab.pool.statistics().flushes);
    let (before, begun) = (counts(), lab.tasks.now());
    lab.write(volume, page, 1, page).await.expect("there is space");
    let written = lab.tasks.now();
    volume.flush().await.expect("it is durable");
    let (after, ended) = (counts(), lab.tasks.now());
    let micros = |time: Duration| time.as_micros() as u64;
    [micros(written - begun), micros(ended - written), after.0 - before.0, after.1 - before.1]
}

fn turns(options: OpenOptions, count: u64) -> Vec<[u64; 4]> {
    Lab::run(64, options, move |lab| async move {
        let volume = clone(&lab).await;
        let mut all = Vec::new();
        for page in 0..count {
            all.push(turn(&lab, &volume, 7 * page).await);
        }
        all
    })
}

/// Each request of this device takes 100 us.
#[test]
fn a_write_and_flush_of_a_clone_take_as_long_as_in_place() {
    let all = turns(OpenOptions::default(), 8);
    assert!(all[3..].iter().all(|turn| *turn == [100, 100, 1, 1]), "{all:?}");
    let with_times = OpenOptions::default().with_clock(Some(|| 1)).with_commit_interval(Duration::from_secs(5));
    let all = turns(with_times, 8);
    assert!(all[3..].iter().all(|turn| *turn == [100, 100, 1, 1]), "times of changes wait: {all:?}");
    let never = turns(OpenOptions::default().with_early_groups(EarlyGroups::Never), 8);
    assert!(never[3..].iter().all(|turn| *turn == [100, 200, 1, 1]), "{never:?}");
}

#[test]
fn a_group_with_other_records_is_written_as_a_whole() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let volume = clone(&lab).await;
        for page in 0..4 {
            turn(&lab, &volume, 7 * page).await;
        }
        let before = lab.pool.statistics().journal.count;
        let write = lab.write(&volume, 100, 1, 100);
        let other = lab.write(&volume, 300, 1, 300);
        write.await.expect("there is space");
        other.await.expect("there is space");
        volume.flush().await.expect("it is durable");
        let count = lab.pool.statistics().journal.count - before;
        assert!(count <= 3, "the early group, its commit, and what the other write recorded: {count}");
        // As after a loss of power: the pool is not closed.
        let pool = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default()).await;
        let pool = pool.expect("it opens");
        let volume = pool.volume("clone").expect("it is durable");
        for page in [100, 300] {
            let (read, buf) = volume.read(page * 4096, pool.buffer(4096)).await;
            read.expect("it is there");
            assert_eq!(super::lab::stamp_of(&buf), Some(page));
        }
    });
}
