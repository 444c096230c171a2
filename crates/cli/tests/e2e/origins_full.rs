//! An origin whose pool runs full: the effect of its policy, and the messages.

use std::fs;
use std::time::{Duration, Instant};

use crate::harness::{Lab, POOL, Server, wait_until};
use crate::metrics::{scrape, unix};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// Creates a pool with room for about half of an origin of 96 MiB, which has the snapshots `old`,
/// droppable, and `new`.
fn small_pool(policy: &str) -> Lab {
    let lab = Lab::with_pool("64M");
    fs::write(lab.path("disk.img"), vec![1; 96 * MIB]).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img", "--when-full", policy]);
    lab.ok(&["snapshot", "pool.img/disk@old", "--droppable"]);
    lab
}

/// Writes `byte` from the front until a write fails; returns the bytes written.
fn fill(disk: &mut Client, byte: u8, end: usize) -> usize {
    let mut written = 0;
    while written < end && disk.write(written as u64, &vec![byte; MIB], false).is_ok() {
        written += MIB;
    }
    written
}

#[test]
fn a_full_pool_fails_the_write_and_no_snapshot() {
    let lab = small_pool("error");
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    let written = fill(&mut disk, 2, 96 * MIB);
    assert!((30 * MIB..64 * MIB).contains(&written), "{written}");
    disk.write(0, &vec![3; MIB], true).expect("what is kept already costs nothing");
    drop(disk);
    server.stop();
    assert!(lab.contents("disk@old") == vec![1; 96 * MIB]);
    let now = fs::read(lab.path("disk.img")).unwrap();
    assert!(now[..MIB] == vec![3; MIB] && now[MIB..written] == vec![2; written - MIB]);
    assert!(now[written + MIB..].iter().all(|&b| b == 1));
    lab.assert_clean();
}

#[test]
fn a_full_pool_drops_the_oldest_snapshot_that_may_be() {
    let lab = small_pool("drop-oldest");
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    assert_eq!(fill(&mut disk, 2, 96 * MIB), 96 * MIB);
    drop(disk);
    assert_eq!(lab.names(), ["disk"]);
    lab.ok(&["snapshot", "pool.img/disk@keep"]);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    let written = fill(&mut disk, 3, 96 * MIB);
    assert!(written < 96 * MIB, "the one that may not be dropped stays");
    drop(disk);
    server.stop();
    assert!(lab.contents("disk@keep") == vec![2; 96 * MIB]);
    lab.assert_clean();
}

#[test]
fn a_write_that_finds_no_space_waits_for_a_deletion() {
    let lab = small_pool("wait:30");
    let server = Server::start(&lab);
    let socket = server.socket().to_path_buf();
    let writer = std::thread::spawn(move || fill(&mut Client::connect(&socket, "disk").unwrap(), 2, 96 * MIB));
    let full = || lab.json(&["stats", POOL])["free"].as_u64().unwrap() < 4 << 20;
    wait_until("the pool is full", full);
    lab.ok(&["delete", "pool.img/disk@old"]);
    assert_eq!(writer.join().unwrap(), 96 * MIB);
    server.stop();
    assert!(fs::read(lab.path("disk.img")).unwrap() == vec![2; 96 * MIB]);
    lab.assert_clean();
}

#[test]
fn a_clone_that_finds_no_space_stays_as_it_is_and_is_flattened_when_there_is() {
    let lab = small_pool("error");
    lab.ok(&["clone", "pool.img/disk@old", "pool.img/c"]);
    let full = lab.run(&["flatten", "pool.img/c"]).refused();
    assert!(full.contains("the pool is full"), "{full}");
    let held = lab.run(&["delete", "pool.img/disk@old"]).refused();
    assert!(held.contains("held by \"c\""), "{held}");
    assert!(lab.contents("c") == vec![1; 96 * MIB]);
    lab.ok(&["grow", POOL, "--size", "128M"]);
    lab.ok(&["flatten", "pool.img/c"]);
    lab.ok(&["delete", "pool.img/disk@old"]);
    assert!(lab.contents("c") == vec![1; 96 * MIB]);
    lab.assert_clean();
}

#[test]
fn a_snapshot_that_is_dropped_is_told_of_in_the_log_the_figures_and_the_metrics() {
    let lab = small_pool("drop-oldest");
    let server = Server::start_with(&lab, POOL, &["--metrics", "unix:metrics"]);
    let told = || {
        let stats = lab.ok(&["stats", POOL, "-H", "-p"]);
        let row = stats.lines().find_map(|line| line.strip_prefix("dropped_snapshots\t")).expect("a row").to_string();
        let metric = scrape(&mut unix(lab.path("metrics")))["forkdisk_dropped_snapshots_total"];
        let live = lab.json(&["stats", POOL])["live"]["activity"]["dropped"].as_u64();
        let log = fs::read_to_string(lab.path("serve.log")).unwrap();
        (row, metric, live, log.matches("dropped disk@old: the pool is full").count())
    };
    assert_eq!(told(), ("0".to_string(), 0.0, Some(0), 0));
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    assert_eq!(fill(&mut disk, 2, 96 * MIB), 96 * MIB);
    assert_eq!(told(), ("1".to_string(), 1.0, Some(1), 1));
    drop(disk);
    server.stop();
}

/// Serves a pool in which a rollback to `old` finds no space for what `new` shows.
fn full_for_a_rollback(policy: &str) -> (Lab, Server) {
    let lab = small_pool(policy);
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    assert_eq!(fill(&mut disk, 2, 32 * MIB), 32 * MIB);
    drop(disk);
    lab.ok(&["snapshot", "pool.img/disk@new"]);
    (lab, server)
}

#[test]
fn a_rollback_that_finds_no_space_waits_as_long_as_a_write_does() {
    let (lab, server) = full_for_a_rollback("wait:4");
    let start = Instant::now();
    let said = lab.run(&["rollback", "pool.img/disk@old"]).refused();
    assert!(said.contains("not all back at disk@old") && said.contains("the pool is full"), "{said}");
    assert!(start.elapsed() >= Duration::from_secs(4), "{:?}", start.elapsed());
    lab.ok(&["set", "when-full=error", "pool.img/disk"]);
    let start = Instant::now();
    lab.run(&["rollback", "pool.img/disk@old"]).refused();
    assert!(start.elapsed() < Duration::from_secs(4), "by that policy writes do not wait");
    lab.ok(&["grow", POOL, "--size", "128M"]);
    lab.ok(&["rollback", "pool.img/disk@old"]);
    server.stop();
    assert!(fs::read(lab.path("disk.img")).unwrap() == vec![1; 96 * MIB]);
    lab.assert_clean();
}

#[test]
fn a_rollback_that_waits_for_space_goes_on_when_there_is_some() {
    let (lab, server) = full_for_a_rollback("wait:600");
    let mut asked = lab.command(&["rollback", "pool.img/disk@old"]).spawn().unwrap();
    wait_until("the pool is full", || lab.stat("free") < 4 << 20);
    std::thread::sleep(Duration::from_secs(2));
    assert!(asked.try_wait().unwrap().is_none(), "it waits");
    lab.ok(&["grow", POOL, "--size", "128M"]);
    assert!(asked.wait().unwrap().success());
    server.stop();
    assert!(fs::read(lab.path("disk.img")).unwrap() == vec![1; 96 * MIB]);
    lab.assert_clean();
}
