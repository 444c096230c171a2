//! A mount that alone uses its pool: what a quota or a bound refuses is refused to the program that writes it.

use crate::harness::{Lab, noise};
use crate::mount::{Mounted, python};

const MIB: usize = 1 << 20;

/// Writes pages of `v` until one is refused, and prints how many were accepted; then flushes.
const FILL: &str = "
import errno, os
v = os.open('v', os.O_RDWR)
count = 0
try:
    while count < 2048:
        assert os.pwrite(v, b'x' * 4096, count * 4096) == 4096
        count += 1
except OSError as error:
    assert error.errno == errno.ENOSPC, error
os.fsync(v)
os.close(v)
print(count)
";

fn filled(mount: &Mounted) -> Option<usize> {
    Some(python(mount, FILL)?.trim().parse().unwrap())
}

#[test]
fn a_write_is_refused_at_once_where_the_pool_had_limits_before_the_mount() {
    for (limit, allowed) in [("diverge=2M", 2 * MIB), ("quota=6M", 2 * MIB)] {
        let lab = Lab::with_pool("128M");
        lab.import("base", &noise(1, 4 * MIB));
        lab.ok(&["fork", "pool.img/base", "pool.img/v"]);
        lab.ok(&["resize", "pool.img/v", "--size", "8M"]);
        lab.ok(&["set", limit, "pool.img/v"]);
        let Some(mount) = Mounted::new(&lab) else { return };
        let Some(count) = filled(&mount) else { return };
        // A quota does not count what replaces shared pages.
        let expected = if limit.starts_with("quota") { 4 * MIB + allowed } else { allowed };
        assert_eq!(count * 4096, expected, "{limit}");
        assert_eq!(std::fs::read(mount.path("v")).unwrap()[..expected], vec![b'x'; expected]);
        mount.unmount(&lab);
        assert_eq!(lab.contents("v")[..expected], vec![b'x'; expected]);
        lab.assert_clean();
    }
}

#[test]
fn a_file_that_gets_a_bound_on_the_mount_has_it_from_its_next_open() {
    let lab = Lab::with_pool("128M");
    lab.import("v", &noise(1, 4 * MIB));
    lab.ok(&["snapshot", "pool.img/v@s"]);
    let Some(mount) = Mounted::new(&lab) else { return };
    let set = "
import errno, os
attribute, bound = 'user.forkdisk.diverge', b'1M'
v = os.open('v', os.O_RDWR)
os.pwrite(v, b'y' * 4096, 0)
try:
    os.setxattr('v', attribute, bound)
    raise SystemExit('set while it is open for writing')
except OSError as error:
    assert error.errno == errno.EBUSY, error
os.close(v)
os.setxattr('v', attribute, bound)
";
    let Some(_) = python(&mount, set) else { return };
    assert_eq!(filled(&mount).unwrap(), 256 + 1, "the page that it had alone is no new one");
    let map = "
import mmap, os
v = os.open('v', os.O_RDWR)
memory = mmap.mmap(v, 4096)
assert memory[:2] == b'xx'
memory[:2] = b'zz'
memory.flush()
assert os.pread(v, 2, 0) == b'zz'
with open('other', 'wb') as other:
    other.write(b'o' * 8000000)
";
    python(&mount, map);
    mount.unmount(&lab);
    let found = lab.contents("v");
    assert!(found[..2] == *b"zz" && found[2..257 * 4096].iter().all(|&byte| byte == b'x'));
    assert!(found[257 * 4096..] == noise(1, 4 * MIB)[257 * 4096..]);
    assert!(lab.contents("other").starts_with(&[b'o'; 8_000_000]));
    lab.assert_clean();
}
