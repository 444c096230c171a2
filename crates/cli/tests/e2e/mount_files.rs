//! A mounted pool behaves like any file system, and copies are clones.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom, XattrFlags, fallocate, flock, getxattr, seek, setxattr};
use rustix::io::Errno;

use crate::harness::{Lab, noise, succeed};
use crate::mount::{Mounted, python, sh};

const MIB: usize = 1 << 20;
const KIB: u64 = 1 << 10;

fn lab() -> Lab {
    Lab::with_pool("1G")
}

#[test]
fn files_of_a_mount_are_the_volumes_of_its_pool() {
    let lab = lab();
    lab.import("vm/base", &noise(1, MIB + 100));
    lab.ok(&["snapshot", "pool.img/vm/base@then"]);
    let Some(mount) = Mounted::new(&lab) else { return };
    assert!(fs::read(mount.path("vm/base")).unwrap() == noise(1, MIB + 100));
    fs::write(mount.path("vm/new"), noise(2, 5000)).unwrap();
    fs::write(mount.path("vm/base"), b"now").unwrap();
    assert!(fs::read(mount.path(".snapshots/vm/base/then")).unwrap() == noise(1, MIB + 100));
    let error = fs::write(mount.path(".snapshots/vm/base/then"), b"x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc_erofs()));
    mount.unmount(&lab);
    assert_eq!(lab.names(), ["vm/base", "vm/base@then", "vm/new"]);
    assert_eq!(lab.contents("vm/base"), b"now");
    assert!(lab.contents("vm/new") == noise(2, 5000));
    assert!(lab.contents("vm/base@then") == noise(1, MIB + 100));
    lab.assert_clean();
}

fn libc_erofs() -> i32 {
    Errno::ROFS.raw_os_error()
}

#[test]
fn a_name_that_was_looked_for_in_vain_is_there_once_it_is_made() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(
        &mount,
        "for n in a b c d e f b/x; do [ ! -e $n ]; done; echo one > a; [ -e a ]; mkdir b; [ -d b ]; [ ! -e b/x ]; cp a \
         b/x; [ -e b/x ]
         mv a c; [ -e c ]; [ ! -e a ]; mv b d; [ -e d/x ]; [ ! -e b ]; cp c a; rm a; [ ! -e a ]; : > a; [ -e a ]
         [ ! -e .snapshots/e ]; [ ! -e .snapshots/c/s ]; cp c e; [ -d .snapshots/e ]; mkdir .snapshots/c/s; [ $(cat \
         .snapshots/c/s) = one ]
         rmdir .snapshots/c/s; [ ! -e .snapshots/c/s ]; mv c f; [ -d .snapshots/f ]; [ ! -e .snapshots/c ]; [ $(ls | \
         wc -l) = 4 ]",
    );
    mount.unmount(&lab);
    assert_eq!(lab.names(), ["a", "d/x", "e", "f"]);
    lab.assert_clean();
}

#[test]
fn cp_makes_a_clone_whatever_the_size() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let used = |lab: &Lab| lab.stat("used");
    fs::write(mount.path("a"), noise(3, 64 * MIB)).unwrap();
    sh(&mount, "truncate -s 900T large; printf x | dd of=large bs=1 seek=800T conv=notrunc status=none");
    mount.unmount(&lab);
    let before = used(&lab);
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(
        &mount,
        "cp a b; cp a d; cp b c; cp large larger; cp -a a e; cmp a b; cmp a c; rm d; [ $(stat -c %s larger) = $((900 \
         << 40)) ]",
    );
    fs::File::options().write(true).open(mount.path("b")).unwrap().write_all_at(&noise(4, 8192), 4096).unwrap();
    sh(&mount, "! cmp -s a b; cmp a c; cmp -n 4096 a b; cmp -i 12288 a b; du -k b | grep -q '^65536\\b'");
    mount.unmount(&lab);
    let grown = used(&lab) - before;
    assert!(grown < MIB as u64, "five clones of 64 MiB and a write of 8 KiB took {grown} bytes");
    let du = lab.json(&["du", "pool.img/c"]);
    let du = &du["volumes"][0];
    assert_eq!(du["referenced"], 64 << 20);
    assert!(du["exclusive"].as_u64().unwrap() < 64 << 10, "{du}");
    assert_eq!(lab.json(&["list", "pool.img/c"])[0]["origin"], "b");
    lab.assert_clean();
}

