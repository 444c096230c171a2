//! Pools on file systems with and without cloning: reads and writes of a copying break there.

use std::fs::File;
use std::path::PathBuf;

use serde_json::json;

use crate::harness::{LIMIT, Lab, Limited, Server, client, missing, noise, succeed};
use crate::nbd::Client;

const MIB: usize = 1 << 20;
const POOL: &str = "fs/pool.img";

/// A separate file system in a file of the lab, mounted on `fs`. Unmounted when dropped.
struct FileSystem {
    dir: PathBuf,
}

impl FileSystem {
    fn new(lab: &Lab, kind: &str, package: &str, options: &[&str]) -> Option<FileSystem> {
        let mut mkfs = client(&format!("mkfs.{kind}"), package)?;
        let mut mount = client("mount", "mount")?;
        let (image, dir) = (lab.path("fs.img"), lab.path("fs"));
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        succeed(mkfs.arg("-q").args(options).arg(&image));
        std::fs::create_dir(&dir).unwrap();
        let mounted = mount.args(["-o", "loop", "-t", kind]).arg(&image).arg(&dir).output_within(LIMIT).unwrap();
        if !mounted.status.success() {
            let why = String::from_utf8_lossy(&mounted.stderr).trim().to_string();
            missing(&format!(
                "cannot mount {kind} from a file ({why}): this takes root, loop devices and the file system"
            ));
            return None;
        }
        Some(FileSystem { dir })
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if let Some(mut umount) = client("umount", "mount") {
            // Lazily, since a failed test may have left the pool open.
            let _ = umount.arg("-l").arg(&self.dir).output_within(LIMIT);
        }
    }
}

/// Breaks chunks of a served pool on that file system with `offload` on; returns the copier's
/// figures, and checks all contents, also after the server was killed.
fn break_chunks(kind: &str, package: &str, options: &[&str]) -> Option<serde_json::Value> {
    let lab = Lab::empty();
    let _fs = FileSystem::new(&lab, kind, package, options)?;
    let at = |name: &str| format!("{POOL}/{name}");
    lab.ok(&["init", POOL, "--size", "256M"]);
    lab.ok(&["create", &at("a"), "--size", "16M", "--chunk", "1M", "--break", "copy"]);
    assert_eq!(lab.json(&["copier", POOL, "--set", "offload=on"])["offload"], true);
    assert_eq!(lab.json(&["copier", POOL])["offload"], true, "it lasts");
    let server = Server::start_on(&lab, POOL);
    let image = noise(3, 12 * MIB);
    let mut nbd = Client::connect(server.socket(), "a").unwrap();
    nbd.write(0, &image, false).unwrap();
    lab.ok(&["snapshot", &at("a@s")]);
    let mut expected = image.clone();
    expected.resize(16 * MIB, 0);
    // A page in the middle; both ends of a chunk; a page in a hole.
    for (i, place) in [MIB + 40_960, 4 * MIB, 6 * MIB - 4096, 13 * MIB].into_iter().enumerate() {
        nbd.write(place as u64, &[i as u8 + 7; 4096], false).unwrap();
        expected[place..place + 4096].fill(i as u8 + 7);
    }
    let shown = lab.json(&["copier", POOL, "--volume", "a"]);
    // Part of a page, across the boundary of two chunks.
    nbd.write(8 * MIB as u64 - 512, &[1; 1024], false).unwrap();
    expected[8 * MIB - 512..8 * MIB + 512].fill(1);
    // In place, over cloned data.
    nbd.write(MIB as u64, &[2; 8192], false).unwrap();
    expected[MIB..MIB + 8192].fill(2);
    nbd.flush().unwrap();
    assert!(nbd.read(0, 16 * MIB).unwrap() == expected);
    server.kill();
    let contents = |name: &str| {
        let output = lab.command(&["export", &at(name), "-"]).output_within(LIMIT).unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    assert!(contents("a") == expected, "{kind}: what was flushed is lost");
    assert!(contents("a@s")[..12 * MIB] == image, "{kind}: the snapshot has changed");
    let check = lab.run(&["check", POOL]);
    assert_eq!(check.status.code(), Some(0), "{check:?}");
    Some(shown)
}

fn clones(kind: &str, package: &str, options: &[&str]) {
    let Some(shown) = break_chunks(kind, package, options) else { return };
    let figures = ["jobs", "failed", "bytes_read", "bytes_written", "bytes_offloaded"].map(|name| &shown[name]);
    // At the ends of a chunk the written range is not cloned first.
    let cloned = 3 * MIB - 2 * 4096;
    assert_eq!(figures, [&json!(3), &json!(0), &json!(0), &json!(3 * 4096), &json!(cloned)], "{kind}: {shown}");
}

#[test]
fn on_xfs_a_copying_break_writes_what_the_client_wrote_and_reads_nothing() {
    clones("xfs", "xfsprogs", &["-m", "reflink=1"]);
}

#[test]
fn on_btrfs_a_copying_break_writes_what_the_client_wrote_and_reads_nothing() {
    clones("btrfs", "btrfs-progs", &[]);
}

#[test]
fn on_a_file_system_that_cannot_clone_offload_changes_nothing() {
    for (kind, package, options) in [("ext4", "e2fsprogs", &[] as &[&str]), ("xfs", "xfsprogs", &["-m", "reflink=0"])] {
        let Some(shown) = break_chunks(kind, package, options) else { continue };
        let figures = ["jobs", "failed", "bytes_written", "bytes_offloaded"].map(|name| &shown[name]);
        assert_eq!(figures, [&json!(3), &json!(0), &json!(3 * MIB), &json!(0)], "{kind}: {shown}");
    }
}
