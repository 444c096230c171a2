//! What programs expect of any file system beside reading and writing.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{LIMIT, Lab, Limited, client};
use crate::mount::Mounted;
use crate::mount_served::{self, Both};

const MIB: usize = 1 << 20;

/// A sparse file, copied within the mount and out of it.
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
             cp --target-directory=$at/out -a --backup -S .old vm; (cd $at/out; cp $at/mnt/vm c; cp ../mnt/vm ../mnt/../out/d)
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

/// A program that writes with `libaio` and `O_DIRECT` while others read through the cache.
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
