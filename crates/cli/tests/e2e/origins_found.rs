//! Recognition of an origin's file or device: after a crash, in the middle of a rollback, and once it has grown.

use std::fs;
use std::os::unix::fs::symlink;

use crate::harness::{Lab, POOL, Server, noise, wait_until};
use crate::mount_programs::Loop;
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// Creates a pool that protects `disk.img` (8 MiB of noise) with a snapshot `a`.
fn lab() -> (Lab, Vec<u8>) {
    let (lab, disk) = (Lab::with_pool("128M"), noise(1, 8 * MIB));
    fs::write(lab.path("disk.img"), &disk).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img", "--chunk", "4K"]);
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    (lab, disk)
}

/// Replaces `disk.img` by another disk; returns the other's contents.
fn swap(lab: &Lab) -> Vec<u8> {
    fs::rename(lab.path("disk.img"), lab.path("away.img")).unwrap();
    let other = noise(2, 8 * MIB);
    fs::write(lab.path("disk.img"), &other).unwrap();
    other
}

/// Checks that the pool is served without the origin, the other disk is not written, and the right
/// one is accepted afterwards.
fn refused_and_left_alone(lab: &Lab, other: &[u8]) {
    let server = Server::start(lab);
    assert!(Client::connect(server.socket(), "disk").is_err(), "another disk is not shown");
    let log = fs::read_to_string(lab.path("serve.log")).unwrap();
    assert!(log.contains("is not the device that"), "{log}");
    let refused = lab.run(&["rollback", "pool.img/disk@a"]).refused();
    assert!(refused.contains("not open"), "{refused}");
    server.stop();
    assert!(fs::read(lab.path("disk.img")).unwrap() == other, "nothing was written to it");
    fs::rename(lab.path("away.img"), lab.path("disk.img")).unwrap();
}

