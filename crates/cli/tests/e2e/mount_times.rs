//! Every change of a volume changes the times of its file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::{Lab, client, noise, succeed};
use crate::mount::Mounted;
use crate::mount_served::{Both, sh};

const MIB: usize = 1 << 20;

/// Returns the times of the last change of the contents and of the attributes, in nanoseconds.
fn times(file: &Path) -> (i128, i128) {
    let found = file.metadata().unwrap();
    let nanos = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
    (nanos(found.mtime(), found.mtime_nsec()), nanos(found.ctime(), found.ctime_nsec()))
}

#[track_caller]
fn later(what: &str, file: &Path, change: impl FnOnce()) {
    let before = times(file);
    std::thread::sleep(Duration::from_millis(20));
    change();
    let after = times(file);
    assert!(after.0 > before.0 && after.1 > before.1, "{what}: {before:?}, then {after:?}");
}

#[track_caller]
fn same(what: &str, file: &Path, change: impl FnOnce()) {
    let before = times(file);
    std::thread::sleep(Duration::from_millis(20));
    change();
    assert_eq!(times(file), before, "{what}");
}

#[test]
fn every_way_to_change_a_volume_changes_the_times_of_its_file() {
    let lab = Lab::with_pool("256M");
    lab.import("v", &noise(1, 4 * MIB));
    lab.ok(&["snapshot", "pool.img/v@then"]);
    let Some(both) = Both::start(&lab) else { return };
    let (file, dir) = (both.path("v"), both.path(""));
    let mut nbd = both.nbd("v");
    // The first write of a page is recorded in the map; later ones change only data.
    for round in 0..2 {
        later("an NBD write", &file, || {
            nbd.write(4096, &noise(2 + round, 4096), false).unwrap();
            nbd.flush().unwrap();
        });
        later("a direct write", &file, || {
            sh(&dir, "dd if=/dev/zero of=v bs=4096 count=1 oflag=direct conv=notrunc status=none");
        });
        later("a buffered write", &file, || sh(&dir, "dd if=/dev/zero of=v bs=100 count=1 conv=notrunc status=none"));
    }
    later("a trim", &file, || nbd.trim(MIB as u64, 65536).unwrap());
    later("a hole", &file, || sh(&dir, "fallocate -p -o 2M -l 64K v"));
    if client("python3", "python3").is_some() {
        let script = "import mmap, os
f = os.open('v', os.O_RDWR)
m = mmap.mmap(f, 8192)
m[100:104] = b'mmap'
m.flush()";
        let write = || drop(succeed(client("python3", "python3").unwrap().args(["-c", script]).current_dir(&dir)));
        later("a map in memory", &file, write);
    }
    same("reading and flushing", &file, || {
        nbd.read(0, 4096).unwrap();
        nbd.flush().unwrap();
        sh(&dir, "cat v > /dev/null; sync v");
    });
    later("a resize", &file, || drop(lab.ok(&["resize", "pool.img/v", "--size", "8M"])));
    nbd.leave().unwrap();
    later("a copy over it", &file, || sh(&dir, "cat .snapshots/v/then > v"));
    crate::harness::wait_until("the client has gone", || lab.run(&["rollback", "pool.img/v@then"]).status.success());
    later("a rollback", &file, || drop(lab.ok(&["rollback", "pool.img/v@then"])));
    // A time that is set takes precedence over earlier writes.
    sh(&dir, "dd if=/dev/zero of=v bs=100 count=1 conv=notrunc status=none; touch -d 2001-02-03T04:05:06Z v; sync v");
    assert_eq!(times(&file).0, 981_173_106_000_000_000);
    let mut nbd = both.nbd("v");
    nbd.write(0, &noise(4, 4096), false).unwrap();
    nbd.flush().unwrap();
    let last = times(&file);
    assert!(last.0 > 981_173_106_000_000_000);
    nbd.leave().unwrap();
    both.stop();
    let Some(mount) = Mounted::new(&lab) else { return };
    assert_eq!(times(&mount.path("v")), last, "they are kept");
    mount.unmount(&lab);
    lab.ok(&["resize", "pool.img/v", "--size", "9M"]);
    let Some(mount) = Mounted::new(&lab) else { return };
    assert!(times(&mount.path("v")) > last, "a verb on an idle pool");
    mount.unmount(&lab);
    lab.assert_clean();
}

/// A time is recorded by a commit that happens anyway, and otherwise after the commit interval.
#[test]
fn the_time_of_a_write_survives_a_kill_after_the_commit_interval() {
    let lab = Lab::with_pool("256M");
    lab.import("v", &noise(1, MIB));
    let Some(mut both) = Both::start_with(&lab, &["--commit-interval", "300ms"]) else { return };
    let file = both.path("v");
    let imported = times(&file);
    let mut nbd = both.nbd("v");
    // In place: no record is written for it.
    nbd.write(0, &noise(2, 4096), true).unwrap();
    let written = times(&file);
    assert!(written > imported);
    std::thread::sleep(Duration::from_millis(1500));
    both.kill();
    let Some(mount) = Mounted::new(&lab) else { return };
    assert_eq!(times(&mount.path("v")), written);
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn rsync_copies_what_an_nbd_client_wrote() {
    let lab = Lab::with_pool("256M");
    lab.import("v", &noise(1, MIB));
    let (Some(both), Some(_)) = (Both::start(&lab), client("rsync", "rsync")) else { return };
    let rsync = || drop(succeed(Command::new("rsync").arg("-a").arg(both.path("v")).arg(lab.path("out/"))));
    rsync();
    // rsync compares whole seconds.
    std::thread::sleep(Duration::from_millis(1100));
    let mut nbd = both.nbd("v");
    nbd.write(8192, &noise(2, 4096), false).unwrap();
    nbd.flush().unwrap();
    rsync();
    assert!(std::fs::read(lab.path("out/v")).unwrap()[8192..12288] == noise(2, 4096));
    nbd.leave().unwrap();
    both.stop();
}
