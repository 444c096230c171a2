//! Disks of virtual machines by vhost-user-blk: a front end of the tests with the driver of a guest.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forkdisk_vhost_user::testing::Guest;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vhost::vhost_user::VhostUserFrontend;

use crate::harness::{Lab, POOL, Server, noise, wait_until};
use crate::nbd::Client;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const OK: u8 = 0;
const PAGE: usize = 4096;
const SECTORS: u64 = (PAGE / 512) as u64;

fn socket(lab: &Lab, name: &str) -> PathBuf {
    lab.path("vm").join(format!("{name}.sock"))
}

fn serve(lab: &Lab, options: &[&str]) -> Server {
    Server::start_with(lab, POOL, &[&["--vhost-user", "vm"], options].concat())
}

fn connect(lab: &Lab, name: &str) -> Guest {
    Guest::connect(&socket(lab, name), 2, 128, 1 << 20).unwrap()
}

fn sockets(lab: &Lab) -> Vec<String> {
    let names = fs::read_dir(lab.path("vm")).unwrap();
    let mut names: Vec<String> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_virtual_machine_has_a_volume_as_its_disk() {
    let lab = Lab::with_pool("128M");
    lab.import("vm1", &noise(1, 8 << 20));
    let server = serve(&lab, &[]);
    assert!(server.announced()["vhost_user"].as_str().unwrap().ends_with("/vm"));
    let mut guest = connect(&lab, "vm1");
    assert_eq!(guest.capacity().unwrap(), 8 << 20);
    assert_eq!(guest.request(IN, 0, &[], 1 << 20).unwrap(), (OK, noise(1, 8 << 20)[..1 << 20].to_vec()));
    assert_eq!(guest.request(OUT, 2048, &noise(2, 1 << 20), 0).unwrap().0, OK);
    assert_eq!(guest.request(FLUSH, 0, &[], 0).unwrap().0, OK);
    lab.ok(&["snapshot", "pool.img/vm1@now"]);
    assert_eq!(guest.request(OUT, 2048, &noise(3, PAGE), 0).unwrap().0, OK);
    let range = [&4096u64.to_le_bytes()[..], &2048u32.to_le_bytes(), &0u32.to_le_bytes()].concat();
    assert_eq!(guest.request(DISCARD, 0, &range, 0).unwrap().0, OK);
    assert_eq!(guest.request(IN, 4096, &[], PAGE).unwrap(), (OK, vec![0; PAGE]));

    // The same volume by NBD, and its snapshot.
    let mut client = Client::connect(server.socket(), "vm1").unwrap();
    assert!(client.read(1 << 20, PAGE).unwrap() == noise(3, PAGE));
    let mut client = Client::connect(server.socket(), "vm1@now").unwrap();
    assert!(client.read(1 << 20, 1 << 20).unwrap() == noise(2, 1 << 20));
    drop(client);

    // A clone has a disk of its own.
    lab.ok(&["clone", "pool.img/vm1@now", "pool.img/vm2"]);
    let mut second = connect(&lab, "vm2");
    assert_eq!(second.request(OUT, 0, &noise(4, PAGE), 0).unwrap().0, OK);
    assert_eq!(guest.request(IN, 0, &[], PAGE).unwrap().1, noise(1, 8 << 20)[..PAGE]);
    drop((guest, second));
    server.stop();
    assert!(sockets(&lab).is_empty());
    assert!(lab.contents("vm2")[..PAGE] == noise(4, PAGE));
    lab.assert_clean();
}

#[test]
fn sockets_follow_the_volumes_that_a_pattern_names() {
    let lab = Lab::with_pool("64M");
    for name in ["vm-1", "other", "lab/vm"] {
        lab.ok(&["create", &format!("pool.img/{name}"), "--size", "1M"]);
    }
    let server = serve(&lab, &["--vhost-user-volumes", "vm-*,lab/*", "--socket-mode", "0660"]);
    assert_eq!(sockets(&lab), ["lab%2Fvm.sock", "vm-1.sock"]);
    let meta = fs::metadata(socket(&lab, "vm-1")).unwrap();
    assert!(meta.file_type().is_socket() && meta.mode() & 0o777 == 0o660);
    lab.ok(&["clone", "pool.img/other", "pool.img/vm-2"]);
    lab.ok(&["rename", "pool.img/vm-1", "pool.img/none"]);
    assert_eq!(sockets(&lab), ["lab%2Fvm.sock", "vm-2.sock"]);
    server.stop();
    let message = lab.run(&["serve", POOL, "--vhost-user", "vm", "--vhost-user-queues", "65"]).refused();
    assert!(message.contains("at most 64"), "{message}");
    let message = lab.run(&["serve", POOL, "--vhost-user", "vm", "--socket-dir", "./vm"]).refused();
    assert!(message.contains("the same folder"), "{message}");
}

#[test]
fn a_virtual_machine_learns_that_its_disk_has_grown() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "4M"]);
    let server = serve(&lab, &["--vhost-user-block-size", "4096"]);
    let mut guest = connect(&lab, "a");
    assert_eq!(guest.config(20, 4).unwrap(), 4096u32.to_le_bytes());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    lab.ok(&["resize", "pool.img/a", "--size", "8M"]);
    let mut header = [0; 12];
    ours.read_exact(&mut header).unwrap();
    assert_eq!(guest.capacity().unwrap(), 8 << 20);
    assert_eq!(guest.request(OUT, (8 << 20) / 512 - SECTORS, &noise(1, PAGE), 0).unwrap().0, OK);
    drop(guest);
    server.stop();
}

