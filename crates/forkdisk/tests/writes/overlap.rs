//! Groups that are written while the flush of the commit before runs.

use std::rc::Rc;
use std::time::Duration;

use forkdisk::{OpenOptions, Pool, Runtime};

use super::lab::{Disk, Lab, stamp_of};

/// Rounds of a client: a write and a flush.
const ROUNDS: u64 = 12;
/// Pages between those of two clients.
const APART: u64 = 100;

/// Pages written by a round of a client.
fn page(client: u64, round: u64) -> u64 {
    client * APART + 3 * round
}

/// Runs clients that write a page and flush, in turns, each begun a while after the one before. Returns microseconds
/// until all have ended, and the journal's writes and the flushes meanwhile.
async fn run(lab: &Lab, volume: &Disk, clients: u64) -> [u64; 3] {
    let counts = |lab: &Lab| (lab.pool.statistics().journal.count, lab.pool.statistics().flushes);
    let (before, begun) = (counts(lab), lab.tasks.now());
    let start = |client: u64| {
        let (lab, volume) = (lab.clone(), volume.clone());
        lab.tasks.clone().start(async move {
            lab.tasks.sleep(Duration::from_micros(30 * client)).await;
            for round in 0..ROUNDS {
                let page = page(client, round);
                lab.write(&volume, page, 1, page).await.expect("there is space");
                volume.flush().await.expect("it is durable");
            }
        })
    };
    let running: Vec<_> = (0..clients).map(start).collect();
    for client in running {
        client.await;
    }
    let after = counts(lab);
    [(lab.tasks.now() - begun).as_micros() as u64, after.0 - before.0, after.1 - before.1]
}

/// In place, and on a clone.
fn both(clients: u64) -> [[u64; 3]; 2] {
    Lab::run(64, OpenOptions::default(), move |lab| async move {
        let volume = lab.volume("v", 4).await;
        lab.fill(&volume).await;
        let in_place = run(&lab, &volume, clients).await;
        lab.pool.clone_volume("v", "clone", 0).await.expect("a clone");
        let clone = lab.pool.volume("clone").expect("just made");
        let on_clone = run(&lab, &clone, clients).await;
        // As after a loss of power: the pool is not closed.
        let pool = Pool::open(lab.tape.clone(), Rc::new(lab.tasks.clone()), OpenOptions::default()).await;
        let clone = pool.expect("it opens").volume("clone").expect("it is durable");
        for client in 0..clients {
            for round in 0..ROUNDS {
                let page = page(client, round);
                let (read, buf) = clone.read(page * 4096, lab.pool.buffer(4096)).await;
                read.expect("it is there");
                assert_eq!(stamp_of(&buf), Some(page));
            }
        }
        [in_place, on_clone]
    })
}

/// Each request of this device takes 100 us: a round on a clone takes 300, in place 200. Without overlapping groups the
/// two clients wait for each other: 400.
#[test]
fn a_group_is_written_while_the_flush_for_another_client_runs() {
    let [in_place, on_clone] = both(2);
    assert_eq!(in_place, [100 + ROUNDS * 200, 0, 2 * ROUNDS]);
    assert_eq!(on_clone, [100 + ROUNDS * 300, 2 * ROUNDS, 2 * ROUNDS]);
}

#[test]
fn many_clients_that_flush_at_once_share_groups() {
    let [_, [_, groups, flushes]] = both(8);
    assert!(groups <= 4 * ROUNDS && flushes <= 3 * ROUNDS, "{groups} groups, {flushes} flushes");
}
