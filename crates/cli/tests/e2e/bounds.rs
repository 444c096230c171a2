//! A bound limits what a branch costs the pool, for independent clients and beside a database.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::Value;

use crate::attach_postgres::{Postgres, programs};
use crate::harness::{LIMIT, Lab, POOL, Server, noise, succeed, wait_until};
use crate::mount::Mounted;
use crate::nbd::Client;

const MIB: usize = 1 << 20;
const ENOSPC: i32 = 28;

fn of(lab: &Lab, volume: &str) -> Value {
    lab.json(&["list", volume])[0].clone()
}

/// Writes noise from the beginning until the volume refuses it; returns how many MiB that was.
fn fill(client: &mut Client, seed: u64, most: u64) -> u64 {
    for at in 0..most {
        if let Err(error) = client.write(at << 20, &noise(seed + at, MIB), false) {
            assert_eq!(error.raw_os_error(), Some(ENOSPC));
            return at;
        }
    }
    most
}

#[test]
fn a_branch_with_snapshots_cannot_take_more_than_its_bound() {
    let lab = Lab::with_pool("128M");
    lab.write_file("base.raw", &noise(1, 32 * MIB));
    lab.ok(&["import", "base.raw", "pool.img/base"]);
    lab.ok(&["fork", "pool.img/base", "pool.img/kid", "--set", "diverge=8M,label.owner=ci"]);
    let server = Server::start(&lab);
    let mut kid = Client::connect(server.socket(), "kid").unwrap();
    assert_eq!(fill(&mut kid, 100, 32), 8, "overwriting what is shared");
    kid.write(0, &noise(2, 8 * MIB), true).unwrap();
    lab.ok(&["snapshot", "pool.img/kid@a"]);
    assert_eq!(kid.write(0, &noise(3, MIB), false).unwrap_err().raw_os_error(), Some(ENOSPC), "the snapshot counts");
    let mut base = Client::connect(server.socket(), "base").unwrap();
    assert_eq!(fill(&mut base, 200, 32), 32, "others are not bounded");
    assert!(kid.read(20 << 20, MIB).unwrap() == noise(1, 32 * MIB)[20 * MIB..21 * MIB]);
    lab.ok(&["delete", "pool.img/kid@a"]);
    kid.write(0, &noise(4, 8 * MIB), true).unwrap();
    kid.trim(0, 2 * MIB as u32).unwrap();
    kid.flush().unwrap();
    assert_eq!([&of(&lab, "pool.img/kid")["diverge"], &of(&lab, "pool.img/kid")["diverged"]], [8 * MIB, 6 * MIB]);
    server.kill();
    let server = Server::start(&lab);
    // What the snapshot had is freed once more.
    wait_until("it is counted as before the kill", || of(&lab, "pool.img/kid")["diverged"] == 6 * MIB);
    let mut kid = Client::connect(server.socket(), "kid").unwrap();
    kid.write(0, &noise(5, 2 * MIB), false).unwrap();
    kid.write(30 << 20, &noise(5, MIB), false).expect("what the source does not refer to any more is the branch's own");
    lab.ok(&["snapshot", "pool.img/kid@b"]);
    assert!(kid.write(30 << 20, &[1], false).is_err());
    lab.ok(&["set", "diverge=9M", "pool.img/kid"]);
    kid.write(30 << 20, &noise(6, MIB), false).unwrap();
    drop((kid, base));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_bound_is_given_shown_and_taken_away() {
    let lab = Lab::with_pool("128M");
    lab.write_file("base.raw", &noise(1, 4 * MIB));
    lab.ok(&["import", "base.raw", "pool.img/base", "--set", "diverge=1M"]);
    lab.ok(&["create", "pool.img/new", "--size", "1G", "--set", "diverge=2M,expires=2h"]);
    lab.ok(&["clone", "pool.img/base", "pool.img/copy", "--set", "diverge=3M"]);
    lab.ok(&["clone", "pool.img/copy", "pool.img/bare"]);
    lab.ok(&["snapshot", "pool.img/copy@s"]);
    for (name, bound) in [("base", 1), ("new", 2), ("copy", 3)] {
        let record = of(&lab, &format!("pool.img/{name}"));
        assert_eq!([&record["diverge"], &record["diverged"]], [&Value::from(bound * MIB), &Value::from(0)], "{name}");
    }
    for bare in ["pool.img/bare", "pool.img/copy@s"] {
        assert_eq!(of(&lab, bare)["diverge"], Value::Null);
    }
    let shown = lab.ok(&["list", POOL]);
    assert!(shown.lines().next().unwrap().contains("DIVERGED") && shown.contains("3M"), "{shown}");
    let server = Server::start_with(&lab, POOL, &["--metrics", "unix:metrics"]);
    let mut copy = Client::connect(server.socket(), "copy").unwrap();
    copy.write(0, &noise(7, MIB), false).unwrap();
    let mut metrics = UnixStream::connect(lab.path("metrics")).unwrap();
    metrics.set_read_timeout(Some(LIMIT)).unwrap();
    metrics.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let told = std::io::read_to_string(metrics).unwrap();
    for line in ["diverge_bytes{volume=\"copy\"} 3145728", "diverged_bytes{volume=\"copy\"} 1048576"] {
        assert!(told.contains(&format!("forkdisk_volume_{line}")), "{line}");
    }
    lab.ok(&["set", "diverge=none", "pool.img/copy"]);
    assert_eq!(of(&lab, "pool.img/copy")["diverge"], Value::Null);
    copy.write(0, &noise(8, 4 * MIB), false).unwrap();
    drop(copy);
    server.stop();
    for bad in ["diverge=", "diverge=0", "diverge=4095", "diverge=2P", "diverge=-1"] {
        assert!(!lab.run(&["set", bad, "pool.img/copy"]).status.success(), "{bad}");
    }
    assert!(lab.run(&["set", "diverge=1M", "pool.img/copy@s"]).refused().contains("no volume"));
    lab.assert_clean();
}

#[test]
fn postgresql_goes_on_beside_branches_at_their_bounds() {
    let Some(bin) = programs() else { return };
    let lab = Lab::with_pool("1G");
    let Some((both, server)) = Postgres::start_on_mount(&bin, &lab) else { return };
    lab.write_file("base.raw", &noise(1, 64 * MIB));
    lab.ok(&["import", "base.raw", "pool.img/base"]);
    lab.ok(&["fork", "pool.img/base", "pool.img/kids/{1..4}", "--set", "diverge=16M"]);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut rounds = 0;
            while !ended.load(Ordering::Relaxed) || rounds == 0 {
                succeed(server.client("pgbench").args(["-n", "-c", "2", "-t", "50", "postgres"]));
                server.query("checkpoint");
                rounds += 1;
            }
        });
        // Each writes over and over again all of what it shares, with snapshots in between, far beyond its bound.
        for round in 0..3 {
            for kid in 1..=4 {
                let mut client = both.nbd(&format!("kids/{kid}"));
                fill(&mut client, 1000 * round + 100 * kid, 64);
                lab.ok(&["snapshot", &format!("pool.img/kids/{kid}@r{round}")]);
                assert!(fill(&mut client, 5000 * round + 100 * kid, 64) <= 16);
            }
        }
        let count = || server.query("select count(*) from pgbench_history").parse::<u64>().unwrap();
        let before = count();
        wait_until("the load goes on", || count() > before + 50);
        ended.store(true, Ordering::Relaxed);
        load.join().unwrap();
    });
    for kid in 1..=4 {
        let diverged = of(&lab, &format!("pool.img/kids/{kid}"))["diverged"].as_u64().unwrap();
        assert!((15 << 20..=16 << 20).contains(&diverged), "{diverged}");
    }
    server.transactions_of_whole_database();
    server.stop("fast");
    drop(server);
    both.stop();
    lab.assert_clean();
}

