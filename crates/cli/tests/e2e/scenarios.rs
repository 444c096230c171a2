//! The scenarios of the device-mapper test suites, on a served pool: verbs through the control socket
//! while clients are connected.

use std::path::PathBuf;
use std::thread;

use forkdisk::{ErrorKind, Mode, PoolInfo};
use forkdisk_control::{Client as Control, Method, VolumeRecord, params};

use crate::harness::{Lab, POOL, Server, wait_until};
use crate::nbd::Client;
use crate::stomper::{PAGE, Stomper};

const MIB: u64 = 1 << 20;
/// Tolerance for tables and the directory.
const TABLES: u64 = MIB / 4;
/// Number of objects in tests with very many.
const LOTS: usize = 1000;

/// A served pool, and a control connection to it.
struct Served {
    lab: Lab,
    server: Server,
    control: Control,
}

impl Served {
    fn with_pool(size: &str) -> Served {
        Served::with(size, &[])
    }

    fn with(size: &str, more: &[&str]) -> Served {
        let lab = Lab::with_pool(size);
        let server = Server::start_with(&lab, POOL, more);
        let socket: PathBuf = server.announced()["control"].as_str().unwrap().into();
        let control = Control::connect(&socket).unwrap();
        Served { lab, server, control }
    }

    #[track_caller]
    fn call<M: Method>(&mut self, method: M) -> M::Reply {
        self.control.call(method, None, |_| {}).unwrap_or_else(|e| panic!("{}: {e}", M::NAME))
    }

    #[track_caller]
    fn create(&mut self, names: &[&str], size: u64) {
        self.call(params::Create { volumes: owned(names), size, ..params::Create::default() });
    }

    #[track_caller]
    fn snapshot(&mut self, names: &[&str]) -> Vec<VolumeRecord> {
        self.call(params::Snapshot { snapshots: owned(names), ..params::Snapshot::default() })
    }

    #[track_caller]
    fn fork(&mut self, source: &str, clone: &str) {
        let (source, volumes) = (source.into(), vec![clone.into()]);
        self.call(params::Clone { source, volumes, ..params::Clone::default() });
    }

    /// Deletes these objects once the server has noticed that their clients have disconnected.
    #[track_caller]
    fn delete(&mut self, names: &[&str]) {
        let delete =
            params::Delete { objects: owned(names), recursive: true, until_freed: true, ..params::Delete::default() };
        wait_until("they are not in use", || match self.control.call(delete.clone(), None, |_| {}) {
            Ok(_) => true,
            Err(failure) if failure.kind == ErrorKind::Busy => false,
            Err(failure) => panic!("delete {names:?}: {failure}"),
        });
    }

    #[track_caller]
    fn stats(&mut self) -> PoolInfo {
        self.call(params::Stats {})
    }

    /// Returns the bytes in use once all freed space is available.
    #[track_caller]
    fn used(&mut self) -> u64 {
        let mut used = 0;
        wait_until("space has come back", || {
            let stats = self.stats();
            used = stats.used;
            stats.freeing == 0
        });
        used
    }

    #[track_caller]
    fn client(&self, export: &str) -> Client {
        Client::connect(self.server.socket(), export).unwrap()
    }

