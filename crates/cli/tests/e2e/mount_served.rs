//! One daemon, two paths to a volume: data written by one is read by the other at once.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

use crate::harness::{LIMIT, Lab, Limited, POOL, Server, client, missing, noise, succeed};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// A daemon on a pool that is also mounted at `mnt`. Unmounted when dropped.
pub struct Both {
    server: Option<Server>,
    dir: PathBuf,
}

impl Both {
    pub fn start(lab: &Lab) -> Option<Both> {
        Both::start_with(lab, &[])
    }

    /// As [`start`](Self::start), with more options of `serve`.
    pub fn start_with(lab: &Lab, options: &[&str]) -> Option<Both> {
        if !Path::new("/dev/fuse").exists() {
            missing("/dev/fuse does not exist: load the kernel module fuse");
            return None;
        }
        client("fusermount3", "fuse3")?;
        let dir = lab.path("mnt");
        fs::create_dir_all(&dir).unwrap();
        let server = Server::start_with(lab, POOL, &[&["--mount", dir.to_str().unwrap()], options].concat());
        Some(Both { server: Some(server), dir })
    }

    /// As [`start`](Self::start), for programs of other users, too.
    pub fn start_for_all_users(lab: &Lab) -> Option<Both> {
        let mut both = Both::start(lab)?;
        both.server.take().unwrap().stop();
        both.server = Some(Server::start(lab));
        lab.ok(&["mount", POOL, both.dir.to_str().unwrap(), "-o", "allow_other"]);
        Some(both)
    }

    pub fn nbd(&self, export: &str) -> Client {
        self.try_nbd(export).unwrap()
    }

    pub fn try_nbd(&self, export: &str) -> std::io::Result<Client> {
        Client::connect(self.server().socket(), export)
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn file(&self, name: &str) -> File {
        File::options().read(true).write(true).create(true).truncate(false).open(self.dir.join(name)).unwrap()
    }

    /// Returns the path of a file in the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Kills the daemon, as a crash would, and unmounts.
    pub fn kill(&mut self) {
        self.server.take().unwrap().kill();
        succeed(client("fusermount3", "fuse3").unwrap().arg("-u").arg(&self.dir));
    }

    pub fn stop(mut self) {
        self.server.take().unwrap().stop();
    }
}

impl Drop for Both {
    fn drop(&mut self) {
        if self.server.take().is_some()
            && let Some(mut unmount) = client("fusermount3", "fuse3")
        {
            let _ = unmount.args(["-u", "-q", "-z"]).arg(&self.dir).output_within(LIMIT);
        }
    }
}

/// Runs a shell script in a folder.
#[track_caller]
pub fn sh(dir: &Path, script: &str) {
    succeed(Command::new("bash").args(["-euo", "pipefail", "-c", script]).current_dir(dir));
}

fn read(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn what_one_way_writes_the_other_reads_at_once() {
    let lab = Lab::with_pool("256M");
    lab.import("a", &noise(1, 4 * MIB));
    let Some(both) = Both::start(&lab) else { return };
    let (mut nbd, file) = (both.nbd("a"), both.file("a"));
    assert!(read(&file, 0, 4 * MIB) == noise(1, 4 * MIB), "all of it is in the kernel's cache now");
    nbd.write(MIB as u64 + 512, &noise(2, 1024), false).unwrap();
    assert!(read(&file, MIB as u64 + 512, 1024) == noise(2, 1024));
    nbd.trim(2 << 20, MIB as u32).unwrap();
    assert!(read(&file, 2 << 20, MIB) == vec![0; MIB]);
    file.write_all_at(&noise(3, 100), 77).unwrap();
    assert!(nbd.read(0, 4096).unwrap()[77..177] == noise(3, 100));
    both.stop();
    assert!(lab.contents("a")[77..177] == noise(3, 100));
    lab.assert_clean();
}

#[test]
fn a_random_mix_of_both_ways_is_one_disk() {
    let lab = Lab::with_pool("256M");
    let len = 2 * MIB;
    let mut model = noise(4, len);
    lab.import("a", &model);
    let Some(both) = Both::start(&lab) else { return };
    let (mut nbd, file) = (both.nbd("a"), both.file("a"));
    let mut rng = SmallRng::seed_from_u64(5);
    for step in 0..2000 {
        let at = rng.random_range(0..(len / 512) as u64 - 64) * 512;
        let size = rng.random_range(1..=64) * 512;
        let range = at as usize..at as usize + size;
        let mut bytes = vec![0; size];
        rng.fill_bytes(&mut bytes);
        match rng.random_range(0..5) {
            0 => {
                nbd.write(at, &bytes, false).unwrap();
                model[range].copy_from_slice(&bytes);
            }
            1 => {
                file.write_all_at(&bytes, at).unwrap();
                model[range].copy_from_slice(&bytes);
            }
            2 if step % 10 == 0 => {
                nbd.trim(at, size as u32).unwrap();
                model[range].fill(0);
            }
            3 => assert!(nbd.read(at, size).unwrap() == model[range], "step {step}: NBD at {at}"),
            _ => assert!(read(&file, at, size) == model[range], "step {step}: file at {at}"),
        }
    }
    both.stop();
    assert!(lab.contents("a") == model);
    lab.assert_clean();
}

/// A client writes rising numbers; a reader of the file finds no number older than the last
/// answered one, although readers fill the kernel's cache all the time.
#[test]
fn readers_of_a_file_never_find_what_was_overwritten_before_they_asked() {
    let lab = Lab::with_pool("256M");
    lab.import("a", &vec![0; 64 << 10]);
    let Some(both) = Both::start(&lab) else { return };
    let (answered, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let file = both.file("a");
            let (answered, ended) = (&answered, &ended);
            scope.spawn(move || {
                while !ended.load(Ordering::SeqCst) {
                    let least = answered.load(Ordering::SeqCst);
                    let found = u64::from_le_bytes(read(&file, 8192, 8).try_into().unwrap());
                    assert!(found >= least, "{found} is older than {least}");
                }
            });
        }
        let mut nbd = both.nbd("a");
        for number in 1..=3000u64 {
            let mut sector = [0; 512];
            sector[..8].copy_from_slice(&number.to_le_bytes());
            nbd.write(8192, &sector, false).unwrap();
            answered.store(number, Ordering::SeqCst);
        }
        ended.store(true, Ordering::SeqCst);
    });
    both.stop();
}

