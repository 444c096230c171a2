//! Volumes that do not store what is there already, and no zeroes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use rustix::fs::{XattrFlags, setxattr};
use serde_json::Value;

use crate::harness::{Lab, Server, noise};
use crate::mount::{Mounted, sh};
use crate::nbd::Client;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// A memory file of which every hundredth page has changed.
fn changed(memory: &[u8]) -> Vec<u8> {
    let mut next = memory.to_vec();
    next.iter_mut().skip(17).step_by(100 * PAGE).for_each(|byte| *byte ^= 1);
    next
}

/// Bytes in which two volumes differ.
fn difference(lab: &Lab, a: &str, b: &str) -> u64 {
    let runs = lab.json(&["diff", a, b]);
    runs.as_array().unwrap().iter().map(|run| run["length"].as_u64().unwrap()).sum()
}

#[test]
fn a_memory_file_written_anew_onto_a_clone_takes_what_changed() {
    let lab = Lab::with_pool("256M");
    let memory = noise(1, 16 * MIB);
    lab.import("memory.1", &memory);
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(&mount, "cp memory.1 memory.2; cp memory.1 whole");
    setxattr(mount.path("memory.2"), "user.forkdisk.writes", b"compare", XattrFlags::empty()).unwrap();
    let next = changed(&memory);
    for name in ["memory.2", "whole"] {
        let file = File::options().write(true).open(mount.path(name)).unwrap();
        next.chunks(MIB).enumerate().for_each(|(i, part)| file.write_all_at(part, (i * MIB) as u64).unwrap());
        file.sync_all().unwrap();
    }
    assert!(fs::read(mount.path("memory.2")).unwrap() == next);
    mount.unmount(&lab);
    assert_eq!(difference(&lab, "pool.img/memory.1", "pool.img/memory.2"), 41 * PAGE as u64);
    assert_eq!(difference(&lab, "pool.img/memory.1", "pool.img/whole"), 16 * MIB as u64);
    assert!(lab.contents("memory.2") == next && lab.contents("memory.1") == memory);
    lab.ok(&["clone", "pool.img/memory.2", "pool.img/memory.3"]);
    let of_clone = &lab.json(&["list", "pool.img/memory.3"])[0];
    assert_eq!((&of_clone["writes"], &of_clone["zeroes"]), (&Value::from("compare"), &Value::from("written")));
    lab.assert_clean();
}

#[test]
fn policies_are_set_under_clients_and_outlive_a_kill() {
    let lab = Lab::with_pool("256M");
    lab.import("base", &noise(2, MIB));
    let server = Server::start(&lab);
    lab.ok(&["fork", "pool.img/base", "pool.img/a", "--set", "writes=compare,zeroes=holes"]);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(2, MIB), false).unwrap();
    client.write(8 << 10, &[0; 16 << 10], true).unwrap();
    assert_eq!(difference(&lab, "pool.img/base", "pool.img/a"), 16 << 10);
    lab.ok(&["set", "writes=all", "pool.img/a"]);
    client.write(64 << 10, &noise(2, MIB)[64 << 10..128 << 10], true).unwrap();
    assert_eq!(difference(&lab, "pool.img/base", "pool.img/a"), 80 << 10);
    server.kill();
    let listed = &lab.json(&["list", "pool.img/a"])[0];
    assert_eq!((&listed["writes"], &listed["zeroes"]), (&Value::from("all"), &Value::from("holes")));
    let mut expected = noise(2, MIB);
    expected[8 << 10..24 << 10].fill(0);
    assert!(lab.contents("a") == expected);
    let refused = lab.run(&["set", "writes=some", "pool.img/a"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(refused.stderr.contains("'some' is none of all, compare"), "{refused:?}");
    lab.assert_clean();
}
