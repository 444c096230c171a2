//! Changes of attached volumes: refused with the name of the device, or followed by the device.

use std::fs;

use crate::attach::{Attaching, device_text, shell};
use crate::harness::{POOL, Server, client, noise};

const MIB: usize = 1 << 20;

#[test]
fn what_cannot_be_done_to_an_attached_volume_names_the_device_and_the_way() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let lab = &it.lab;
    lab.import("a", &noise(1, MIB));
    lab.ok(&["snapshot", "pool.img/a@1"]);
    for is_served in [false, true] {
        let server = is_served.then(|| Server::start(lab));
        let (device, snapshot) = (it.attach("a"), it.attach("a@1"));
        let verbs: [(&[&str], _); 8] = [
            (&["delete", "-r", "pool.img/a"], &device),
            (&["delete", "pool.img/a@1"], &snapshot),
            (&["rollback", "pool.img/a@1"], &device),
            (&["rollback", "--force", "pool.img/a@1"], &device),
            (&["resize", "pool.img/a", "--size", "4K", "--allow-shrink"], &device),
            (&["resize", "pool.img/a", "--size", "4K", "--allow-shrink", "--force"], &device),
            (&["rename", "pool.img/a", "pool.img/b"], &device),
            (&["rename", "pool.img/a@1", "pool.img/a@2"], &snapshot),
        ];
        for (verb, device) in verbs {
            let (refused, device) = (lab.run(verb).refused(), device_text(device));
            let way = format!("is attached as {device}: `forkdisk detach {device}` first");
            assert!(refused.contains(&way) && !refused.contains("mnt"), "{verb:?}: {refused}");
        }
        assert!(fs::read(&device).unwrap() == noise(1, MIB), "nothing was taken away");
        for device in [&device, &snapshot] {
            lab.ok(&["detach", device_text(device)]);
        }
        if let Some(server) = server {
            server.stop();
        }
        // The advice in the message works.
        lab.ok(&["rollback", "pool.img/a@1"]);
    }
    lab.assert_clean();
}

/// A pool that only a mount has open runs no verbs; the files of a served mount can be attached like any others.
#[test]
fn a_loop_device_on_a_file_of_a_mount_is_named_too() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let lab = &it.lab;
    lab.import("a", &noise(1, MIB));
    let dir = lab.path("mnt");
    fs::create_dir(&dir).unwrap();
    let server = Server::start_with(lab, POOL, &["--mount", dir.to_str().unwrap()]);
    let device = shell(&format!("losetup --find --show {}/a", dir.display()));
    let device = device.trim();
    let refused = lab.run(&["delete", "pool.img/a"]).refused();
    assert!(refused.contains(&format!("is attached as {device}: `forkdisk detach {device}`")), "{refused}");
    lab.ok(&["detach", device]);
    lab.ok(&["delete", "pool.img/a"]);
    server.stop();
    lab.assert_clean();
}

/// Growing a mounted ext4 needs CAP_SYS_RESOURCE. Without it the file system is grown unmounted.
#[test]
fn a_mounted_file_system_grows_with_its_volume() {
    let Some(it) = Attaching::with_pool("2G") else { return };
    let lab = &it.lab;
    let capabilities = shell("sed -n 's/CapEff:[[:space:]]*//p' /proc/self/status");
    let has_resource = u64::from_str_radix(capabilities.trim(), 16).unwrap() & 1 << 24 != 0;
    let kinds = [
        ("ext4", "mkfs.ext4 -q -F", has_resource.then_some("resize2fs"), "fsck.ext4 -fn"),
        ("xfs", "mkfs.xfs -q -f", Some("xfs_growfs"), "xfs_repair -n"),
    ];
    for (name, mkfs, online, fsck) in kinds {
        if client(mkfs.split(' ').next().unwrap(), "e2fsprogs, xfsprogs").is_none() {
            return;
        }
        let address = format!("{POOL}/{name}");
        lab.ok(&["create", &address, "--size", "320M"]);
        let device = it.attach(name);
        let shown = device_text(&device);
        shell(&format!("{mkfs} {shown}"));
        it.mount(&device, "defaults");
        fs::write(it.below.join("before"), noise(1, 20 * MIB)).unwrap();
        for (size, bytes) in [("500M", 500 << 20), ("600001023", 600_001_023)] {
            let resized = lab.run(&["resize", &address, "--size", size]);
            assert_eq!((resized.stderr.as_str(), resized.status.code()), ("", Some(0)));
            assert_eq!(shell(&format!("blockdev --getsize64 {shown}")).trim(), format!("{}", bytes / 512 * 512));
        }
        match online {
            Some(program) => drop(shell(&format!("{program} {shown} 2>&1"))),
            None => {
                it.umount();
                shell(&format!("fsck.ext4 -fp {shown} > /dev/null; resize2fs {shown} 2>&1"));
                it.mount(&device, "defaults");
            }
        }
        fs::write(it.below.join("after"), noise(2, 400 * MIB)).unwrap();
        it.umount();
        shell(&format!("{fsck} {shown} > /dev/null 2>&1"));
        lab.ok(&["detach", shown]);
        let device = it.attach(name);
        it.mount(&device, "ro");
        assert!(fs::read(it.below.join("before")).unwrap() == noise(1, 20 * MIB));
        assert!(fs::read(it.below.join("after")).unwrap() == noise(2, 400 * MIB));
        it.umount();
        lab.ok(&["detach", device_text(&device)]);
    }
    lab.assert_clean();
}
