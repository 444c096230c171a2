//! Volumes that do not store everything that is written: what is there already, and zeroes.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::Buf;
use forkdisk::testing::{DelayingDevice, Inline, MemoryDevice};
use forkdisk::{
    Changes, CreateOptions, ErrorKind, ExtensionChanges, ForkOptions, FormatOptions, OpenOptions, Pool, Writes, Zeroes,
};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

struct Lab {
    tasks: Inline,
    pool: Pool<MemoryDevice>,
}

fn lab() -> Lab {
    let (tasks, device) = (Inline::new(), MemoryDevice::new(64 * MIB as u64));
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB as u64, [1; 16], 0))).unwrap();
    let pool = tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
    Lab { tasks, pool }
}

/// Bytes in which each page has its own contents, and none is zero.
fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i / PAGE * 7 + i * 31 + i / 251) % 255) as u8 + 1).collect()
}

fn policy(writes: Writes, zeroes: Zeroes) -> Changes {
    Changes::default().with_extension(ExtensionChanges::default().with_writes(writes).with_zeroes(zeroes))
}

impl Lab {
    /// Creates a volume, writes its contents, and sets its policy.
    fn volume(&self, name: &str, contents: &[u8], changes: &Changes) {
        self.tasks.run(self.pool.create(name, &CreateOptions::new(contents.len() as u64, 0))).unwrap();
        self.write(name, 0, contents);
        self.tasks.run(self.pool.set(name, changes)).unwrap();
    }

    fn write(&self, name: &str, offset: u64, bytes: &[u8]) {
        let volume = self.pool.volume(name).unwrap();
        self.tasks.run(volume.write(offset, Buf::copy_of(bytes), false)).0.unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        let volume = self.pool.volume(name).unwrap();
        let (read, buf) = self.tasks.run(volume.read(0, Buf::zeroed(volume.size() as usize)));
        read.unwrap();
        buf.to_vec()
    }

    /// Shared pages of which the volume got its own.
    fn broken_pages(&self, name: &str) -> u64 {
        let all = self.pool.volume_statistics();
        let (_, of) = all.into_iter().find(|(info, _)| info.name == name).unwrap();
        of.unwrap().faults.r#break.bytes / PAGE as u64
    }
}

#[test]
fn a_file_written_anew_onto_a_clone_takes_the_pages_that_changed() {
    let lab = lab();
    let mut contents = noise(4 * MIB);
    lab.volume("last", &contents, &policy(Writes::Compare, Zeroes::Written));
    lab.tasks.run(lab.pool.fork("last", &["next"], &ForkOptions::new(1))).unwrap();
    assert_eq!(lab.pool.find("next").unwrap().writes, Writes::Compare, "as the source");
    for page in (0..1024).step_by(100) {
        contents[page * PAGE + 4095] ^= 1;
    }
    for (at, part) in contents.chunks(256 << 10).enumerate() {
        lab.write("next", (at as u64) << 18, part);
    }
    assert!(lab.read("next") == contents);
    assert_eq!(lab.broken_pages("next"), 11);
    assert!(lab.read("last") == noise(4 * MIB));
}

#[test]
fn parts_of_pages_that_are_there_already_are_dropped_and_others_are_written() {
    let lab = lab();
    let mut contents = noise(64 << 10);
    lab.volume("v", &contents, &policy(Writes::Compare, Zeroes::Written));
    lab.tasks.run(lab.pool.snapshot(&[("v", "s")], 1)).unwrap();
    lab.write("v", 5000, &contents[5000..30_001]);
    assert_eq!(lab.broken_pages("v"), 0);
    contents[29_999] ^= 1;
    lab.write("v", 5000, &contents[5000..30_001]);
    assert!(lab.read("v") == contents);
    assert_eq!(lab.broken_pages("v"), 1);
    // In place, now that the page is the volume's own.
    contents[29_999] ^= 1;
    lab.write("v", 29_000, &contents[29_000..30_500]);
    assert!(lab.read("v") == contents);
    assert_eq!(lab.broken_pages("v"), 1);
    assert!(lab.read("v@s") == noise(64 << 10));
}