#[test]
fn verbs_and_the_mount_of_a_daemon_see_each_other() {
    let lab = Lab::with_pool("256M");
    lab.import("a", &noise(6, MIB));
    let Some(both) = Both::start(&lab) else { return };
    let file = both.file("a");
    file.write_all_at(b"then", 0).unwrap();
    lab.ok(&["snapshot", "pool.img/a@then"]);
    file.write_all_at(b"now!", 0).unwrap();
    assert_eq!(fs::read(both.dir.join(".snapshots/a/then")).unwrap()[..4], *b"then");
    lab.ok(&["resize", "pool.img/a", "--size", "2M"]);
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    let refused = lab.run(&["rollback", "pool.img/a@then"]).refused();
    assert!(refused.contains("programs on the mount") && refused.contains("mnt"), "{refused}");
    drop(file);
    lab.ok(&["rollback", "pool.img/a@then"]);
    assert_eq!(fs::read(both.dir.join("a")).unwrap()[..4], *b"then");
    lab.ok(&["clone", "pool.img/a", "pool.img/b"]);
    lab.ok(&["rename", "pool.img/a", "pool.img/c"]);
    assert!(!both.dir.join("a").exists() && both.dir.join("b").exists() && both.dir.join("c").exists());
    succeed(Command::new("cp").arg(both.dir.join("c")).arg(both.dir.join("d")));
    assert_eq!(lab.names(), ["b", "c", "c@then", "d"]);
    both.stop();
    lab.assert_clean();
}

