//! A crash of the daemon alone: no acknowledged write is lost.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::attach::{Attaching, device_text, shell};
use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Server, client, noise, succeed};
use crate::mount::{Mounted, sh};
use crate::mount_programs::Loop;
use crate::nbd::Client;

const PAGE: usize = 4096;
/// First writes without a flush.
const WRITES: u64 = 3000;

/// Returns pages of a volume in random order, with their contents.
fn pages(seed: u64) -> Vec<(u64, Vec<u8>)> {
    let mut all: Vec<u64> = (0..WRITES).collect();
    all.shuffle(&mut SmallRng::seed_from_u64(seed));
    all.into_iter().map(|page| (page, noise(seed ^ page, PAGE))).collect()
}

fn write(server: &Server, export: &str, pages: &[(u64, Vec<u8>)]) {
    let mut client = Client::connect(server.socket(), export).unwrap();
    for (page, data) in pages {
        client.write(page * PAGE as u64, data, false).unwrap();
    }
    client.vanish();
}

/// Returns how many pages do not hold what was written.
fn lost(server: &Server, export: &str, pages: &[(u64, Vec<u8>)]) -> usize {
    let mut client = Client::connect(server.socket(), export).unwrap();
    pages.iter().filter(|(page, data)| client.read(page * PAGE as u64, PAGE).unwrap() != *data).count()
}

/// Writes to a file with direct I/O, without a flush: each write is acknowledged by the daemon.
fn write_direct(path: &Path, pages: &[(u64, Vec<u8>)]) {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::options().write(true).custom_flags(direct).open(path).unwrap();
    let mut room = vec![0; 2 * PAGE];
    let at = room.as_ptr().align_offset(PAGE);
    for (page, data) in pages {
        room[at..at + PAGE].copy_from_slice(data);
        file.write_all_at(&room[at..at + PAGE], page * PAGE as u64).unwrap();
    }
}

/// Returns how many pages of a file do not hold what was written.
fn lost_in(path: &Path, pages: &[(u64, Vec<u8>)]) -> usize {
    let found = fs::read(path).unwrap();
    pages.iter().filter(|(page, data)| found[*page as usize * PAGE..][..PAGE] != data[..]).count()
}

/// Returns the files of the volatile log of the lab's pool.
fn logs(lab: &Lab) -> Vec<PathBuf> {
    let uuid = lab.json(&["stats", POOL])["uuid"].as_str().unwrap().to_string();
    let folders = ["/run/forkdisk".to_string(), format!("/dev/shm/forkdisk-{}", rustix::process::geteuid().as_raw())];
    // XDG_RUNTIME_DIR may be one of the other folders.
    let own = std::env::var("XDG_RUNTIME_DIR").map(|dir| format!("{dir}/forkdisk"));
    let folders: BTreeSet<String> = folders.into_iter().chain(own).collect();
    let entries = folders.into_iter().filter_map(|folder| fs::read_dir(PathBuf::from(folder).join(&uuid)).ok());
    let paths = entries.flatten().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("volatile"))).collect()
}

#[test]
fn first_writes_that_no_flush_covered_survive_a_killed_daemon() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "32M"]);
    for round in 0..3 {
        let server = Server::start(&lab);
        let pages = pages(round);
        if round == 2 {
            lab.ok(&["snapshot", &format!("{POOL}/a@s")]);
        }
        write(&server, "a", &pages);
        server.kill();
        let server = Server::start(&lab);
        assert_eq!(lost(&server, "a", &pages), 0, "round {round}");
        let said = fs::read_to_string(lab.path("serve.log")).unwrap();
        assert!(said.contains("was not closed in order") && said.contains("of the volatile log"), "{said}");
        server.stop();
        assert_eq!(logs(&lab), Vec::<PathBuf>::new(), "what was closed in order leaves no log");
        lab.assert_clean();
    }
}

#[test]
fn a_verb_behind_a_killed_daemon_sees_and_keeps_what_was_acknowledged() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "32M"]);
    let server = Server::start(&lab);
    let pages = pages(7);
    write(&server, "a", &pages);
    server.kill();
    // A read-only open changes nothing; the first verb that writes takes the log over.
    let read = lab.contents("a");
    assert!(pages.iter().all(|(page, data)| read[*page as usize * PAGE..][..PAGE] == data[..]));
    lab.ok(&["snapshot", &format!("{POOL}/a@then")]);
    let kept = lab.contents("a@then");
    assert!(kept == read, "the snapshot was taken of something else");
    lab.assert_clean();
}