#[test]
fn what_is_reserved_is_there_when_others_have_filled_the_pool() {
    let lab = Lab::with_pool("128M");
    lab.ok(&["create", "pool.img/db", "--size", "256M", "--set", "reserve=40M"]);
    lab.ok(&["create", "pool.img/other", "--size", "1G"]);
    let server = Server::start_with(&lab, POOL, &["--when-full", "error"]);
    let mut other = Client::connect(server.socket(), "other").unwrap();
    let taken = fill(&mut other, 1, 1000);
    assert!((40..88).contains(&taken), "{taken} MiB");
    let mut db = Client::connect(server.socket(), "db").unwrap();
    for at in 0..40 {
        db.write((5 * at) << 20, &noise(500 + at, MIB), false).unwrap();
        // What checkpoints return others may have, and nothing of what is reserved.
        let _ = other.write(900 << 20, &noise(at, MIB), false);
    }
    db.flush().unwrap();
    assert_eq!([&of(&lab, "pool.img/db")["reserve"], &of(&lab, "pool.img/db")["diverged"]], [40 * MIB, 40 * MIB]);
    assert!(lab.run(&["set", "reserve=100M", "pool.img/db"]).refused().contains("too few"));
    other.trim(0, 30 << 20).unwrap();
    drop((db, other));
    server.stop();
    lab.ok(&["set", "reserve=50M", "pool.img/db"]);
    lab.ok(&["delete", "pool.img/other"]);
    lab.assert_clean();
}