/// A removed file is reachable only by its descriptor: data copied from it is shared by both.
#[test]
fn a_file_removed_while_open_does_not_write_over_what_was_copied_from_it() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let a = File::options().read(true).write(true).create(true).truncate(false).open(mount.path("a")).unwrap();
    a.write_all_at(&noise(7, 4 * MIB), 0).unwrap();
    a.sync_all().unwrap();
    fs::remove_file(mount.path("a")).unwrap();
    let copy = |name: &str, from: u64, len: usize| {
        let to = File::create(mount.path(name)).unwrap();
        let (mut at, mut into, mut left) = (from, 0, len);
        while left > 0 {
            left -= rustix::fs::copy_file_range(&a, Some(&mut at), &to, Some(&mut into), left).unwrap();
        }
    };
    copy("whole", 0, 4 * MIB);
    copy("part", MIB as u64, 2 * MIB);
    a.write_all_at(&noise(8, 4 * MIB), 0).unwrap();
    a.sync_all().unwrap();
    copy("later", 0, 4 * MIB);
    drop(a);
    mount.unmount(&lab);
    let (before, after) = (noise(7, 4 * MIB), noise(8, 4 * MIB));
    assert!(lab.contents("whole") == before && lab.contents("part") == before[MIB..3 * MIB]);
    assert!(lab.contents("later") == after);
    lab.assert_clean();
}

#[test]
fn a_sparse_file_of_many_pieces_is_cloned_with_its_holes() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let file = File::create(mount.path("a")).unwrap();
    for i in 0..2000 {
        file.write_all_at(&[(i % 250) as u8 + 1; 100], i * 50_000).unwrap();
    }
    file.set_len(200 << 20).unwrap();
    file.sync_all().unwrap();
    sh(&mount, "cp a b; cmp a b; [ $(stat -c %b a) = $(stat -c %b b) ]; [ $(stat -c %b a) -lt 100000 ]");
    drop(file);
    mount.unmount(&lab);
    let referenced = lab.json(&["list", "pool.img/b"])[0]["referenced"].as_u64().unwrap();
    assert_eq!(referenced, lab.json(&["list", "pool.img/a"])[0]["referenced"].as_u64().unwrap());
    lab.assert_clean();
}

