//! A full file system under a pool, or under a file that is written next to one.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::{LIMIT, Lab, Limited, Server, missing, noise, wait_until};
use crate::mount::{Mounted, sh};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// A small tmpfs at this path. `None` (after saying why) without permission to mount.
struct SmallFileSystem<'a>(&'a Path);

impl SmallFileSystem<'_> {
    fn mount<'a>(place: &'a Path, size: &str) -> Option<SmallFileSystem<'a>> {
        fs::create_dir_all(place).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(place)
            .output_within(LIMIT);
        if !mounted.is_ok_and(|output| output.status.success()) {
            missing("a small file system cannot be mounted: that needs root");
            return None;
        }
        Some(SmallFileSystem(place))
    }
}

impl Drop for SmallFileSystem<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status_within(LIMIT);
    }
}

/// Serves a pool in the small file system, larger than that; returns it with a client of its volume
/// `a`, which has 8 MiB.
fn serve_a_volume_in_the_small_file_system(lab: &Lab) -> (Server, Client) {
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    lab.ok(&["create", "small/pool.img/a", "--size", "512M"]);
    let server = Server::start_with(lab, "small/pool.img", &["--when-full", "error"]);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    for piece in 0..8 {
        client.write(piece << 20, &noise(piece, MIB), false).unwrap();
    }
    client.flush().unwrap();
    (server, client)
}

#[test]
fn a_full_host_file_system_is_like_a_full_pool() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "48M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    lab.run_with_input(&["import", "-", "small/pool.img/a"], &noise(4, MIB)).ok();
    let message = lab.run_with_input(&["import", "-", "small/pool.img/big"], &noise(5, 64 * MIB)).refused();
    assert!(message.contains("space"), "{message}");
    let list = lab.json(&["list", "small/pool.img"]);
    assert!(list.as_array().unwrap().iter().any(|volume| volume["name"] == "a"), "{list}");
    assert!(!list.to_string().contains("big"), "{list}");
    let out = lab.command(&["export", "small/pool.img/a", "-"]).output_within(LIMIT).unwrap();
    assert!(out.stdout == noise(4, MIB));
}

#[test]
fn an_upgrade_on_a_full_host_file_system_takes_no_client_away() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "48M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    lab.ok(&["create", "small/pool.img/a", "--size", "512M"]);
    let server = Server::start_with(&lab, "small/pool.img", &["--wait-for-space", "20s"]);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    fs::write(place.join("filler"), vec![1; 20 * MIB]).unwrap();
    client.write(0, &noise(20, 4 * MIB), false).unwrap();
    client.flush().unwrap();
    fs::write(place.join("rest"), vec![1; 64 * MIB]).unwrap_err();
    // It is done if a checkpoint finds room, and refused otherwise.
    for _ in 0..2 {
        let upgraded = lab.run(&["upgrade", "small/pool.img"]);
        let is_refused = ["could not be closed", "is full"].iter().any(|why| upgraded.stderr.contains(why));
        assert!(upgraded.status.success() || is_refused, "{upgraded:?}");
        assert!(client.read(0, 4 * MIB).unwrap() == noise(20, 4 * MIB));
    }
    fs::remove_file(place.join("rest")).unwrap();
    wait_until("there is room", || lab.run(&["upgrade", "small/pool.img"]).status.success());
    assert!(client.read(0, 4 * MIB).unwrap() == noise(20, 4 * MIB));
    drop(client);
    server.stop();
}

#[test]
fn a_served_pool_outlasts_a_full_host_file_system() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    let (server, mut client) = serve_a_volume_in_the_small_file_system(&lab);
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    // Writes in place, trims and flushes succeed; requests for new space fail and break nothing.
    client.write(0, &noise(100, MIB), false).unwrap();
    assert_eq!(client.write(20 << 20, &noise(101, MIB), false).unwrap_err().raw_os_error(), Some(28));
    client.trim(4 << 20, 2 << 20).unwrap();
    client.flush().unwrap();
    // Longer than the interval at which the server frees space, which itself needs some.
    std::thread::sleep(Duration::from_secs(7));
    client.write(4096, &noise(102, 4096), true).unwrap();
    assert!(client.read(1 << 20, MIB).unwrap() == noise(1, MIB));
    fs::remove_file(place.join("filler")).unwrap();
    client.write(20 << 20, &noise(103, MIB), true).unwrap();
    drop(client);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
    assert_eq!(lab.json(&["list", "small/pool.img/a"])[0]["referenced"], 7 * MIB);
}

