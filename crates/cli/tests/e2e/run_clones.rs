//! `forkdisk run`: FICLONE and FICLONERANGE make clones on mounts.

use std::fs;
use std::process::Command;

use crate::harness::{LIMIT, Lab, Limited, noise, succeed};
use crate::mount::Mounted;

const MIB: usize = 1 << 20;

/// Bytes that the volumes of a pool hold, each counted once.
fn used(lab: &Lab, mount: &Mounted) -> u64 {
    succeed(Command::new("sync").arg("-f").arg(mount.path("")));
    let _ = lab;
    let text = succeed(Command::new("df").args(["--output=used", "-B1"]).arg(mount.path("")));
    text.lines().nth(1).unwrap().trim().parse().unwrap()
}

fn run(lab: &Lab, words: &[&str]) -> std::process::Output {
    lab.command(&[&["run", "--"], words].concat()).output_within(LIMIT).unwrap()
}

#[test]
fn cp_with_reflinks_and_ioctls_of_a_program_make_clones() {
    let lab = Lab::with_pool("1G");
    let Some(mount) = Mounted::new(&lab) else { return };
    let (a, b) = (mount.path("a"), mount.path("b"));
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    fs::write(a, noise(1, 16 * MIB + 100)).unwrap();
    let refused = Command::new("cp").args(["--reflink=always", a, b]).output().unwrap();
    assert!(!refused.status.success(), "the kernel passes FICLONE on: `run` is not needed any more");
    let before = used(&lab, &mount);
    let made = run(&lab, &["cp", "--reflink=always", a, b]);
    assert!(made.status.success(), "{made:?}");
    assert!(fs::read(b).unwrap() == noise(1, 16 * MIB + 100));
    let script = format!(
        "
import fcntl, os, struct, errno
FICLONE, FICLONERANGE = 0x40049409, 0x4020940d
a, b = os.open({a:?}, os.O_RDONLY), os.open({a:?} + '.range', os.O_RDWR | os.O_CREAT, 0o644)
def clone(*words, target=b):
    try:
        fcntl.ioctl(target, FICLONERANGE, struct.pack('qQQQ', a, *words))
    except OSError as e:
        return errno.errorcode[e.errno]
assert clone(1 << 20, 2 << 20, 4096) is None
expected = open({a:?}, 'rb').read()
assert os.pread(b, 2 << 20, 4096) == expected[1 << 20:3 << 20]
assert clone(16 << 20, 0, 8 << 20) is None, 'to the end'
assert os.pread(b, 200, 8 << 20) == expected[16 << 20:]
assert clone(100, 4096, 0) == 'EINVAL'
assert clone(0, 1 << 40, 0) == 'EINVAL'
assert clone(0, 4096, 0, target=os.open({a:?}, os.O_RDONLY)) == 'EBADF'
assert clone(0, 4096, 0, target=os.open('/tmp', os.O_RDONLY)) not in (None, 'ENOSYS')
try:
    fcntl.ioctl(b, FICLONE, 9999)
    raise SystemExit('a descriptor that is not open')
except OSError as e:
    assert e.errno == errno.EBADF, e
raise SystemExit(7)
"
    );
    let made = run(&lab, &["python3", "-c", &script]);
    assert_eq!(made.status.code(), Some(7), "the status of the program: {made:?}");
    assert!(used(&lab, &mount) - before < MIB as u64, "nothing was copied");
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn other_file_systems_and_failures_are_as_without_it() {
    let lab = Lab::empty();
    let file = lab.write_file("a", &noise(1, MIB));
    let copy = lab.path("b");
    let with = run(&lab, &["cp", "--reflink=always", file.to_str().unwrap(), copy.to_str().unwrap()]);
    let without = Command::new("cp").arg("--reflink=always").arg(&file).arg(&copy).output().unwrap();
    assert_eq!((with.status, with.stderr), (without.status, without.stderr));
    let missing = run(&lab, &["/no/such/program"]);
    assert!(!missing.status.success());
    let said = String::from_utf8_lossy(&missing.stderr).to_string();
    assert!(said.contains("/no/such/program: No such file or directory"), "{said}");
    let killed = run(&lab, &["sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.status.code(), Some(128 + 9));
    // What the program has started goes on, and the verb ends with it.
    let later = run(&lab, &["sh", "-c", "(sleep 0.3; echo later) & exit 3"]);
    assert_eq!((later.status.code(), String::from_utf8_lossy(&later.stdout).trim()), (Some(3), "later"));
    let nested = run(&lab, &[lab.command(&[]).get_program().to_str().unwrap(), "run", "--", "true"]);
    let said = String::from_utf8_lossy(&nested.stderr).to_string();
    assert!(!nested.status.success() && said.contains("under `forkdisk run`"), "{said}");
}