#[test]
fn after_a_kill_another_disk_of_the_same_length_is_refused_before_it_is_written() {
    let (lab, old) = lab();
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    disk.write(3 * MIB as u64, &[7; MIB], false).unwrap();
    disk.write(0, &[7; 4096], false).unwrap();
    disk.flush().unwrap();
    server.kill();
    let other = swap(&lab);
    refused_and_left_alone(&lab, &other);
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    assert_eq!(disk.read(3 * MIB as u64, MIB).unwrap(), [7; MIB]);
    let mut snapshot = Client::connect(server.socket(), "disk@a").unwrap();
    assert_eq!(snapshot.read(3 * MIB as u64, MIB).unwrap(), old[3 * MIB..4 * MIB]);
    drop((disk, snapshot));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_rollback_that_was_killed_does_not_go_on_on_another_disk() {
    let (lab, old) = lab();
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    (0..8).for_each(|i| disk.write(i * MIB as u64, &[5; MIB], false).unwrap());
    drop(disk);
    server.stop();
    lab.ok(&["copier", POOL, "--set", "throttle=256K/s"]);
    let mut asked = lab.command(&["rollback", "pool.img/disk@a"]).spawn().unwrap();
    wait_until("it has begun", || fs::read(lab.path("disk.img")).unwrap()[..4096] == old[..4096]);
    asked.kill().unwrap();
    let _ = asked.wait();
    lab.ok(&["copier", POOL, "--set", "throttle=none"]);
    let other = swap(&lab);
    refused_and_left_alone(&lab, &other);
    lab.ok(&["rollback", "pool.img/disk@a"]);
    assert!(fs::read(lab.path("disk.img")).unwrap() == old);
    lab.assert_clean();
}

#[test]
fn a_disk_that_lost_its_power_and_was_written_by_forkdisk_is_no_other_disk() {
    let (lab, _) = lab();
    for round in 0..4 {
        let server = Server::start(&lab);
        let mut disk = Client::connect(server.socket(), "disk").unwrap();
        (0..64).for_each(|i| disk.write((i * 31 + round) % 2000 * 4096, &noise(i + round, 4096), false).unwrap());
        server.kill();
    }
    let server = Server::start(&lab);
    Client::connect(server.socket(), "disk").unwrap().read(0, MIB).unwrap();
    server.stop();
    lab.assert_clean();
}

#[test]
fn an_origin_that_grew_is_taken_on_with_its_snapshots_by_resize() {
    let (lab, old) = lab();
    for (size, why) in [("16M", "Make the device longer first"), ("4M", "Make the device longer first")] {
        let refused = lab.run(&["resize", "pool.img/disk", "--size", size, "--allow-shrink"]).refused();
        assert!(refused.contains(why) && refused.contains("8388608"), "{refused}");
    }
    fs::File::options().write(true).open(lab.path("disk.img")).unwrap().set_len(16 * MIB as u64).unwrap();
    let listed = lab.run(&["list", POOL]);
    assert!(listed.stderr.contains("16777216 bytes instead of 8388608"), "{}", listed.stderr);
    assert!(listed.stderr.contains("resize"), "{}", listed.stderr);
    let server = Server::start(&lab);
    assert!(Client::connect(server.socket(), "disk").is_err());
    lab.ok(&["resize", "pool.img/disk", "--size", "16M"]);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    disk.write(12 * MIB as u64, &[3; MIB], false).unwrap();
    lab.ok(&["snapshot", "pool.img/disk@b"]);
    disk.write(0, &[4; MIB], false).unwrap();
    drop(disk);
    server.stop();
    for (name, len) in [("disk@a", 8 * MIB), ("disk@b", 16 * MIB)] {
        lab.ok(&["export", &format!("pool.img/{name}"), "out.img", "--force"]);
        let out = fs::read(lab.path("out.img")).unwrap();
        assert!(out.len() == len && out[..8 * MIB] == old, "{name}");
    }
    lab.ok(&["rollback", "pool.img/disk@a"]);
    let disk = fs::read(lab.path("disk.img")).unwrap();
    assert!(disk.len() == 16 * MIB && disk[..8 * MIB] == old && disk[12 * MIB..13 * MIB] == [3; MIB]);
    lab.assert_clean();
}

#[test]
fn a_device_that_grew_while_it_is_served_is_taken_on_once_its_clients_have_gone() {
    let (lab, _) = lab();
    let server = Server::start(&lab);
    let disk = Client::connect(server.socket(), "disk").unwrap();
    fs::File::options().write(true).open(lab.path("disk.img")).unwrap().set_len(12 * MIB as u64).unwrap();
    let refused = lab.run(&["resize", "pool.img/disk", "--size", "12M"]).refused();
    assert!(refused.contains("in use"), "{refused}");
    drop(disk);
    wait_until("the client has gone", || lab.run(&["resize", "pool.img/disk", "--size", "12M"]).status.success());
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    disk.write(11 * MIB as u64, &[1; MIB], false).unwrap();
    drop(disk);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_link_that_leads_to_another_device_after_a_kill_is_refused() {
    let lab = Lab::with_pool("64M");
    let (one, two) = (noise(3, 4 * MIB), noise(4, 4 * MIB));
    fs::write(lab.path("one.img"), &one).unwrap();
    fs::write(lab.path("two.img"), &two).unwrap();
    let Some(first) = Loop::new(&lab.path("one.img")) else { return };
    let Some(second) = Loop::new(&lab.path("two.img")) else { return };
    // Links as udev creates them in /dev/disk/by-id.
    let link = lab.path("by-id");
    symlink(&first.0, &link).unwrap();
    lab.ok(&["protect", "pool.img/disk", "by-id"]);
    assert_eq!(lab.json(&["list", "pool.img/disk"])[0]["origin"], link.to_str().unwrap());
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    Client::connect(server.socket(), "disk").unwrap().write(MIB as u64, &[9; 4096], true).unwrap();
    server.kill();
    fs::remove_file(&link).unwrap();
    symlink(&second.0, &link).unwrap();
    let server = Server::start(&lab);
    assert!(Client::connect(server.socket(), "disk").is_err());
    server.stop();
    assert!(fs::read(lab.path("two.img")).unwrap() == two);
    fs::remove_file(&link).unwrap();
    symlink(&first.0, &link).unwrap();
    let server = Server::start(&lab);
    assert_eq!(Client::connect(server.socket(), "disk").unwrap().read(MIB as u64, 4096).unwrap(), [9; 4096]);
    server.stop();
}
