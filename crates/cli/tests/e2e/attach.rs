//! Volumes as block devices of the kernel: by its loop driver here, by its NBD client in user-mode
//! Linux (`kernel_nbd`).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{LIMIT, Lab, Limited, POOL, Run, Server, client, missing, noise, succeed, wait_until};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// A lab whose devices, mounts and daemon are removed when it is dropped, even if the test fails.
pub struct Attaching {
    pub lab: Lab,
    /// Mount point for file systems on devices.
    pub below: PathBuf,
}

impl Attaching {
    /// Returns `None` (after saying why) if loop devices are not available.
    pub fn with_pool(size: &str) -> Option<Attaching> {
        let has = |path: &str| Path::new(path).exists();
        if !rustix::process::geteuid().is_root() || !has("/dev/loop-control") || !has("/dev/fuse") {
            missing("block devices need root, the kernel's loop driver and FUSE");
            return None;
        }
        let lab = Lab::with_pool(size);
        let below = lab.path("below");
        fs::create_dir(&below).unwrap();
        Some(Attaching { lab, below })
    }

    /// Attaches by the loop driver, or by the means in `FORKDISK_TEST_ATTACH_BY`; returns the device.
    #[track_caller]
    pub fn attach(&self, object: &str) -> PathBuf {
        let by = std::env::var("FORKDISK_TEST_ATTACH_BY").unwrap_or("loop".to_string());
        let device = self.lab.ok(&["attach", "--by", &by, &format!("{POOL}/{object}")]);
        let device = PathBuf::from(device.trim_end());
        assert!(device.starts_with("/dev/"), "{device:?}");
        device
    }

    fn attached(&self) -> Vec<(String, String)> {
        let list = self.lab.json(&["attach", "--list", POOL]);
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_string();
        list.as_array().unwrap().iter().map(|a| (text(&a["device"]), text(&a["object"]))).collect()
    }

    #[track_caller]
    pub fn mount(&self, device: &Path, options: &str) {
        succeed(Command::new("mount").args(["-o", options]).arg(device).arg(&self.below));
    }

    #[track_caller]
    pub fn umount(&self) {
        succeed(Command::new("umount").arg(&self.below));
    }
}

impl Drop for Attaching {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-q").arg(&self.below).output_within(LIMIT);
        let list = self.lab.run(&["attach", "--list", POOL, "--json"]).stdout;
        let list: serde_json::Value = serde_json::from_str(&list).unwrap_or_default();
        for device in list.as_array().into_iter().flatten().filter_map(|a| a["device"].as_str()) {
            self.lab.run(&["detach", device]);
        }
        self.lab.run(&["stop", POOL]);
    }
}

#[track_caller]
pub fn shell(script: &str) -> String {
    succeed(Command::new("bash").args(["-euo", "pipefail", "-c", &format!("PATH=$PATH:/usr/sbin:/sbin; {script}")]))
}

pub fn device_text(device: &Path) -> &str {
    device.to_str().unwrap()
}