    /// Stops the server; the pool must be intact.
    #[track_caller]
    fn end(self) {
        let Served { lab, server, control } = self;
        drop(control);
        server.stop();
        lab.assert_clean();
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

#[track_caller]
fn assert_about(what: &str, is: u64, expected: u64) {
    assert!(is.abs_diff(expected) <= TABLES, "{what}: {is}, not about {expected}");
}

#[test]
fn space_use_is_n_for_n_written_and_2n_after_a_snapshot_and_the_same_writes_again() {
    let mut it = Served::with_pool("64M");
    it.create(&["a"], 16 * MIB);
    let before = it.used();
    let mut client = it.client("a");
    let mut stomper = Stomper::new(1, 8 * MIB);
    stomper.wipe(&mut client);
    assert_eq!(it.call(params::List::default())[0].referenced, 8 * MIB);
    assert_about("used", it.used() - before, 8 * MIB);
    it.snapshot(&["a@x"]);
    let old = stomper.fork(1);
    stomper.wipe(&mut client);
    assert_about("used", it.used() - before, 16 * MIB);
    let usage = it.call(params::Du { objects: vec![] });
    assert!(usage.volumes.iter().all(|volume| volume.referenced == 8 * MIB), "{usage:?}");
    assert!(usage.volumes.iter().all(|volume| (8 * MIB..8 * MIB + TABLES).contains(&volume.exclusive)), "{usage:?}");
    old.verify_export(&it.server, "a@x");
    stomper.verify(&mut client);
    it.end();
}

#[test]
fn many_snapshots_of_the_same_volume_taken_in_one_go() {
    let mut it = Served::with_pool("64M");
    it.create(&["a"], 4 * MIB);
    let before = it.used();
    let mut client = it.client("a");
    let mut origin = Stomper::new(1, 4 * MIB);
    origin.stomp(&mut client, 300);
    let then = origin.fork(1);
    let names: Vec<String> = (1..=999).map(|i| format!("a@{i}")).collect();
    let made = it.snapshot(&names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(made.len(), 999);
    origin.stomp(&mut client, 300);
    it.fork("a@1", "first");
    let mut first = then.fork(2);
    let mut client_of_first = it.client("first");
    first.stomp(&mut client_of_first, 300);
    for name in ["a@1", "a@500", "a@999"] {
        then.verify_export(&it.server, name);
    }
    origin.verify(&mut client);
    first.verify(&mut client_of_first);
    drop((client, client_of_first));
    it.delete(&["a", "first"]);
    assert!(it.used() <= before, "{} are used, and {before} were with an empty volume", it.used());
    it.end();
}

#[test]
fn parallel_io_to_an_origin_and_five_clones_that_share_with_it() {
    let mut it = Served::with_pool("256M");
    it.create(&["0"], 8 * MIB);
    let mut origin = Stomper::new(1, 8 * MIB);
    origin.wipe(&mut it.client("0"));
    for i in 1..6 {
        it.snapshot(&[&format!("0@{i}")]);
        it.fork(&format!("0@{i}"), &i.to_string());
    }
    thread::scope(|scope| {
        for i in 0..6 {
            let (mut own, mut client) = (origin.fork(i + 10), it.client(&i.to_string()));
            scope.spawn(move || {
                for _ in 0..6 {
                    own.stomp(&mut client, 200);
                }
                own.verify(&mut client);
            });
        }
    });
    origin.verify_export(&it.server, "0@1");
    origin.verify_export(&it.server, "0@5");
    it.end();
}

#[test]
fn ref_count_tree_of_five_snapshots_wiped_one_after_the_other() {
    let mut it = Served::with_pool("128M");
    it.create(&["0"], 4 * MIB);
    let empty = it.used();
    let mut origin = Stomper::new(1, 4 * MIB);
    origin.wipe(&mut it.client("0"));
    let first = it.used();
    for i in 1..6 {
        it.snapshot(&[&format!("0@{i}")]);
        it.fork(&format!("0@{i}"), &i.to_string());
        it.delete(&[&format!("0@{i}")]);
    }
    assert_about("shared by six", it.used(), first);
    for i in 0..6 {
        origin.fork(i + 10).wipe(&mut it.client(&i.to_string()));
        // The last one owns what the others have left.
        assert_about("used", it.used(), first + (i.min(4) + 1) * 4 * MIB);
    }
    it.delete(&["0", "1", "2", "3", "4", "5"]);
    assert!(it.used() <= empty);
    it.end();
}

#[test]
fn pattern_stomper_sees_each_side_of_a_snapshot_show_its_own_only() {
    let mut it = Served::with_pool("64M");
    it.create(&["origin"], 4 * MIB);
    let mut client = it.client("origin");
    let mut origin = Stomper::new(1, 4 * MIB);
    let mut forks = Vec::new();
    for i in 0..4 {
        origin.stomp(&mut client, 100);
        it.snapshot(&[&format!("origin@{i}")]);
        it.fork(&format!("origin@{i}"), &format!("fork/{i}"));
        forks.push((origin.fork(1), origin.fork(100 + i)));
    }
    for (i, (_, fork)) in forks.iter_mut().enumerate() {
        let mut client = it.client(&format!("fork/{i}"));
        fork.stomp(&mut client, 100);
        fork.discard(&mut client, 17 * i as u64, 100);
    }
    origin.stomp(&mut client, 100);
    for (i, (then, fork)) in forks.iter().enumerate() {
        then.verify_export(&it.server, &format!("origin@{i}"));
        fork.verify_export(&it.server, &format!("fork/{i}"));
    }
    origin.verify(&mut client);
    it.end();
}

#[test]
fn lots_of_empty_volumes() {
    let mut it = Served::with_pool("64M");
    let before = it.used();
    let names: Vec<String> = (0..LOTS).map(|i| format!("lots/{i}")).collect();
    names.iter().for_each(|name| it.create(&[name], 1 << 40));
    assert_eq!(it.stats().volumes as usize, LOTS);
    assert_eq!(it.client("lots/999").size, 1 << 40);
    it.delete(&["lots"]);
    assert!(it.used() <= before + TABLES);
    it.end();
}

#[test]
fn lots_of_snapshots_each_of_another_state() {
    let mut it = Served::with_pool("128M");
    it.create(&["a"], MIB);
    let mut client = it.client("a");
    let mut origin = Stomper::new(1, MIB);
    let mut then = Vec::new();
    for i in 0..LOTS {
        origin.stomp(&mut client, 2);
        it.snapshot(&[&format!("a@{i}")]);
        then.push(origin.clone());
    }
    for i in (0..LOTS).step_by(97).chain([LOTS - 1]) {
        then[i].verify_export(&it.server, &format!("a@{i}"));
    }
    it.end();
}

#[test]
fn lots_of_recursive_clones_999_deep() {
    let mut it = Served::with_pool("256M");
    it.create(&["0"], MIB);
    let mut stomper = Stomper::new(1, MIB);
    stomper.stomp(&mut it.client("0"), 50);
    for i in 1..LOTS {
        let (from, to) = (format!("{}@s", i - 1), i.to_string());
        it.snapshot(&[&from]);
        it.fork(&from, &to);
        if i.is_multiple_of(9) {
            stomper.stomp(&mut it.client(&to), 1);
        }
    }
    stomper.verify_export(&it.server, "999");
    // From the middle and from both ends: the clones are independent.
    for names in (300..700).chain(0..300).map(|i| i.to_string()).collect::<Vec<_>>().chunks(50) {
        it.delete(&names.iter().map(String::as_str).collect::<Vec<_>>());
    }
    stomper.verify_export(&it.server, "999");
    it.end();
}

#[test]
fn create_delete_cycle_uses_nothing_in_the_end() {
    let mut it = Served::with_pool("64M");
    let mut before = 0;
    for i in 0..LOTS {
        if i == 1 {
            // From here on the directory has its pages.
            before = it.used();
        }
        it.create(&["a"], 16 * MIB);
        if i.is_multiple_of(100) {
            Stomper::new(i as u64, MIB).wipe(&mut it.client("a"));
        }
        it.delete(&["a"]);
    }
    assert_eq!(it.used(), before);
    it.end();
}

#[test]
fn create_many_delete_many_uses_nothing_in_the_end() {
    let mut it = Served::with_pool("64M");
    let names: Vec<String> = (0..LOTS).map(|i| format!("many/{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut used = Vec::new();
    for _ in 0..3 {
        it.create(&names, 16 * MIB);
        for name in names.iter().step_by(100) {
            Stomper::new(1, MIB).stomp(&mut it.client(name), 10);
        }
        it.delete(&names);
        used.push(it.used());
    }
    assert!(used.iter().all(|&bytes| bytes <= used[0]), "{used:?}");
    it.end();
}

#[test]
fn rolling_snapshots_keep_the_newest_and_space_does_not_grow() {
    const KEPT: usize = 10;
    let mut it = Served::with_pool("64M");
    it.create(&["a"], MIB);
    let mut client = it.client("a");
    let mut origin = Stomper::new(1, MIB);
    let mut used = Vec::new();
    for i in 0..LOTS {
        origin.stomp(&mut client, 4);
        it.snapshot(&[&format!("a@{i}")]);
        if i >= KEPT {
            it.delete(&[&format!("a@{}", i - KEPT)]);
        }
        if i.is_multiple_of(100) && i > 0 {
            used.push(it.used());
        }
    }
    let most = used[0] + (KEPT as u64 + 1) * 4 * PAGE + TABLES;
    assert!(used.iter().all(|&bytes| bytes <= most), "{used:?}");
    origin.verify_export(&it.server, &format!("a@{}", LOTS - 1));
    origin.verify(&mut client);
    it.end();
}

/// Writes pages from `first` on until the pool is full; returns how many fit.
#[track_caller]
fn fill(client: &mut Client, first: u64) -> u64 {
    let full =
        (first..).find_map(|page| client.write(page * PAGE, &[1; PAGE as usize], false).err().map(|e| (page, e)));
    let (page, error) = full.unwrap();
    assert_eq!(error.raw_os_error(), Some(28), "{error}");
    page - first
}

#[test]
fn out_of_space_is_said_at_once_if_asked_and_deleting_helps() {
    let mut it = Served::with("16M", &["--when-full", "error"]);
    it.create(&["a"], 1 << 30);
    let before = it.used();
    let mut client = it.client("a");
    let pages = fill(&mut client, 0);
    assert!(pages > 1000, "{pages} fit into 16M");
    assert_eq!(it.stats().mode, Mode::OutOfDataSpace);
    assert!(client.read(0, PAGE as usize).unwrap() == [1; PAGE as usize]);
    client.write(0, &[2; PAGE as usize], true).unwrap();
    drop(client);
    it.delete(&["a"]);
    assert!(it.used() <= before);
    assert_eq!(it.stats().mode, Mode::ReadWrite);
    it.create(&["b"], 1 << 30);
    it.client("b").write(0, &[3; PAGE as usize], true).unwrap();
    it.end();
}

#[test]
fn a_discard_makes_room_in_a_full_pool() {
    let mut it = Served::with("16M", &["--when-full", "error"]);
    it.create(&["a"], 1 << 30);
    let mut client = it.client("a");
    let pages = fill(&mut client, 0);
    client.trim(0, (pages / 2 * PAGE) as u32).unwrap();
    client.flush().unwrap();
    wait_until("there is room again", || client.write(pages * PAGE, &[2; PAGE as usize], false).is_ok());
    assert!(fill(&mut client, pages + 1) > pages / 4);
    it.end();
}

#[test]
fn a_write_without_space_waits_until_the_pool_grows_and_others_go_on_meanwhile() {
    let mut it = Served::with("16M", &["--when-full", "wait", "--wait-for-space", "1h"]);
    it.create(&["a"], 1 << 30);
    let mut writer = it.client("a");
    let mut other = it.client("a");
    other.write(0, &[7; PAGE as usize], false).unwrap();
    thread::scope(|scope| {
        let writing = scope.spawn(move || {
            for page in 0..8192 {
                writer.write(page * PAGE, &[1; PAGE as usize], false).unwrap();
            }
            writer.flush().unwrap();
        });
        wait_until("the pool is full", || it.stats().mode == Mode::OutOfDataSpace);
        assert!(!writing.is_finished());
        for round in 0..50 {
            other.write(0, &[round; PAGE as usize], false).unwrap();
            other.flush().unwrap();
            assert!(other.read(0, PAGE as usize).unwrap() == [round; PAGE as usize]);
        }
        it.call(params::Grow { size: 64 * MIB });
        writing.join().unwrap();
    });
    assert_eq!(it.stats().mode, Mode::ReadWrite);
    assert!(it.client("a").read(8191 * PAGE, PAGE as usize).unwrap() == [1; PAGE as usize]);
    it.end();
}

#[test]
fn discards_single_partial_alternate_and_random_unmap_what_is_not_shared() {
    let mut it = Served::with_pool("64M");
    it.create(&["a"], 8 * MIB);
    let mut client = it.client("a");
    let mut own = Stomper::new(1, 8 * MIB);
    let referenced =
        |it: &mut Served| it.call(params::List { objects: vec!["a".into()], ..params::List::default() })[0].referenced;
    own.wipe(&mut client);
    own.discard(&mut client, 700, 1);
    (0..256).step_by(2).for_each(|page| own.discard(&mut client, page, 1));
    for (first, count) in [(1000, 37), (300, 256), (1999, 1), (1500, 300)] {
        own.discard(&mut client, first, count);
    }
    assert_eq!(referenced(&mut it), own.mapped() * PAGE);
    // Parts of pages become zeroes; the pages stay.
    client.trim(800 * PAGE + 512, 1024).unwrap();
    assert_eq!(referenced(&mut it), own.mapped() * PAGE);
    let page = client.read(800 * PAGE, PAGE as usize).unwrap();
    assert!(page[512..1536].iter().all(|&byte| byte == 0) && page[..24] != [0; 24]);
    own.discard(&mut client, 800, 1);
    own.verify(&mut client);
    assert!(client.trim(8 * MIB, PAGE as u32).is_err(), "past the end");
    assert!(client.trim(8 * MIB - PAGE, 2 * PAGE as u32).is_err(), "across the end");
    it.end();
}

#[test]
fn what_is_discarded_stays_where_it_is_shared_also_with_io_going_on() {
    let mut it = Served::with_pool("64M");
    it.create(&["a"], 8 * MIB);
    let mut client = it.client("a");
    let mut own = Stomper::new(1, 8 * MIB);
    own.wipe(&mut client);
    let full = it.used();
    it.snapshot(&["a@x"]);
    let then = own.fork(1);
    thread::scope(|scope| {
        let mut reader = it.client("a@x");
        let then = &then;
        scope.spawn(move || (0..5).for_each(|_| then.verify(&mut reader)));
        for first in (0..2048).step_by(64) {
            own.discard(&mut client, first, 64);
            own.stomp(&mut client, 1);
        }
    });
    then.verify_export(&it.server, "a@x");
    own.verify(&mut client);
    assert!(it.used() >= full, "the snapshot holds everything");
    it.delete(&["a@x"]);
    assert_about("used", it.used() + 8 * MIB, full + own.mapped() * PAGE);
    it.end();
}

#[test]
fn limits_of_chunks_and_sizes_are_kept() {
    let mut it = Served::with_pool("64M");
    for (name, chunk) in [("smallest", 4096), ("largest", 64 * MIB)] {
        it.call(params::Create {
            volumes: vec![name.into()],
            size: 16 * MIB,
            chunk: Some(chunk),
            ..params::Create::default()
        });
        let mut stomper = Stomper::new(chunk, 4 * MIB);
        let mut client = it.client(name);
        stomper.stomp(&mut client, 50);
        stomper.verify(&mut client);
    }
    for chunk in [0, 2048, 5000, 12_288, 128 * MIB] {
        let odd =
            params::Create { volumes: vec!["odd".into()], size: MIB, chunk: Some(chunk), ..params::Create::default() };
        it.control.call(odd, None, |_| {}).expect_err("a chunk is a power of two from 4K to 64M");
    }
    it.create(&["pebibyte"], 1 << 50);
    let mut client = it.client("pebibyte");
    client.write((1 << 50) - PAGE, &[5; PAGE as usize], true).unwrap();
    assert!(client.write(1 << 50, &[5; PAGE as usize], true).is_err());
    let more = params::Create { volumes: vec!["more".into()], size: (1 << 50) + 1, ..params::Create::default() };
    it.control.call(more, None, |_| {}).expect_err("more than 1 PiB");
    it.lab.run(&["init", "small.img", "--size", "4K"]).refused();
    assert_eq!(it.lab.json(&["list", POOL]).as_array().unwrap().len(), 3);
    it.end();
}