#[test]
fn ranges_are_shared_and_unaligned_edges_copied() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let (source, mut expected) = (noise(5, 9 * MIB), noise(6, 12 * MIB));
    fs::write(mount.path("a"), &source).unwrap();
    fs::write(mount.path("b"), &expected).unwrap();
    let (a, b) = (File::open(mount.path("a")).unwrap(), File::options().write(true).open(mount.path("b")).unwrap());
    // Whole blocks; pages; the same offset within a page; another offset; beyond the end.
    let ranges =
        [(MIB, 2 * MIB, 3 * MIB), (4096, 8 * MIB, 40960), (100, 4196, 70_000), (7, 5000, 9999), (0, 12 * MIB, 5)];
    for (from, to, len) in ranges {
        let (mut done, mut at, mut into) = (0, from as u64, to as u64);
        while done < len {
            done += rustix::fs::copy_file_range(&a, Some(&mut at), &b, Some(&mut into), len - done).unwrap();
        }
        expected.resize(expected.len().max(to + len), 0);
        expected[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    assert!(fs::read(mount.path("b")).unwrap() == expected);
    drop((a, b));
    mount.unmount(&lab);
    assert!(lab.contents("b") == expected);
    let exclusive = lab.json(&["du", "pool.img/b"])["volumes"][0]["exclusive"].as_u64().unwrap();
    assert!(exclusive < 9 << 20, "three of twelve MiB are shared, yet {exclusive} bytes are its own");
    lab.assert_clean();
}

#[test]
fn removing_gives_space_back_also_while_a_file_is_open() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    fs::write(mount.path("kept"), noise(7, 4 * MIB)).unwrap();
    let open = File::options().read(true).write(true).open(mount.path("kept")).unwrap();
    fs::remove_file(mount.path("kept")).unwrap();
    assert!(!mount.path("kept").exists());
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    open.write_all_at(b"still here", 100).unwrap();
    open.sync_all().unwrap();
    let mut bytes = [0; 10];
    open.read_exact_at(&mut bytes, 100).unwrap();
    assert_eq!(&bytes, b"still here");
    // A new file with the same name is another one.
    fs::write(mount.path("kept"), b"new").unwrap();
    assert_eq!(open.metadata().unwrap().len(), 4 << 20);
    drop(open);
    fs::remove_file(mount.path("kept")).unwrap();
    mount.unmount(&lab);
    assert_eq!(lab.names(), [""; 0]);
    assert_eq!(lab.stat("used"), Lab::with_pool("1G").stat("used"));
    lab.assert_clean();
}

#[test]
fn renaming_moves_files_and_folders_and_replaces_what_was_there() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(
        &mount,
        "mkdir -p d/e; echo one > d/e/a; echo two > b; exec 3< b; mv d/e/a b; [ $(cat b) = one ]; [ $(cat <&3) = two ]
         mv b d/e/c; mv d f; [ $(cat f/e/c) = one ]; [ ! -e d ]; mkdir g; mv -T f g; [ $(cat g/e/c) = one ]
         ! mv -T g g/e 2>/dev/null; mkdir h; touch h/x; ! mv -T g h 2>/dev/null; mv -n g/e/c h/x; [ -e g/e/c ]
         mv g/e/c 'h/%'; mv 'h/%' g/e/c; [ -e g/e/c ]; mkdir .snapshots/g/e/c/s; mv g k; [ $(cat \
         .snapshots/k/e/c/s) = one ]",
    );
    fs::rename(mount.path("h/x"), mount.path("k/e/c")).unwrap();
    assert_eq!(fs::read(mount.path(".snapshots/k/s/e/c")).unwrap(), b"one\n", "what a snapshot shows stays");
    mount.unmount(&lab);
    assert_eq!((lab.contents("k/e/c@s"), lab.contents("k/e/c")), (b"one\n".to_vec(), Vec::new()));
    lab.assert_clean();
}

#[test]
fn folders_stay_when_they_are_empty() {
    let lab = lab();
    lab.ok(&["create", "pool.img/cli/vol", "--size", "1M"]);
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(&mount, "mkdir empty; chmod 700 empty; rm cli/vol; [ -d cli ]; mkdir -p x/y/z; rmdir x/y/z; [ -d x/y ]");
    let error = fs::remove_dir(mount.path("x")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty);
    mount.unmount(&lab);
    let Some(mount) = Mounted::new(&lab) else { return };
    let text = sh(&mount, "ls -A; stat -c %a empty; rm -r x cli; ls -A");
    assert_eq!(text, "cli\nempty\nx\n700\nempty\n");
    mount.unmount(&lab);
    lab.ok(&["create", "pool.img/empty/v", "--size", "1M"]);
    lab.run(&["create", "pool.img/empty", "--size", "1M"]).refused();
    lab.assert_clean();
}

