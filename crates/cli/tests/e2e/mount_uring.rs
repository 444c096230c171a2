//! FUSE over io_uring: the same files as over /dev/fuse, upgrades, kills, and kernels that do not offer it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::harness::{Lab, POOL, Server, client, noise, succeed};
use crate::mount::Mounted;

/// Whether the kernel offers it to new mounts.
const OFFER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Sets the kernel's offer while it lives. Other tests work either way.
struct Offer {
    before: String,
    _lock: MutexGuard<'static, ()>,
}

impl Offer {
    /// Sets it; `None` (after saying why) if that is not possible here.
    fn set(word: &str) -> Option<Offer> {
        static LOCK: Mutex<()> = Mutex::new(());
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let before = fs::read_to_string(OFFER).unwrap_or_default();
        let is_set = before.trim() == word || fs::write(OFFER, word).is_ok();
        if !is_set {
            eprintln!("not tested: this kernel has no FUSE over io_uring, or the offer can be set by root only");
            return None;
        }
        Some(Offer { before, _lock: lock })
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let _ = fs::write(OFFER, self.before.trim());
    }
}

/// Writes, reads back and renames files until `ends` is set; returns how often.
fn work(dir: &Path, n: u64, ends: &AtomicBool) -> u64 {
    let path = dir.join(format!("f{n}"));
    let mut count = 0;
    while !ends.load(Ordering::Relaxed) {
        let data = noise(n * 1_000_000 + count, 1 + (count as usize * 7919) % 200_000);
        fs::write(&path, &data).unwrap();
        assert!(fs::read(&path).unwrap() == data, "{n}: {count}");
        fs::rename(&path, path.with_extension("new")).unwrap();
        fs::rename(path.with_extension("new"), &path).unwrap();
        count += 1;
    }
    count
}