#[test]
fn a_disk_in_use_is_not_taken_away_without_force() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, 1 << 20));
    lab.ok(&["snapshot", "pool.img/a@old"]);
    let server = serve(&lab, &[]);
    let mut guest = connect(&lab, "a");
    guest.request(OUT, 0, &noise(2, PAGE), 0).unwrap();
    let is_named = |message: &str| message.contains("a virtual machine, ") && message.contains("(pid ");
    for refused in [&["delete", "-r", "pool.img/a"][..], &["rollback", "pool.img/a@old"], &["stop", POOL]] {
        let message = lab.run(refused).refused();
        assert!(is_named(&message), "{message}");
    }
    assert_eq!(guest.request(IN, 0, &[], PAGE).unwrap(), (OK, noise(2, PAGE)));
    lab.ok(&["rollback", "--force", "pool.img/a@old"]);
    guest.reconnect(&socket(&lab, "a")).unwrap();
    assert_eq!(guest.request(IN, 0, &[], PAGE).unwrap().1, noise(1, 1 << 20)[..PAGE]);
    drop(guest);
    server.stop();
}

#[test]
fn an_idle_daemon_with_a_thousand_sockets_sleeps() {
    let lab = Lab::with_pool("256M");
    let names: Vec<String> = (0..1000).map(|n| format!("pool.img/v{n}")).collect();
    let mut create: Vec<&str> = vec!["create"];
    create.extend(names.iter().map(String::as_str));
    lab.ok(&[&create[..], &["--size", "1M"]].concat());
    let server = serve(&lab, &["--socket-dir", "sockets"]);
    // A machine with few descriptors has fewer sockets, and the daemon says so.
    assert!(sockets(&lab).len() > 300);
    let status = format!("/proc/{}/status", server.pid());
    let wakes = || -> u64 {
        let status = fs::read_to_string(&status).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    std::thread::sleep(Duration::from_secs(6));
    let before = wakes();
    std::thread::sleep(Duration::from_secs(5));
    let woken = wakes() - before;
    assert!(woken <= 10, "{woken} times in five seconds");
    server.stop();
}

/// Random writes of pages with several under way, and what they have to leave.
struct Writer {
    random: SmallRng,
    /// What each page holds when all writes are answered: the seed of its contents.
    pages: Vec<u64>,
    /// The page that each slot writes.
    slots: Vec<Option<usize>>,
    answered: u64,
}

impl Writer {
    fn new(pages: usize, slots: u16) -> Writer {
        let random = SmallRng::seed_from_u64(7);
        Writer { random, pages: vec![0; pages], slots: vec![None; slots.into()], answered: 0 }
    }

    /// Starts a write in each free slot. No two writes of a page are under way at once.
    fn fill(&mut self, guest: &mut Guest) {
        let queue = &mut guest.queues[0];
        for slot in 0..self.slots.len() {
            let page = self.random.random_range(0..self.pages.len());
            if self.slots[slot].is_some() || self.slots.contains(&Some(page)) {
                continue;
            }
            self.pages[page] = self.random.random_range(1..u64::MAX);
            self.slots[slot] = Some(page);
            queue.fill(slot as u16, &noise(self.pages[page], PAGE)).unwrap();
            queue.submit(slot as u16, OUT, page as u64 * SECTORS, PAGE as u32, false).unwrap();
        }
        queue.notify().unwrap();
    }

    fn wait(&mut self, guest: &mut Guest) {
        let done = guest.queues[0].wait(20).unwrap();
        assert_eq!(done.status, OK);
        assert!(self.slots[usize::from(done.slot)].take().is_some(), "answered twice");
        self.answered += 1;
    }

    fn run_for(&mut self, guest: &mut Guest, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            self.fill(guest);
            self.wait(guest);
        }
    }

    /// Waits for all answers and compares all pages.
    fn verify(&mut self, guest: &mut Guest) {
        while self.slots.iter().any(Option::is_some) {
            self.wait(guest);
        }
        for (page, seed) in self.pages.iter().enumerate().filter(|(_, seed)| **seed != 0) {
            let (status, found) = guest.request(IN, page as u64 * SECTORS, &[], PAGE).unwrap();
            assert!(status == OK && found == noise(*seed, PAGE), "page {page}");
        }
    }
}

