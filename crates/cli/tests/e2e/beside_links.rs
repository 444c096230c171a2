//! Hard links: all names of a file are alike, for programs, verbs, snapshots and forks.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with};

use crate::harness::{Lab, client, noise};
use crate::mount::Mounted;
use crate::mount_served::{Both, sh};

/// Number and names of a file.
fn of(path: &Path) -> (u64, u64) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.ino(), meta.nlink())
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

/// Makes, uses, renames and removes names as POSIX says.
fn check_names(dir: &Path) {
    let at = |name: &str| dir.join(name);
    fs::create_dir(at("sub")).unwrap();
    fs::write(at("a"), noise(1, 100_000)).unwrap();
    fs::hard_link(at("a"), at("b")).unwrap();
    fs::hard_link(at("b"), at("sub/c")).unwrap();
    let (ino, _) = of(&at("a"));
    assert_eq!([of(&at("a")), of(&at("b")), of(&at("sub/c"))], [(ino, 3); 3]);
    File::options().write(true).open(at("sub/c")).unwrap().write_at(b"through c", 50_000).unwrap();
    assert_eq!(&fs::read(at("a")).unwrap()[50_000..50_009], b"through c");
    sh(dir, "chmod 600 b; truncate -s 60000 a");
    assert_eq!(
        (fs::metadata(at("sub/c")).unwrap().mode() & 0o777, fs::metadata(at("b")).unwrap().len()),
        (0o600, 60_000)
    );
    assert_eq!(errno(fs::hard_link(at("a"), at("b"))), Some(17), "EEXIST");
    assert_eq!(errno(fs::hard_link(at("sub"), at("folder"))), Some(1), "EPERM");
    // Renaming one name onto another does nothing.
    fs::rename(at("a"), at("b")).unwrap();
    assert_eq!(of(&at("a")), (ino, 3));
    sh(dir, "rm a; [ ! -e a ]");
    assert_eq!(of(&at("b")), (ino, 2));
    // Over one of several names.
    fs::write(at("other"), b"other").unwrap();
    fs::hard_link(at("other"), at("more")).unwrap();
    fs::rename(at("b"), at("other")).unwrap();
    assert_eq!((of(&at("other")), of(&at("more")).1), ((ino, 2), 1));
    assert_eq!(fs::read(at("more")).unwrap(), b"other");
    renameat_with(CWD, at("more"), CWD, at("other"), RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(at("other")).unwrap(), of(&at("more"))), (b"other".to_vec(), (ino, 2)));
    // The last name, while the file is open.
    let open = File::open(at("other")).unwrap();
    fs::hard_link(at("other"), at("again")).unwrap();
    fs::remove_file(at("other")).unwrap();
    fs::remove_file(at("again")).unwrap();
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    let mut start = [0; 5];
    open.read_exact_at(&mut start, 0).unwrap();
    assert_eq!(&start, b"other");
    symlink("more", at("link")).unwrap();
    linkat(CWD, at("link"), CWD, at("same-link"), AtFlags::empty()).unwrap();
    assert_eq!((of(&at("link")).1, fs::read_link(at("same-link")).unwrap()), (2, "more".into()));
    sh(dir, "rm link more; [ -L same-link ]; rm same-link; rm sub/c; rmdir sub");
}

/// Programs that make and copy hard links.
fn check_programs(dir: &Path) {
    sh(dir, "mkdir -p t/in; seq 9999 > t/a; ln t/a t/b; ln t/a t/in/c; echo x > t/single");
    sh(dir, "cp -a t copied; cp -al t linked; tar cf t.tar t; mkdir tar; tar -C tar --strip-components=1 -xf t.tar");
    let mut copies = vec!["t", "copied", "tar"];
    if client("rsync", "rsync").is_some() {
        sh(dir, "rsync -aH t/ rsync/");
        copies.push("rsync");
    }
    let of = |copy: &str, name: &str| of(&dir.join(copy).join(name));
    for copy in copies {
        let names = if copy == "t" { 6 } else { 3 };
        assert_eq!(of(copy, "a"), (of(copy, "in/c").0, names), "{copy}");
        assert_eq!(fs::read(dir.join(copy).join("b")).unwrap(), fs::read(dir.join("t/a")).unwrap(), "{copy}");
    }
    assert_eq!((of("linked", "b"), of("linked", "single")), (of("t", "a"), of("t", "single")));
    assert_ne!(of("copied", "a").0, of("t", "a").0);
    if client("git", "git").is_some() {
        let git = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main";
        sh(dir, &format!("{git} init -q r; echo 1 > r/f; {git} -C r add f; {git} -C r commit -q -m 1"));
        sh(dir, &format!("{git} clone -q --local r s; {git} -C s fsck --strict; [ $(cat s/f) = 1 ]"));
        sh(dir, "[ $(find s/.git/objects -type f -links 2 | wc -l) -ge 3 ]; rm -rf r; git -C s log -1 --format=%s");
    }
    sh(dir, "rm -rf t copied tar t.tar rsync; [ $(cat linked/single) = x ]; rm -rf linked");
}

