//! Direct I/O on files of a mount: many requests of one program in flight, beside programs that read the same files
//! through the page cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forkdisk::Device;
use forkdisk::device::Segment;
use forkdisk_uring::{Config, DeviceOptions, UringDevice, block_on};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Lab, POOL, noise};
use crate::mount::Mounted;
use crate::mount_served::Both;

const PAGE: usize = 4096;
/// Pages of the file; few, so that writes and readers meet.
const PAGES: u64 = 64;
const WRITERS: u64 = 16;
const TIME: Duration = Duration::from_secs(4);

/// Reads random pages through the page cache until `ends` is set.
fn read_cached(path: &Path, seed: u64, ends: &AtomicBool) {
    let (file, mut random) = (File::open(path).unwrap(), SmallRng::seed_from_u64(seed));
    let mut buf = vec![0; 4 * PAGE];
    while !ends.load(Ordering::Relaxed) {
        file.read_at(&mut buf, random.random_range(0..PAGES) * PAGE as u64).unwrap();
    }
}

/// Writes each of its pages again and again without the page cache, and reads it through the page cache when the write
/// has ended. Returns the number of writes.
async fn write_direct(device: UringDevice, cached: &File, n: u64, start: Instant) -> u64 {
    let mut count = 0;
    let mut found = vec![0; PAGE];
    while start.elapsed() < TIME {
        count += 1;
        let page = n + WRITERS * (count % (PAGES / WRITERS));
        let (offset, data) = (page * PAGE as u64, noise(page * 1_000_000 + count, PAGE));
        let mut buf = device.buffer(PAGE);
        buf.copy_from_slice(&data);
        let segment = Segment { offset, at: 0, len: PAGE };
        device.write(buf, [segment].into_iter().collect(), false).await.0.unwrap();
        cached.read_exact_at(&mut found, offset).unwrap();
        assert!(found == data, "page {page}: write {count} is not seen");
    }
    count
}

/// Sets its flag when it is dropped, also by a failure.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs writers of one program, and readers beside them.
fn check(path: &Path) {
    File::options().write(true).open(path).unwrap().write_all_at(&noise(1, PAGES as usize * PAGE), 0).unwrap();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|n| {
                scope.spawn({
                    let ends = &ends;
                    move || read_cached(path, n, ends)
                })
            })
            .collect();
        let (start, end) = (Instant::now(), Ends(&ends));
        let counts = block_on(Config::default(), |rt| async move {
            let device = UringDevice::open(&rt, path, &DeviceOptions::default()).unwrap();
            let mut tasks = Vec::new();
            for n in 0..WRITERS {
                let (device, cached) = (device.clone(), File::open(path).unwrap());
                tasks.push(rt.spawn(async move { write_direct(device, &cached, n, start).await }));
            }
            let mut counts = Vec::new();
            for task in tasks {
                counts.push(task.await);
            }
            counts
        });
        drop(end);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let counts = counts.unwrap();
        assert!(counts.iter().all(|&count| count > 2), "{counts:?}");
    });
}

#[test]
fn a_direct_write_is_seen_through_the_page_cache_when_it_has_ended() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/v"), "--size", "256K"]);
    let Some(mounted) = Mounted::new(&lab) else { return };
    check(&mounted.path("v"));
    mounted.unmount(&lab);
}

#[test]
fn a_direct_write_to_a_served_file_is_seen_through_the_page_cache() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/v"), "--size", "256K"]);
    let Some(both) = Both::start(&lab) else { return };
    check(&both.path("v"));
    both.stop();
}
