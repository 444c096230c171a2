//! Verbs and the end of a daemon while clients write without a pause.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Lab, POOL, Server, noise, wait_until};
use crate::nbd::Client;
use crate::stomper::{PAGE, Stomper};

const PAGES: u64 = 256;

/// Returns a page with the number of its write.
fn page(number: u64) -> Vec<u8> {
    let mut bytes = noise(number, PAGE as usize);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Returns the last write of a sequence (write n goes to page n modulo [`PAGES`], from 1 on) that
/// an export shows. It must show all writes before it, and none after it.
#[track_caller]
fn last_write(socket: &Path, export: &str) -> u64 {
    let bytes = Client::connect(socket, export).unwrap().read(0, (PAGES * PAGE) as usize).unwrap();
    let shown: Vec<&[u8]> = bytes.chunks(PAGE as usize).collect();
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let last = shown.iter().map(|bytes| number(bytes)).max().unwrap();
    for (at, bytes) in shown.iter().enumerate() {
        let at = at as u64;
        let expected = (0..PAGES).map(|back| last.saturating_sub(back)).find(|n| n % PAGES == at);
        match expected.filter(|&n| n > 0) {
            Some(n) => assert!(**bytes == page(n), "{export} shows write {last}, but not write {n}"),
            None => assert!(bytes.iter().all(|&byte| byte == 0), "{export}: page {at}"),
        }
    }
    last
}

/// Runs `verbs` while two clients write, each to its own volume: `b`'s write n after `a`'s write n
/// is acknowledged, and `a`'s next after that.
fn beside_a_chain_of_writes(server: &Server, verbs: impl FnOnce(&[AtomicU64; 2])) {
    let done = [AtomicU64::new(0), AtomicU64::new(0)];
    let stop = &AtomicBool::new(false);
    let mut clients = ["a", "b"].map(|name| Client::connect(server.socket(), name).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1.. {
                for (client, done) in clients.iter_mut().zip(&done) {
                    client.write(n % PAGES * PAGE, &page(n), false).unwrap();
                    done.store(n, SeqCst);
                }
                if stop.load(SeqCst) {
                    return;
                }
            }
        });
        // Even if `verbs` panics.
        let _stop = Defer(|| stop.store(true, SeqCst));
        verbs(&done);
    });
}

struct Defer<F: FnMut()>(F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn a_snapshot_of_two_volumes_under_load_is_one_instant() {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", "pool.img/a", "pool.img/b", "--size", "1M"]);
    let server = Server::start(&lab);
    let mut taken = Vec::new();
    beside_a_chain_of_writes(&server, |done| {
        wait_until("they write", || done[1].load(SeqCst) > 0);
        for i in 0..30 {
            let before = [done[0].load(SeqCst), done[1].load(SeqCst)];
            lab.ok(&["snapshot", &format!("pool.img/a@{i}"), &format!("pool.img/b@{i}")]);
            taken.push((before, [done[0].load(SeqCst), done[1].load(SeqCst)]));
        }
    });
    for (i, (before, after)) in taken.iter().enumerate() {
        let [a, b] = ["a", "b"].map(|name| last_write(server.socket(), &format!("{name}@{i}")));
        assert!(a == b || a == b + 1, "snapshot {i} shows {a} writes of a and {b} of b");
        // One more may have been in flight.
        assert!(
            before[0] <= a && a <= after[0] + 1 && before[1] <= b && b <= after[1] + 1,
            "{before:?} {a} {b} {after:?}"
        );
    }
    server.stop();
    lab.assert_clean();
}

/// Runs writers that never pause, each to its own pages of volume `a`, until the server ends; returns
/// for each page the last write acknowledged and the last one sent, which are the allowed contents.
fn until_the_end(socket: &Path, end: impl FnOnce(&AtomicU64)) -> Vec<(u64, u64)> {
    const WRITERS: u64 = 4;
    let all = AtomicU64::new(0);
    // By page: the last acknowledged and the last sent.
    let pages = Mutex::new(vec![(0, 0); PAGES as usize]);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (all, pages) = (&all, &pages);
            let mut client = Client::connect(socket, "a").unwrap();
            scope.spawn(move || {
                for n in 1.. {
                    let at = n * WRITERS % PAGES + writer;
                    pages.lock().unwrap()[at as usize].1 = n;
                    if client.write(at * PAGE, &page(n), false).is_err() {
                        return;
                    }
                    pages.lock().unwrap()[at as usize].0 = n;
                    all.fetch_add(1, SeqCst);
                }
            });
        }
        wait_until("pages are written again and again", || all.load(SeqCst) > 2 * PAGES);
        end(&all);
    });
    pages.into_inner().unwrap()
}

