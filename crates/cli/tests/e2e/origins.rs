//! A file protected in place: served, snapshotted, cloned, and made an ordinary file again.

use std::fs;
use std::process::Command;

use std::os::unix::fs::FileExt;

use crate::harness::{Lab, POOL, Server, client, noise, succeed, wait_until};
use crate::mount::Mounted;
use crate::mount_programs::{Below, Loop};
use crate::nbd::Client;
use crate::stomper::Stomper;

const MIB: usize = 1 << 20;

/// Writes `byte` to `len` bytes at `offset` of an export, with an independent client.
fn write(server: &Server, export: &str, byte: u8, offset: usize, len: usize) {
    let uri = format!("nbd+unix:///{export}?socket={}", server.socket().display());
    let command = format!("write -P {byte} {offset} {len}");
    let done = Command::new("qemu-io").args(["-f", "raw", "-c", &command, "-c", "flush", &uri]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.contains("wrote"), "{said}");
}

/// Creates a pool that protects `disk.img`, 8 MiB of ones.
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
    let stats = lab.json(&["stats", POOL]);
    assert_eq!(stats["kept"], 5 * MIB, "4 MiB for one snapshot and another for the other");
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
fn an_origin_is_rolled_back_and_all_its_snapshots_stay() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    write(&server, "disk", 2, MIB, 4 * MIB);
    lab.ok(&["snapshot", "pool.img/disk@b"]);
    write(&server, "disk", 3, 2 * MIB, MIB);
    // Served: later connections see the old contents, and can write at once.
    lab.ok(&["rollback", "pool.img/disk@a"]);
    write(&server, "disk", 4, 3 * MIB, 4096);
    assert!(lab.json(&["list", "pool.img/disk"])[0]["protection"]["rolling"].is_null(), "it has waited for the end");
    server.stop();
    let mut expected = vec![1; 8 * MIB];
    expected[3 * MIB..3 * MIB + 4096].fill(4);
    assert!(fs::read(lab.path("disk.img")).unwrap() == expected, "an ordinary disk again");
    // Forward again, on an idle pool.
    lab.ok(&["rollback", "pool.img/disk@b"]);
    let mut newer = vec![1; 8 * MIB];
    newer[MIB..5 * MIB].fill(2);
    assert!(fs::read(lab.path("disk.img")).unwrap() == newer);
    for (object, bytes) in [("disk@a", &vec![1; 8 * MIB]), ("disk@b", &newer)] {
        lab.ok(&["export", &format!("pool.img/{object}"), "out.img", "--force"]);
        assert!(&fs::read(lab.path("out.img")).unwrap() == bytes, "{object}");
    }
    assert!(lab.json(&["diff", "pool.img/disk@b", "pool.img/disk"]).as_array().unwrap().iter().all(|run| {
        run["offset"].as_u64().unwrap() >= MIB as u64 && run["offset"].as_u64().unwrap() < 5 * MIB as u64
    }));
    lab.assert_clean();
    let none = lab.run(&["rollback", "pool.img/disk@never"]).refused();
    assert!(none.contains("disk@never"), "{none}");
}

/// Reads 8 MiB of an export.
fn contents(server: &Server, export: &str) -> Vec<u8> {
    let mut client = Client::connect(server.socket(), export).unwrap();
    (0..8).flat_map(|i| client.read(i * MIB as u64, MIB).unwrap()).collect()
}