/// Rounds of a writer that is interrupted by the end of its server, and of the next server.
fn interrupted(rounds: u32, interrupt: impl Fn(Server)) {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", "pool.img/a", "--size", "16M"]);
    let mut server = serve(&lab, &[]);
    let mut guest = connect(&lab, "a");
    let mut writer = Writer::new((16 << 20) / PAGE, 32);
    for round in 0..rounds {
        writer.run_for(&mut guest, Duration::from_millis(u64::from(20 + round % 5 * 7)));
        writer.fill(&mut guest);
        if round % 3 == 0 {
            lab.ok(&["snapshot", &format!("pool.img/a@{round}")]);
        }
        interrupt(server);
        server = serve(&lab, &[]);
        guest.reconnect(&socket(&lab, "a")).unwrap();
        if round % 4 == 0 {
            writer.verify(&mut guest);
        }
    }
    writer.verify(&mut guest);
    assert!(writer.answered > u64::from(rounds) * 32, "{} writes", writer.answered);
    drop(guest);
    server.stop();
    lab.assert_clean();
}

#[test]
fn no_request_is_lost_over_twenty_upgrades() {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", "pool.img/a", "--size", "16M"]);
    let server = serve(&lab, &[]);
    let mut guest = connect(&lab, "a");
    let mut writer = Writer::new((16 << 20) / PAGE, 32);
    for round in 0..20 {
        writer.run_for(&mut guest, Duration::from_millis(u64::from(20 + round % 5 * 7u32)));
        writer.fill(&mut guest);
        let upgraded = lab.json(&["upgrade", POOL]);
        assert_eq!(upgraded["connections"], 2, "{upgraded}");
        // Without a new connection of the front end.
        if round % 4 == 0 {
            writer.verify(&mut guest);
        }
    }
    writer.verify(&mut guest);
    lab.ok(&["resize", "pool.img/a", "--size", "32M"]);
    assert_eq!(guest.capacity().unwrap(), 32 << 20);
    drop(guest);
    server.stop();
    lab.assert_clean();
}

#[test]
fn no_request_is_lost_or_done_twice_over_twenty_killed_daemons() {
    interrupted(20, Server::kill);
}

#[test]
fn no_request_is_lost_over_twenty_daemons_that_end_in_order() {
    interrupted(20, Server::stop_impatiently);
}

#[test]
fn a_front_end_that_dies_leaves_its_disk_to_the_next_one() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, 1 << 20));
    let server = serve(&lab, &[]);
    for round in 0..10 {
        let mut guest = connect(&lab, "a");
        for slot in 0..20 {
            guest.queues[0].fill(slot, &noise(round, PAGE)).unwrap();
            guest.queues[0].submit(slot, OUT, u64::from(slot) * SECTORS, PAGE as u32, false).unwrap();
        }
        guest.queues[0].notify().unwrap();
        drop(guest);
        let mut next = connect(&lab, "a");
        let (status, found) = next.request(IN, 0, &[], PAGE).unwrap();
        assert_eq!(status, OK);
        let is_whole = (0..=round).any(|written| found == noise(written, PAGE)) || found == noise(1, 1 << 20)[..PAGE];
        assert!(is_whole, "a page of one write");
    }
    wait_until("all front ends have gone", || lab.run(&["stop", POOL]).status.success());
    drop(server);
}