#[test]
fn mkdir_takes_a_snapshot_of_what_was_written_and_rmdir_deletes_it() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(
        &mount,
        "echo one > v; mkdir .snapshots/v/s1; echo two > v; mkdir .snapshots/v/s2; echo three > v
         [ $(cat .snapshots/v/s1) = one ]; [ $(cat .snapshots/v/s2) = two ]; [ $(ls .snapshots/v | wc -l) = 2 ]
         ! mkdir .snapshots/v/s1 2>/dev/null; ! mkdir .snapshots/none/s 2>/dev/null
         [ $(cat v) = three ]; cp .snapshots/v/s1 w; [ $(cat w) = one ]
         mv .snapshots/v/s1 .snapshots/v/first; rmdir .snapshots/v/s2; rm -f .snapshots/v/first; [ -z \"$(ls \
         .snapshots/v)\" ]
         mkdir .snapshots/v/s1; rm v; [ ! -e v ]; [ $(cat .snapshots/v/s1) = three ]
         rmdir .snapshots/v/s1; [ ! -e .snapshots/v ]; ! touch .snapshots/x 2>/dev/null",
    );
    mount.unmount(&lab);
    assert_eq!(lab.names(), ["w"]);
    lab.assert_clean();
}

#[test]
fn modes_owners_and_times_are_kept() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let stat = "stat -c '%n %a %u %g %X %y %s' a d; stat -c '%a' .";
    let said = sh(
        &mount,
        &format!(
            "umask 027; echo x > a; mkdir d; chmod 4751 a; chown 12:34 d; chmod 1777 d; chmod 711 .
             touch -a -d '1999-01-02 03:04:05 UTC' a; touch -m -d '2001-01-01 00:00:00.123456789 UTC' a d; {stat}"
        ),
    );
    assert!(said.contains("a 4751"), "{said}");
    assert!(said.contains("d 1777 12 34") && said.contains("915246245 2001-01-01 00:00:00.123456789"), "{said}");
    mount.unmount(&lab);
    let Some(mount) = Mounted::new(&lab) else { return };
    assert_eq!(sh(&mount, stat), said);
    // Writing clears the special bits.
    sh(&mount, "echo y >> a; [ $(stat -c %a a) = 751 ] || [ $(id -u) = 0 ]");
}

#[test]
fn holes_are_holes() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let file = File::create_new(mount.path("a")).unwrap();
    file.set_len(4 << 20).unwrap();
    file.write_all_at(&noise(8, 8192), 1 << 20).unwrap();
    file.write_all_at(&noise(9, 4096), 3 << 20).unwrap();
    let at = |from| seek(&file, from).map_err(|e| e.raw_os_error());
    assert_eq!(at(SeekFrom::Data(0)), Ok(1 << 20));
    assert_eq!(at(SeekFrom::Hole(0)), Ok(0));
    assert_eq!(at(SeekFrom::Hole(1 << 20)), Ok((1 << 20) + 8192));
    assert_eq!(at(SeekFrom::Data((1 << 20) + 8192)), Ok(3 << 20));
    assert_eq!(at(SeekFrom::Hole(3 << 20)), Ok((3 << 20) + 4096));
    assert_eq!(at(SeekFrom::Data((3 << 20) + 4096)), Err(Errno::NXIO.raw_os_error()));
    assert_eq!(at(SeekFrom::Hole(4 << 20)), Err(Errno::NXIO.raw_os_error()));
    file.sync_all().unwrap();
    assert_eq!(fs::metadata(mount.path("a")).unwrap().blocks(), 24);
}