#[test]
fn a_rollback_goes_on_after_the_server_was_killed() {
    let lab = Lab::with_pool("128M");
    let old = noise(1, 8 * MIB);
    fs::write(lab.path("disk.img"), &old).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img", "--chunk", "4K"]);
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    write(&server, "disk", 2, 0, 8 * MIB);
    lab.ok(&["snapshot", "pool.img/disk@b"]);
    // Slow enough to be killed on the way.
    lab.ok(&["copier", POOL, "--set", "throttle=256K/s"]);
    let asked = lab.command(&["rollback", "pool.img/disk@a"]).spawn();
    let mut asked = asked.unwrap();
    let rolling = || lab.json(&["list", "pool.img/disk"])[0]["protection"]["rolling"] == "disk@a";
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !rolling() {
        assert!(std::time::Instant::now() < deadline, "it has begun");
    }
    for (refused, why) in [
        (vec!["snapshot", "pool.img/disk@c"], "is being rolled back"),
        (vec!["delete", "pool.img/disk@a"], "is being rolled back"),
        (vec!["unprotect", "pool.img/disk", "-r"], "is being rolled back"),
    ] {
        let said = lab.run(&refused).refused();
        assert!(said.contains(why), "{refused:?}: {said}");
    }
    assert!(contents(&server, "disk") == old, "what the snapshot holds is read at once");
    write(&server, "disk", 5, 7 * MIB, 4096);
    server.kill();
    let _ = asked.wait();
    lab.ok(&["copier", POOL, "--set", "throttle=none"]);
    let server = Server::start(&lab);
    let mut expected = old.clone();
    expected[7 * MIB..7 * MIB + 4096].fill(5);
    assert!(contents(&server, "disk") == expected);
    while rolling() {
        assert!(std::time::Instant::now() < deadline + std::time::Duration::from_secs(60), "it ends");
    }
    assert!(contents(&server, "disk@b").iter().all(|&byte| byte == 2));
    server.stop();
    assert!(fs::read(lab.path("disk.img")).unwrap() == expected);
    lab.assert_clean();
}

#[test]
fn a_rollback_that_was_killed_is_ended_by_asking_again() {
    let lab = Lab::with_pool("128M");
    let (old, new) = (noise(1, 8 * MIB), vec![2; 8 * MIB]);
    fs::write(lab.path("disk.img"), &old).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img", "--chunk", "4K"]);
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    write(&server, "disk", 2, 0, 8 * MIB);
    server.stop();
    lab.ok(&["copier", POOL, "--set", "throttle=1M/s"]);
    let mut asked = lab.command(&["rollback", "pool.img/disk@a"]).spawn().unwrap();
    wait_until("it has begun", || fs::read(lab.path("disk.img")).unwrap() != new);
    asked.kill().unwrap();
    let _ = asked.wait();
    let listed = lab.run(&["list", "pool.img/disk"]);
    assert!(listed.stderr.contains("not all back at disk@a"), "{}", listed.stderr);
    assert!(fs::read(lab.path("disk.img")).unwrap() != old, "killed on the way");
    lab.ok(&["copier", POOL, "--set", "throttle=none"]);
    lab.ok(&["rollback", "pool.img/disk@a"]);
    assert!(fs::read(lab.path("disk.img")).unwrap() == old);
    lab.assert_clean();
}

#[test]
fn two_rollbacks_at_once_come_one_after_the_other() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    write(&server, "disk", 2, 0, 8 * MIB);
    lab.ok(&["snapshot", "pool.img/disk@b"]);
    for _ in 0..3 {
        let asked = ["a", "b", "b"].map(|name| {
            lab.command(&["rollback", &format!("pool.img/disk@{name}")]).stderr(std::process::Stdio::piped()).spawn()
        });
        for one in asked {
            let done = one.unwrap().wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            // Fails only if two of them start at the same moment.
            assert!(done.status.success() || said.contains("wait until that has ended"), "{said}");
        }
        let disk = contents(&server, "disk");
        assert!(disk.iter().all(|&byte| byte == disk[0]), "one of them");
    }
    server.stop();
    lab.assert_clean();
}

#[test]
fn what_would_be_refused_is_refused_when_it_is_only_asked_what_would_go() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    lab.ok(&["clone", "pool.img/disk@a", "pool.img/c"]);
    for (asked, why) in [
        (vec!["unprotect", "-n", "pool.img/none"], "none"),
        (vec!["unprotect", "-n", "pool.img/c"], "is a volume of the pool"),
        (vec!["unprotect", "-n", "pool.img/disk"], "it has snapshots"),
        (vec!["unprotect", "-rn", "pool.img/disk"], "held by \"c\""),
        (vec!["delete", "-n", "pool.img/disk@a"], "held by \"c\""),
    ] {
        let said = lab.run(&asked).refused();
        assert!(said.contains(why), "{asked:?}: {said}");
    }
}

