//! Real file systems on volumes: created, filled and checked through a client.

use std::fs;

use crate::harness::{Lab, Mount, Server, client, noise, succeed};

const MIB: usize = 1 << 20;

#[test]
fn ext4_made_on_an_export_is_whole() {
    let Some(mut mkfs) = client("mkfs.ext4", "e2fsprogs") else { return };
    let lab = Lab::with_pool("512M");
    lab.ok(&["create", "pool.img/a", "--size", "128M"]);
    let server = Server::start(&lab);
    let Some(mount) = Mount::new(&lab, &server, "a") else { return };
    let files = lab.path("files");
    fs::create_dir(&files).unwrap();
    for i in 0..50 {
        fs::write(files.join(format!("{i}")), noise(i, (i as usize + 1) * 10_000)).unwrap();
    }
    succeed(mkfs.args(["-q", "-F", "-d"]).arg(&files).arg(mount.file()));
    mount.unmount();
    server.stop();
    lab.ok(&["export", "pool.img/a", "out.img"]);
    let mut fsck = client("fsck.ext4", "e2fsprogs").unwrap();
    succeed(fsck.arg("-fn").arg(lab.path("out.img")));
    let mut debugfs = client("debugfs", "e2fsprogs").unwrap();
    let dump = lab.path("49");
    succeed(debugfs.arg("-R").arg(format!("dump /49 {}", dump.display())).arg(lab.path("out.img")));
    assert!(fs::read(dump).unwrap() == noise(49, 500_000));
}

#[test]
fn each_clone_of_a_file_system_keeps_its_own_files() {
    let Some(mut mkfs) = client("mkfs.ext4", "e2fsprogs") else { return };
    let lab = Lab::with_pool("512M");
    let image = lab.write_file("image.raw", b"");
    fs::File::options().write(true).open(&image).unwrap().set_len(64 << 20).unwrap();
    succeed(mkfs.args(["-q", "-F"]).arg(&image));
    lab.ok(&["import", "image.raw", "pool.img/base"]);
    lab.ok(&["clone", "pool.img/base", "pool.img/vm1", "pool.img/vm2"]);
    let server = Server::start(&lab);
    for (i, vm) in ["vm1", "vm2"].iter().enumerate() {
        let Some(mount) = Mount::new(&lab, &server, vm) else { return };
        let file = lab.write_file(vm, &noise(i as u64, 3 * MIB));
        let write = format!("write {} /own", file.display());
        succeed(client("debugfs", "e2fsprogs").unwrap().args(["-w", "-R", &write]).arg(mount.file()));
        mount.unmount();
    }
    server.stop();
    for (i, vm) in ["vm1", "vm2"].iter().enumerate() {
        let out = lab.path(&format!("{vm}.img"));
        lab.ok(&["export", &format!("pool.img/{vm}"), out.to_str().unwrap()]);
        succeed(client("fsck.ext4", "e2fsprogs").unwrap().arg("-fn").arg(&out));
        let dump = lab.path("dump");
        succeed(
            client("debugfs", "e2fsprogs").unwrap().arg("-R").arg(format!("dump /own {}", dump.display())).arg(&out),
        );
        assert!(fs::read(&dump).unwrap() == noise(i as u64, 3 * MIB), "{vm}");
    }
    assert!(lab.contents("base") == fs::read(image).unwrap(), "what they were cloned from is as it was");
    lab.assert_clean();
}
