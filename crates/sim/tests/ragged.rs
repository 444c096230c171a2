//! Writes and reads at any byte, compared with a plain array, on a disk that accepts whole sectors only.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::{Buf, CreateOptions, FormatOptions, OpenOptions, Pool, Runtime, Volume};
use forkdisk_sim::disk::{Config, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;
use forkdisk_sim::rng::Rng;

const POOL: u64 = 16 << 20;
const SIZE: usize = 300_001;
const PATIENCE_STEPS: u64 = 10_000_000;

async fn volume(disk: SimDisk, runtime: Rc<dyn Runtime>) -> (Pool<SimDisk>, Volume<SimDisk>) {
    let options = FormatOptions::new(POOL, [7; 16], 1);
    Pool::format(&disk, &options).await.unwrap();
    let pool = Pool::open(disk, runtime, OpenOptions::default()).await.unwrap();
    pool.create("a", &CreateOptions::new(SIZE as u64, 1)).await.unwrap();
    let volume = pool.volume("a").unwrap();
    (pool, volume)
}

/// Writes ranges of any start and length, sometimes with a snapshot so that pages are provisioned, broken and
/// written in place, and reads others back.
async fn exercise(disk: SimDisk, runtime: Rc<dyn Runtime>, seed: u64) {
    let (pool, volume) = volume(disk, runtime).await;
    let mut rng = Rng::new(seed);
    let mut model = vec![0; SIZE];
    for round in 0..200 {
        let offset = rng.index(SIZE);
        let len = 1 + rng.index((SIZE - offset).min(40_000));
        let fill: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
        let (written, buf) = volume.write(offset as u64, Buf::copy_of(&fill), rng.one_in(8)).await;
        written.unwrap();
        assert!(buf[..] == fill[..], "round {round}: the writer's buffer comes back as it was");
        model[offset..offset + len].copy_from_slice(&fill);
        let at = rng.index(SIZE);
        let n = 1 + rng.index(SIZE - at);
        let (read, buf) = volume.read(at as u64, Buf::zeroed(n)).await;
        read.unwrap();
        assert!(buf[..] == model[at..at + n], "round {round}: {n} bytes at {at}");
        if rng.one_in(10) {
            pool.snapshot(&[("a", &format!("s{round}"))], 2).await.unwrap();
        }
    }
    let report = pool.check().await.unwrap();
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

#[test]
fn a_discard_up_to_the_end_gives_the_last_partial_page_back() {
    let exec = Executor::new(1);
    let disk = SimDisk::new(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, POOL), &exec, 1);
    let runtime = Rc::new(exec.clone());
    let ran = exec.run(PATIENCE_STEPS, async move {
        let (pool, volume) = volume(disk, runtime).await;
        volume.write(0, Buf::copy_of(&vec![1; SIZE]), false).await.0.unwrap();
        volume.discard(0, SIZE as u64).await.unwrap();
        let (read, buf) = volume.read(0, Buf::copy_of(&vec![2; SIZE])).await;
        read.unwrap();
        assert!(buf.iter().all(|&byte| byte == 0));
        assert_eq!(pool.list()[0].referenced, 0);
    });
    ran.unwrap();
}

fn on_sectors_of(sector: usize) {
    for seed in 0..4 {
        let exec = Executor::new(seed);
        let disk = SimDisk::new(Medium::blank(Config { sector, cache: Volatile::Yes }, POOL), &exec, seed);
        let ran = exec.run(PATIENCE_STEPS, exercise(disk.clone(), Rc::new(exec.clone()), seed));
        assert_eq!(disk.misuse(), None, "seed {seed}");
        ran.unwrap();
    }
}

#[test]
fn writes_at_any_byte_suit_sectors_of_512_bytes() {
    on_sectors_of(512);
}

#[test]
fn writes_at_any_byte_suit_sectors_of_4096_bytes() {
    on_sectors_of(4096);
}