#[test]
fn the_pool_and_the_name_may_be_two_words() {
    let lab = Lab::with_pool("64M");
    fs::write(lab.path("disk.img"), vec![1; MIB]).unwrap();
    lab.ok(&["protect", POOL, "disks/one", "disk.img", "--chunk", "16K"]);
    assert_eq!(lab.names(), ["disks/one"]);
    let none = lab.run(&["protect", "nowhere.img", "x", "disk.img"]).refused();
    assert!(none.contains("nowhere.img: there is no pool here"), "{none}");
    let snapshot = lab.run(&["protect", POOL, "disks/one@x", "disk.img"]).refused();
    assert!(snapshot.contains("is a snapshot"), "{snapshot}");
    for few in [&["protect", "disk.img"][..], &["protect"], &["unprotect"]] {
        assert_eq!(lab.run(few).status.code(), Some(2), "{few:?}");
    }
    lab.ok(&["unprotect", POOL, "disks/one"]);
    assert!(lab.names().is_empty());
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
    // It can be unprotected all the same.
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

#[test]
fn a_device_of_another_length_is_refused_and_found_again_elsewhere() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let bytes = fs::read(lab.path("disk.img")).unwrap();
    fs::write(lab.path("disk.img"), vec![1; 4 * MIB]).unwrap();
    let run = lab.run(&["export", "pool.img/disk@a", "out.img"]);
    assert!(!run.status.success() && run.stderr.contains("4194304 bytes instead of 8388608"), "{}", run.stderr);
    // It has moved: the same contents are accepted at their new path.
    fs::remove_file(lab.path("disk.img")).unwrap();
    fs::write(lab.path("moved.img"), &bytes).unwrap();
    let other = lab.run(&["set", &format!("path={}", lab.path("missing.img").display()), "pool.img/disk"]);
    // After the warning that the origin is not open.
    assert_eq!(other.status.code(), Some(1));
    assert!(other.stderr.lines().last().unwrap().contains("missing.img does not exist"), "{}", other.stderr);
    lab.ok(&["unprotect", "pool.img/disk", "-r"]);
    assert_eq!(fs::read(lab.path("moved.img")).unwrap(), bytes);
}

#[test]
fn what_was_said_of_origins_and_snapshots_is_listed() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@plain"]);
    lab.ok(&["snapshot", "pool.img/disk@own", "--independent", "--droppable"]);
    lab.ok(&["set", "when-full=drop-oldest", "pool.img/disk"]);
    lab.ok(&["set", "copy-ahead=2M", "pool.img/disk"]);
    let list = lab.json(&["list", POOL]);
    let of = |name: &str| list.as_array().unwrap().iter().find(|v| v["name"] == name).unwrap().clone();
    let disk = of("disk");
    assert_eq!((&disk["type"], &disk["protection"]["when_full"]), (&"origin".into(), &"drop-oldest".into()));
    assert_eq!(disk["protection"]["copy_ahead"], 2 * MIB);
    assert_eq!(disk["origin"].as_str().unwrap(), lab.path("disk.img").to_str().unwrap());
    assert_eq!(of("disk@plain")["flags"], serde_json::json!([]));
    assert_eq!(of("disk@own")["flags"], serde_json::json!(["independent", "droppable"]));
    assert!(of("disk@own")["protection"].is_null());
    // As text; without origins, none of their columns is shown.
    lab.ok(&["clone", "pool.img/disk@plain", "pool.img/c"]);
    let text = lab.ok(&["list", POOL]);
    let line = |name: &str| text.lines().find(|l| l.split_whitespace().next() == Some(name)).unwrap().to_string();
    assert!(line("NAME").ends_with("FLAGS                  DEPENDS-ON  WHEN-FULL    COPY-AHEAD"), "{text}");
    assert!(line("disk").contains("disk.img") && line("disk").ends_with("drop-oldest          2M"), "{text}");
    assert!(line("disk@own").contains("independent,droppable") && line("c").contains("disk@plain  -"), "{text}");
    let stats = lab.json(&["stats", POOL]);
    assert_eq!((&stats["volumes"], &stats["origins"], &stats["kept"]), (&2.into(), &1.into(), &0.into()));
    let plain = Lab::with_pool("64M");
    plain.ok(&["create", "pool.img/a", "--size", "1M"]);
    assert!(plain.ok(&["list", POOL]).lines().next().unwrap().ends_with("GATHER"));
}

