//! What programs expect of any file system beside reading and writing.

use std::fs;
use std::path::Path;

use crate::harness::Lab;
use crate::mount::Mounted;
use crate::mount_served::{self, Both};

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
