//! Extended attributes that programs set (`user.NAME`) live with their files and folders.

use std::fs;
use std::path::Path;

use rustix::fs::{XattrFlags, getxattr, listxattr, lsetxattr, removexattr, setxattr};

use crate::harness::{Lab, client};
use crate::mount::Mounted;
use crate::mount_served::{Both, sh};

fn set(path: &Path, name: &str, value: &[u8]) -> Result<(), i32> {
    setxattr(path, name, value, XattrFlags::empty()).map_err(|e| e.raw_os_error())
}

fn get(path: &Path, name: &str) -> Result<Vec<u8>, i32> {
    let mut value = vec![0; 1024];
    let n = getxattr(path, name, &mut value).map_err(|e| e.raw_os_error())?;
    value.truncate(n);
    Ok(value)
}

/// The names that are listed, without the one of a property.
fn list(path: &Path) -> Vec<String> {
    let mut names = vec![0; 4096];
    let n = listxattr(path, &mut names).unwrap();
    let names = String::from_utf8(names[..n].to_vec()).unwrap();
    let names = names.split_terminator('\0').filter(|name| !name.starts_with("user.forkdisk."));
    names.map(str::to_string).collect()
}

/// Errors of Linux: EPERM, E2BIG, EEXIST, ENOSPC, ERANGE, ENODATA, EOPNOTSUPP.
fn check_errors(dir: &Path) {
    let file = dir.join("errors");
    fs::write(&file, b"x").unwrap();
    std::os::unix::fs::symlink("errors", dir.join("link")).unwrap();
    let with = |name: &str, flags| setxattr(&file, name, b"2", flags).map_err(|e| e.raw_os_error());
    assert_eq!(with("user.a", XattrFlags::REPLACE), Err(61));
    assert_eq!(with("user.a", XattrFlags::CREATE), Ok(()));
    assert_eq!(with("user.a", XattrFlags::CREATE), Err(17));
    assert_eq!(with("user.a", XattrFlags::REPLACE), Ok(()));
    set(&file, "user.a", b"long").unwrap();
    assert_eq!(getxattr(&file, "user.a", &mut [0; 2][..]).unwrap_err().raw_os_error(), 34);
    assert_eq!(listxattr(&file, &mut [0; 2][..]).unwrap_err().raw_os_error(), 34);
    assert_eq!(removexattr(&file, "user.b").unwrap_err().raw_os_error(), 61);
    assert_eq!((get(&file, "user.b"), set(&file, "user.b", &[1; 300])), (Err(61), Err(28)));
    assert_eq!(set(&file, "user.b", &[1; 70_000]), Err(7));
    assert_eq!(set(&file, &format!("user.{}", "n".repeat(251)), b""), Err(34));
    for name in ["security.x", "trusted.x", "system.x", "user.forkdisk.x"] {
        assert_eq!(set(&file, name, b"1"), Err(95), "{name}");
    }
    let of_link = lsetxattr(dir.join("link"), "user.a", b"1", XattrFlags::empty());
    assert_eq!(of_link.unwrap_err().raw_os_error(), 1);
    removexattr(&file, "user.a").unwrap();
    assert!(list(&file).is_empty());
    fs::remove_file(dir.join("link")).unwrap();
    fs::remove_file(&file).unwrap();
}

fn check_copies(dir: &Path) {
    fs::create_dir(dir.join("f")).unwrap();
    fs::write(dir.join("f/v"), vec![1; 100_000]).unwrap();
    set(&dir.join("f/v"), "user.comment", b"of the file\xff").unwrap();
    set(&dir.join("f/v"), "user.empty", b"").unwrap();
    set(&dir.join("f"), "user.comment", b"of the folder").unwrap();
    sh(dir, "cp -a f cp; mkdir preserve; cp --preserve=xattr f/v preserve/v; mv f moved; mv moved f");
    let mut copies = vec!["f", "cp", "preserve"];
    if client("rsync", "rsync").is_some() {
        sh(dir, "rsync -aX f/ rsync/");
        copies.push("rsync");
    }
    sh(dir, "tar --xattrs -cf f.tar f; mkdir tar; tar --xattrs -C tar -xf f.tar; rm f.tar");
    copies.push("tar/f");
    for copy in copies {
        assert_eq!(get(&dir.join(copy).join("v"), "user.comment").unwrap(), b"of the file\xff", "{copy}");
        assert_eq!(list(&dir.join(copy).join("v")), ["user.comment", "user.empty"], "{copy}");
        if copy != "preserve" {
            assert_eq!(get(&dir.join(copy), "user.comment").unwrap(), b"of the folder", "{copy}");
        }
    }
}

#[test]
fn attributes_of_programs_are_kept_and_copied_by_them() {
    let lab = Lab::with_pool("256M");
    let Some(mut both) = Both::start(&lab) else { return };
    let root = both.path("");
    check_errors(&root);
    check_copies(&root);
    set(&root, "user.root", b"1").unwrap();
    fs::create_dir(both.path(".snapshots/f/s")).unwrap();
    set(&both.path("f/v"), "user.comment", b"changed").unwrap();
    lab.ok(&["fork", "pool.img/f", "pool.img/live"]);
    lab.ok(&["fork", "pool.img/f@s", "pool.img/kept"]);
    lab.ok(&["set", "label.a=b", "pool.img/f/v"]);
    fs::File::open(both.path("f/v")).unwrap().sync_all().unwrap();
    both.kill();
    let both = Both::start(&lab).unwrap();
    for (name, value) in [
        ("f/v", &b"changed"[..]),
        ("live/v", b"changed"),
        ("kept/v", b"of the file\xff"),
        (".snapshots/f/s/v", b"of the file\xff"),
        ("live", b"of the folder"),
    ] {
        assert_eq!(get(&both.path(name), "user.comment").unwrap(), value, "{name}");
    }
    assert_eq!(get(&both.path(""), "user.root").unwrap(), b"1");
    assert_eq!(set(&both.path(".snapshots/f/s/v"), "user.comment", b""), Err(30), "EROFS");
    both.stop();
    lab.assert_clean();
}

#[test]
fn a_mount_that_is_alone_keeps_the_attributes_of_programs() {
    let lab = Lab::with_pool("256M");
    let Some(mount) = Mounted::new(&lab) else { return };
    check_errors(mount.dir());
    check_copies(mount.dir());
    mount.unmount(&lab);
    let mount = Mounted::new(&lab).unwrap();
    assert_eq!(get(&mount.path("f/v"), "user.comment").unwrap(), b"of the file\xff");
    assert_eq!(list(&mount.path("f")), ["user.comment"]);
    mount.unmount(&lab);
    lab.assert_clean();
}