#[test]
fn a_writable_snapshot_is_written_over_nbd_and_nobody_else_sees_it() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@fixed"]);
    lab.ok(&["snapshot", "pool.img/disk@try", "--writable"]);
    let server = Server::start(&lab);
    let mut test = Client::connect(server.socket(), "disk@try").unwrap();
    test.write(MIB as u64, &noise(1, MIB), true).unwrap();
    let mut fixed = Client::connect(server.socket(), "disk@fixed").unwrap();
    assert!(fixed.write(0, &[1; 512], false).is_err());
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    disk.write(0, &vec![2; 2 * MIB], true).unwrap();
    assert!(test.read(MIB as u64, MIB).unwrap() == noise(1, MIB));
    assert!(test.read(0, MIB).unwrap() == vec![1; MIB] && fixed.read(0, 2 * MIB).unwrap() == vec![1; 2 * MIB]);
    drop((test, fixed, disk));
    server.stop();
    assert!(fs::read(lab.path("disk.img")).unwrap()[..2 * MIB] == vec![2; 2 * MIB]);
    assert!(lab.contents("disk@try")[MIB..2 * MIB] == noise(1, MIB));
    lab.assert_clean();
    let plain = lab.run(&["snapshot", "pool.img/disk@x@y", "--writable"]).refused();
    assert!(!plain.is_empty());
}

#[test]
fn an_origin_and_a_volume_of_the_pool_are_frozen_at_one_instant() {
    let lab = lab();
    lab.ok(&["create", "pool.img/data", "--size", "4M"]);
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    let mut data = Client::connect(server.socket(), "data").unwrap();
    disk.write(0, &vec![5; MIB], false).unwrap();
    data.write(0, &vec![6; MIB], false).unwrap();
    lab.ok(&["snapshot", "pool.img/disk@both", "pool.img/data@both"]);
    disk.write(0, &vec![7; MIB], false).unwrap();
    data.write(0, &vec![8; MIB], false).unwrap();
    // All or none: one of the names is taken.
    lab.run(&["snapshot", "pool.img/disk@more", "pool.img/data@both"]).refused();
    drop((disk, data));
    server.kill();
    assert_eq!(lab.names(), ["data", "data@both", "disk", "disk@both"]);
    assert!(lab.contents("disk@both")[..MIB] == vec![5; MIB] && lab.contents("data@both")[..MIB] == vec![6; MIB]);
    lab.assert_clean();
}