#[track_caller]
fn assert_acknowledged(lab: &Lab, pages: &[(u64, u64)]) {
    assert_eq!(lab.json(&["stats", POOL])["clean"], true);
    let contents = lab.contents("a");
    for (at, (shown, &(acknowledged, sent))) in contents.chunks(PAGE as usize).zip(pages).enumerate() {
        let n = u64::from_le_bytes(shown[..8].try_into().unwrap());
        assert!(acknowledged <= n && n <= sent, "page {at} shows write {n}, not {acknowledged} to {sent}");
        let is_whole = if n == 0 { shown.iter().all(|&byte| byte == 0) } else { shown == page(n) };
        assert!(is_whole, "page {at} is torn");
    }
    lab.assert_clean();
}

#[test]
fn sigterm_under_load_loses_nothing_that_was_acknowledged() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let socket = server.socket().to_path_buf();
    let pages = until_the_end(&socket, |_| server.stop());
    assert_acknowledged(&lab, &pages);
}

#[test]
fn stop_under_load_returns_when_everything_acknowledged_is_safe() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let socket = server.socket().to_path_buf();
    let pages = until_the_end(&socket, |_| {
        assert_eq!(lab.ok(&["stop", POOL, "--force"]), "");
        // Another process can open it at once.
        lab.assert_clean();
    });
    assert_acknowledged(&lab, &pages);
    assert!(lab.contents("a@x").iter().all(|&byte| byte == 0));
}

#[test]
fn a_second_signal_ends_a_server_whose_client_does_not_finish() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start_with(&lab, POOL, &["--drain-timeout", "1h"]);
    let mut done = Client::connect(server.socket(), "a").unwrap();
    done.write(0, &page(1), false).unwrap();
    // A client that requests more than sockets buffer, and receives nothing.
    let mut slow = Client::connect(server.socket(), "a").unwrap();
    (0..32).for_each(|_| slow.start_read(0, 1 << 20).unwrap());
    let pid = Pid::from_raw(server.pid() as i32).unwrap();
    let log = || std::fs::read_to_string(lab.path("serve.log")).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    wait_until("it waits for its clients", || log().contains("letting clients finish"));
    server.stop();
    assert!(log().contains("a second signal"), "{}", log());
    assert_eq!(lab.json(&["stats", POOL])["clean"], true);
    assert!(lab.contents("a")[..PAGE as usize] == page(1));
}

#[test]
fn however_many_signals_come_the_pool_is_closed_in_order() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let socket = server.socket().to_path_buf();
    let pages = until_the_end(&socket, |_| server.stop_impatiently());
    assert_acknowledged(&lab, &pages);
}

/// Runs `verbs` while three clients stomp on their own volumes; then verifies all of them.
fn beside_stompers(lab: &Lab, server: &Server, verbs: impl FnOnce(&dyn Fn() -> u64)) {
    const SIZE: u64 = 8 << 20;
    let stop = &AtomicBool::new(false);
    let rounds = &AtomicU64::new(0);
    let names = ["w/0", "w/1", "w/2"];
    names.iter().for_each(|name| drop(lab.ok(&["create", &format!("{POOL}/{name}"), "--size", "8M"])));
    let socket: &PathBuf = &server.socket().to_path_buf();
    thread::scope(|scope| {
        for (seed, name) in (1..).zip(names) {
            scope.spawn(move || {
                let mut client = Client::connect(socket, name).unwrap();
                let mut stomper = Stomper::new(seed, SIZE);
                while !stop.load(SeqCst) {
                    stomper.stomp(&mut client, 10);
                    rounds.fetch_add(1, SeqCst);
                }
                stomper.verify(&mut client);
            });
        }
        let _stop = Defer(|| stop.store(true, SeqCst));
        wait_until("all of them write", || rounds.load(SeqCst) > 10);
        verbs(&|| rounds.load(SeqCst));
    });
}