#[test]
fn one_disk_has_a_socket_where_the_user_wants_it() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, 1 << 20));
    lab.ok(&["snapshot", "pool.img/a@s"]);
    let server = Server::start(&lab);
    let at = |name: &str| lab.path(name).display().to_string();
    lab.ok(&["vhost-user", "pool.img/a", &at("a.vm"), "--mode", "0660"]);
    lab.ok(&["vhost-user", "pool.img/a@s", &at("s.vm")]);
    assert_eq!(fs::metadata(lab.path("a.vm")).unwrap().mode() & 0o777, 0o660);
    assert_eq!(fs::metadata(lab.path("s.vm")).unwrap().mode() & 0o777, 0o600);
    let mut guest = Guest::connect(&lab.path("a.vm"), 1, 64, 1 << 16).unwrap();
    assert_eq!(guest.request(OUT, 0, &noise(2, PAGE), 0).unwrap().0, OK);
    let mut snapshot = Guest::connect(&lab.path("s.vm"), 1, 64, 1 << 16).unwrap();
    assert_eq!(snapshot.request(IN, 0, &[], PAGE).unwrap(), (OK, noise(1, 1 << 20)[..PAGE].to_vec()));
    assert_eq!(snapshot.request(OUT, 0, &noise(2, PAGE), 0).unwrap().0, 1, "a snapshot cannot be written");

    // Paths are those of the caller's folder; what is wrong has its reason.
    for (refused, why) in [
        (&["vhost-user", "pool.img/none", "x.vm"][..], "none"),
        (&["vhost-user", "pool.img/a", "no/such/folder.vm"], "does not exist"),
        (&["vhost-user", "pool.img/a", "a.vm"], "another process listens"),
        (&["vhost-user", "pool.img/a", "pool.img"], "not a socket"),
        (&["vhost-user", "--remove", "pool.img/a", "none.vm"], "no socket"),
        (&["vhost-user", "--remove", "pool.img/a", "s.vm"], "the socket of a@s"),
    ] {
        let message = lab.run(refused).refused();
        assert!(message.contains(why), "{message}");
    }

    // The disk keeps its socket when it is renamed, and its guest when the socket is removed.
    drop(guest);
    lab.ok(&["rename", "pool.img/a", "pool.img/b"]);
    let mut guest = Guest::connect(&lab.path("a.vm"), 1, 64, 1 << 16).unwrap();
    lab.ok(&["vhost-user", "--remove", "pool.img/b", "a.vm"]);
    assert!(!lab.path("a.vm").exists());
    assert_eq!(guest.request(IN, 0, &[], PAGE).unwrap(), (OK, noise(2, PAGE)));
    drop((guest, snapshot));
    server.stop();
    assert!(!lab.path("s.vm").exists());
}

#[test]
fn one_disk_is_served_without_a_daemon() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, 1 << 20));
    let message = lab.run(&["vhost-user", "--remove", "pool.img/a", "a.vm"]).refused();
    assert!(message.contains("no daemon serves"), "{message}");
    let said = lab.ok(&["vhost-user", "pool.img/a", "a.vm", "--daemon"]);
    assert!(said.contains("a.vm"), "{said}");
    let mut guest = Guest::connect(&lab.path("a.vm"), 1, 64, 1 << 16).unwrap();
    assert_eq!(guest.request(IN, 0, &[], PAGE).unwrap(), (OK, noise(1, 1 << 20)[..PAGE].to_vec()));
    lab.ok(&["snapshot", "pool.img/a@served"]);
    drop(guest);
    lab.ok(&["stop", POOL]);
    assert!(!lab.path("a.vm").exists());
    lab.assert_clean();
}

#[test]
fn several_disks_of_an_idle_pool_are_served_by_one_daemon() {
    let lab = Lab::with_pool("64M");
    let names = ["a", "b", "c", "d"];
    for name in names {
        lab.import(name, &noise(name.as_bytes()[0].into(), 1 << 20));
    }
    std::thread::scope(|scope| {
        for name in names {
            let lab = &lab;
            scope.spawn(move || {
                lab.ok(&["vhost-user", &format!("pool.img/{name}"), &format!("{name}.vm"), "--daemon"]);
            });
        }
    });
    for name in names {
        let mut guest = Guest::connect(&lab.path(&format!("{name}.vm")), 1, 64, 1 << 16).unwrap();
        let expected = noise(name.as_bytes()[0].into(), 1 << 20)[..PAGE].to_vec();
        assert_eq!(guest.request(IN, 0, &[], PAGE).unwrap(), (OK, expected));
    }
    wait_until("all front ends have gone", || lab.run(&["stop", POOL]).status.success());
    lab.assert_clean();
}

#[test]
fn a_full_pool_is_an_error_of_the_request_and_space_ends_it() {
    let lab = Lab::with_pool("32M");
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let server = serve(&lab, &["--when-full", "error"]);
    let mut guest = connect(&lab, "a");
    let mib = |n: u64| noise(n, 1 << 20);
    let full = (0..64).find(|n| guest.request(OUT, n * 2048, &mib(*n), 0).unwrap().0 != OK).unwrap();
    assert!((8..32).contains(&full), "{full} MiB of 32 were written");
    assert_eq!(guest.request(FLUSH, 0, &[], 0).unwrap().0, OK);
    for n in 0..full {
        assert_eq!(guest.request(IN, n * 2048, &[], 1 << 20).unwrap(), (OK, mib(n)));
    }
    lab.ok(&["grow", POOL, "--size", "128M"]);
    assert_eq!(guest.request(OUT, full * 2048, &mib(full), 0).unwrap().0, OK);
    drop(guest);
    server.stop();
    lab.assert_clean();
}