#[test]
fn a_flattened_clone_needs_neither_snapshot_nor_origin() {
    let lab = lab();
    lab.ok(&["create", "pool.img/plain", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    disk.write(0, &noise(2, 2 * MIB), true).unwrap();
    lab.ok(&["clone", "pool.img/disk@a", "pool.img/c", "pool.img/idle"]);
    let mut clone = Client::connect(server.socket(), "c").unwrap();
    clone.write(MIB as u64 + 1000, &noise(3, 5000), false).unwrap();
    let done = lab.json(&["flatten", "pool.img/c"]);
    assert_eq!((&done["name"], &done["referenced"]), (&"c".into(), &(8 * MIB).into()));
    assert_eq!(done["copied"], 8 * MIB - 8192);
    assert!(lab.json(&["list", "pool.img/c"])[0]["depends_on"].is_null());
    assert_eq!(lab.json(&["list", "pool.img/idle"])[0]["depends_on"], "disk@a");
    // Connected clients continue, and holes can be made now.
    clone.write(0, &noise(4, 700), true).unwrap();
    let mut expected = vec![1; 8 * MIB];
    expected[MIB + 1000..MIB + 6000].copy_from_slice(&noise(3, 5000));
    expected[..700].copy_from_slice(&noise(4, 700));
    assert!(clone.read(0, 8 * MIB).unwrap() == expected);
    for (name, why) in [("c", "depends on no origin"), ("plain", "depends on no origin"), ("disk", "is an origin")] {
        let refused = lab.run(&["flatten", &format!("pool.img/{name}")]).refused();
        assert!(refused.contains(why), "{refused}");
    }
    let held = lab.run(&["delete", "pool.img/disk@a"]).refused();
    assert!(held.contains("held by \"idle\""), "{held}");
    drop((clone, disk));
    server.stop();

    let told = lab.ok(&["flatten", "pool.img/idle"]);
    assert!(told.contains("8M copied"), "{told}");
    lab.ok(&["delete", "pool.img/disk@a"]);
    lab.ok(&["unprotect", "pool.img/disk"]);
    fs::remove_file(lab.path("disk.img")).unwrap();
    assert!(lab.contents("c") == expected && lab.contents("idle") == vec![1; 8 * MIB]);
    lab.assert_clean();
}

#[test]
fn an_origin_is_a_file_of_the_mount_and_its_snapshots_are_files_of_the_past() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    let Some(mount) = Mounted::new(&lab) else { return };
    let (file, past) = (mount.path("disk"), mount.path(".snapshots/disk/a"));
    assert!(fs::read(&file).unwrap() == vec![1; 8 * MIB] && fs::read(&past).unwrap() == vec![1; 8 * MIB]);
    let disk = fs::File::options().write(true).open(&file).unwrap();
    disk.write_all_at(&noise(1, 5000), MIB as u64 + 700).unwrap();
    disk.sync_all().unwrap();
    fs::create_dir(mount.path(".snapshots/disk/b")).unwrap();
    disk.write_all_at(&noise(2, MIB), 3 * MIB as u64).unwrap();
    let mut then = vec![1; 8 * MIB];
    then[MIB + 700..MIB + 5700].copy_from_slice(&noise(1, 5000));
    let mut now = then.clone();
    now[3 * MIB..4 * MIB].copy_from_slice(&noise(2, MIB));
    assert!(fs::read(&file).unwrap() == now && fs::read(mount.path(".snapshots/disk/b")).unwrap() == then);
    assert!(fs::read(&past).unwrap() == vec![1; 8 * MIB]);
    // Its length is that of its device, and it cannot be removed as a volume.
    assert!(disk.set_len(4 * MIB as u64).is_err() && disk.set_len(9 * MIB as u64).is_err());
    drop(disk);
    assert!(fs::remove_file(&file).is_err());
    assert!(fs::File::options().write(true).open(&past).is_err());
    fs::copy(&past, mount.path("copy")).unwrap();
    assert!(fs::read(mount.path("copy")).unwrap() == vec![1; 8 * MIB]);
    mount.unmount(&lab);
    assert!(fs::read(lab.path("disk.img")).unwrap() == now);
    assert_eq!(lab.names(), ["copy", "disk", "disk@a", "disk@b"]);
    assert!(lab.contents("disk@b") == then && lab.contents("copy") == vec![1; 8 * MIB]);
    lab.assert_clean();
}

#[test]
fn a_served_origin_is_the_same_over_nbd_and_as_a_file() {
    let lab = lab();
    let Some(mut unmount) = client("fusermount3", "fuse3") else { return };
    if !std::path::Path::new("/dev/fuse").exists() {
        return crate::harness::missing("/dev/fuse does not exist: load the kernel module fuse");
    }
    let dir = lab.path("mnt");
    fs::create_dir(&dir).unwrap();
    let server = Server::start_with(&lab, POOL, &["--mount", dir.to_str().unwrap()]);
    let mut nbd = Client::connect(server.socket(), "disk").unwrap();
    let file = fs::File::options().read(true).write(true).open(dir.join("disk")).unwrap();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    nbd.write(MIB as u64 + 512, &noise(1, 1024), false).unwrap();
    file.write_all_at(&noise(2, 4000), 2 * MIB as u64 + 100).unwrap();
    let mut expected = vec![1; 8 * MIB];
    expected[MIB + 512..MIB + 1536].copy_from_slice(&noise(1, 1024));
    expected[2 * MIB + 100..2 * MIB + 4100].copy_from_slice(&noise(2, 4000));
    let mut seen = vec![0; 8 * MIB];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == expected && nbd.read(0, 8 * MIB).unwrap() == expected);
    assert!(fs::read(dir.join(".snapshots/disk/a")).unwrap() == vec![1; 8 * MIB]);
    drop((file, nbd));
    server.stop();
    let _ = unmount.args(["-u", "-q", "-z"]).arg(&dir).output();
    assert!(fs::read(lab.path("disk.img")).unwrap() == expected);
    lab.assert_clean();
}

