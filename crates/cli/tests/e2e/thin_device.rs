//! A pool on a thin block device, once the storage below that is full.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::harness::{Lab, Limited, Server, client, noise, succeed, wait_until};
use crate::mount_programs::{Below, Loop};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

/// A device of 512 MiB on an ext4 of 100 MiB.
struct Thin {
    device: Loop,
    place: PathBuf,
    _mounted: Below,
    _below: Loop,
}

impl Thin {
    fn new(lab: &Lab) -> Option<Thin> {
        fs::File::create(lab.path("fs.img")).unwrap().set_len(100 << 20).unwrap();
        let below = Loop::new(&lab.path("fs.img"))?;
        succeed(client("mkfs.ext4", "e2fsprogs")?.args(["-q", "-F", "-m", "0"]).arg(&below.0));
        let place = lab.path("small");
        fs::create_dir(&place).unwrap();
        succeed(Command::new("mount").arg(&below.0).arg(&place));
        let mounted = Below(place.clone());
        fs::File::create(place.join("lun")).unwrap().set_len(512 << 20).unwrap();
        let device = Loop::new(&place.join("lun"))?;
        Some(Thin { device, place, _mounted: mounted, _below: below })
    }

    /// Fills the remaining space.
    fn fill(&self) {
        fs::write(self.place.join("filler"), vec![1; 128 * MIB]).unwrap_err();
    }

    fn make_room(&self) {
        fs::remove_file(self.place.join("filler")).unwrap();
    }
}

/// Returns the outcome of a verb that must not wait for space.
#[track_caller]
fn answer(lab: &Lab, verb: &[&str]) -> String {
    let output = lab.command(verb).output_within(Duration::from_secs(60)).unwrap_or_else(|e| panic!("{verb:?}: {e}"));
    format!("{:?} {}", output.status.code(), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_thin_device_that_is_full_is_like_a_full_file_system() {
    let lab = Lab::empty();
    let Some(thin) = Thin::new(&lab) else { return };
    let pool = thin.device.0.as_str();
    lab.ok(&["init", pool]);
    let volume = format!("{pool}/v");
    lab.ok(&["create", &volume, "--size", "400M"]);
    let server = Server::start_with(&lab, pool, &["--wait-for-space", "3s"]);
    let mut disk = Client::connect(server.socket(), "v").unwrap();
    (0..16).for_each(|i| disk.write(i << 20, &noise(i, MIB), false).unwrap());
    disk.flush().unwrap();
    lab.ok(&["snapshot", &format!("{volume}@s")]);
    thin.fill();
    let start = std::time::Instant::now();
    let refused = (16..64).find_map(|i| disk.write(i << 20, &noise(i, MIB), false).err());
    assert_eq!(refused.expect("it is full").raw_os_error(), Some(28));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    // Existing data is read, and written in place once it is exclusive.
    assert!(disk.read(0, MIB).unwrap() == noise(0, MIB));
    let deleted = answer(&lab, &["delete", &format!("{volume}@s")]);
    assert!(deleted.starts_with("Some(0)"), "{deleted}");
    disk.flush().unwrap();
    let listed = answer(&lab, &["list", pool]);
    assert!(listed.starts_with("Some(0)"), "{listed}");
    drop(disk);
    server.stop_impatiently();
    // On an idle pool: each verb answers, and loses nothing.
    for verb in [&["create", &format!("{pool}/w"), "--size", "1M"][..], &["delete", &format!("{pool}/w")]] {
        let _ = answer(&lab, verb);
    }
    thin.make_room();
    wait_until("there is room", || lab.run(&["create", &format!("{pool}/x"), "--size", "1M"]).status.success());
    let server = Server::start_on(&lab, pool);
    let mut disk = Client::connect(server.socket(), "v").unwrap();
    (0..16).for_each(|i| assert!(disk.read(i << 20, MIB).unwrap() == noise(i, MIB), "{i}"));
    disk.write(100 << 20, &noise(100, MIB), true).unwrap();
    drop(disk);
    server.stop();
    assert_eq!(lab.run(&["check", pool]).status.code(), Some(0));
}

#[test]
fn the_journal_of_a_pool_on_a_device_is_set_aside_when_it_is_made() {
    let lab = Lab::empty();
    let Some(thin) = Thin::new(&lab) else { return };
    lab.ok(&["init", &thin.device.0, "--journal", "16M"]);
    use std::os::unix::fs::MetadataExt;
    let stored = fs::metadata(thin.place.join("lun")).unwrap().blocks() * 512;
    assert!(stored >= 16 << 20, "{stored} bytes are stored");
}
