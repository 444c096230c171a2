//! Common programs on files of a mount.

use std::fs::{self, File};
use std::process::Command;

use crate::harness::{LIMIT, Lab, Limited, client, fingerprint, missing, noise, succeed};
use crate::mount::{Mounted, sh};

const MIB: usize = 1 << 20;

#[test]
fn rsync_updates_in_place_and_keeps_holes() {
    let lab = Lab::with_pool("512M");
    let Some(mount) = Mounted::new(&lab) else { return };
    if client("rsync", "rsync").is_none() {
        return;
    }
    let rsync = || client("rsync", "rsync").unwrap();
    let mut image = [noise(1, 4 * MIB), vec![0; 20 * MIB], noise(2, 4 * MIB)].concat();
    let source = lab.write_file("image", &image);
    succeed(rsync().args(["--inplace", "--sparse"]).arg(&source).arg(mount.path("a")));
    sh(&mount, "[ $(stat -c %b a) -lt 20000 ]; cp a before");
    image[5000..6000].fill(7);
    image[26 * MIB..].fill(0);
    fs::write(&source, &image).unwrap();
    succeed(rsync().args(["--inplace", "--no-whole-file", "--checksum"]).arg(&source).arg(mount.path("a")));
    assert!(fs::read(mount.path("a")).unwrap() == image);
    succeed(rsync().args(["-a", "--sparse"]).arg(mount.dir()).arg(lab.path("out/")));
    assert!(fs::read(lab.path("out/mnt/a")).unwrap() == image);
    mount.unmount(&lab);
    assert!(lab.contents("before")[..4 * MIB] == noise(1, 4 * MIB));
    lab.assert_clean();
}

#[test]
fn qemu_works_on_files_of_a_mount() {
    if client("qemu-io", "qemu-utils").is_none() || client("qemu-img", "qemu-utils").is_none() {
        return;
    }
    let lab = Lab::with_pool("512M");
    let Some(mount) = Mounted::new(&lab) else { return };
    let file = mount.path("disk.raw");
    let qemu_img = || client("qemu-img", "qemu-utils").unwrap();
    succeed(qemu_img().args(["create", "-q", "-f", "raw"]).arg(&file).arg("64M"));
    for cache in ["none", "writeback"] {
        let commands = [
            "aio_write -P 0xaa 0 1M",
            "aio_write -P 0xbb 1M 4M",
            "aio_flush",
            "write -P 0xcc 300k 3k",
            "write -z -u 2M 1M",
            "discard 4M 512k",
            "flush",
            "read -P 0xaa 0 300k",
            "read -P 0xcc 300k 3k",
            "read -P 0xbb 1M 1M",
            "read -P 0 2M 1M",
        ];
        let commands = commands.iter().flat_map(|c| ["-c", c]);
        let mut qemu_io = client("qemu-io", "qemu-utils").unwrap();
        let text = succeed(qemu_io.args(["-f", "raw", "-t", cache, "-d", "unmap"]).args(commands).arg(&file));
        assert!(!text.contains("failed"), "{text}");
    }
    let qcow = mount.path("disk.qcow2");
    succeed(qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&file).arg(&qcow));
    succeed(qemu_img().args(["compare", "-f", "raw", "-F", "qcow2"]).arg(&file).arg(&qcow));
    succeed(qemu_img().args(["check", "-q"]).arg(&qcow));
    succeed(qemu_img().args(["snapshot", "-c", "x"]).arg(&qcow));
    let map = succeed(qemu_img().args(["map", "--output=json", "-f", "raw"]).arg(&file));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let data = |e: &&serde_json::Value| e["data"] == true;
    let bytes: u64 = map.as_array().unwrap().iter().filter(data).map(|e| e["length"].as_u64().unwrap()).sum();
    assert!(bytes < 6 << 20, "{map}");
    mount.unmount(&lab);
    lab.assert_clean();
}

/// fsx continues with the file of the previous run, and also with a clone of it.
#[test]
fn clones_between_runs_of_fsx_never_change() {
    let Some(_) = client("fsx", "make tools") else { return };
    let lab = Lab::with_pool("1G");
    let Some(mount) = Mounted::new(&lab) else { return };
    let runs = crate::kill_loop::number_from_env("FORKDISK_TEST_FSX_RUNS", 12);
    let mut ancestors: Vec<(String, u64)> = Vec::new();
    let config = lab.write_file(
        "fsx.toml",
        b"flen = 3000000\n[opsize]\nmax = 150000\n[weights]\nclose_open = \
        1.0\nread = 10.0\nwrite = 10.0\nmapread = 5.0\nmapwrite = 5.0\ntruncate = 2.0\nfsync = 1.0\nfdatasync = \
        1.0\nposix_fallocate = 1.0\npunch_hole = 3.0\ncopy_file_range = 3.0\nhole = 1.0\n",
    );
    for run in 0..runs {
        let mut fsx = client("fsx", "make tools").unwrap();
        fsx.args(["-N", "250", "-S", &(run + 1).to_string(), "-f"]).arg(&config).arg(mount.path("file"));
        succeed(&mut fsx);
        sh(&mount, &format!("cp file clone{run}; cmp file clone{run}"));
        ancestors.push((format!("clone{run}"), fingerprint(&mount.path("file"))));
        for (name, print) in &ancestors {
            assert_eq!(fingerprint(&mount.path(name)), *print, "{name} has changed after run {run}");
        }
    }
    mount.unmount(&lab);
    let Some(mount) = Mounted::new(&lab) else { return };
    for (name, print) in &ancestors {
        assert_eq!(fingerprint(&mount.path(name)), *print, "{name} after mounting again");
    }
    mount.unmount(&lab);
    lab.assert_clean();
}