#[test]
fn a_device_or_file_that_somebody_has_is_refused_and_the_message_says_who() {
    let lab = lab();
    lab.ok(&["init", "other.img", "--size", "64M"]);
    let server = Server::start(&lab);
    let locked = lab.run(&["protect", "other.img/disk", "disk.img"]).refused();
    assert!(locked.contains("disk.img is in use by") && locked.contains(&server.pid().to_string()), "{locked}");
    let itself = lab.run(&["protect", "other.img/disk", "other.img"]).refused();
    assert!(itself.contains("is a forkdisk pool itself"), "{itself}");
    server.stop();

    if client("mkfs.ext4", "e2fsprogs").is_none() {
        return;
    }
    let image = lab.write_file("fs.img", &[]);
    fs::File::options().write(true).open(&image).unwrap().set_len(32 << 20).unwrap();
    succeed(client("mkfs.ext4", "e2fsprogs").unwrap().args(["-q", "-F"]).arg(&image));
    let Some(device) = Loop::new(&image) else { return };
    let below = Below(lab.path("below"));
    fs::create_dir(&below.0).unwrap();
    succeed(Command::new("mount").arg(&device.0).arg(&below.0));
    let mounted = lab.run(&["protect", "other.img/fs", &device.0]).refused();
    assert!(mounted.contains(&format!("{} is in use", device.0)), "{mounted}");
    let backing = lab.run(&["protect", "other.img/fs", "fs.img"]).refused();
    assert!(backing.contains(&format!("it backs {}; detach that first (losetup -d)", device.0)), "{backing}");
    succeed(Command::new("umount").arg(&below.0));
    // The device itself can be protected like any other.
    lab.ok(&["protect", "other.img/fs", &device.0]);
    lab.ok(&["unprotect", "other.img/fs"]);
}

/// Creates a pool of `size` that protects `disk.img`, `mib` MiB of zeroes.
fn blank(size: &str, mib: u64) -> Lab {
    let lab = Lab::with_pool(size);
    fs::File::create(lab.path("disk.img")).unwrap().set_len(mib << 20).unwrap();
    lab.ok(&["protect", "pool.img/disk", "disk.img", "--copy-ahead", "1M"]);
    lab
}

/// Returns the bytes in use once all freed space is available.
fn used(lab: &Lab) -> u64 {
    wait_until("space has come back", || lab.stat("freeing") == 0);
    lab.stat("used")
}

/// Deletes `names` once the server has noticed that their clients have disconnected.
fn delete(lab: &Lab, names: &[&str]) {
    let names: Vec<String> = names.iter().map(|name| format!("pool.img/{name}")).collect();
    let args: Vec<&str> = ["delete"].into_iter().chain(names.iter().map(String::as_str)).collect();
    wait_until("they are not in use", || {
        let run = lab.run(&args);
        assert!(run.status.success() || run.stderr.contains("in use"), "{}", run.stderr);
        run.status.success()
    });
}

/// Tolerance for tables, the directory and fragmented pieces.
const TABLES: u64 = 1 << 19;

#[test]
fn space_use_of_an_origin_is_what_was_overwritten_since_the_snapshot_once() {
    let lab = blank("64M", 16);
    // Only what is written.
    lab.ok(&["set", "copy-ahead=0", "pool.img/disk"]);
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    let mut stomper = Stomper::new(1, 8 << 20);
    let before = used(&lab);
    stomper.wipe(&mut disk);
    assert!(used(&lab) - before <= TABLES, "without a snapshot nothing is kept");
    lab.ok(&["snapshot", "pool.img/disk@a", "pool.img/disk@b"]);
    let old = stomper.fork(1);
    stomper.wipe(&mut disk);
    stomper.wipe(&mut disk);
    let after = used(&lab) - before;
    assert!(after.abs_diff(8 << 20) <= TABLES, "{after}: once for both snapshots");
    assert_eq!(lab.stat("kept"), 8 << 20);
    old.verify_export(&server, "disk@a");
    old.verify_export(&server, "disk@b");
    delete(&lab, &["disk@b"]);
    assert_eq!(lab.stat("kept"), 8 << 20, "the older one has it now");
    old.verify_export(&server, "disk@a");
    delete(&lab, &["disk@a"]);
    let left = used(&lab) - before;
    assert!(left <= TABLES, "{left}");
    stomper.verify(&mut disk);
    drop(disk);
    server.stop();
    lab.assert_clean();
}