#[test]
fn file_systems_on_attached_volumes_are_made_used_trimmed_and_whole() {
    let Some(it) = Attaching::with_pool("3G") else { return };
    let lab = &it.lab;
    let kinds = [
        ("ext4", "mkfs.ext4 -q -F", "fsck.ext4 -fn", "e2fsprogs"),
        ("xfs", "mkfs.xfs -q -f", "xfs_repair -n", "xfsprogs"),
        ("btrfs", "mkfs.btrfs -q -f", "btrfs check --readonly", "btrfs-progs"),
    ];
    for (kind, mkfs, fsck, package) in kinds {
        if client(mkfs.split(' ').next().unwrap(), package).is_none() {
            return;
        }
        lab.ok(&["create", &format!("{POOL}/{kind}"), "--size", "400M"]);
        let device = it.attach(kind);
        let shown = device_text(&device);
        assert_eq!(it.attached(), [(shown.to_string(), kind.to_string())]);
        assert_eq!(shell(&format!("blockdev --getsize64 {shown}")).trim(), (400 << 20).to_string());
        assert_eq!(shell(&format!("cat /sys/block/{}/loop/dio", &shown[5..])).trim(), "1", "direct I/O");
        shell(&format!("{mkfs} {shown}"));
        it.mount(&device, "defaults");
        fs::write(it.below.join("kept"), noise(1, 20 * MIB)).unwrap();
        fs::write(it.below.join("gone"), noise(2, 60 * MIB)).unwrap();
        shell(&format!("sync -f {}", it.below.display()));
        let full = lab.json(&["list", &format!("{POOL}/{kind}")])[0]["referenced"].as_u64().unwrap();
        fs::remove_file(it.below.join("gone")).unwrap();
        // A file system may free a removed file's blocks some time later.
        let mut trims = (0..60).map(|_| {
            shell(&format!("sync -f {0}; fstrim {0}", it.below.display()));
            lab.json(&["list", &format!("{POOL}/{kind}")])[0]["referenced"].as_u64().unwrap()
        });
        let is_less = |&trimmed: &u64| {
            let less = trimmed + (50 << 20) < full;
            if !less {
                std::thread::sleep(std::time::Duration::from_millis(500));
            }
            less
        };
        assert!(trims.any(|trimmed| is_less(&trimmed)), "{kind}: fstrim frees little of {full} bytes");
        let refused = lab.run(&["detach", shown]).refused();
        assert!(refused.contains("is in use") && refused.contains("unmount"), "{refused}");
        let refused = lab.run(&["stop", POOL]).refused();
        assert!(refused.contains(kind) && refused.contains("forkdisk detach"), "{refused}");
        lab.ok(&["snapshot", &format!("{POOL}/{kind}@used")]);
        it.umount();
        shell(&format!("{fsck} {shown} > /dev/null"));
        lab.ok(&["detach", shown]);
        assert_eq!(it.attached(), []);
        // The daemon that was started for the device has ended.
        assert!(lab.run(&["stop", POOL]).refused().contains("no daemon"), "{kind}");
        lab.assert_clean();
        // Taken while it was mounted: as after a crash.
        lab.ok(&["clone", &format!("{POOL}/{kind}@used"), &format!("{POOL}/{kind}-clone")]);
        let clone = it.attach(&format!("{kind}-clone"));
        it.mount(&clone, if kind == "xfs" { "nouuid" } else { "defaults" });
        assert!(fs::read(it.below.join("kept")).unwrap() == noise(1, 20 * MIB), "{kind}");
        it.umount();
        lab.ok(&["detach", &format!("{POOL}/{kind}-clone")]);
    }
    lab.assert_clean();
}