#[test]
fn all_names_of_a_file_are_alike_on_a_mount() {
    let lab = Lab::with_pool("256M");
    let Some(mount) = Mounted::new(&lab) else { return };
    check_names(mount.dir());
    check_programs(mount.dir());
    fs::write(mount.path("a"), b"1").unwrap();
    fs::hard_link(mount.path("a"), mount.path("b")).unwrap();
    mount.unmount(&lab);
    let mount = Mounted::new(&lab).unwrap();
    assert_eq!(of(&mount.path("a")), (of(&mount.path("b")).0, 2));
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn names_live_with_their_file_over_kills_snapshots_and_forks() {
    let lab = Lab::with_pool("256M");
    let Some(mut both) = Both::start(&lab) else { return };
    check_names(&both.path(""));
    check_programs(&both.path(""));
    sh(&both.path(""), "mkdir f; echo old > f/a; ln f/a f/b; ln f/a outside; ln f/a f/c");
    fs::create_dir(both.path(".snapshots/f/s")).unwrap();
    sh(&both.path(""), "echo newer > outside; rm f/a; mv f/b f/d; sync f/c");
    lab.ok(&["fork", "pool.img/f", "pool.img/live"]);
    lab.ok(&["fork", "pool.img/f@s", "pool.img/kept"]);
    both.kill();
    let both = Both::start(&lab).unwrap();
    let read = |name: &str| fs::read_to_string(both.path(name)).unwrap();
    assert_eq!((of(&both.path("f/c")), of(&both.path("outside")).1), ((of(&both.path("f/d")).0, 3), 3));
    for name in ["a", "b", "c"] {
        assert_eq!(
            (read(&format!(".snapshots/f/s/{name}")), read(&format!("kept/{name}"))),
            ("old\n".into(), "old\n".into())
        );
    }
    assert_eq!((of(&both.path("live/c")), read("live/d")), ((of(&both.path("live/d")).0, 2), "newer\n".into()));
    let refused = fs::hard_link(both.path(".snapshots/f/s/c"), both.path("x"));
    assert_eq!(errno(refused), Some(1), "EPERM");
    both.stop();
    lab.assert_clean();
}

#[test]
fn verbs_and_clients_use_any_name_of_a_file() {
    let lab = Lab::with_pool("256M");
    let Some(both) = Both::start(&lab) else { return };
    fs::write(both.path("a"), noise(3, 1 << 20)).unwrap();
    fs::hard_link(both.path("a"), both.path("b")).unwrap();
    let listed = lab.json(&["list", "pool.img"]);
    let found: Vec<_> = listed.as_array().unwrap().iter().map(|v| (v["name"].as_str(), &v["hard_links"][0])).collect();
    assert_eq!(found, [(Some("a"), &"b".into()), (Some("b"), &"a".into())]);
    assert_eq!(listed[0]["id"], listed[1]["id"]);
    let mut client = both.nbd("b");
    client.write(0, b"by another name", true).unwrap();
    assert_eq!(&fs::read(both.path("a")).unwrap()[..15], b"by another name");
    drop(client);
    lab.ok(&["clone", "pool.img/b", "pool.img/c"]);
    lab.ok(&["snapshot", "pool.img/b@s"]);
    let refused = lab.run(&["delete", "pool.img/b"]).refused();
    assert!(refused.contains("snapshots left: b@s"), "{refused}");
    lab.ok(&["rename", "pool.img/b", "pool.img/d"]);
    lab.ok(&["delete", "-r", "pool.img/a"]);
    assert_eq!(lab.names(), ["c", "d", "d@s"]);
    assert_eq!(of(&both.path("d")).1, 1);
    lab.ok(&["delete", "-r", "pool.img/d", "pool.img/c"]);
    both.stop();
    assert!(lab.names().is_empty());
    lab.assert_clean();
}
