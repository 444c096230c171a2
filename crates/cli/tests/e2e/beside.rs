//! What lies beside a disk lives and forks with it: names of all programs, symbolic links, FIFOs, sockets, and files
//! that get their name when they are complete.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, linkat, mknodat};

use crate::harness::{Lab, noise};
use crate::mount::{Mounted, sh};
use crate::mount_served::Both;

fn names_in(dir: &Path) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().as_bytes().to_vec()).collect();
    names.sort();
    names
}

#[test]
fn files_have_the_names_that_programs_give_them() {
    let lab = Lab::with_pool("256M");
    let Some(both) = Both::start(&lab) else { return };
    let mut names: Vec<&[u8]> = vec![
        b"a:b",
        b"a~",
        b"#sql-1",
        b"a b",
        b" a ",
        b"rabbit@host",
        b"Copy (1).txt",
        b"100%",
        b"%41",
        b"a?*[b]{c}",
        b"\"'\\`$!&;|<>^",
        b"two\nlines",
        b"\xff\xfe",
        "Stra\u{df}e \u{65e5}".as_bytes(),
        b"@",
        b"-",
        b"...",
    ];
    let dir = both.path("vm");
    fs::create_dir(&dir).unwrap();
    for (i, name) in names.iter().enumerate() {
        fs::write(dir.join(OsStr::from_bytes(name)), [i as u8]).unwrap();
    }
    fs::create_dir(both.path(".snapshots/vm/at@noon")).unwrap();
    lab.ok(&["fork", "pool.img/vm", "pool.img/kid"]);
    names.sort();
    for folder in ["vm", "kid", ".snapshots/vm/at@noon"] {
        assert_eq!(names_in(&both.path(folder)), names, "{folder}");
    }
    assert!(fs::write(dir.join("x".repeat(256)), b"").unwrap_err().raw_os_error() == Some(36), "ENAMETOOLONG");
    assert!(fs::write(dir.join("@".repeat(100)), b"").unwrap_err().raw_os_error() == Some(36), "ENAMETOOLONG");
    // The same names elsewhere: with escapes.
    let escaped = "kid/rabbit%40host";
    assert!(lab.names().iter().any(|name| name == escaped));
    lab.ok(&["clone", "pool.img/kid/rabbit%40host", "pool.img/kid/%22 %22"]);
    assert!(both.path("kid/\" \"").exists());
    assert_eq!(both.nbd(escaped).read(0, 1).unwrap().len(), 1);
    let refused = lab.run(&["create", "pool.img/a%41", "--size", "1M"]).refused();
    assert!(refused.contains("'%' stands only before"), "{refused}");
    both.stop();
    assert_eq!(lab.contents("vm/rabbit%40host@at%40noon").len(), 1);
    lab.assert_clean();
}