#[test]
fn a_pool_that_is_served_is_mounted_by_its_daemon() {
    let lab = Lab::with_pool("256M");
    if !Path::new("/dev/fuse").exists() || client("fusermount3", "fuse3").is_none() {
        return missing("FUSE is not to be had");
    }
    let server = Server::start(&lab);
    for dir in ["one", "two"] {
        fs::create_dir(lab.path(dir)).unwrap();
        let said = lab.ok(&["mount", POOL, dir]);
        assert!(said.contains("is mounted on"), "{said}");
    }
    fs::write(lab.path("one/x"), noise(7, 3 * MIB + 5)).unwrap();
    assert!(fs::read(lab.path("two/x")).unwrap() == noise(7, 3 * MIB + 5), "two mounts are one pool");
    let open = |dir: &str| File::options().read(true).write(true).open(lab.path(dir).join("x")).unwrap();
    let (one, two) = (open("one"), open("two"));
    for i in 0..50 {
        read(&two, 0, 4096);
        one.write_all_at(&noise(i, 700), 300).unwrap();
        assert!(read(&two, 300, 700) == noise(i, 700), "also for files that are open: {i}");
    }
    one.set_len(5000).unwrap();
    assert_eq!(two.metadata().unwrap().len(), 5000);
    drop((one, two));
    fs::write(lab.path("two/x"), noise(7, 3 * MIB + 5)).unwrap();
    lab.ok(&["umount", "one"]);
    assert!(!lab.path("one/x").exists());
    let mut nbd = Client::connect(server.socket(), "x").unwrap();
    assert!(nbd.read(0, 4096).unwrap() == noise(7, 3 * MIB + 5)[..4096]);
    drop(nbd);
    lab.ok(&["stop", POOL]);
    assert!(!lab.path("two/x").exists(), "the end of the daemon unmounts");
    assert!(lab.contents("x") == noise(7, 3 * MIB + 5));
    let refused = lab.run(&["umount", "two"]).refused();
    assert!(refused.contains("no pool is mounted there"), "{refused}");
    lab.assert_clean();
}

#[test]
fn rmdir_on_the_mount_of_a_daemon_removes_snapshots_and_no_folder_above_them() {
    let lab = Lab::with_pool("256M");
    let Some(both) = Both::start(&lab) else { return };
    fs::create_dir(lab.path("two")).unwrap();
    lab.ok(&["mount", POOL, "two"]);
    for dir in ["mnt", "two"] {
        sh(
            &lab.path(dir),
            "mkdir vm; echo one > v; echo two > vm/w
             for v in v vm/w; do
                 mkdir .snapshots/$v/s1; [ -f .snapshots/$v/s1 ]; cmp $v .snapshots/$v/s1; [ $(ls .snapshots/$v) = s1 ]
                 rmdir .snapshots/$v/s1; [ -z \"$(ls .snapshots/$v)\" ]
                 mkdir .snapshots/$v/s2; mv .snapshots/$v/s2 .snapshots/$v/s3; rm -f .snapshots/$v/s3
                 [ -z \"$(ls .snapshots/$v)\" ]
             done
             if rmdir v 2> /dev/null || rmdir vm 2> /dev/null || rmdir .snapshots/v 2> /dev/null; then exit 9; fi
             mkdir -p x/y/z; rmdir x/y/z; [ -d x/y ]; rmdir x/y x; [ ! -e x ]; rm v vm/w; rmdir vm",
        );
    }
    // One path creates them, the other removes them.
    sh(&lab.path("mnt"), "echo one > v; mkdir .snapshots/v/made");
    lab.ok(&["snapshot", "pool.img/v@asked"]);
    lab.ok(&["delete", "pool.img/v@made"]);
    sh(&lab.path("two"), "[ $(ls .snapshots/v) = asked ]; rmdir .snapshots/v/asked");
    assert_eq!(lab.names(), ["v"]);
    lab.ok(&["umount", "two"]);
    both.stop();
    lab.assert_clean();
}

#[test]
fn umount_does_not_wait_for_a_daemon_whose_control_socket_it_does_not_know() {
    let lab = Lab::with_pool("256M");
    lab.import("a", &noise(8, MIB));
    let Some(both) = Both::start_with(&lab, &["--control", "control.sock"]) else { return };
    both.file("a").write_all_at(b"then", 0).unwrap();
    lab.ok(&["umount", "mnt"]);
    assert!(!both.dir.join("a").exists());
    assert!(both.nbd("a").read(0, 4096).unwrap()[..4] == *b"then", "it is served on");
    lab.ok(&["mount", POOL, "mnt", "--control", "control.sock"]);
    lab.ok(&["umount", "mnt", "--control", "control.sock"]);
    assert!(!both.dir.join("a").exists());
    both.stop();
    lab.assert_clean();
}

#[test]
fn what_an_nbd_client_uses_is_not_removed_replaced_or_shortened() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, MIB));
    lab.import("b", &noise(2, MIB));
    let Some(both) = Both::start(&lab) else { return };
    let mut nbd = both.nbd("a");
    let busy = |outcome: std::io::Result<()>| assert_eq!(outcome.unwrap_err().raw_os_error(), Some(16), "EBUSY");
    busy(fs::remove_file(both.dir.join("a")));
    busy(fs::rename(both.dir.join("b"), both.dir.join("a")));
    busy(both.file("a").set_len(4096));
    both.file("a").set_len(2 * MIB as u64).unwrap();
    nbd.write(0, &noise(3, 4096), true).unwrap();
    assert!(fs::read(both.dir.join("a")).unwrap()[..4096] == noise(3, 4096));
    nbd.leave().unwrap();
    // The daemon notices the disconnect a moment later.
    crate::harness::wait_until("the file is free", || fs::rename(both.dir.join("b"), both.dir.join("a")).is_ok());
    fs::remove_file(both.dir.join("a")).unwrap();
    both.stop();
    lab.assert_clean();
}

