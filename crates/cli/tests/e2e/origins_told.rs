//! Reports about origins and refusals: figures, the log, messages.

use std::fs;
use std::time::{Duration, Instant};

use crate::harness::{Lab, POOL, Server, wait_until};
use crate::metrics::{scrape, unix};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// Creates a pool that protects `disk.img`, 8 MiB of ones, which has the snapshot `a`.
fn lab() -> Lab {
    let lab = Lab::with_pool("128M");
    fs::write(lab.path("disk.img"), vec![1; 8 * MIB]).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img", "--copy-ahead", "0"]);
    lab.ok(&["snapshot", "pool.img/disk@a", "--writable"]);
    lab
}

#[test]
fn what_is_done_on_an_origins_own_device_is_counted() {
    let lab = lab();
    let server = Server::start_with(&lab, POOL, &["--metrics", "unix:metrics"]);
    let figures = || lab.json(&["stats", POOL])["live"].clone();
    let before = figures();
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    // Twice: the second time everything is kept already.
    (0..2).for_each(|_| disk.write(0, &vec![2; MIB], true).unwrap());
    disk.read(4 << 20, 2 * MIB).unwrap();
    disk.flush().unwrap();
    let mut old = Client::connect(server.socket(), "disk@a").unwrap();
    assert!(old.read(MIB as u64 / 2, MIB).unwrap() == vec![1; MIB], "half of it kept, half from the device");
    let after = figures();
    let risen = |path: &str| {
        let of = |figures: &serde_json::Value| figures.pointer(path).and_then(|v| v.as_u64()).expect("a figure");
        of(&after) - of(&before)
    };
    assert_eq!(after["origins"][0]["name"], "disk");
    assert_eq!(risen("/origins/0/write/bytes"), 2 * MIB as u64);
    assert_eq!(risen("/origins/0/read/bytes"), (MIB + 2 * MIB + MIB / 2) as u64, "kept, read, and shown");
    assert!(risen("/origins/0/flushes") >= 1 && risen("/origins/0/write/count") >= 2);
    assert_eq!(risen("/activity/data_write/bytes"), MIB as u64, "what is kept is written to the pool");
    assert_eq!(risen("/activity/data_read/bytes"), MIB as u64 / 2);
    let text = lab.ok(&["stats", POOL]);
    let row = |name: &str| text.lines().find(|line| line.split_whitespace().next() == Some(name)).expect("a row");
    assert!(row("origins_device_written").contains("2M in ") && row("origins_device_read").contains("M in "), "{text}");
    let samples = scrape(&mut unix(lab.path("metrics")));
    let bytes = |direction: &str| {
        samples[&format!("forkdisk_origin_device_bytes_total{{volume=\"disk\",direction=\"{direction}\"}}")]
    };
    assert_eq!(bytes("write"), after["origins"][0]["write"]["bytes"].as_f64().unwrap());
    assert!(bytes("read") >= (3 * MIB + MIB / 2) as f64);
    assert!(samples["forkdisk_origin_device_flushes_total{volume=\"disk\"}"] >= 1.0);
    drop((disk, old));
    server.stop();
}

#[test]
fn a_request_that_fails_for_a_client_is_told_in_the_log_once() {
    let lab = lab();
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    disk.write(0, &vec![2; 8 * MIB], true).unwrap();
    drop(disk);
    lab.ok(&["snapshot", "pool.img/disk@b"]);
    // Slow enough to last for the rest of the test.
    lab.ok(&["copier", POOL, "--set", "throttle=256K/s"]);
    let mut rollback = lab.command(&["rollback", "pool.img/disk@a"]).spawn().unwrap();
    wait_until("it is under way", || lab.json(&["list", "pool.img/disk"])[0]["protection"]["rolling"] == "disk@a");
    let mut snapshot = Client::connect(server.socket(), "disk@a").unwrap();
    let log = || fs::read_to_string(lab.path("serve.log")).unwrap();
    for _ in 0..5 {
        assert_eq!(snapshot.write(4096, &[9; 4096], false).unwrap_err().raw_os_error(), Some(5));
    }
    let told = log();
    let lines: Vec<&str> = told.lines().filter(|line| line.contains("I/O error")).collect();
    assert_eq!(lines.len(), 1, "{told}");
    assert!(lines[0].contains("a write of disk@a has failed") && lines[0].contains("WARN"), "{told}");
    assert!(lines[0].contains("is being rolled back to \"disk@a\"; wait until that has ended"), "{told}");
    lab.ok(&["copier", POOL, "--set", "throttle=none"]);
    assert!(rollback.wait().unwrap().success());
    snapshot.write(4096, &[9; 4096], false).expect("it has ended");
    drop(snapshot);
    server.stop();
}