#[test]
fn a_pool_without_data_space_is_low_whatever_it_counts_as_free_and_the_log_says_so() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    let (server, mut client) = serve_a_volume_in_the_small_file_system(&lab);
    let log = || fs::read_to_string(lab.path("serve.log")).unwrap();
    assert_eq!(lab.json(&["stats", "small/pool.img"])["low"], false);
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    assert_eq!(client.write(20 << 20, &noise(1, MIB), false).unwrap_err().raw_os_error(), Some(28));
    let stats = lab.json(&["stats", "small/pool.img"]);
    assert_eq!((&stats["mode"], &stats["low"]), (&"out-of-data-space".into(), &true.into()), "{stats}");
    wait_until("the log says that it is full", || log().contains("the pool is out of data space"));
    fs::remove_file(place.join("filler")).unwrap();
    client.write(20 << 20, &noise(2, MIB), true).unwrap();
    wait_until("the log says that there is room", || {
        client.write(21 << 20, &noise(3, 4096), true).unwrap();
        log().contains("the pool has data space again")
    });
    drop(client);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
}

#[test]
fn gathering_on_a_full_host_file_system_is_refused_and_waits_for_nothing() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "40M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "200M"]);
    lab.ok(&["create", "small/pool.img/a", "--size", "16M", "--chunk", "4K"]);
    let server = Server::start_on(&lab, "small/pool.img");
    let mut client = Client::connect(server.socket(), "a").unwrap();
    // Every other page first, then the pages between them.
    for start in [0, 1] {
        for page in (start..2048).step_by(2) {
            client.write(page * 4096, &noise(page, 4096), false).unwrap();
        }
    }
    client.flush().unwrap();
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    // Frees a page and fills its place in the file system as well: to reclaim it a checkpoint is needed.
    client.trim(0, 4096).unwrap();
    client.flush().unwrap();
    let refused = lab.run(&["defrag", "small/pool.img/a"]).refused();
    assert!(refused.contains("is full"), "{refused}");
    fs::remove_file(place.join("filler")).unwrap();
    // The checkpoint is retried once a second.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !lab.run(&["defrag", "small/pool.img/a"]).status.success() {
        assert!(std::time::Instant::now() < deadline, "there is room again");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(client.read(1 << 20, 4096).unwrap() == noise(256, 4096));
    drop(client);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
}

#[test]
fn gathering_does_with_the_room_that_the_host_has_and_says_when_it_has_none() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    ["a", "b"].iter().for_each(|name| drop(lab.ok(&["create", &format!("small/pool.img/{name}"), "--size", "20M"])));
    let server = Server::start_on(&lab, "small/pool.img");
    let mut clients = ["a", "b"].map(|name| Client::connect(server.socket(), name).unwrap());
    let contents = |volume: u64, piece: u64| noise(1000 * volume + piece, MIB);
    for piece in 0..20 {
        for (volume, client) in (0..).zip(&mut clients) {
            client.write(piece << 20, &contents(volume, piece), true).unwrap();
        }
    }
    let leave = |room: u64| {
        fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
        let filler = fs::OpenOptions::new().write(true).open(place.join("filler")).unwrap();
        filler.set_len(filler.metadata().unwrap().len() - room).unwrap();
    };
    // Less space than one piece needs.
    leave(256 << 10);
    let told = lab.json(&["defrag", "small/pool.img/a"]);
    assert_eq!((&told["moved"], &told["host_full"]), (&0.into(), &true.into()), "{told}");
    let told = lab.ok(&["defrag", "small/pool.img/a"]);
    assert!(told.contains("the file system under the pool has no room to move it"), "{told}");
    // Less than the volume: the space of moved pages is reused for the next ones.
    leave(6 << 20);
    let told = lab.json(&["defrag", "small/pool.img/a"]);
    assert_eq!((&told["moved"], &told["host_full"]), (&(20 * MIB).into(), &false.into()), "{told}");
    for (volume, client) in (0..).zip(&mut clients) {
        (0..20).for_each(|piece| assert!(client.read(piece << 20, MIB).unwrap() == contents(volume, piece)));
    }
    drop(clients);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
}