#[test]
fn check_du_and_dry_runs_work_under_load_and_hold_up_nobody() {
    let lab = Lab::with_pool("512M");
    lab.import("still", &noise(1, 16 << 20));
    lab.ok(&["snapshot", "pool.img/still@x"]);
    let server = Server::start_with(&lab, POOL, &["--dirty", "256K"]);
    let still = lab.json(&["du", "pool.img/still"]);
    beside_stompers(&lab, &server, |rounds| {
        for i in 0..10 {
            let before = rounds();
            // Meanwhile tables are copied all the time.
            lab.ok(&["snapshot", &format!("pool.img/w/0@{i}"), &format!("pool.img/w/1@{i}")]);
            let report = lab.run(&["check", POOL, "--json"]);
            assert_eq!(report.status.code(), Some(0), "{report:?}");
            assert_eq!(lab.json(&["du", "pool.img/still"]), still);
            let planned = lab.json(&["delete", "-n", "-v", "-r", "pool.img/w", "pool.img/still"]);
            assert!(planned["frees"].as_u64().unwrap() > 16 << 20, "{planned}");
            wait_until("clients have gone on", || rounds() > before);
        }
        lab.ok(&["delete", "pool.img/w/0@0", "pool.img/w/0@5"]);
    });
    lab.assert_clean();
    server.stop();
    lab.assert_clean();
}

#[test]
fn clients_keep_what_they_have_through_renames_and_find_it_by_its_new_name() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    let mut old = Client::connect(server.socket(), "a@x").unwrap();
    client.write(0, &page(1), false).unwrap();
    lab.ok(&["rename", "pool.img/a", "pool.img/dir/b"]);
    client.write(PAGE, &page(2), false).unwrap();
    assert!(client.read(0, PAGE as usize).unwrap() == page(1));
    assert!(old.read(0, PAGE as usize).unwrap().iter().all(|&byte| byte == 0));
    assert!(Client::connect(server.socket(), "a").is_err());
    let mut again = Client::connect(server.socket(), "dir/b").unwrap();
    assert!(again.read(PAGE, PAGE as usize).unwrap() == page(2));
    assert!(Client::connect(server.socket(), "dir/b@x").is_ok());
    // A new volume with the old name is another one.
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    Client::connect(server.socket(), "a").unwrap().write(0, &page(3), false).unwrap();
    assert!(client.read(0, PAGE as usize).unwrap() == page(1));
    drop((client, old, again));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_client_uses_what_a_resize_gave_at_once_and_sees_it_when_it_connects_again() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    assert!(client.write(1 << 20, &page(1), false).is_err(), "beyond its end");
    lab.ok(&["resize", "pool.img/a", "--size", "2M"]);
    client.write(1 << 20, &page(2), false).unwrap();
    let mut later = Client::connect(server.socket(), "a").unwrap();
    assert_eq!((client.size, later.size), (1 << 20, 2 << 20));
    assert!(later.read(1 << 20, PAGE as usize).unwrap() == page(2));
    lab.run(&["resize", "pool.img/a", "--size", "1M", "--allow-shrink"]).refused();
    lab.ok(&["resize", "pool.img/a", "--size", "1M", "--allow-shrink", "--force"]);
    assert!(later.write(1 << 20, &page(3), false).is_err(), "beyond its end again");
    assert!(later.read(1 << 20, PAGE as usize).is_err());
    let mut last = Client::connect(server.socket(), "a").unwrap();
    assert_eq!(last.size, 1 << 20);
    last.write((1 << 20) - PAGE, &page(4), true).unwrap();
    lab.ok(&["resize", "pool.img/a", "--size", "2M"]);
    assert!(last.read(1 << 20, PAGE as usize).unwrap().iter().all(|&byte| byte == 0), "what was cut off is gone");
}