#[test]
fn pages_of_zeroes_become_holes_and_parts_of_pages_stay() {
    let lab = lab();
    let mut contents = noise(64 << 10);
    lab.volume("v", &contents, &policy(Writes::All, Zeroes::Holes));
    lab.write("v", 4000, &[0; 20_000]);
    contents[4000..24_000].fill(0);
    assert!(lab.read("v") == contents);
    assert_eq!(lab.pool.find("v").unwrap().referenced, 64 * 1024 - 4 * PAGE as u64);
    // Zeroes over a hole leave it a hole.
    lab.write("v", 4096, &[0; 4096]);
    assert_eq!(lab.pool.find("v").unwrap().referenced, 64 * 1024 - 4 * PAGE as u64);
    lab.write("v", 8192, &[7; 4096]);
    contents[8192..12_288].fill(7);
    assert!(lab.read("v") == contents);
}

#[test]
fn without_a_policy_everything_is_stored_and_a_snapshot_has_none() {
    let lab = lab();
    let contents = noise(64 << 10);
    lab.volume("v", &contents, &Changes::default());
    lab.tasks.run(lab.pool.snapshot(&[("v", "s")], 1)).unwrap();
    lab.write("v", 0, &contents[..PAGE]);
    assert_eq!(lab.broken_pages("v"), 1);
    let refused = lab.tasks.run(lab.pool.set("v@s", &policy(Writes::Compare, Zeroes::Written))).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    // A policy that is set while the volume is open takes effect at once, and ends so.
    let volume = lab.pool.volume("v").unwrap();
    let rewrite = |at: usize| {
        lab.tasks.run(volume.write(at as u64, Buf::copy_of(&contents[at..at + PAGE]), false)).0.unwrap();
        lab.broken_pages("v")
    };
    lab.tasks.run(lab.pool.set("v", &policy(Writes::Compare, Zeroes::Holes))).unwrap();
    assert_eq!(rewrite(2 * PAGE), 1);
    lab.tasks.run(lab.pool.set("v", &policy(Writes::All, Zeroes::Written))).unwrap();
    assert_eq!(rewrite(2 * PAGE), 2);
}

/// What a write would replace is compared, then the volume gets other contents, and only then the rest is written: the
/// part that was dropped would be missing.
#[test]
fn a_live_rollback_comes_before_or_after_a_write_that_is_compared() {
    let (tasks, device) = (Inline::new(), MemoryDevice::new(64 * MIB as u64));
    let clock = Rc::new(tasks.clone());
    let device = DelayingDevice::new(device, clock.clone(), Duration::from_millis(1));
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB as u64, [1; 16], 0))).unwrap();
    let pool = tasks.run(Pool::open(device, clock, OpenOptions::default())).unwrap();
    tasks.run(pool.create("v", &CreateOptions::new(64 << 10, 0))).unwrap();
    tasks.run(pool.set("v", &policy(Writes::Compare, Zeroes::Holes))).unwrap();
    let volume = pool.volume("v").unwrap();
    let write = |bytes: &[u8]| {
        let (volume, buf) = (volume.clone(), Buf::copy_of(bytes));
        async move { volume.write(0, buf, false).await.0 }
    };
    for (contents, snapshot) in [([1; PAGE], "before"), ([2; PAGE], "after")] {
        tasks.run(write(&[contents, [3; PAGE]].concat())).unwrap();
        tasks.run(pool.snapshot(&[("v", snapshot)], 1)).unwrap();
    }
    // The first page is there already, the second one is not.
    let written = [[2; PAGE], [4; PAGE]].concat();
    let running = tasks.start(write(&written));
    tasks.run_until_idle();
    tasks.run(pool.rollback_live("v", "v@before")).unwrap();
    tasks.run(running).unwrap();
    let found = tasks.run(volume.read(0, Buf::zeroed(2 * PAGE))).1.to_vec();
    let seen = (found[0], found[PAGE]);
    assert!(found == written || found == [[1; PAGE], [3; PAGE]].concat(), "{seen:?}");
}
