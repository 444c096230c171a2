//! A file that is protected in place: served, snapshotted, cloned, and an ordinary file again.

use std::fs;
use std::process::Command;

use crate::harness::{Lab, POOL, Server};

const MIB: usize = 1 << 20;

/// Writes `byte` to `len` bytes at `offset` of an export, with a client nobody here wrote.
fn write(server: &Server, export: &str, byte: u8, offset: usize, len: usize) {
    let uri = format!("nbd+unix:///{export}?socket={}", server.socket().display());
    let command = format!("write -P {byte} {offset} {len}");
    let done = Command::new("qemu-io").args(["-f", "raw", "-c", &command, "-c", "flush", &uri]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.contains("wrote"), "{said}");
}

/// A pool that protects `disk.img`, 8 MiB of ones.
fn lab() -> Lab {
    let lab = Lab::with_pool("64M");
    fs::write(lab.path("disk.img"), vec![1; 8 * MIB]).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img"]);
    lab
}

#[test]
fn a_protected_file_is_written_in_place_and_its_snapshots_stay() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    write(&server, "disk", 2, 0, 4 * MIB);
    lab.ok(&["snapshot", "pool.img/disk@b", "--droppable"]);
    write(&server, "disk", 3, MIB, MIB);
    lab.ok(&["clone", "pool.img/disk@a", "pool.img/c"]);
    write(&server, "c", 9, 100, 1000);
    let held = lab.run(&["delete", "pool.img/disk@a"]).refused();
    assert!(held.contains("held by \"c\""), "{held}");
    server.stop();

    let disk = fs::read(lab.path("disk.img")).unwrap();
    let all = |bytes: &[u8], byte| bytes.iter().all(|&b| b == byte);
    assert!(all(&disk[..MIB], 2) && all(&disk[MIB..2 * MIB], 3) && all(&disk[4 * MIB..], 1));
    for (object, at_1_mib) in [("disk@a", 1), ("disk@b", 2), ("disk", 3)] {
        lab.ok(&["export", &format!("pool.img/{object}"), "out.img", "--force"]);
        assert_eq!(fs::read(lab.path("out.img")).unwrap()[MIB], at_1_mib, "{object}");
    }
    lab.ok(&["export", "pool.img/c", "c.img"]);
    let clone = fs::read(lab.path("c.img")).unwrap();
    assert!(all(&clone[..100], 1) && all(&clone[100..1100], 9) && all(&clone[1100..], 1));
    let changes = lab.json(&["diff", "pool.img/disk@a", "pool.img/disk@b"]);
    assert_eq!((&changes[0]["offset"], &changes[0]["length"]), (&0.into(), &(4 * MIB).into()));

    lab.ok(&["delete", "pool.img/disk@b", "pool.img/c"]);
    assert_eq!(lab.names(), ["disk", "disk@a"]);
    lab.ok(&["check", POOL]);
    let refused = lab.run(&["unprotect", "pool.img/disk"]).refused();
    assert!(refused.contains("it has snapshots"), "{refused}");
    lab.ok(&["unprotect", "pool.img/disk", "-r"]);
    assert!(lab.names().is_empty());
    assert_eq!(fs::read(lab.path("disk.img")).unwrap(), disk, "an ordinary file again");
}

#[test]
fn what_is_not_the_origin_as_it_was_left_is_refused() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let again = lab.run(&["protect", "pool.img/disk", "disk.img"]).refused();
    assert!(again.contains("in use") || again.contains("exists"), "{again}");
    let mut changed = vec![1; 8 * MIB];
    changed[0] = 7;
    fs::write(lab.path("disk.img"), &changed).unwrap();
    let run = lab.run(&["export", "pool.img/disk@a", "out.img"]);
    assert!(run.stderr.contains("not the device"), "{}", run.stderr);
    assert!(!run.status.success());
    // It can be left all the same.
    lab.ok(&["unprotect", "pool.img/disk", "-r"]);
    assert_eq!(fs::read(lab.path("disk.img")).unwrap(), changed);
}

#[test]
fn a_file_of_a_crooked_length_or_none_at_all_is_refused() {
    let lab = Lab::with_pool("64M");
    fs::write(lab.path("odd.img"), vec![0; 1001]).unwrap();
    for args in [["protect", "pool.img/x", "odd.img"], ["protect", "pool.img/x", "missing.img"]] {
        lab.run(&args).refused();
    }
    assert!(lab.names().is_empty());
}