#[test]
fn what_waited_longer_than_the_commit_interval_survives_a_lost_log_too() {
    let lab = Lab::with_pool("64M");
    let crash = |volume: &str, wait: Duration| {
        lab.ok(&["create", &format!("{POOL}/{volume}"), "--size", "16M"]);
        let server = Server::start_with(&lab, POOL, &["--commit-interval", "1s"]);
        // Removed, as by a crash of the machine. Finding it takes time, in which something may be committed.
        let logs = logs(&lab);
        assert!(!logs.is_empty(), "there is no volatile log");
        let pages = pages(9);
        write(&server, volume, &pages);
        std::thread::sleep(wait);
        server.kill();
        logs.iter().for_each(|log| fs::remove_file(log).unwrap());
        let server = Server::start(&lab);
        let lost = lost(&server, volume, &pages);
        server.stop();
        lost
    };
    assert_eq!(crash("waits", Duration::from_secs(4)), 0);
    assert!(crash("does-not", Duration::ZERO) > 0, "nothing is lost without waiting, so the test shows nothing");
}

#[test]
fn qemu_reconnects_to_a_daemon_that_was_killed_and_misses_nothing() {
    let Some(mut qemu) = client("qemu-io", "qemu-utils") else { return };
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "32M"]);
    let server = Server::start(&lab);
    let socket = server.socket().to_path_buf();
    let options = format!("driver=nbd,server.type=unix,server.path={},export=a,reconnect-delay=60", socket.display());
    let mut child = qemu
        .args(["-t", "writeback", "--image-opts", &options])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"write -P 77 1M 256k\n").unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("ops;") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "qemu-io ended");
    }
    server.kill();
    let server = Server::start(&lab);
    stdin.write_all(b"flush\nread -P 77 1M 256k\nquit\n").unwrap();
    drop(stdin);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    child.wait_within(LIMIT).unwrap();
    assert!(rest.contains("read 262144/262144") && !rest.contains("failed"), "{rest}");
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_libnbd_client_that_connects_again_misses_nothing_and_its_flush_tells_the_truth() {
    let Some(mut nbdsh) = client("nbdsh", "python3-libnbd") else { return };
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "32M"]);
    let server = Server::start(&lab);
    let script = r#"
import os, random, sys
pages = {page: random.Random(page).randbytes(4096) for page in random.Random(1).sample(range(4096), 1000)}
def connected():
    new = nbd.NBD()
    new.connect_uri(os.environ["URI"])
    return new
h = connected()
for page, data in pages.items():
    h.pwrite(data, page * 4096)
print("written", flush=True)
sys.stdin.readline()
try:
    h.flush()
    print("the old connection is alive")
except nbd.Error:
    h = connected()
h.flush()
print("lost", sum(h.pread(4096, page * 4096) != data for page, data in pages.items()), flush=True)
h.shutdown()
"#;
    let mut child = nbdsh
        .args(["-c", script])
        .env("URI", server.uri("a"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "written\n");
    server.kill();
    let server = Server::start(&lab);
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    child.wait_within(LIMIT).unwrap();
    assert_eq!(rest, "lost 0\n");
    server.stop();
    lab.assert_clean();
}

/// As after a crash of the machine: the files have only what `sync` and the commit interval made durable.
#[test]
fn what_was_synced_or_committed_by_interval_is_on_a_mount_after_a_lost_log() {
    let lab = Lab::with_pool("64M");
    let mount = lab.path("mnt");
    fs::create_dir(&mount).unwrap();
    if client("fusermount3", "fuse3").is_none() {
        return;
    }
    let options = ["--mount", mount.to_str().unwrap(), "--commit-interval", "1s"];
    let server = Server::start_with(&lab, POOL, &options);
    let data = noise(3, 3 << 20);
    fs::create_dir(mount.join("d")).unwrap();
    fs::write(mount.join("d/vm"), &data).unwrap();
    succeed(&mut Command::new("sync"));
    std::thread::sleep(Duration::from_secs(4));
    let logs = logs(&lab);
    server.kill();
    logs.iter().for_each(|log| fs::remove_file(log).unwrap());
    succeed(Command::new("umount").arg("-l").arg(&mount));
    assert!(lab.contents("d/vm") == data);
    lab.assert_clean();
}

