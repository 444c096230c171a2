//! One owner per pool and device, by whatever path; and nothing in use is overwritten.

use std::fs;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use forkdisk::{HostIdentity, OpenOptions, Pool};

use crate::harness::{Lab, POOL, Server, client, missing, noise, succeed, wait_until};
use crate::mount::Mounted;
use crate::mount_programs::{Below, Loop};
use crate::nbd::Client;

/// Creates a pool with a volume, and a loop device over its file.
fn pool_and_loop() -> Option<(Lab, Loop)> {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let device = Loop::new(&lab.path(POOL))?;
    Some((lab, device))
}

#[test]
fn a_pool_that_is_served_is_refused_by_another_way() {
    let Some((lab, device)) = pool_and_loop() else { return };
    let Some(behind) = Loop::new(device.0.as_ref()) else { return };
    for (served, others) in [(POOL, [&device.0, &behind.0]), (&device.0, [&POOL.to_string(), &behind.0])] {
        let server = Server::start_on(&lab, served);
        fs::create_dir_all(lab.path("m")).unwrap();
        for other in others {
            let volume = format!("{other}/a");
            let snapshot = format!("{other}/a@s");
            let socket = lab.path("other.sock");
            let verbs: [&[&str]; 8] = [
                &["snapshot", &snapshot],
                &["list", other],
                &["delete", &volume],
                &["export", &volume, "out.img"],
                &["check", other],
                &["mount", other, "m"],
                &["serve", other, "--socket", socket.to_str().unwrap(), "--control", "other.control"],
                &["init", other, "--force", "--size", "64M"],
            ];
            for verb in verbs {
                let run = lab.run(verb);
                assert!(!run.status.success(), "{verb:?} while {served} is served: {run:?}");
                let told = run.stderr;
                assert!(told.contains(&format!("(pid {})", server.pid())), "{verb:?}: {told}");
                assert!(told.contains("the same pool under another path or a copy of it"), "{verb:?}: {told}");
            }
        }
        server.stop();
    }
    lab.assert_clean();
    assert_eq!(lab.names(), ["a"]);
}

#[test]
fn a_pool_that_is_mounted_is_refused_by_another_way_and_not_after_a_kill() {
    let Some((lab, device)) = pool_and_loop() else { return };
    let Some(mount) = Mounted::new(&lab) else { return };
    let snapshot = format!("{}/a@s", device.0);
    let told = lab.run(&["snapshot", &snapshot]).refused();
    assert!(told.contains("forkdisk mount") && told.contains("under another path"), "{told}");
    mount.unmount(&lab);
    let server = Server::start(&lab);
    server.kill();
    // The kernel has released the lock with the process.
    lab.ok(&["snapshot", &snapshot]);
    assert_eq!(lab.names(), ["a", "a@s"]);
}

#[test]
fn readers_have_a_pool_together_by_two_ways() {
    let Some((lab, device)) = pool_and_loop() else { return };
    let server = Server::start_with(&lab, POOL, &["--read-only"]);
    lab.ok(&["list", &device.0]);
    lab.run(&["delete", &format!("{}/a", device.0)]).refused();
    server.stop();
    lab.ok(&["delete", &format!("{}/a", device.0)]);
}

#[test]
fn a_pool_that_is_served_is_refused_by_a_hard_link_and_a_bind_mount() {
    let Some((lab, _device)) = pool_and_loop() else { return };
    fs::hard_link(lab.path(POOL), lab.path("hard.img")).unwrap();
    let below = Below(lab.path("below"));
    fs::create_dir(&below.0).unwrap();
    succeed(Command::new("mount").arg("--bind").arg(lab.path(".")).arg(&below.0));
    let server = Server::start(&lab);
    for other in ["hard.img", "below/pool.img", "below/hard.img"] {
        for verb in
            [["serve", other, "--socket=o.sock", "--control=o.control"], ["init", other, "--force", "--size=64M"]]
        {
            let told = lab.run(&verb).refused();
            assert!(told.contains(&format!("(pid {})", server.pid())), "{verb:?}: {told}");
        }
        // A verb finds the daemon, by whatever path the pool is named.
        assert!(lab.ok(&["list", other]).contains('a'));
    }
    server.stop();
    lab.assert_clean();
}