/// Number of reads of volumes that the daemon has served.
fn reads(lab: &Lab) -> u64 {
    let stats = lab.json(&["stats", POOL]);
    let reads = &stats["live"]["activity"]["volumes"]["operations"]["read"]["operations"];
    reads.as_u64().unwrap_or_else(|| panic!("{stats}"))
}

#[test]
fn the_kernel_keeps_what_it_has_read_until_another_door_writes() {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", &format!("{POOL}/m"), "--size", "8M"]);
    let Some(both) = Both::start(&lab) else { return };
    let mut client = both.nbd("m");
    let data = noise(3, 8 * MIB);
    client.write(0, &data, false).unwrap();
    let path = both.path("m");
    assert!(fs::read(&path).unwrap() == data);
    let before = reads(&lab);
    for _ in 0..3 {
        assert!(fs::read(&path).unwrap() == data);
        // Two at once.
        let (a, b) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        let mut found = vec![0; 8 * MIB];
        a.read_exact_at(&mut found, 0).unwrap();
        b.read_exact_at(&mut found[..MIB], 7 * MIB as u64).unwrap();
    }
    assert_eq!(reads(&lab), before, "the kernel has all of it");
    // While it is open, and while it is not: at once, also after the client has gone.
    for round in 0..20 {
        let open = (round % 2 == 0).then(|| File::open(&path).unwrap());
        let new = noise(100 + round, 4096);
        let at = (round * 17 % 2000) as usize * 4096;
        client.write(at as u64, &new, false).unwrap();
        if round % 4 == 3 {
            drop(client);
            client = both.nbd("m");
        }
        let found = fs::read(&path).unwrap();
        assert!(found[at..at + 4096] == new, "round {round}");
        drop(open);
    }
    // By a verb.
    lab.ok(&["snapshot", &format!("{POOL}/m@s")]);
    let before = fs::read(&path).unwrap();
    client.write(0, &noise(7, MIB), false).unwrap();
    assert!(fs::read(&path).unwrap()[..MIB] == noise(7, MIB));
    drop(client);
    lab.ok(&["rollback", &format!("{POOL}/m@s")]);
    assert!(fs::read(&path).unwrap() == before, "after a rollback");
    // By this mount.
    let file = both.file("m");
    file.write_all_at(b"here", 5).unwrap();
    drop(file);
    assert_eq!(&fs::read(&path).unwrap()[5..9], b"here");
}