#[test]
fn links_and_special_files_are_what_they_are_after_a_kill() {
    let lab = Lab::with_pool("256M");
    let Some(mut both) = Both::start(&lab) else { return };
    let dir = both.path("vm");
    fs::create_dir(&dir).unwrap();
    let long = "t/".repeat(2047) + "t";
    symlink("../base", dir.join("link")).unwrap();
    symlink(&long, dir.join("long")).unwrap();
    mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o620), 0).unwrap();
    let listener = UnixListener::bind(dir.join("api.sock")).unwrap();
    UnixStream::connect(dir.join("api.sock")).unwrap();
    drop(listener);
    let device = mknodat(CWD, dir.join("dev"), FileType::CharacterDevice, Mode::from_raw_mode(0o600), 0x103);
    assert_eq!(device.unwrap_err().raw_os_error(), 1, "EPERM");
    fs::write(dir.join("file"), b"1").unwrap();
    sh_in(&dir, "chown -h 7:8 link; chmod 600 fifo; mv api.sock vm.sock; touch -h -d @1000 link; rm file");
    both.kill();
    let both = Both::start(&lab).unwrap();
    lab.ok(&["fork", "pool.img/vm", "pool.img/kid"]);
    for folder in ["vm", "kid"] {
        let of = |name: &str| fs::symlink_metadata(both.path(folder).join(name)).unwrap();
        assert_eq!(names_in(&both.path(folder)), [&b"fifo"[..], b"link", b"long", b"vm.sock"]);
        assert_eq!(fs::read_link(both.path(folder).join("link")).unwrap(), Path::new("../base"));
        assert_eq!(fs::read_link(both.path(folder).join("long")).unwrap(), Path::new(&long));
        let link = of("link");
        assert_eq!((link.uid(), link.gid(), link.mtime(), link.len()), (7, 8, 1000, 7));
        assert!(of("fifo").file_type().is_fifo() && of("fifo").mode() & 0o777 == 0o600);
        assert!(of("vm.sock").file_type().is_socket());
    }
    // They are no disks.
    assert!(both.try_nbd("kid/link").is_err());
    let refused = lab.run(&["export", "pool.img/vm/fifo", "out"]).refused();
    assert!(refused.contains("is a FIFO, not a disk"), "{refused}");
    let listed = lab.json(&["list", "pool.img/kid"]);
    let kinds: Vec<&str> = listed.as_array().unwrap().iter().map(|v| v["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["fifo", "link", "link", "socket"]);
    both.stop();
    lab.assert_clean();
}

#[test]
fn a_file_gets_its_name_when_it_is_complete() {
    let lab = Lab::with_pool("256M");
    let Some(mount) = Mounted::new(&lab) else { return };
    let unnamed = |bytes: &[u8]| {
        let mut file = File::options()
            .read(true)
            .write(true)
            .mode(0o640)
            .custom_flags(rustix::fs::OFlags::TMPFILE.bits() as i32)
            .open(mount.dir())
            .unwrap();
        file.write_all(bytes).unwrap();
        file
    };
    let name = |file: &File, name: &str| {
        let fd = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
        linkat(CWD, fd.as_str(), CWD, mount.path(name), AtFlags::SYMLINK_FOLLOW)
    };
    let (mut first, second) = (unnamed(&noise(1, 300_000)), unnamed(b"2"));
    assert_eq!(names_in(mount.dir()).len(), 0);
    name(&first, "a").unwrap();
    assert_eq!(name(&second, "a").unwrap_err().raw_os_error(), 17, "EEXIST");
    name(&first, "b").unwrap();
    fs::remove_file(mount.path("b")).unwrap();
    first.write_all(b"more").unwrap();
    let meta = first.metadata().unwrap();
    assert_eq!((meta.nlink(), meta.mode() & 0o7777, meta.len()), (1, 0o640 & meta.mode(), 300_004));
    assert!(fs::read(mount.path("a")).unwrap() == [&noise(1, 300_000)[..], b"more"].concat());
    drop((first, second));
    sh(&mount, "[ \"$(ls)\" = a ]");
    mount.unmount(&lab);
    assert_eq!(lab.names(), ["a"]);
    lab.assert_clean();
}

/// A machine's folder: programs work in it while it is kept and forked, and each fork is what it was.
#[test]
fn a_machines_folder_is_kept_and_forked_while_it_runs() {
    let lab = Lab::with_pool("512M");
    let Some(mut both) = Both::start(&lab) else { return };
    let dir = both.path("vm");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("disk"), noise(1, 3 << 20)).unwrap();
    fs::write(dir.join("memory"), noise(2, 2 << 20)).unwrap();
    symlink("memory", dir.join("current")).unwrap();
    let listener = UnixListener::bind(dir.join("api.sock")).unwrap();
    let mut log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
    let write_config = |i: u32| {
        fs::write(dir.join("config.json.tmp"), format!("{{\"round\": {i}}}")).unwrap();
        fs::rename(dir.join("config.json.tmp"), dir.join("config.json")).unwrap();
    };
    for i in 0..5 {
        write_config(i);
        writeln!(log, "round {i}").unwrap();
        fs::create_dir(both.path(&format!(".snapshots/vm/s{i}"))).unwrap();
        lab.ok(&["fork", "pool.img/vm", &format!("pool.img/live/{i}")]);
        // What the snapshot has is replaced, renamed and removed.
        write_config(100);
        fs::rename(dir.join("log"), dir.join("log.1")).unwrap();
        log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
        fs::remove_file(dir.join("current")).unwrap();
        symlink("disk", dir.join("current")).unwrap();
    }
    UnixStream::connect(dir.join("api.sock")).unwrap();
    drop((listener, log));
    for i in 0..5 {
        lab.ok(&["fork", &format!("pool.img/vm@s{i}"), &format!("pool.img/kept/{i}")]);
    }
    both.kill();
    let both = Both::start(&lab).unwrap();
    for i in 0..5 {
        for folder in [format!("live/{i}"), format!("kept/{i}"), format!(".snapshots/vm/s{i}")] {
            let read = |name: &str| fs::read_to_string(both.path(&folder).join(name)).unwrap();
            assert_eq!(read("config.json"), format!("{{\"round\": {i}}}"), "{folder}");
            assert_eq!(read("log"), format!("round {i}\n"), "{folder}");
            let target = if i == 0 { "memory" } else { "disk" };
            assert_eq!(fs::read_link(both.path(&folder).join("current")).unwrap(), Path::new(target));
            assert!(fs::read(both.path(&folder).join("disk")).unwrap() == noise(1, 3 << 20));
            let socket = fs::symlink_metadata(both.path(&folder).join("api.sock")).unwrap();
            assert!(socket.file_type().is_socket());
            assert_eq!(both.path(&folder).join("log.1").exists(), i > 0, "{folder}");
        }
    }
    sh_in(&both.path(""), "rm -r vm; for s in .snapshots/vm/s[0-3]; do rmdir $s; done; ls .snapshots/vm/s4");
    assert_eq!(fs::read_to_string(both.path(".snapshots/vm/s4/config.json")).unwrap(), "{\"round\": 4}");
    fs::remove_dir(both.path(".snapshots/vm/s4")).unwrap();
    both.stop();
    assert!(!lab.names().iter().any(|name| name.starts_with(".snapshots") || name.starts_with("vm")));
    lab.assert_clean();
}