#[test]
fn neither_export_nor_init_nor_protect_writes_to_swap() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    if client("mkswap", "util-linux").is_none() {
        return;
    }
    let image = lab.write_file("swap.img", &vec![0; 8 << 20]);
    let Some(device) = Loop::new(&image) else { return };
    succeed(client("mkswap", "util-linux").unwrap().arg(&device.0));
    let swapon = Command::new("swapon").arg(&device.0).output().unwrap();
    if !swapon.status.success() {
        missing(&format!("swap needs a kernel that allows it: {}", String::from_utf8_lossy(&swapon.stderr)));
        return;
    }
    let verbs: [&[&str]; 3] = [
        &["export", "--force", "pool.img/a", &device.0],
        &["init", &device.0, "--force"],
        &["protect", "pool.img/d", &device.0],
    ];
    let told: Vec<_> = verbs.iter().map(|verb| lab.run(verb)).collect();
    succeed(Command::new("swapoff").arg(&device.0));
    for (verb, run) in verbs.iter().zip(told) {
        assert!(!run.status.success() && run.stderr.contains("swap"), "{verb:?}: {}", run.stderr);
    }
}

#[test]
fn export_does_not_overwrite_a_device_that_is_mounted() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    if client("mkfs.ext4", "e2fsprogs").is_none() {
        return;
    }
    fs::File::create(lab.path("fs.img")).unwrap().set_len(32 << 20).unwrap();
    let Some(device) = Loop::new(&lab.path("fs.img")) else { return };
    succeed(client("mkfs.ext4", "e2fsprogs").unwrap().args(["-q", "-F"]).arg(&device.0));
    let below = Below(lab.path("below"));
    fs::create_dir(&below.0).unwrap();
    succeed(Command::new("mount").arg(&device.0).arg(&below.0));
    let export = ["export", "--force", "pool.img/a", &device.0];
    let told = lab.run(&export).refused();
    let place = format!("in use by a file system mounted on {} (umount it first)", below.0.display());
    assert!(told.contains(&place) && told.contains("--force does not"), "{told}");
    let _server = Server::start(&lab);
    assert!(lab.run(&export).refused().contains(&place), "a daemon's export as well");
    drop(below);
    lab.ok(&export);
}

#[test]
fn a_copy_of_a_pool_gets_an_identity_of_its_own_while_the_pool_is_served() {
    let Some((lab, device)) = pool_and_loop() else { return };
    lab.import("b", &noise(5, 3 << 20));
    lab.ok(&["snapshot", "pool.img/b@s"]);
    // A copy of a pool that was not closed, as copies of disks are: its journal must be replayed.
    let killed = Server::start(&lab);
    let mut client = Client::connect(killed.socket(), "b").unwrap();
    client.write(0, &[9; 4096], true).unwrap();
    killed.kill();
    fs::copy(lab.path(POOL), lab.path("copy.img")).unwrap();
    let uuid = |pool: &str| lab.json(&["stats", pool])["uuid"].as_str().unwrap().to_string();
    let server = Server::start(&lab);
    let old = uuid(POOL);
    let socket = lab.path("other.sock");
    let serve = ["serve", "copy.img", "--socket", socket.to_str().unwrap()];
    let told = lab.run(&serve).refused();
    assert!(told.contains("a copy gets an identity of its own with `forkdisk set uuid=new "), "{told}");
    // Refused for the pool itself, by any path, while it is served.
    for pool in [POOL, &device.0] {
        let told = lab.run(&["set", "uuid=new", pool]).refused();
        assert!(told.contains("is served") || told.contains("is in use"), "{told}");
    }
    let said = lab.json(&["set", "uuid=new", "copy.img"]);
    let mut copy = lab.command(&serve).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the copy is served", || Client::connect(&socket, "b").is_ok());
    assert_eq!(uuid("copy.img"), said["uuid"].as_str().unwrap());
    assert!(uuid(POOL) == old && uuid("copy.img") != old);
    for (socket, byte) in [(server.socket(), 1), (socket.as_path(), 2)] {
        let mut client = Client::connect(socket, "b").unwrap();
        assert_eq!(client.read(0, 4096).unwrap(), [9; 4096]);
        client.write(0, &[byte; 4096], true).unwrap();
    }
    lab.ok(&["snapshot", "copy.img/b@t"]);
    lab.ok(&["stop", "copy.img"]);
    assert!(copy.wait().unwrap().success());
    server.stop();
    lab.ok(&["check", "copy.img"]);
    lab.assert_clean();
    assert_eq!(lab.names(), ["a", "b", "b@s"]);
    // On an idle pool, and once more.
    let before = uuid(POOL);
    lab.ok(&["set", "uuid=new", POOL]);
    assert_ne!(uuid(POOL), before);
    assert_eq!(lab.contents("b")[..4096], [1; 4096]);
    lab.assert_clean();
    for (value, why) in [("uuid=x", "uuid=new"), ("uuid=", "uuid=new")] {
        let told = lab.run(&["set", value, POOL]);
        assert!(told.status.code() == Some(2) && told.stderr.contains(why), "{}", told.stderr);
    }
}