#[test]
fn a_deletion_on_a_full_host_file_system_is_done_and_says_that_space_is_missing() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    let (server, mut client) = serve_a_volume_in_the_small_file_system(&lab);
    lab.ok(&["snapshot", "small/pool.img/a@x"]);
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    assert_eq!(client.write(0, &noise(101, MIB), false).unwrap_err().raw_os_error(), Some(28));
    let run = lab.run(&["delete", "--until-freed", "small/pool.img/a@x"]);
    assert_eq!(run.status.code(), Some(0), "it is gone: {}", run.stderr);
    let said = run.stderr;
    assert!(said.contains("it is done, but its space is not free yet"), "{said}");
    assert!(said.contains("give it room") && !said.contains("try again"), "{said}");
    // A verb that frees nothing does not mention it.
    lab.ok(&["resize", "small/pool.img/a", "--size", "600M"]);
    let shrunk = lab.run(&["resize", "small/pool.img/a", "--size", "512M", "--allow-shrink", "--force"]);
    let said = shrunk.stderr;
    assert!(shrunk.status.success(), "{said}");
    assert!(said.contains("it is done, but its space is not free yet"), "{said}");
    lab.ok(&["resize", "small/pool.img/a", "--size", "512M"]);
    fs::remove_file(place.join("filler")).unwrap();
    let list = lab.json(&["list", "small/pool.img"]).to_string();
    assert!(!list.contains("a@x"), "{list}");
    drop(client);
    server.stop();
    lab.ok(&["check", "small/pool.img"]);
}

#[test]
fn an_export_to_a_full_file_system_leaves_nothing_behind() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(6, 16 * MIB));
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "4M") else { return };
    let message = lab.run(&["export", "pool.img/a", "small/out.raw"]).refused();
    assert!(message.contains("pace"), "{message}");
    assert!(!place.join("out.raw").exists());
}

#[test]
fn what_is_removed_from_a_mount_makes_room_on_a_full_host_file_system() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "96M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    symlink("small/pool.img", lab.path("pool.img")).unwrap();
    let Some(mount) = Mounted::new(&lab) else { return };
    let contents = noise(21, 40 * MIB);
    fs::write(mount.path("a"), &contents).unwrap();
    sh(&mount, "sync a; cp a b");
    for round in 0..3 {
        let overwritten = sh(&mount, "dd if=/dev/urandom of=a bs=1M count=100 conv=notrunc,fsync 2>&1 || true");
        assert!(overwritten.contains("No space left on device"), "round {round}: {overwritten}");
        fs::remove_file(mount.path("a")).unwrap();
        let small = noise(22 + round, 8 * MIB);
        fs::write(mount.path("c"), &small).unwrap();
        sh(&mount, "sync c");
        assert!(fs::read(mount.path("c")).unwrap() == small, "round {round}");
        assert!(fs::read(mount.path("b")).unwrap() == contents, "round {round}");
        sh(&mount, "rm c; cp b a");
    }
    mount.unmount(&lab);
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
}

#[test]
fn a_volume_deleted_from_a_served_pool_makes_room_on_a_full_host_file_system() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    let (server, client) = serve_a_volume_in_the_small_file_system(&lab);
    lab.ok(&["create", "small/pool.img/b", "--size", "512M"]);
    let mut other = Client::connect(server.socket(), "b").unwrap();
    let full = (0..).find(|piece| other.write(piece << 20, &noise(*piece, MIB), false).is_err()).unwrap();
    drop(client);
    lab.ok(&["delete", "small/pool.img/a"]);
    wait_until("removing has made room", || other.write(full << 20, &noise(full, MIB), true).is_ok());
    drop(other);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
}

#[test]
fn umount_says_that_the_pool_could_not_be_closed_on_a_full_host_file_system() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "24M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    symlink("small/pool.img", lab.path("pool.img")).unwrap();
    let Some(mount) = Mounted::new(&lab) else { return };
    let contents = noise(23, 4 * MIB);
    fs::write(mount.path("a"), &contents).unwrap();
    sh(&mount, "sync a");
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    sh(&mount, "cp a b; sync b");
    let said = lab.run(&["umount", "mnt"]).refused();
    assert!(said.contains("is unmounted") && said.contains("not closed cleanly"), "{said}");
    assert!(!mount.path("a").exists());
    drop(mount);
    fs::remove_file(place.join("filler")).unwrap();
    assert_eq!(lab.names(), ["a", "b"]);
    assert!(lab.contents("a") == contents && lab.contents("b") == contents);
    lab.assert_clean();
    // The next verb that closes the pool has nothing to report.
    let Some(mount) = Mounted::new(&lab) else { return };
    mount.unmount(&lab);
}

