//! Pools that older versions wrote are read, checked and written (README.md here says how they were made).
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::path::PathBuf;
use std::rc::Rc;

use forkdisk::device::{Buf, Segment};
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, Device, OpenOptions, OriginPlace, Pool};

const PAGE: usize = 4096;
/// Incompatible features that 0.1.0 knows.
const KNOWN_TO_0_1_0: u64 = 0b1111;

fn file(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden_images/0.1.0").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the bytes of an image in the format of `od -A x -t x1`.
fn bytes_of(image: &str) -> Vec<u8> {
    let (mut bytes, mut repeats) = (Vec::new(), false);
    for line in image.lines() {
        if line == "*" {
            repeats = true;
            continue;
        }
        let mut words = line.split_whitespace();
        let at = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
        if std::mem::take(&mut repeats) {
            let last = bytes[bytes.len() - 16..].to_vec();
            bytes.extend(last.iter().cycle().take(at - bytes.len()));
        }
        assert_eq!(bytes.len(), at, "the offsets are those of the bytes");
        bytes.extend(words.map(|byte| u8::from_str_radix(byte, 16).unwrap()));
    }
    bytes
}

fn disk(tasks: &Inline, image: &str) -> MemoryDevice {
    let bytes = bytes_of(&file(image));
    let disk = MemoryDevice::new(bytes.len() as u64);
    for (i, page) in bytes.chunks(PAGE).enumerate().filter(|(_, page)| page.iter().any(|&byte| byte != 0)) {
        let segment = Segment { offset: (i * PAGE) as u64, at: 0, len: page.len() };
        tasks.run(disk.write(Buf::copy_of(page), [segment].into_iter().collect(), false)).0.unwrap();
    }
    disk
}

fn open(tasks: &Inline, disk: &MemoryDevice, read_only: bool) -> Pool<MemoryDevice> {
    let options = OpenOptions::default().with_read_only(read_only);
    tasks.run(Pool::open(disk.clone(), Rc::new(tasks.clone()), options)).expect("opened")
}

/// Returns what `cksum` of POSIX prints first.
fn cksum(bytes: &[u8]) -> u32 {
    let mut length = bytes.len();
    let lengths = std::iter::from_fn(|| {
        let low = (length > 0).then_some(length as u8)?;
        length >>= 8;
        Some(low)
    });
    let step = |crc: u32, byte: u8| {
        (0..8)
            .fold(crc ^ u32::from(byte) << 24, |crc, _| if crc >> 31 == 1 { crc << 1 ^ 0x04c1_1db7 } else { crc << 1 })
    };
    !bytes.iter().copied().chain(lengths).fold(0, step)
}

/// Returns the line of each volume and snapshot as `cksum` prints it.
fn sums(tasks: &Inline, pool: &Pool<MemoryDevice>) -> String {
    let line = |name: String, size: u64| {
        let volume = pool.volume(&name).unwrap();
        let (result, buf) = tasks.run(volume.read(0, Buf::zeroed(size as usize)));
        result.unwrap();
        format!("{name} {} {size}\n", cksum(&buf))
    };
    pool.list().into_iter().map(|info| line(info.name, info.size)).collect()
}

/// Returns the incompatible features that either superblock has.
fn features(tasks: &Inline, disk: &MemoryDevice) -> u64 {
    let slot = |offset: u64| {
        let segment = Segment { offset, at: 0, len: PAGE };
        let (result, page) = tasks.run(disk.read(Buf::zeroed(PAGE), [segment].into_iter().collect()));
        result.unwrap();
        u64::from_le_bytes(page[40..48].try_into().unwrap())
    };
    slot(0) | slot(128 * PAGE as u64)
}

fn check(tasks: &Inline, pool: &Pool<MemoryDevice>) {
    let report = tasks.run(pool.check()).unwrap();
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

/// Reads and checks the pool of an image, changes it, and does so again after a clean close.
fn take_over(image: &str, was_clean: bool) -> (Inline, MemoryDevice) {
    let tasks = Inline::default();
    let disk = disk(&tasks, &format!("{image}.od"));
    let expected = file(&format!("{image}.sums"));
    for (read_only, is_clean) in [(true, was_clean), (false, was_clean), (false, true)] {
        let pool = open(&tasks, &disk, read_only);
        assert_eq!(pool.recovery().clean, is_clean);
        assert_eq!(pool.recovery().journal > 0, !is_clean);
        assert_eq!(sums(&tasks, &pool), expected);
        check(&tasks, &pool);
        if !read_only {
            tasks.run(pool.create("new", &CreateOptions::new(1 << 20, 9).with_quota(1 << 20))).unwrap();
            tasks.run(pool.volume("new").unwrap().write(0, Buf::copy_of(&[1; PAGE]), true)).0.unwrap();
            assert!(features(&tasks, &disk) & !KNOWN_TO_0_1_0 != 0, "0.1.0 refuses it while it is open or killed");
            tasks.run(pool.delete(&["new"])).unwrap();
        }
        tasks.run(pool.close()).unwrap();
        assert_eq!(features(&tasks, &disk) & !KNOWN_TO_0_1_0, 0, "0.1.0 opens it once it is closed in order");
    }
    (tasks, disk)
}

#[test]
fn a_pool_that_0_1_0_closed_is_read_checked_and_written() {
    let (tasks, disk) = take_over("clean", true);
    let pool = open(&tasks, &disk, true);
    let clone = pool.find("folder/c").unwrap();
    assert_eq!((clone.quota, clone.chunk, clone.origin.as_str()), (64 << 20, 128 << 10, "a@x"));
}

#[test]
fn the_journal_of_a_pool_that_0_1_0_left_is_replayed() {
    take_over("killed", false);
}

#[test]
fn an_origin_that_0_1_0_protected_is_opened_written_and_closed() {
    let tasks = Inline::default();
    let (disk, protected) = (disk(&tasks, "origin.od"), disk(&tasks, "disk.od"));
    let expected = file("origin.sums");
    for _ in 0..2 {
        let pool = open(&tasks, &disk, false);
        let modified = file("disk.modified").trim().parse().unwrap();
        let place = OriginPlace::at(&pool.origins()[0].path, modified);
        tasks.run(pool.attach_origin("o", protected.clone(), &place)).expect("it is the same device");
        assert_eq!(sums(&tasks, &pool), expected);
        check(&tasks, &pool);
        let volume = pool.volume("o").unwrap();
        let (result, old) = tasks.run(volume.read(1 << 20, Buf::zeroed(PAGE)));
        result.unwrap();
        tasks.run(volume.write(1 << 20, Buf::copy_of(&[1; PAGE]), true)).0.unwrap();
        tasks.run(volume.write(1 << 20, old, true)).0.unwrap();
        drop(volume);
        tasks.run(pool.detach_origin("o", || modified)).unwrap();
        tasks.run(pool.close()).unwrap();
    }
}