#[test]
fn changes_of_a_pool_wait_for_verbs_and_each_other_and_a_kill_leaves_it_whole() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(8, 2 << 20));
    let verbs: Vec<_> = (0..5)
        .flat_map(|i| {
            let create = lab.command(&["create", &format!("pool.img/c{i}"), "--size", "1M"]);
            [create, lab.command(&["set", "uuid=new", POOL]), lab.command(&["set", "multihost=100ms", POOL])]
        })
        .map(|mut verb| verb.stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    for verb in verbs {
        let output = verb.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(lab.names().len(), 6);
    lab.ok(&["set", "multihost=off", POOL]);
    for round in 0..20 {
        let mut verb = lab.command(&["set", "uuid=new", POOL]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(round * 2));
        let _ = verb.kill();
        let _ = verb.wait();
        assert!(lab.contents("a") == noise(8, 2 << 20), "round {round}");
    }
    lab.assert_clean();
}

#[test]
fn a_pool_that_another_host_has_open_is_refused_and_named() {
    let Some((lab, device)) = pool_and_loop() else { return };
    let told = lab.run(&["set", "multihost=1ms", POOL]).refused();
    assert!(told.contains("100 ms to 60 s"), "{told}");
    lab.ok(&["set", "multihost=200ms", POOL]);
    // Through a separate device and without this machine's locks, as from another host.
    let (opened, is_open) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let elsewhere = std::path::PathBuf::from(&device.0);
    let host = std::thread::spawn(move || {
        forkdisk_uring::block_on(forkdisk_uring::Config::default(), |runtime| async move {
            let options = forkdisk_uring::DeviceOptions::default();
            let device = forkdisk_uring::UringDevice::open(&runtime, &elsewhere, &options).unwrap();
            let identity = HostIdentity::new("elsewhere", [9; 16], [1; 16]);
            let options = OpenOptions::default().with_host(Some(identity));
            let pool = Pool::open(device, Rc::new(runtime.clone()), options).await.unwrap();
            pool.create("theirs", &forkdisk::CreateOptions::new(1 << 20, 1)).await.unwrap();
            opened.send(()).unwrap();
            while ended.try_recv().is_err() {
                runtime.sleep_for(Duration::from_millis(20)).await;
            }
            pool.close().await.unwrap();
        })
        .unwrap();
    });
    is_open.recv().unwrap();
    let refused: Vec<String> =
        [&["list", POOL][..], &["snapshot", "pool.img/a@s"], &["set", "uuid=new", POOL], &["serve", POOL]]
            .into_iter()
            .map(|verb| lab.run(verb).refused())
            .collect();
    end.send(()).unwrap();
    host.join().unwrap();
    for told in refused {
        assert!(told.contains("in use on another host, \"elsewhere\""), "{told}");
    }
    assert_eq!(lab.names(), ["a", "theirs"]);
    lab.ok(&["set", "multihost=off", POOL]);
    lab.assert_clean();
}

#[test]
fn init_names_what_it_would_destroy() {
    let lab = Lab::with_pool("64M");
    let uuid = lab.json(&["stats", POOL])["uuid"].as_str().unwrap().to_string();
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/a@s"]);
    let told = lab.run(&["init", POOL, "--force", "--size", "64M"]).refused();
    let would = format!("is the pool {uuid} with 1 volume and 1 snapshot, which would be lost: --destroy {uuid}");
    assert!(told.contains(&would), "{told}");
    let other = "00000000-0000-4000-8000-000000000000";
    lab.run(&["init", POOL, "--destroy", other, "--size", "64M"]).refused();
    assert_eq!(lab.names(), ["a", "a@s"]);
    lab.ok(&["init", POOL, "--destroy", &uuid, "--size", "64M"]);
    assert!(lab.names().is_empty());
    // Without volumes nothing is lost.
    lab.ok(&["init", POOL, "--force", "--size", "64M"]);
}

#[test]
fn an_origin_keeps_the_link_that_it_was_named_by() {
    let lab = Lab::with_pool("64M");
    fs::write(lab.path("disk.img"), vec![7; 1 << 20]).unwrap();
    std::os::unix::fs::symlink("disk.img", lab.path("by-id")).unwrap();
    lab.ok(&["protect", "pool.img/d", "by-id"]);
    let origin = lab.json(&["list", "pool.img/d"]).to_string();
    assert!(origin.contains(lab.path("by-id").to_str().unwrap()), "{origin}");
    // The same disk under another device name, as after a boot.
    fs::rename(lab.path("disk.img"), lab.path("other.img")).unwrap();
    fs::remove_file(lab.path("by-id")).unwrap();
    std::os::unix::fs::symlink("other.img", lab.path("by-id")).unwrap();
    assert!(lab.contents("d") == vec![7; 1 << 20]);
}