#[test]
fn files_are_the_same_by_io_uring() {
    let Some(_offer) = Offer::set("Y") else { return };
    let lab = Lab::with_pool("256M");
    let Some(mounted) = Mounted::with(&lab, &["-o", "fuse_uring=yes"]) else { return };
    for (n, len) in [0, 1, 4095, 4096, 65_537, 1 << 20, (5 << 20) + 3].into_iter().enumerate() {
        let data = noise(n as u64, len);
        fs::write(mounted.path(&format!("f{n}")), &data).unwrap();
        assert!(fs::read(mounted.path(&format!("f{n}"))).unwrap() == data, "{len} bytes");
    }
    let long = "n".repeat(200);
    fs::create_dir_all(mounted.path(&format!("a/b/{long}"))).unwrap();
    fs::rename(mounted.path(&format!("a/b/{long}")), mounted.path("a/c")).unwrap();
    assert_eq!(fs::read_dir(mounted.path("a")).unwrap().count(), 2);
    assert_eq!(fs::read(mounted.path("none")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    succeed(Command::new("cp").arg(mounted.path("f6")).arg(mounted.path("copy")));
    assert!(fs::read(mounted.path("copy")).unwrap() == noise(6, (5 << 20) + 3));
    if let Some(mut fio) = client("fio", "fio") {
        let file = format!("--filename={}", mounted.path("copy").display());
        let job = ["--name=v", &file, "--rw=randrw", "--bs=4k", "--size=4M", "--ioengine=libaio", "--iodepth=64"];
        fio.args(job).args(["--direct=1", "--verify=crc32c", "--verify_fatal=1", "--loops=3"]);
        fio.current_dir(lab.path(""));
        succeed(&mut fio);
    }
    mounted.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn a_kernel_that_does_not_offer_io_uring_is_told_and_auto_mounts() {
    let Some(_offer) = Offer::set("N") else { return };
    let lab = Lab::with_pool("64M");
    fs::create_dir(lab.path("mnt")).unwrap();
    let refused = lab.run(&["mount", POOL, "mnt", "-o", "fuse_uring=yes"]).refused();
    assert!(refused.contains("echo 1 > /sys/module/fuse/parameters/enable_uring"), "{refused}");
    let refused = lab.run(&["mount", POOL, "mnt", "-o", "fuse_uring=maybe"]).refused();
    assert!(refused.contains("auto, yes or no"), "{refused}");
    for word in ["auto", "no"] {
        let Some(mounted) = Mounted::with(&lab, &["-o", &format!("fuse_uring={word}")]) else { return };
        fs::write(mounted.path(word), word).unwrap();
        assert_eq!(fs::read_to_string(mounted.path(word)).unwrap(), word);
        mounted.unmount(&lab);
    }
    lab.assert_clean();
}

#[test]
fn programs_go_on_over_upgrades_by_io_uring() {
    let Some(_offer) = Offer::set("Y") else { return };
    let lab = Lab::with_pool("256M");
    fs::create_dir(lab.path("m")).unwrap();
    let server = Server::start_with(&lab, POOL, &["--mount", "m", "--fuse-uring", "yes"]);
    let dir = lab.path("m");
    let removed = File::options().read(true).write(true).create_new(true).open(dir.join("x")).unwrap();
    removed.write_all_at(&noise(1, 1 << 20), 0).unwrap();
    fs::remove_file(dir.join("x")).unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    let workers = (0..6u64).map(|n| {
        let (dir, ends) = (dir.clone(), ends.clone());
        thread::spawn(move || work(&dir, n, &ends))
    });
    let workers: Vec<_> = workers.collect();
    for round in 0..10 {
        assert_eq!(lab.json(&["upgrade", POOL])["mounts"], 1, "{round}");
        let mut found = vec![0; 1 << 20];
        removed.read_exact_at(&mut found, 0).unwrap();
        assert!(found == noise(1, 1 << 20));
        assert!(fs::read_dir(&dir).unwrap().count() <= 7);
    }
    ends.store(true, Ordering::Relaxed);
    let counts: Vec<u64> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    assert!(counts.iter().all(|&count| count > 1), "{counts:?}");
    // Nothing else uses it: every entry is idle.
    lab.json(&["upgrade", POOL]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 6);
    drop(removed);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_program_that_fails_to_take_over_loses_no_request_of_a_queue() {
    let Some(_offer) = Offer::set("Y") else { return };
    let lab = Lab::with_pool("256M");
    fs::create_dir(lab.path("m")).unwrap();
    let server = Server::start_with(&lab, POOL, &["--mount", "m", "--fuse-uring", "yes"]);
    let (dir, ends) = (lab.path("m"), Arc::new(AtomicBool::new(false)));
    let workers = (0..4u64).map(|n| {
        let (dir, ends) = (dir.clone(), ends.clone());
        thread::spawn(move || work(&dir, n, &ends))
    });
    let workers: Vec<_> = workers.collect();
    // The first does not say that it can continue queues, the second says so of adjoining payloads only, the third says
    // so of all and ends.
    for (name, ready, why) in [
        ("old", r#"\034\000\000\000\000\000\000\000{"Ready":{"format":1}}      "#, "fuse-uring"),
        ("next", r#"\050\000\000\000\000\000\000\000{"Ready":{"format":1,"fuse_uring":true}}"#, "fuse-uring"),
        (
            "bad",
            r#"\073\000\000\000\000\000\000\000{"Ready":{"format":1,"fuse_uring":true,"fuse_stride":true}}"#,
            "without taking over",
        ),
    ] {
        let text = format!("#!/bin/sh\nprintf '{ready}' >&0\nsleep 1\n");
        let program = lab.write_file(name, text.as_bytes());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let message = lab.run(&["upgrade", POOL, "--program", program.to_str().unwrap()]).refused();
        assert!(message.contains(why), "{name}: {message}");
        assert!(fs::read_dir(&dir).unwrap().count() <= 4);
    }
    ends.store(true, Ordering::Relaxed);
    workers.into_iter().for_each(|worker| assert!(worker.join().unwrap() > 1));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_killed_server_ends_its_mount_by_io_uring() {
    let Some(_offer) = Offer::set("Y") else { return };
    let lab = Lab::with_pool("256M");
    let Some(mut mounted) = Mounted::with(&lab, &["-o", "fuse_uring=yes"]) else { return };
    let workers = (0..4).map(|n| {
        let path = mounted.path(&format!("f{n}"));
        thread::spawn(move || {
            let data = noise(n, 100_000);
            // Ends with the mount.
            while fs::write(&path, &data).and_then(|()| fs::read(&path)).is_ok() {}
        })
    });
    let workers: Vec<_> = workers.collect();
    thread::sleep(std::time::Duration::from_millis(200));
    mounted.kill();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    assert!(fs::read(mounted.path("f0")).is_err());
    mounted.release();
    let Some(again) = Mounted::with(&lab, &["-o", "fuse_uring=yes"]) else { return };
    fs::write(again.path("after"), "kill").unwrap();
    again.terminate();
    lab.assert_clean();
}

#[test]
fn a_kept_mount_does_not_use_io_uring() {
    let Some(_offer) = Offer::set("Y") else { return };
    let lab = Lab::with_pool("64M");
    let refused = lab.run(&["serve", POOL, "--keeper", "--fuse-uring", "yes"]).refused();
    assert!(refused.contains("exclude each other"), "{refused}");
}

#[test]
fn a_verb_on_the_mount_of_a_stopped_server_ends() {
    for offer in ["Y", "N"] {
        let Some(_offer) = Offer::set(offer) else { return };
        let lab = Lab::with_pool("64M");
        fs::create_dir(lab.path("m")).unwrap();
        let server = Server::start_with(&lab, POOL, &["--mount", "m"]);
        let signal = |name: &str| succeed(Command::new("kill").args([name, &server.pid().to_string()]));
        signal("-STOP");
        let mounted = lab.run(&["mount", POOL, "m"]);
        signal("-CONT");
        let why = mounted.refused();
        assert!(why.contains("does not answer"), "{offer}: {why}");
        fs::write(lab.path("m/a"), "goes on").unwrap();
        server.stop();
        lab.assert_clean();
    }
}