/// The file's blocks are allocated before, so that no journal is involved: writes to them go to the
/// volume, and elsewhere in the pool since they are shared with a snapshot.
#[test]
fn what_a_file_system_on_a_device_passed_on_survives_a_killed_daemon() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let lab = &it.lab;
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "64M"]);
    let file = it.below.join("file");
    for round in 0..3 {
        let server = Server::start_with(lab, POOL, &["--commit-interval", "0"]);
        let device = it.attach("a");
        if round == 0 {
            shell(&format!("mkfs.ext4 -q -F {}", device_text(&device)));
        }
        it.mount(&device, "noatime");
        fs::write(&file, noise(round, WRITES as usize * PAGE)).unwrap();
        succeed(Command::new("sync").arg("-f").arg(&it.below));
        lab.ok(&["snapshot", &format!("{POOL}/a@{round}")]);
        let pages = pages(round);
        write_direct(&file, &pages);
        assert!(!logs(lab).is_empty(), "there is no volatile log");
        server.kill();
        it.umount();
        let server = Server::start(lab);
        let said = fs::read_to_string(lab.path("serve.log")).unwrap();
        assert!(said.contains("of the volatile log"), "{said}");
        let device = it.attach("a");
        it.mount(&device, "noatime");
        assert_eq!(lost_in(&file, &pages), 0, "round {round}");
        it.umount();
        shell(&format!("fsck.ext4 -fn {} > /dev/null", device_text(&device)));
        lab.ok(&["detach", device_text(&device)]);
        server.stop();
        lab.assert_clean();
    }
}

#[test]
fn what_was_written_to_a_file_of_a_mount_survives_a_killed_server() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(8, WRITES as usize * PAGE));
    for round in 0..3 {
        let Some(mut mounted) = Mounted::new(&lab) else { return };
        let pages = pages(round);
        write_direct(&mounted.path("a"), &pages);
        mounted.kill();
        mounted.release();
        let Some(mounted) = Mounted::new(&lab) else { return };
        assert_eq!(lost_in(&mounted.path("a"), &pages), 0, "round {round}");
        mounted.unmount(&lab);
        lab.assert_clean();
    }
}

#[test]
fn names_and_attributes_of_a_mount_survive_a_killed_server() {
    let lab = Lab::with_pool("64M");
    let Some(mut mounted) = Mounted::new(&lab) else { return };
    sh(&mounted, "mkdir d && : >d/a && : >d/gone && chmod 640 d/a && mv d/a d/b && rm d/gone && truncate -s 3M d/b");
    mounted.kill();
    mounted.release();
    let Some(mounted) = Mounted::new(&lab) else { return };
    assert_eq!(sh(&mounted, "ls d; stat -c '%a %s' d/b").trim(), "b\n640 3145728");
    mounted.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn an_origin_and_its_snapshots_survive_a_killed_daemon() {
    let lab = Lab::with_pool("64M");
    let before = noise(1, 8 << 20);
    let disk = lab.write_file("disk", &before);
    lab.ok(&["protect", &format!("{POOL}/o"), disk.to_str().unwrap()]);
    let server = Server::start(&lab);
    lab.ok(&["snapshot", &format!("{POOL}/o@s")]);
    let pages: Vec<(u64, Vec<u8>)> = pages(3).into_iter().filter(|(page, _)| *page < 2048).take(400).collect();
    write(&server, "o", &pages);
    server.kill();
    let server = Server::start(&lab);
    assert_eq!(lost(&server, "o", &pages), 0);
    let mut client = Client::connect(server.socket(), "o@s").unwrap();
    assert!(client.read(0, 8 << 20).unwrap() == before, "the snapshot has changed");
    client.vanish();
    server.stop();
    lab.assert_clean();
}

#[test]
fn what_a_killed_daemon_left_is_found_by_a_loop_device_over_the_pool_too() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "32M"]);
    let Some(device) = Loop::new(&lab.path(POOL)) else { return };
    for (before, after) in [(POOL, device.0.as_str()), (device.0.as_str(), POOL)] {
        let server = Server::start_on(&lab, before);
        let pages = pages(before.len() as u64);
        write(&server, "a", &pages);
        server.kill();
        let server = Server::start_on(&lab, after);
        assert_eq!(lost(&server, "a", &pages), 0, "{before}, then {after}");
        server.stop();
    }
    lab.assert_clean();
}

#[test]
fn a_copy_of_the_pool_is_not_given_what_the_pool_left() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "32M"]);
    succeed(Command::new("cp").arg(lab.path(POOL)).arg(lab.path("copy.img")));
    let server = Server::start(&lab);
    let pages = pages(5);
    write(&server, "a", &pages);
    server.kill();
    let other = Server::start_on(&lab, "copy.img");
    assert_eq!(lost(&other, "a", &pages), pages.len());
    other.stop();
    let server = Server::start(&lab);
    assert_eq!(lost(&server, "a", &pages), 0, "the copy took what was the pool's");
    server.stop();
    lab.assert_clean();
}