#[test]
fn many_snapshots_of_an_origin_then_writes_to_it_and_to_the_first() {
    let lab = blank("64M", 4);
    let server = Server::start(&lab);
    let mut disk = Client::connect(server.socket(), "disk").unwrap();
    let mut origin = Stomper::new(1, 4 << 20);
    origin.stomp(&mut disk, 300);
    let then = origin.fork(1);
    lab.ok(&["snapshot", "pool.img/disk@1", "--writable"]);
    let names: Vec<String> = (2..=999).map(|i| format!("pool.img/disk@{i}")).collect();
    let args: Vec<&str> = ["snapshot"].into_iter().chain(names.iter().map(String::as_str)).collect();
    lab.ok(&args);
    origin.stomp(&mut disk, 300);
    let mut first = then.fork(2);
    let mut client = Client::connect(server.socket(), "disk@1").unwrap();
    first.stomp(&mut client, 300);
    ["disk@2", "disk@500", "disk@999"].iter().for_each(|name| then.verify_export(&server, name));
    origin.verify(&mut disk);
    first.verify(&mut client);
    drop((disk, client));
    let all: Vec<String> = (1..=999).map(|i| format!("disk@{i}")).collect();
    delete(&lab, &all.iter().map(String::as_str).collect::<Vec<_>>());
    origin.verify_export(&server, "disk");
    server.stop();
    assert_eq!(lab.names(), ["disk"]);
    lab.assert_clean();
}

#[test]
fn a_stomped_origin_its_snapshots_and_their_clones_each_show_their_own() {
    let lab = blank("128M", 8);
    let server = Server::start(&lab);
    let connect = |name: &str| Client::connect(server.socket(), name).unwrap();
    let mut disk = connect("disk");
    let mut origin = Stomper::new(1, 8 << 20);
    let mut past = Vec::new();
    for i in 0..6u64 {
        origin.stomp(&mut disk, 250);
        let flags: &[&str] = if i == 3 { &["--independent"] } else { &[] };
        lab.ok(&[&["snapshot", &format!("pool.img/disk@{i}")], flags].concat());
        past.push(origin.fork(i + 10));
    }
    origin.stomp(&mut disk, 250);
    let mut forks = Vec::new();
    for i in [1, 3, 4] {
        lab.ok(&["clone", &format!("pool.img/disk@{i}"), &format!("pool.img/c{i}")]);
        let mut fork = past[i].fork(i as u64 + 20);
        fork.stomp(&mut connect(&format!("c{i}")), 200);
        forks.push((format!("c{i}"), fork));
    }
    let verify = |past: &[(usize, &Stomper)], forks: &[(String, Stomper)], origin: &Stomper| {
        past.iter().for_each(|(i, stomper)| stomper.verify_export(&server, &format!("disk@{i}")));
        forks.iter().for_each(|(name, stomper)| stomper.verify_export(&server, name));
        origin.verify_export(&server, "disk");
    };
    let all: Vec<(usize, &Stomper)> = past.iter().enumerate().collect();
    verify(&all, &forks, &origin);
    // Two become independent while they are stomped; then everything else is deleted, in no particular order.
    for (name, fork) in forks.iter_mut().filter(|(name, _)| name != "c4") {
        let mut client = connect(name);
        std::thread::scope(|scope| {
            scope.spawn(|| lab.ok(&["flatten", &format!("pool.img/{name}")]));
            fork.stomp(&mut client, 400);
        });
    }
    delete(&lab, &["disk@3", "disk@0"]);
    origin.stomp(&mut disk, 250);
    delete(&lab, &["disk@1", "disk@5"]);
    verify(&[(2, &past[2]), (4, &past[4])], &forks, &origin);
    drop(disk);
    server.kill();
    let server = Server::start(&lab);
    past[4].verify_export(&server, "disk@4");
    forks.iter().for_each(|(name, stomper)| stomper.verify_export(&server, name));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_snapshot_stays_as_long_as_any_of_its_clones() {
    let lab = lab();
    lab.ok(&["snapshot", "pool.img/disk@a"]);
    lab.ok(&["clone", "pool.img/disk@a", "pool.img/c"]);
    lab.ok(&["clone", "pool.img/disk@a", "pool.img/d"]);
    for goes in ["c", "d"] {
        let held = lab.run(&["delete", "pool.img/disk@a", &format!("pool.img/{goes}")]).refused();
        assert!(held.contains("held by"), "{held}");
        assert_eq!(lab.names(), ["c", "d", "disk", "disk@a"]);
    }
    lab.ok(&["delete", "pool.img/disk@a", "pool.img/c", "pool.img/d"]);
    assert_eq!(lab.names(), ["disk"]);
    lab.assert_clean();
}