#[test]
fn partitions_of_an_attached_volume_are_devices() {
    let Some(it) = Attaching::with_pool("512M") else { return };
    it.lab.ok(&["create", "pool.img/disk", "--size", "128M"]);
    let disk = it.attach("disk");
    // One Linux partition from 1 MiB on, in an MBR partition table.
    let mut sector = [0; 512];
    sector[446 + 4] = 0x83;
    sector[446 + 8..446 + 12].copy_from_slice(&2048u32.to_le_bytes());
    sector[446 + 12..446 + 16].copy_from_slice(&(100u32 << 11).to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let file = File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&sector, 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    it.lab.ok(&["detach", device_text(&disk)]);
    let disk = it.attach("disk");
    let partition = PathBuf::from(format!("{}p1", disk.display()));
    if !partition.exists() {
        // This kernel does not read partition tables itself.
        let Some(mut partx) = client("partx", "util-linux") else { return };
        succeed(partx.arg("--add").arg(&disk));
    }
    wait_until("the partition is a device", || partition.exists());
    shell(&format!("mkfs.ext4 -q -F {}", partition.display()));
    it.mount(&partition, "defaults");
    fs::write(it.below.join("x"), noise(3, MIB)).unwrap();
    let refused = it.lab.run(&["detach", "pool.img/disk"]).refused();
    assert!(refused.contains("is in use"), "{refused}");
    it.umount();
    shell(&format!("fsck.ext4 -fn {} > /dev/null", partition.display()));
    it.lab.ok(&["detach", "pool.img/disk"]);
    assert!(!partition.exists(), "the partition goes with its disk");
    it.lab.assert_clean();
}

#[test]
fn a_served_pool_stays_served_and_every_way_shows_the_same() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let lab = &it.lab;
    lab.import("a", &noise(4, 4 * MIB));
    lab.ok(&["snapshot", "pool.img/a@then"]);
    let server = Server::start(lab);
    let (a, then) = (it.attach("a"), it.attach("a@then"));
    assert_eq!(it.attached().len(), 2);
    let refused = lab.run(&["attach", "--by", "loop", "pool.img/a"]).refused();
    assert!(refused.contains("attached already") && refused.contains(device_text(&a)), "{refused}");
    let device = File::options().write(true).open(&a).unwrap();
    device.write_all_at(&noise(5, 8192), MIB as u64).unwrap();
    device.sync_all().unwrap();
    let mut nbd = Client::connect(server.socket(), "a").unwrap();
    assert!(nbd.read(MIB as u64, 8192).unwrap() == noise(5, 8192));
    drop((nbd, device));
    assert!(fs::read(&then).unwrap() == noise(4, 4 * MIB), "the snapshot is as it was");
    assert!(File::options().write(true).open(&then).and_then(|f| f.write_all_at(b"x", 0)).is_err());
    for object in ["pool.img/a", "pool.img/a@then"] {
        lab.ok(&["detach", object]);
    }
    let refused = lab.run(&["detach", "pool.img/a"]).refused();
    assert!(refused.contains("is not attached"), "{refused}");
    let clients = Client::connect(server.socket(), "a").unwrap();
    drop(clients);
    server.stop();
    lab.assert_clean();
}

/// A mount without a daemon has the pool to itself: its files are attached where they are.
#[test]
fn a_mounted_pool_is_attached_through_its_mount() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let Some(mount) = crate::mount::Mounted::new(&it.lab) else { return };
    fs::write(mount.path("a"), noise(6, 2 * MIB)).unwrap();
    let device = it.attach("a");
    assert!(fs::read(&device).unwrap() == noise(6, 2 * MIB));
    let refused = it.lab.run(&["umount", "mnt"]).refused();
    assert!(refused.contains("in use"), "{refused}");
    it.lab.ok(&["detach", device_text(&device)]);
    mount.unmount(&it.lab);
    it.lab.assert_clean();
}