#[test]
fn fallocate_extends_punches_and_zeroes() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let mut expected = noise(10, 2 * MIB);
    fs::write(mount.path("a"), &expected).unwrap();
    let file = File::options().read(true).write(true).open(mount.path("a")).unwrap();
    let call = |flags, offset: u64, len: u64| fallocate(&file, flags, offset, len);
    let size = || file.metadata().unwrap().len();
    call(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 5000, 100 * KIB).unwrap();
    expected[5000..5000 + 100 * 1024].fill(0);
    call(FallocateFlags::ZERO_RANGE, 1 << 20, 3 << 20).unwrap();
    expected[1 << 20..].fill(0);
    expected.resize(4 * MIB, 0);
    call(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 10, 100).unwrap();
    expected[10..110].fill(0);
    call(FallocateFlags::KEEP_SIZE, 0, 8 << 20).unwrap();
    assert_eq!(size(), 4 << 20);
    call(FallocateFlags::empty(), 0, 5 << 20).unwrap();
    expected.resize(5 * MIB, 0);
    assert!(fs::read(mount.path("a")).unwrap() == expected);
    assert_eq!(call(FallocateFlags::empty(), 0, 1 << 40), Err(Errno::NOSPC));
    assert!(call(FallocateFlags::COLLAPSE_RANGE, 0, 4096).is_err());
    file.sync_all().unwrap();
    assert_eq!(seek(&file, SeekFrom::Hole(0)).unwrap(), 8192, "whole pages of the hole give their space back");
}

#[test]
fn truncating_and_growing_again_shows_zeroes() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(
        &mount,
        "head -c 3000000 /dev/urandom > a; truncate -s 1234567 a; truncate -s 5000000 a; cmp -n 3765433 -i 1234567:0 a \
         /dev/zero
         head -c 100 a > h; : > a; [ $(stat -c %s a) = 0 ]; truncate -s 3000000 a; cmp -n 3000000 a /dev/zero; [ \
         $(stat -c %b a) = 0 ]
         printf end >> a; [ $(stat -c %s a) = 3000003 ]; [ $(tail -c 3 a) = end ]",
    );
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn locks_exclude_each_other() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    fs::write(mount.path("a"), "x").unwrap();
    let (one, two) = (File::open(mount.path("a")).unwrap(), File::open(mount.path("a")).unwrap());
    flock(&one, FlockOperation::LockExclusive).unwrap();
    assert_eq!(flock(&two, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK));
    flock(&one, FlockOperation::Unlock).unwrap();
    flock(&two, FlockOperation::NonBlockingLockShared).unwrap();
    let script = "
import fcntl, os
a = os.open('a', os.O_RDWR)
fcntl.lockf(a, fcntl.LOCK_EX, 10, 5)
if os.fork() == 0:
    b = os.open('a', os.O_RDWR)
    fcntl.lockf(b, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 100)
    try:
        fcntl.lockf(b, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 7)
    except OSError:
        os._exit(0)
    os._exit(1)
assert os.wait()[1] == 0
";
    python(&mount, script);
}

#[test]
fn memory_maps_are_written_back_and_shared() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let script = "
import mmap, os
f = os.open('a', os.O_RDWR | os.O_CREAT)
os.ftruncate(f, 3 << 20)
m = mmap.mmap(f, 3 << 20)
for i in range(0, 3 << 20, 5000):
    m[i:i + 4] = i.to_bytes(4, 'little')
assert os.pread(f, 4, 5000) == (5000).to_bytes(4, 'little')
os.pwrite(f, b'four', 5000)
assert m[5000:5004] == b'four'
m.flush()
m.close()
os.close(f)
";
    if python(&mount, script).is_none() {
        return;
    }
    mount.unmount(&lab);
    let bytes = lab.contents("a");
    assert_eq!(&bytes[5000..5004], b"four");
    assert!((10_000..3 << 20).step_by(5000).all(|i| bytes[i..i + 4] == (i as u32).to_le_bytes()));
}

