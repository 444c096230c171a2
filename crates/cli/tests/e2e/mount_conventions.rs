//! Conventions that programs expect of any file system besides reading and writing.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{LIMIT, Lab, Limited, POOL, Server, client, noise, succeed};
use crate::mount::{Mounted, python, sh};
use crate::mount_fstab::is_root;
use crate::mount_served::{self, Both};

const MIB: usize = 1 << 20;

/// Runs a script in a folder as another user.
#[track_caller]
fn sh_as(user: u32, dir: &Path, script: &str) {
    let user = user.to_string();
    let mut shell = Command::new("setpriv");
    shell.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--", "bash", "-euo", "pipefail", "-c", script]);
    succeed(shell.current_dir(dir));
}

/// Copies a sparse file within the mount and out of it.
fn copy_sparse(lab: &Lab, dir: &Path) {
    let ours = lab.path("out");
    fs::create_dir_all(&ours).unwrap();
    std::os::unix::fs::symlink(dir, lab.path("link")).unwrap();
    let at = lab.path("");
    mount_served::sh(
        dir,
        &format!(
            "truncate -s 400M vm; for at in 0 150 399; do
                 head -c 1M /dev/urandom | dd of=vm bs=1M seek=$at conv=notrunc iflag=fullblock status=none
             done
             sync vm; mkdir d .snapshots/vm/s; at={at}
             copied() {{ cmp vm $1; [ $(du -k $1 | cut -f1) -lt 8000 ] || {{ du -k $1; exit 9; }}; }}
             cp vm $at/out/a; install -m 644 vm $at/out/b; cp -t $at/out vm; cp .snapshots/vm/s $at/out/s
             cp --target-directory=$at/out -a --backup -S .old vm
             (cd $at/out; cp $at/mnt/vm c; cp ../mnt/vm ../mnt/../out/d)
             for n in a b vm s c d; do copied $at/out/$n; done
             cp vm one; install vm two; cp -t d vm; cp .snapshots/vm/s three; cp vm $at/link/four; (cd d; cp ../vm five)
             cp one d/one; mv d/one $at/out/moved; copied $at/out/moved
             for n in one two d/vm three four d/five; do copied $n; [ $(stat -c %b $n) = $(stat -c %b vm) ]; done",
            at = at.display()
        ),
    );
}

#[test]
fn copies_out_of_the_mount_keep_holes_and_copies_within_are_clones() {
    let lab = Lab::with_pool("1G");
    let Some(mount) = Mounted::new(&lab) else { return };
    copy_sparse(&lab, mount.dir());
    mount.unmount(&lab);
    let used = lab.stat("used");
    assert!(used < 20 << 20, "six copies of 3 MiB of data took {used} bytes: they are no clones");
    lab.assert_clean();
}

#[test]
fn copies_out_of_a_daemons_mount_keep_holes_and_copies_within_are_clones() {
    let lab = Lab::with_pool("1G");
    let Some(both) = Both::start(&lab) else { return };
    copy_sparse(&lab, &both.path(""));
    both.stop();
    let used = lab.stat("used");
    assert!(used < 20 << 20, "six copies of 3 MiB of data took {used} bytes: they are no clones");
    lab.assert_clean();
}

/// Runs a program that writes with `libaio` and `O_DIRECT` while others read through the cache.
fn write_beside_readers(lab: &Lab, dir: &Path) {
    let Some(mut fio) = client("fio", "fio") else { return };
    let file = dir.join("vm");
    fs::write(&file, vec![0; 16 * MIB]).unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    let end = lab.path("end");
    let script = "while [ ! -e \"$1\" ]; do sha256sum \"$2\" > /dev/null; done";
    let reader = || Command::new("bash").args(["-c", script, "-"]).arg(&end).arg(&file).spawn().unwrap();
    let mut readers = [reader(), reader(), reader()];
    let done = fio
        .args(["--name=v", "--size=16M", "--ioengine=libaio", "--direct=1", "--rw=randwrite", "--bs=64k"])
        .args(["--iodepth=1", "--thinktime=2000", "--refill_buffers"])
        .arg(format!("--filename={}", file.display()))
        .current_dir(lab.path(""))
        .stdin(Stdio::null())
        .output_within(LIMIT)
        .unwrap();
    fs::write(&end, "").unwrap();
    readers.iter_mut().for_each(|reader| drop(reader.wait()));
    assert!(done.status.success(), "{done:?}");
    let cached = fs::read(&file).unwrap();
    let mut dd = Command::new("dd");
    let dd = dd.args(["bs=1M", "iflag=direct", "status=none"]).arg(format!("if={}", file.display()));
    let direct = dd.stdin(Stdio::null()).output_within(LIMIT).unwrap().stdout;
    let stale = cached.iter().zip(&direct).filter(|(a, b)| a != b).count();
    assert!(
        cached.len() == direct.len() && stale == 0,
        "{stale} bytes in the cache are older than those of the volume"
    );
}