#[test]
fn what_cannot_be_attached_is_refused_with_the_reason() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let lab = &it.lab;
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let none = lab.run(&["attach", "pool.img/none"]).refused();
    assert!(none.contains("none"), "{none}");
    assert!(lab.run(&["stop", POOL]).refused().contains("no daemon"), "nothing is left behind");
    if !Path::new("/sys/module/nbd").exists() {
        let why = lab.run(&["attach", "--by", "nbd", "pool.img/a"]).refused();
        assert!(why.contains("no NBD client"), "{why}");
    }
    let why = lab.run(&["detach", "/dev/loop-none"]).refused();
    assert!(why.contains("attached nothing there"), "{why}");
    let Some(mut setpriv) = client("setpriv", "util-linux") else { return };
    for (name, mode) in [("", 0o755), (POOL, 0o666)] {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(lab.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let program = lab.command(&["attach", "pool.img/a"]);
    let mut command = setpriv.args(["--reuid", "65534", "--clear-groups", "--"]);
    command = command.arg(program.get_program()).args(program.get_args()).current_dir(lab.path(""));
    let run = Run::from(command.output_within(LIMIT).unwrap());
    // If other users may not run the program itself, nothing is shown.
    if run.stderr.starts_with("forkdisk: ") {
        assert!(run.refused().contains("only root"));
    }
}

#[test]
fn several_attach_and_detach_an_idle_pool_at_once() {
    let Some(it) = Attaching::with_pool("300M") else { return };
    let lab = &it.lab;
    let names = ["a", "b", "c"];
    names.iter().for_each(|name| drop(lab.ok(&["create", &format!("{POOL}/{name}"), "--size", "8M"])));
    for _ in 0..2 {
        let at_once = |verb: &[&str]| {
            let begin = |name: &&str| {
                let address = format!("{POOL}/{name}");
                lab.command(&[verb, &[address.as_str()]].concat()).spawn().unwrap()
            };
            let children: Vec<_> = names.iter().map(begin).collect();
            children.into_iter().for_each(|mut child| {
                let ended = crate::harness::wait_at_most(&mut child, std::time::Duration::from_secs(120));
                assert!(ended.success(), "{verb:?}");
            });
        };
        at_once(&["attach", "--by", "loop"]);
        assert_eq!(it.attached().len(), 3);
        at_once(&["detach"]);
        assert_eq!(it.attached(), []);
        assert!(lab.run(&["stop", POOL]).refused().contains("no daemon"));
    }
    lab.assert_clean();
}

#[test]
fn a_machine_without_ublk_says_so() {
    let Some(it) = Attaching::with_pool("64M") else { return };
    if Path::new("/dev/ublk-control").exists() {
        return missing("this machine has ublk: make test-ublk");
    }
    it.lab.ok(&["create", "pool.img/a", "--size", "8M"]);
    let refused = it.lab.run(&["attach", "--by", "ublk", "pool.img/a"]).refused();
    assert!(
        refused.contains("ublk: /dev/ublk-control does not exist") && refused.contains("modprobe ublk_drv"),
        "{refused}"
    );
    assert!(it.lab.run(&["stop", POOL]).refused().contains("no daemon"));
}

/// Synced data on an attached ext4 survives its killed daemon; afterwards the device can be
/// detached and attached in any order of operations.
#[test]
fn a_device_whose_daemon_was_killed_goes_and_comes_back_in_any_order() {
    let Some(attaching) = Attaching::with_pool("256M") else { return };
    let lab = &attaching.lab;
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "64M"]);
    let server = Server::start(lab);
    let device = attaching.attach("a");
    shell(&format!("mkfs.ext4 -q {}", device_text(&device)));
    attaching.mount(&device, "rw");
    let mut server = Some(server);
    for order in ["detach attach", "attach", "serve stop", "serve attach", "serve detach attach"] {
        let file = attaching.below.join(order.replace(' ', "-"));
        fs::write(&file, noise(order.len() as u64, MIB)).unwrap();
        succeed(Command::new("sync").arg("-f").arg(&attaching.below));
        fs::write(attaching.below.join("unsynced"), noise(9, MIB)).unwrap();
        server.take().unwrap().kill();
        let busy = lab.run(&["detach", &attaching.attached()[0].0]);
        assert!(busy.refused().contains("unmount"), "it is mounted still");
        succeed(Command::new("umount").arg(&attaching.below));
        for step in order.split(' ') {
            match step {
                "serve" => server = Some(Server::start(lab)),
                // A dead device does not keep the daemon from ending; it is removed by the next attach.
                "stop" => {
                    lab.ok(&["stop", POOL]);
                    server = None;
                }
                "detach" => drop(lab.ok(&["detach", &format!("{POOL}/a")])),
                _ => assert!(attaching.attach("a").starts_with("/dev/")),
            }
        }
        if order.ends_with("stop") {
            attaching.attach("a");
        }
        let now = attaching.attached();
        assert_eq!(now.len(), 1, "{order}: {now:?}");
        attaching.mount(Path::new(&now[0].0), "rw");
        assert!(fs::read(&file).unwrap() == noise(order.len() as u64, MIB), "{order}");
        if server.is_none() {
            // A separate daemon for the next round.
            attaching.umount();
            lab.ok(&["detach", &format!("{POOL}/a")]);
            server = Some(Server::start(lab));
            let device = attaching.attach("a");
            attaching.mount(&device, "rw");
        }
    }
    attaching.umount();
    lab.ok(&["detach", &format!("{POOL}/a")]);
    server.unwrap().stop();
    lab.assert_clean();
}