#[test]
fn files_of_a_mount_have_the_policy_of_gathering_it_was_mounted_with() {
    let lab = lab();
    lab.ok(&["create", "pool.img/before", "--size", "1M", "--gather", "off"]);
    let run = lab.run(&["mount", "pool.img", ".", "-o", "gather=always"]);
    assert!(!run.status.success() && run.stderr.contains("off, auto, idle and 1% to 99%"), "{run:?}");
    let Some(mount) = Mounted::with(&lab, &["-o", "noatime,gather=20%"]) else { return };
    sh(&mount, "echo x > a; cp a b; cp before c; mkdir f; mv b f/b");
    mount.unmount(&lab);
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(&mount, "echo x > d; cp a e");
    mount.unmount(&lab);
    let policy = |name: &str| lab.json(&["list", &format!("pool.img/{name}")])[0]["gather"].clone();
    let all = ["before", "a", "f/b", "c", "d", "e"].map(policy);
    let those = ["off", "20%", "20%", "off", "auto", "20%"];
    assert_eq!(all, those, "auto if nothing else is said; a clone has that of what it was cloned from");
    lab.assert_clean();
}

#[test]
fn properties_are_extended_attributes() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(&mount, "echo x > a; cp a b");
    let get = |file: &str, name: &str| {
        let mut value = [0; 64];
        let n = getxattr(mount.path(file), format!("user.forkdisk.{name}"), &mut value);
        n.map(|n| String::from_utf8_lossy(&value[..n]).into_owned())
    };
    assert_eq!((get("b", "origin").unwrap(), get("b", "referenced").unwrap()), ("a".into(), "4096".into()));
    let set = |name: &str, value: &str| setxattr(mount.path("b"), name, value.as_bytes(), XattrFlags::empty());
    set("user.forkdisk.chunk", "128K").unwrap();
    assert_eq!(get("b", "chunk").unwrap(), "131072");
    assert_eq!(set("user.forkdisk.chunk", "5"), Err(Errno::INVAL));
    set("user.forkdisk.gather", "20%").unwrap();
    assert_eq!((get("b", "gather").unwrap(), get("b", "scattered").unwrap()), ("20%".into(), "0".into()));
    assert_eq!(set("user.forkdisk.gather", "200%"), Err(Errno::INVAL));
    assert_eq!(set("user.forkdisk.size", "5"), Err(Errno::PERM));
    assert_eq!(set("trusted.other", "5"), Err(Errno::OPNOTSUPP));
    assert_eq!(get("b", "nothing"), Err(Errno::NODATA));
    sh(&mount, "cp -a b c");
    assert_eq!(get("c", "chunk").unwrap(), "131072");
    mount.unmount(&lab);
    assert_eq!(lab.json(&["list", "pool.img/b"])[0]["chunk"], 128 << 10);
}

#[test]
fn statfs_tells_the_truth_and_a_full_pool_is_enospc() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    let free = || rustix::fs::statfs(mount.dir()).map(|s| s.f_bavail * s.f_bsize as u64).unwrap();
    let before = free();
    let mut file = File::create(mount.path("a")).unwrap();
    file.write_all(&noise(11, 16 * MIB)).unwrap();
    file.sync_all().unwrap();
    let taken = before - free();
    // The space reserved for tables was not part of the free space before.
    let least = (16 << 20) - (16 << 20) / 256;
    assert!((least..18 << 20).contains(&taken), "16 MiB took {taken}");
    let mut outcome = Ok(());
    for _ in 0..20 {
        outcome = file.write_all(&noise(12, 4 * MIB)).and_then(|()| file.sync_all());
        if outcome.is_err() {
            break;
        }
    }
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::StorageFull);
    drop(file);
    assert!(fs::read(mount.path("a")).unwrap()[..16 * MIB] == noise(11, 16 * MIB));
    fs::remove_file(mount.path("a")).unwrap();
    crate::harness::wait_until("removing has made room", || free() > before - (2 << 20));
    fs::write(mount.path("b"), noise(13, 16 * MIB)).unwrap();
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let lab = lab();
    lab.import("a", b"hello");
    let before = fs::read(lab.path("pool.img")).unwrap();
    let Some(mount) = Mounted::with(&lab, &["-o", "ro"]) else { return };
    assert_eq!(fs::read(mount.path("a")).unwrap(), b"hello");
    assert_eq!(fs::write(mount.path("a"), "x").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(fs::create_dir(mount.path("d")).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    mount.unmount(&lab);
    assert!(fs::read(lab.path("pool.img")).unwrap() == before);
}

#[test]
fn a_mount_may_have_more_of_the_pages_that_wait_to_be_written() {
    let lab = lab();
    for wrong in ["0", "101", "half", ""] {
        let said = lab.run(&["mount", "pool.img", "mnt", "-o", &format!("max_ratio={wrong}")]).refused();
        assert!(said.contains("from 1 to 100"), "{said}");
    }
    let Some(mount) = Mounted::with(&lab, &["-o", "noatime,max_ratio=37"]) else { return };
    let device = fs::metadata(mount.path("")).unwrap().dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let ratio = fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/max_ratio")).unwrap();
    assert_eq!(ratio.trim(), "37");
    mount.unmount(&lab);
}

#[test]
fn sigterm_flushes_also_what_is_still_open() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let file = File::create(mount.path("a")).unwrap();
    file.write_all_at(&noise(14, 3 * MIB), 0).unwrap();
    mount.terminate();
    drop(file);
    assert!(lab.contents("a") == noise(14, 3 * MIB));
    lab.assert_clean();
}

