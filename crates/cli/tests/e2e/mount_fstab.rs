//! A pool mounted by mount(8) and /etc/fstab, and unmounted by umount(8).

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::harness::{Lab, POOL, missing, noise, succeed};
use crate::mount::Mounted;

pub fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        missing("other users, mount(8) and namespaces need root");
    }
    is_root
}

#[test]
fn a_mount_behind_umount_waits_for_the_daemon_that_is_ending() {
    let lab = Lab::with_pool("256M");
    let Some(mount) = Mounted::new(&lab) else { return };
    mount.unmount(&lab);
    if !is_root() {
        return;
    }
    for round in 0..4 {
        lab.ok(&["mount", POOL, "mnt", "--daemon"]);
        fs::write(lab.path("mnt/f"), noise(round, 40 << 20)).unwrap();
        succeed(Command::new("umount").arg(lab.path("mnt")));
    }
    assert!(lab.contents("f") == noise(3, 40 << 20));
    lab.assert_clean();
}

/// Runs in a private namespace in which `/sbin` has the helper that `make install` puts there.
#[test]
fn mount_and_fstab_mount_a_pool() {
    let lab = Lab::with_pool("64M");
    if !Path::new("/dev/fuse").exists() || !is_root() {
        return missing("FUSE is not to be had");
    }
    if !fs::read_to_string("/proc/filesystems").unwrap().contains("overlay") {
        return missing("overlayfs puts the helper into /sbin: load the kernel module overlay");
    }
    ["mnt", "sbin", "sbin/nothing"].iter().for_each(|dir| fs::create_dir(lab.path(dir)).unwrap());
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_forkdisk"), lab.path("sbin/mount.fuse.forkdisk")).unwrap();
    let (at, options) = (lab.path("").display().to_string(), "noauto,nofail,_netdev,x-systemd.automount,noexec");
    let at = at.trim_end_matches('/');
    lab.write_file("fstab", format!("{at}/pool.img {at}/mnt fuse.forkdisk {options} 0 0\n").as_bytes());
    let script = format!(
        "mount -t overlay overlay -o lowerdir={at}/sbin:/usr/sbin /usr/sbin
         mount -t fuse.forkdisk {at}/pool.img {at}/mnt; trap 'umount -l {at}/mnt' EXIT
         findmnt -n -o FSTYPE,SOURCE {at}/mnt | grep -q 'fuse.forkdisk *{at}/pool.img'
         echo one > {at}/mnt/f; umount {at}/mnt
         mount --fstab {at}/fstab {at}/mnt; grep -q one {at}/mnt/f; findmnt -n -o OPTIONS {at}/mnt | grep -q noexec
         umount {at}/mnt
         mount -t fuse.forkdisk forkdisk#{at}/pool.img {at}/mnt -o ro; ! touch {at}/mnt/g 2> /dev/null; umount {at}/mnt
         if mount -t fuse.forkdisk {at}/none.img {at}/mnt 2> {at}/said; then exit 9; fi; grep -q none.img {at}/said
         trap - EXIT"
    );
    succeed(Command::new("unshare").args(["--mount", "bash", "-euo", "pipefail", "-c", &script]));
    assert!(lab.contents("f") == b"one\n");
    lab.assert_clean();
}