#[test]
fn a_pool_is_not_protected_as_an_origin() {
    let lab = lab();
    lab.ok(&["init", "other.img", "--size", "64M"]);
    let said = lab.run(&["protect", "pool.img/other", "other.img"]).refused();
    assert!(said.contains("other.img is a forkdisk pool itself") && said.contains("snapshot its volumes"), "{said}");
    assert_eq!(lab.names(), ["disk", "disk@a"]);
    // As the message says: a file that is no pool any more may be protected.
    let wipe = format!("dd if=/dev/zero of={} bs=1M count=1 conv=notrunc", lab.path("other.img").display());
    assert!(said.contains(&wipe), "{said}");
    let mut words = wipe.split(' ');
    crate::harness::succeed(std::process::Command::new(words.next().unwrap()).args(words));
    lab.ok(&["protect", "pool.img/other", "other.img"]);
}

#[test]
fn an_origin_is_as_long_as_its_device_and_no_option_is_said_to_help() {
    let lab = lab();
    for size in ["4M", "16M"] {
        for options in [&[][..], &["--allow-shrink"], &["--allow-shrink", "--force"]] {
            let said = lab.run(&[&["resize", "pool.img/disk", "--size", size], options].concat()).refused();
            assert!(said.contains("disk is an origin: it is as long as its device"), "{said}");
            assert!(said.contains("disk.img") && !said.contains("--allow-shrink"), "{said}");
            assert!(!said.contains("--force"), "{said}");
        }
    }
}

#[test]
fn flattening_is_held_to_the_throttles_of_the_pool_and_of_the_clone() {
    let lab = lab();
    lab.ok(&["clone", "pool.img/disk@a", "pool.img/x", "pool.img/y", "pool.img/z"]);
    let server = Server::start(&lab);
    let flatten = |name: &str| {
        let start = Instant::now();
        assert_eq!(lab.json(&["flatten", &format!("pool.img/{name}")])["copied"], 8 * MIB);
        start.elapsed()
    };
    // The last part is not delayed.
    let at_4_mib_a_second = Duration::from_millis(1800);
    lab.ok(&["copier", POOL, "--set", "throttle=4M/s"]);
    assert!(flatten("x") >= at_4_mib_a_second, "the pool's");
    lab.ok(&["copier", POOL, "--set", "throttle=none"]);
    lab.ok(&["copier", POOL, "--volume", "y", "--set", "throttle=4M/s"]);
    assert!(flatten("y") >= at_4_mib_a_second, "its own");
    // The limit is lifted while the copy waits, which would take hours.
    lab.ok(&["copier", POOL, "--volume", "z", "--set", "throttle=1K/s"]);
    let mut slow = lab.command(&["flatten", "pool.img/z"]).spawn().unwrap();
    let waits = || lab.json(&["copier", POOL, "--volume", "z"])["volume"]["throttle_waits"].clone();
    wait_until("it is held up", || lab.json(&["stats", POOL])["live"]["copier"]["throttle_waits"].as_u64() >= Some(30));
    assert!(slow.try_wait().unwrap().is_none(), "{}", waits());
    lab.ok(&["copier", POOL, "--volume", "z", "--set", "throttle=none"]);
    assert!(slow.wait().unwrap().success());
    server.stop();
    lab.assert_clean();
}