/// After a program has replaced a file, verbs find the new one by its name, and the snapshots of the old one.
#[test]
fn verbs_take_a_replaced_file_for_a_file_and_not_for_a_folder() {
    let lab = Lab::with_pool("256M");
    let Some(both) = Both::start(&lab) else { return };
    let shown = |name: &str| fs::read_to_string(both.path(name)).unwrap();
    fs::write(both.path("log"), "old").unwrap();
    fs::create_dir(both.path(".snapshots/log/monday")).unwrap();
    fs::create_dir(both.path(".snapshots/log/friday")).unwrap();
    fs::remove_file(both.path("log")).unwrap();
    lab.ok(&["clone", "pool.img/log@monday", "pool.img/copy"]);
    assert_eq!(shown("copy"), "old");
    fs::rename(both.path(".snapshots/log/friday"), both.path(".snapshots/log/sunday")).unwrap();
    assert_eq!(shown(".snapshots/log/sunday"), "old");
    fs::write(both.path("log"), "new one").unwrap();
    assert!(fs::rename(both.path(".snapshots/log/sunday"), both.path(".snapshots/log/monday")).is_err());
    lab.ok(&["snapshot", "pool.img/log@now"]);
    let refused = lab.run(&["snapshot", "pool.img/log@monday"]).refused();
    assert!(refused.contains("exists already"), "{refused}");
    let refused = lab.run(&["rename", "pool.img/log@now", "pool.img/log@sunday"]).refused();
    assert!(refused.contains("exists already"), "{refused}");
    assert_eq!((shown(".snapshots/log/now"), shown(".snapshots/log/monday")), ("new one".into(), "old".into()));
    lab.ok(&["rollback", "pool.img/log@monday"]);
    assert_eq!(shown("log"), "old");
    lab.ok(&["rollback", "pool.img/log@now", "--live"]);
    assert_eq!(shown("log"), "new one");
    both.stop();
    lab.assert_clean();
}

fn sh_in(dir: &Path, script: &str) {
    crate::mount_served::sh(dir, script);
}