/// A loop device on a file, with direct I/O. Detached when dropped.
pub struct Loop(pub String);

impl Loop {
    pub fn new(file: &std::path::Path) -> Option<Loop> {
        if !rustix::process::geteuid().is_root() || !std::path::Path::new("/dev/loop-control").exists() {
            missing("loop devices need root and the kernel's loop driver");
            return None;
        }
        let mut losetup = Command::new("losetup");
        let name = succeed(losetup.args(["--find", "--show", "--direct-io=on"]).arg(file));
        Some(Loop(name.trim().to_string()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).output_within(LIMIT);
    }
}

/// A mount point that is unmounted when dropped.
pub struct Below(pub std::path::PathBuf);

impl Drop for Below {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output_within(LIMIT);
    }
}

#[test]
fn file_systems_on_loop_devices_are_whole_and_so_are_their_clones() {
    let lab = Lab::with_pool("2G");
    let Some(mount) = Mounted::new(&lab) else { return };
    let kinds = [
        ("ext4", "mkfs.ext4 -q -F", "fsck.ext4 -fn", "e2fsprogs"),
        ("xfs", "mkfs.xfs -q -f", "xfs_repair -n", "xfsprogs"),
        ("btrfs", "mkfs.btrfs -q -f", "btrfs check --readonly", "btrfs-progs"),
    ];
    for (kind, mkfs, fsck, package) in kinds {
        if client(mkfs.split(' ').next().unwrap(), package).is_none() {
            return;
        }
        let file = mount.path(kind);
        File::create(&file).unwrap().set_len(400 << 20).unwrap();
        let Some(disk) = Loop::new(&file) else { return };
        sh(&mount, &format!("PATH=$PATH:/usr/sbin:/sbin; {mkfs} {}", disk.0));
        let below = Below(lab.path("below"));
        fs::create_dir_all(&below.0).unwrap();
        succeed(Command::new("mount").args(["-o", "discard", &disk.0]).arg(&below.0));
        fs::write(below.0.join("one"), noise(1, 20 * MIB)).unwrap();
        fs::create_dir(below.0.join("d")).unwrap();
        (0..50).for_each(|i| fs::write(below.0.join(format!("d/{i}")), noise(i, 10_000)).unwrap());
        succeed(Command::new("sync").arg("-f").arg(&below.0));
        // As after a crash: the file system is in use while it is cloned.
        fs::copy(&file, mount.path(&format!("{kind}-clone"))).unwrap();
        fs::remove_file(below.0.join("one")).unwrap();
        succeed(Command::new("sync").arg("-f").arg(&below.0));
        succeed(Command::new("fstrim").arg(&below.0));
        drop(below);
        let trimmed = sh(&mount, &format!("stat -c %b {kind}"));
        let full = sh(&mount, &format!("stat -c %b {kind}-clone"));
        let blocks = |text: &str| text.trim().parse::<u64>().unwrap();
        assert!(blocks(&trimmed) + 30_000 < blocks(&full), "{kind}: trimmed {trimmed} full {full}");
        sh(&mount, &format!("PATH=$PATH:/usr/sbin:/sbin; {fsck} {} >/dev/null", disk.0));
        drop(disk);
        let Some(clone) = Loop::new(&mount.path(&format!("{kind}-clone"))) else { return };
        let below = Below(lab.path("below"));
        succeed(Command::new("mount").arg(&clone.0).arg(&below.0));
        assert!(fs::read(below.0.join("one")).unwrap() == noise(1, 20 * MIB), "{kind}");
        assert!((0..50).all(|i| fs::read(below.0.join(format!("d/{i}"))).unwrap() == noise(i, 10_000)), "{kind}");
        drop(below);
        sh(&mount, &format!("PATH=$PATH:/usr/sbin:/sbin; {fsck} {} >/dev/null", clone.0));
    }
    mount.unmount(&lab);
    lab.assert_clean();
}