#[test]
fn a_mount_in_the_background_ends_with_umount() {
    let lab = lab();
    if Mounted::new(&lab).is_none() {
        return;
    }
    let said = lab.ok(&["mount", "pool.img", "mnt", "--daemon"]);
    assert!(said.contains("is mounted on"), "{said}");
    fs::write(lab.path("mnt/a"), "x").unwrap();
    let busy = lab.run(&["create", "pool.img/b", "--size", "1M"]).refused();
    assert!(busy.contains("forkdisk mount"), "{busy}");
    let open = File::open(lab.path("mnt/a")).unwrap();
    assert!(lab.run(&["umount", "mnt"]).refused().contains("in use"));
    drop(open);
    lab.ok(&["umount", "mnt"]);
    assert_eq!(lab.names(), ["a"]);
    assert!(lab.run(&["umount", "mnt"]).refused().contains("no pool is mounted"));
    assert!(lab.run(&["mount", "pool.img", "none"]).refused().contains("none"));
    assert!(lab.run(&["mount", "pool.img", "mnt", "-o", "bad"]).refused().contains("bad"));
}

#[test]
fn somebody_without_root_mounts_through_fusermount3() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    mount.unmount(&lab);
    if !rustix::process::geteuid().is_root() {
        // All tests of this file have run without root then.
        return;
    }
    let dir = tempfile::Builder::new().prefix("forkdisk-nobody-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = dir.path().join("forkdisk");
    // By another process: this process may have children at any time, which would hold the file open for writing.
    succeed(std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_forkdisk")).arg(&program));
    let script = "cd $1; mkdir m; ./forkdisk init p --size 64M >/dev/null
         if ./forkdisk mount p m -o max_ratio=50 2> said; then exit 1; fi; grep -q max_ratio said; ! mountpoint -q m
         ./forkdisk mount p m --daemon >/dev/null
         trap 'fusermount3 -u -q -z m || true' EXIT; echo hello > m/a; cp m/a m/b; mkdir .x; cat m/b; stat -c %U m/a
         mkdir m/.snapshots/a/s; rmdir m/.snapshots/a/s; ./forkdisk umount m; ./forkdisk list p -H; ./forkdisk check p \
         >/dev/null";
    let mut nobody = std::process::Command::new("setpriv");
    nobody.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "bash", "-euc", script, "bash"]);
    let said = succeed(nobody.arg(dir.path()).env("HOME", dir.path()).env_remove("FORKDISK_POOL"));
    assert!(said.starts_with("hello\nnobody\na\t") && said.contains("\nb\t"), "{said}");
}