#[test]
fn a_write_waits_for_the_host_file_system_as_it_waits_for_the_pool() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "48M") else { return };
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    lab.ok(&["create", "small/pool.img/a", "--size", "512M"]);
    let server = Server::start_on(&lab, "small/pool.img");
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(1, MIB), true).unwrap();
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    let filler = place.join("filler");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(3));
            fs::remove_file(&filler).unwrap();
        });
        client.write(8 << 20, &noise(2, 8 * MIB), true).unwrap();
    });
    assert!(!filler.exists(), "it waited");
    assert!(client.read(8 << 20, 8 * MIB).unwrap() == noise(2, 8 * MIB));
    drop(client);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
}

#[test]
fn a_write_that_does_not_fit_leaves_the_room_to_one_that_does() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    let (server, mut client) = serve_a_volume_in_the_small_file_system(&lab);
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    client.trim(4 << 20, 4 << 20).unwrap();
    for _ in 0..100 {
        let refused = client.write(100 << 20, &noise(3, 8 * MIB), false).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(28));
    }
    wait_until("a smaller one fits", || client.write(100 << 20, &noise(4, 2 * MIB), true).is_ok());
    fs::remove_file(place.join("filler")).unwrap();
    wait_until("the large one fits", || client.write(100 << 20, &noise(3, 8 * MIB), true).is_ok());
    drop(client);
    server.stop();
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
    let used = lab.json(&["stats", "small/pool.img"])["used"].as_u64().unwrap();
    assert!(used < 32 << 20, "{used}");
}

#[test]
fn what_a_verb_has_done_on_a_full_host_is_done_and_it_says_so() {
    let lab = Lab::empty();
    let place = lab.path("small");
    let Some(_mounted) = SmallFileSystem::mount(&place, "64M") else { return };
    let at = |name: &str| format!("small/pool.img/{name}");
    lab.ok(&["init", "small/pool.img", "--size", "1G"]);
    lab.ok(&["create", &at("gone"), &at("old"), &at("short"), "--size", "512M"]);
    lab.run_with_input(&["import", "-", &at("a")], &noise(1, 4 * MIB)).ok();
    lab.ok(&["snapshot", &at("a@s")]);
    lab.ok(&["clone", &at("a@s"), &at("b")]);
    fs::write(place.join("filler"), vec![1; 64 * MIB]).unwrap_err();
    for args in [
        &["snapshot", &at("a@t")] as &[&str],
        &["create", &at("new"), "--size", "1M"],
        &["clone", &at("a@s"), &at("c")],
        &["rename", &at("old"), &at("renamed")],
        &["set", "quota=30M", &at("a")],
        &["resize", &at("short"), "--size", "1M", "--allow-shrink"],
        &["rollback", &at("a@s")],
        &["delete", &at("gone")],
        &["delete", &at("b")],
    ] {
        let run = lab.run(args);
        assert!(run.status.success(), "{args:?}: {run:?}");
        // The pool was not closed cleanly, and all of them report that.
        assert!(run.stderr.contains("WARN") && run.stderr.contains("it is done"), "{args:?}: {run:?}");
    }
    // A copy of the pool in its current state: completed verbs are durable without a close.
    let look = |pool: &str| {
        let all = lab.json(&["list", pool]);
        let mut names: Vec<_> =
            all.as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap().to_string()).collect();
        names.sort();
        assert_eq!(names, ["a", "a@s", "a@t", "c", "new", "renamed", "short"]);
        let find = |name: &str| all.as_array().unwrap().iter().find(|v| v["name"] == name).unwrap().clone();
        assert_eq!((find("short")["size"].as_u64(), find("a")["quota"].as_u64()), (Some(1 << 20), Some(30 << 20)));
    };
    let mut copy = Command::new("cp");
    copy.arg("--sparse=always").arg(place.join("pool.img")).arg(lab.path("copy.img"));
    crate::harness::succeed(&mut copy);
    look("copy.img");
    fs::remove_file(place.join("filler")).unwrap();
    look("small/pool.img");
    assert!(lab.run(&["set", "quota=50M", &at("a")]).stderr.contains("not closed in order"), "the one before");
    assert_eq!(lab.run(&["set", "quota=none", &at("a")]).stderr, "");
    assert_eq!(lab.run(&["check", "small/pool.img"]).status.code(), Some(0));
    let out = lab.command(&["export", "small/pool.img/c", "-"]).output_within(LIMIT).unwrap();
    assert!(out.stdout == noise(1, 4 * MIB));
}