#[test]
fn readers_beside_direct_asynchronous_writes_find_what_was_written() {
    let lab = Lab::with_pool("256M");
    let Some(mount) = Mounted::new(&lab) else { return };
    write_beside_readers(&lab, mount.dir());
    mount.unmount(&lab);
    fs::remove_file(lab.path("end")).unwrap();
    let Some(both) = Both::start(&lab) else { return };
    write_beside_readers(&lab, &both.path(""));
    both.stop();
    lab.assert_clean();
}

#[test]
fn folders_with_set_group_id_hand_down_their_group() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    if !is_root() {
        return;
    }
    sh(
        &mount,
        "mkdir g plain; chgrp 1234 g plain; chmod 2775 g; touch g/f plain/f; mkdir g/s plain/s
         mkdir g/s/t; touch g/s/t/f
         for n in g/f g/s g/s/t g/s/t/f; do [ $(stat -c %g $n) = 1234 ]; done
         for n in plain/f plain/s; do [ $(stat -c %g $n) = 0 ]; done
         [ $(stat -c %a g/s/t) = 2755 ]; [ $(stat -c %a plain/s) = 755 ]; [ $(stat -c %a g/f) = 644 ]
         chown 5:6 g; [ $(stat -c %a g) = 2775 ]",
    );
    mount.unmount(&lab);
    lab.assert_clean();
}

/// A file that another user writes to loses its set-user-id and set-group-id bits.
fn write_as_another(lab: &Lab, dir: &Path) {
    fs::set_permissions(lab.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    for way in [
        "printf x | dd of=f conv=notrunc status=none",
        "dd if=/dev/zero of=f bs=4096 count=1 oflag=direct conv=notrunc status=none",
        "fallocate -l 4096 f",
        "fallocate -p -o 4096 -l 4096 f",
        "fallocate -z -o 4096 -l 4096 f",
        "truncate -s 100 f",
        "cat g > f",
        "cp --no-preserve=mode g f",
    ] {
        mount_served::sh(
            dir,
            "rm -f f g; head -c 8192 /dev/urandom > f; cp f g; chmod 6777 f; [ $(stat -c %a f) = 6777 ]",
        );
        sh_as(1234, dir, way);
        mount_served::sh(dir, &format!("[ $(stat -c %a f) = 777 ] || {{ stat -c %a f; echo \"{way}\" >&2; exit 9; }}"));
    }
    mount_served::sh(
        dir,
        "chmod 2644 f; chown 5:6 f; [ $(stat -c %a f) = 2644 ]; chmod 6755 f; chown 6:5 f; [ $(stat -c %a f) = 755 ]
         chmod 4755 f; dd if=/dev/zero of=f count=1 conv=notrunc status=none; [ $(stat -c %a f) = 4755 ]",
    );
}

#[test]
fn writes_of_others_take_set_user_id_away() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::with(&lab, &["-o", "allow_other"]) else { return };
    if !is_root() {
        return;
    }
    write_as_another(&lab, mount.dir());
    mount.unmount(&lab);
    let server = Server::start(&lab);
    lab.ok(&["mount", POOL, "mnt", "-o", "allow_other"]);
    write_as_another(&lab, &lab.path("mnt"));
    lab.ok(&["umount", "mnt"]);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_folder_that_is_read_again_shows_what_is_there_now() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    fs::create_dir(mount.path("d")).unwrap();
    fs::write(mount.path("d/old"), "x").unwrap();
    let mut dir = rustix::fs::Dir::new(File::open(mount.path("d")).unwrap()).unwrap();
    let mut names = || {
        dir.rewind();
        let mut all: Vec<String> = Vec::new();
        while let Some(entry) = dir.read() {
            let entry = entry.unwrap();
            assert_ne!(entry.ino(), u64::from(u32::MAX), "{entry:?}");
            all.push(entry.file_name().to_string_lossy().into_owned());
        }
        all.sort();
        all
    };
    assert_eq!(names(), [".", "..", "old"]);
    (0..10).for_each(|i| fs::write(mount.path(&format!("d/{i}")), "x").unwrap());
    fs::remove_file(mount.path("d/old")).unwrap();
    assert_eq!(names().len(), 12);
    drop(dir);
    mount.unmount(&lab);
}