#[test]
fn the_forks_in_a_folder_cannot_take_more_than_its_bound_together() {
    let lab = Lab::with_pool("256M");
    lab.write_file("base.raw", &noise(1, 32 * MIB));
    lab.ok(&["import", "base.raw", "pool.img/base"]);
    lab.ok(&["fork", "pool.img/base", "pool.img/kids/{1..3}", "pool.img/kids/deep/4", "pool.img/out"]);
    lab.ok(&["set", "diverge=20M", "pool.img/kids"]);
    lab.ok(&["set", "diverge=6M", "pool.img/kids/1"]);
    let server = Server::start(&lab);
    let open = |name: &str| Client::connect(server.socket(), name).unwrap();
    let [mut one, mut two, mut four, mut out] = ["kids/1", "kids/2", "kids/deep/4", "out"].map(open);
    assert_eq!(fill(&mut one, 100, 32), 6, "its own bound");
    assert_eq!(fill(&mut two, 200, 10), 10);
    assert_eq!(fill(&mut four, 300, 32), 4, "what the others have left");
    assert_eq!(two.write(20 << 20, &[1], false).unwrap_err().raw_os_error(), Some(ENOSPC));
    two.write(0, &noise(2, 10 * MIB), false).expect("in place");
    assert_eq!(fill(&mut out, 400, 32), 32, "outside");
    lab.ok(&["fork", "pool.img/kids/2", "pool.img/kids/5"]);
    assert_eq!(fill(&mut open("kids/5"), 500, 32), 0, "a fork of a fork");
    wait_until("its client is gone", || lab.run(&["delete", "pool.img/kids/5"]).status.success());
    two.trim(0, 3 * MIB as u32).unwrap();
    assert_eq!(fill(&mut four, 600, 7), 7, "what one gives back another one takes");
    lab.ok(&["rename", "pool.img/kids/1", "pool.img/one"]);
    four.flush().unwrap();
    two.flush().unwrap();
    let counted = || of(&lab, "pool.img/kids");
    let shown = counted();
    assert_eq!([&shown["type"], &shown["name"]], ["folder", "kids"]);
    assert_eq!([&shown["diverge"], &shown["diverged"]], [20 * MIB, 14 * MIB], "what is moved takes its count along");
    assert!(lab.ok(&["list", POOL]).lines().any(|line| line.contains("folder") && line.contains("14M")));
    server.kill();
    let server = Server::start(&lab);
    wait_until("it is counted as before the kill", || counted()["diverged"] == 14 * MIB);
    let mut four = Client::connect(server.socket(), "kids/deep/4").unwrap();
    assert_eq!(fill(&mut four, 700, 32), 13, "7 of its own, and what is left of the bound");
    lab.ok(&["set", "quota=10M", "pool.img/kids/deep"]);
    assert_eq!(counted()["diverged"], 20 * MIB);
    assert!(lab.run(&["set", "reserve=1M", "pool.img/kids"]).refused().contains("is a folder"));
    assert!(lab.run(&["set", "chunk=1M", "pool.img/kids"]).refused().contains("is a folder"));
    lab.ok(&["set", "diverge=none", "pool.img/kids"]);
    assert_eq!(fill(&mut four, 800, 32), 32, "no bound");
    drop((one, two, four, out));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_folder_of_a_mount_has_its_bound_as_attributes() {
    let lab = Lab::with_pool("256M");
    let Some(mount) = Mounted::new(&lab) else { return };
    let write = |path: &str, bytes: &[u8]| {
        let mut file = File::create(mount.path(path))?;
        file.write_all(bytes).and_then(|()| file.sync_all())
    };
    let set = |path: &str, name: &str, value: &str| {
        setxattr(mount.path(path), format!("user.forkdisk.{name}"), value.as_bytes(), XattrFlags::empty())
    };
    let get = |path: &str, name: &str| {
        let mut value = [0; 64];
        let len = getxattr(mount.path(path), format!("user.forkdisk.{name}"), &mut value)?;
        Ok::<_, rustix::io::Errno>(String::from_utf8(value[..len].to_vec()).unwrap())
    };
    std::fs::create_dir_all(mount.path("kids/deep")).unwrap();
    assert_eq!(get("kids", "diverged").unwrap_or_default(), "0");
    set("kids", "diverge", "4M").unwrap();
    set("kids", "quota", "1G").unwrap();
    assert!(set("kids", "chunk", "64K").is_err() && set("kids", "diverged", "1").is_err());
    write("kids/a", &noise(1, 3 * MIB)).unwrap();
    assert_eq!(write("kids/deep/b", &noise(2, 2 * MIB)).unwrap_err().raw_os_error(), Some(ENOSPC));
    write("out", &noise(3, 8 * MIB)).unwrap();
    std::fs::remove_file(mount.path("kids/deep/b")).unwrap();
    wait_until("the rest is free", || get("kids", "diverged").unwrap() == (3 * MIB).to_string());
    assert_eq!([get("kids", "diverge").unwrap(), get("kids", "quota").unwrap()], ["4194304", "1073741824"]);
    std::fs::rename(mount.path("kids"), mount.path("children")).unwrap();
    assert_eq!(get("children", "diverge").unwrap(), "4194304", "it goes with the folder");
    set("children", "diverge", "none").unwrap();
    write("children/c", &noise(4, 8 * MIB)).unwrap();
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn forks_inherit_from_a_folder_that_is_deleted_as_a_whole() {
    let lab = Lab::with_pool("128M");
    lab.import("base", &noise(1, 8 * MIB));
    let refused = lab.run(&["set", "clone.diverge=2M", "pool.img/kids"]).refused();
    assert!(refused.contains("kids/, makes a folder"), "{refused}");
    let refused = lab.run(&["set", "clone.diverge=2M", "pool.img/base/"]).refused();
    assert!(refused.contains("is a volume, not a folder"), "{refused}");
    lab.ok(&["set", "clone.diverge=2M", "pool.img/kids/"]);
    lab.ok(&["set", "clone.expires=1h", "pool.img/kids"]);
    lab.ok(&["set", "clone.diverge=none", "pool.img/kids/free/"]);
    lab.ok(&["fork", "pool.img/base", "pool.img/kids/1", "pool.img/kids/free/2", "pool.img/other"]);
    let [bound, free, other] = ["kids/1", "kids/free/2", "other"].map(|name| of(&lab, &format!("pool.img/{name}")));
    assert_eq!(
        [&bound["diverge"], &free["diverge"], &other["diverge"]],
        [&Value::from(2 * MIB), &Value::Null, &Value::Null]
    );
    assert!(bound["expires"].is_u64() && free["expires"].is_u64() && other["expires"].is_null());
    let server = Server::start(&lab);
    assert_eq!(fill(&mut Client::connect(server.socket(), "kids/1").unwrap(), 100, 8), 2);
    assert_eq!(fill(&mut Client::connect(server.socket(), "kids/free/2").unwrap(), 200, 8), 8);
    server.kill();
    assert_eq!(of(&lab, "pool.img/kids")["clone"], serde_json::json!({"diverge": "2097152", "expires": "3600"}));
    lab.ok(&["delete", "-r", "pool.img/kids/free/2"]);
    lab.ok(&["delete", "-r", "pool.img/kids/free"]);
    lab.ok(&["delete", "-r", "pool.img/kids"]);
    let left = lab.json(&["list", "pool.img"]);
    let names: Vec<&str> = left.as_array().unwrap().iter().map(|record| record["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["base", "other"]);
    lab.assert_clean();
}