/// The kernel writes back the times of a file after it was removed; that they are not stored must
/// not fail a later sync.
#[test]
fn syncing_after_a_file_that_was_written_is_removed_succeeds() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let root = File::open(mount.dir()).unwrap();
    for i in 0..20 {
        let path = mount.path("a");
        fs::write(&path, noise(i, 100_000)).unwrap();
        sh(&mount, "cp a b");
        let open = File::options().write(true).open(mount.path("b")).unwrap();
        open.write_all_at(b"x", 5).unwrap();
        fs::remove_file(path).unwrap();
        rustix::fs::syncfs(&root).unwrap();
        fs::remove_file(mount.path("b")).unwrap();
        rustix::fs::syncfs(&root).unwrap();
        open.write_all_at(b"y", 6).unwrap();
        open.sync_all().unwrap();
        drop(open);
        rustix::fs::syncfs(&root).unwrap();
    }
    drop(root);
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn walkers_leave_snapshots_alone_unless_they_are_to_be_shown() {
    let lab = lab();
    lab.import("vm/a", &noise(3, MIB));
    lab.ok(&["snapshot", "pool.img/vm/a@s"]);
    let Some(mount) = Mounted::new(&lab) else { return };
    let text = sh(
        &mount,
        "find . | sort; [ $(cat .snapshots/vm/a/s | wc -c) = 1048576 ]; du -s --apparent-size -B 1M vm | cut -f 1",
    );
    assert_eq!(text, ".\n./vm\n./vm/a\n1\n");
    sh(&mount, "mkdir ../empty; rsync -r --delete ../empty/ .; [ ! -e vm/a ]; ls .snapshots/vm/a/s");
    mount.unmount(&lab);
    assert_eq!(lab.contents("vm/a@s"), noise(3, MIB), "the snapshots of what is removed stay");
    let Some(mount) = Mounted::with(&lab, &["-o", "show_snapshots"]) else { return };
    assert_eq!(sh(&mount, "ls -A"), ".snapshots\n");
    mount.unmount(&lab);
    lab.ok(&["delete", "pool.img/vm/a@s"]);
    assert!(lab.names().is_empty(), "nothing is left of a file without snapshots");
    lab.assert_clean();
}

#[test]
fn folders_change_with_their_entries() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(
        &mount,
        "[ $(stat -c %Y .) -gt 1000000000 ]; mkdir d e
         changes() { a=$(stat -c %.Y.%.Z $1); sleep 0.02; eval \"$2\"; [ $(stat -c %.Y.%.Z $1) != $a ] || { echo \"$1: \
         $2\"; exit 9; }; }
         for f in . d; do
             changes $f \": > $f/x\"; changes $f \"mv $f/x $f/y\"; changes $f \"rm $f/y\"; changes $f \"mkdir $f/s\"
             changes $f \"rmdir $f/s\"; : > $f/z; changes $f \"mv $f/z e/z\"; changes e \"mv e/z $f/z\"; rm $f/z
         done",
    );
    let before = sh(&mount, "stat -c %.Y d");
    mount.unmount(&lab);
    let Some(mount) = Mounted::new(&lab) else { return };
    assert_eq!(sh(&mount, "stat -c %.Y d"), before, "it is kept");
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn what_is_impossible_fails_with_its_own_error() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    let long = "n".repeat(200);
    let error = |outcome: std::io::Result<()>| Errno::from_io_error(&outcome.unwrap_err()).unwrap();
    sh(&mount, &format!("mkdir {long}; : > file"));
    assert_eq!(error(fs::write(mount.path(&format!("{long}/{long}")), b"")), Errno::NAMETOOLONG);
    assert_eq!(error(fs::create_dir(mount.path(&format!("{long}/{long}")))), Errno::NAMETOOLONG);
    assert_eq!(error(fs::hard_link(mount.path(&long), mount.path("link"))), Errno::PERM);
    assert_eq!(error(fs::read(mount.path("none")).map(drop)), Errno::NOENT);
    mount.unmount(&lab);
}