#[test]
fn a_folder_that_was_removed_while_open_is_empty_and_has_no_name() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    sh(&mount, "mkdir w; cd w; rmdir ../w; [ -z \"$(ls -A .)\" ]; ! touch x 2> /dev/null; [ $(stat -c %h .) = 0 ]");
    let script = "import os
for end in (lambda: os.rmdir('d'), lambda: os.rename('e', 'd')):
    os.makedirs('d', exist_ok=True); os.makedirs('e', exist_ok=True)
    f = os.open('d', os.O_RDONLY)
    end()
    assert os.fstat(f).st_nlink == 0 and os.listdir(f) == []
    os.close(f)
os.mkdir('d/x'); assert os.listdir('d') == ['x']";
    python(&mount, script);
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn df_counts_files_that_there_are_and_that_there_could_be() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    let script = "touch a b; set -- $(df --output=itotal,iused,iavail . | tail -1)
        [ $2 = 2 ] && [ $3 -gt 1000 ] && [ $1 = $(($2 + $3)) ]";
    sh(&mount, script);
    mount.unmount(&lab);
}

/// Returns a name as it is written in a URI.
fn encoded(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    name.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[test]
fn names_that_programs_use_work_at_every_door() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    let names = ["#sql-1_2", "a b", "k=v,w", "lost+found/12:30", "user.frm~"];
    fs::create_dir(mount.path("lost+found")).unwrap();
    for (i, name) in names.iter().enumerate() {
        fs::write(mount.path(name), noise(i as u64, 4096)).unwrap();
        fs::create_dir(mount.path(".snapshots").join(name).join("at 12:30")).unwrap();
    }
    mount.unmount(&lab);
    let all: Vec<String> = names.iter().flat_map(|n| [n.to_string(), format!("{n}@at 12:30")]).collect();
    assert_eq!(lab.names(), all);
    let server = Server::start_with(&lab, POOL, &["--socket-dir", "sockets"]);
    for (i, name) in names.iter().enumerate() {
        assert!(lab.contents(name) == noise(i as u64, 4096), "{name}");
        let mut nbd = crate::nbd::Client::connect(server.socket(), name).unwrap();
        assert!(nbd.read(0, 4096).unwrap() == noise(i as u64, 4096), "{name}");
        nbd.leave().unwrap();
        if let Some(mut nbdinfo) = client("nbdinfo", "libnbd-bin") {
            assert_eq!(succeed(nbdinfo.arg("--size").arg(server.uri(&encoded(name)))).trim(), "4096", "{name}");
        }
        let (from, to) = (format!("{POOL}/{name}@at 12:30"), format!("{POOL}/of {i}"));
        lab.ok(&["clone", &from, &to]);
        lab.ok(&["delete", &to]);
    }
    assert_eq!(fs::read_dir(lab.path("sockets")).unwrap().count(), names.len());
    server.stop();
    lab.assert_clean();
}

/// Handles that outlive the kernel's cache would later refer to other files: there are none.
#[test]
fn handles_of_files_are_not_given_out() {
    let lab = Lab::with_pool("64M");
    let Some(mount) = Mounted::new(&lab) else { return };
    if !is_root() {
        return;
    }
    let script = "import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
open('a', 'w').close()
handle = (ctypes.c_uint * 36)(128)
number = ctypes.c_int()
given = libc.name_to_handle_at(-100, b'a', handle, ctypes.byref(number), 0)
assert given == -1 and ctypes.get_errno() == 95, (given, ctypes.get_errno())";
    python(&mount, script);
    mount.unmount(&lab);
}
