//! More references to one page than 16 bits count: snapshots, tables and pages alike are created and removed
//! without a trace.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::{Buf, CreateOptions, FormatOptions, OpenOptions, PAGE_SIZE, Pool};
use forkdisk_sim::disk::{Config, Crash, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
const PAGE: u64 = PAGE_SIZE as u64;
const PATIENCE_STEPS: u64 = 200_000_000;

fn machine(medium: Medium, seed: u64) -> (Executor, SimDisk) {
    let exec = Executor::new(seed);
    let disk = SimDisk::new(medium, &exec, seed);
    (exec, disk)
}

/// Runs a step on a machine with the medium; then its power fails.
fn step<F: Future<Output = ()> + 'static>(
    medium: Medium,
    seed: u64,
    f: impl FnOnce(Pool<SimDisk>) -> F + 'static,
) -> Medium {
    let (exec, disk) = machine(medium, seed);
    let (at, runtime) = (disk.clone(), exec.clone());
    exec.run(PATIENCE_STEPS, async move {
        f(Pool::open(at, Rc::new(runtime), OpenOptions::default()).await.unwrap()).await;
    })
    .unwrap();
    let medium = disk.freeze(Crash::Power).crash(seed);
    exec.halt();
    medium
}

fn formatted(size: u64) -> Medium {
    let (exec, disk) = machine(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, size), 1);
    let at = disk.clone();
    let options = FormatOptions::new(size, [1; 16], 1);
    exec.run(PATIENCE_STEPS, async move { Pool::format(&at, &options).await.unwrap() }).unwrap();
    let medium = disk.freeze(Crash::Power).crash(1);
    exec.halt();
    medium
}

async fn assert_whole(pool: &Pool<SimDisk>) {
    let report = pool.check().await.unwrap();
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

/// Checks that nothing is left and everything is free.
async fn assert_empty(pool: &Pool<SimDisk>, used_at_first: u64) {
    pool.wait_freed().await.unwrap();
    assert_eq!(pool.info().used, used_at_first);
    assert_whole(pool).await;
}

#[test]
fn one_page_is_shared_by_more_places_than_16_bits_count() {
    const PLACES: u64 = 70_000;
    let medium = formatted(64 * MIB);
    let medium = step(medium, 2, async |pool| {
        pool.create("v", &CreateOptions::new((PLACES + 1) * PAGE, 1)).await.unwrap();
        let volume = pool.volume("v").unwrap();
        volume.write(0, Buf::copy_of(&[5; PAGE_SIZE]), false).await.0.unwrap();
        // Odd distances: only single pages can be shared.
        volume.clone_range(&volume, 0, PAGE, PAGE).await.unwrap();
        let mut places = 2;
        while places < PLACES {
            let from = (places + 1) % 2;
            let more = (places - from).min(PLACES - places);
            volume.clone_range(&volume, from * PAGE, places * PAGE, more * PAGE).await.unwrap();
            places += more;
        }
        volume.flush().await.unwrap();
        assert_whole(&pool).await;
    });
    let medium = step(medium, 3, async |pool| {
        assert_whole(&pool).await;
        let volume = pool.volume("v").unwrap();
        let before = pool.info().used;
        // Most are removed; those that are left still read the same, and their page is not reused.
        volume.discard(0, (PLACES - 10) * PAGE).await.unwrap();
        pool.wait_freed().await.unwrap();
        volume.write(0, Buf::copy_of(&vec![9; 8 * MIB as usize]), false).await.0.unwrap();
        let (result, buf) = volume.read((PLACES - 10) * PAGE, Buf::zeroed(9 * PAGE_SIZE)).await;
        result.unwrap();
        assert!(buf.iter().all(|&byte| byte == 5));
        assert_whole(&pool).await;
        volume.discard(0, volume.size()).await.unwrap();
        pool.wait_freed().await.unwrap();
        assert!(pool.info().used < before);
        drop(volume);
        pool.delete(&["v"]).await.unwrap();
    });
    step(medium, 4, async |pool| {
        pool.wait_freed().await.unwrap();
        assert_whole(&pool).await;
        assert_eq!(pool.info().volumes, 0);
    });
}

#[test]
fn a_volume_may_have_more_snapshots_than_16_bits_count_references() {
    const SNAPSHOTS: u64 = 66_000;
    let medium = formatted(512 * MIB);
    let used = Rc::new(std::cell::Cell::new(0));
    let at_first = used.clone();
    let medium = step(medium, 2, async move |pool| {
        at_first.set(pool.info().used);
        pool.create("v", &CreateOptions::new(4 * MIB, 1)).await.unwrap();
        let volume = pool.volume("v").unwrap();
        volume.write(0, Buf::copy_of(&vec![5; MIB as usize]), false).await.0.unwrap();
        for i in 0..SNAPSHOTS {
            pool.snapshot(&[("v", &format!("s{i}"))], 1).await.unwrap();
        }
        // All of its tables lose one reference, their targets gain one.
        volume.write(PAGE, Buf::copy_of(&[6; PAGE_SIZE]), false).await.0.unwrap();
        volume.flush().await.unwrap();
    });
    let medium = step(medium, 3, async |pool| {
        assert_whole(&pool).await;
        let names: Vec<String> = (0..SNAPSHOTS - 1).map(|i| format!("v@s{i}")).collect();
        for some in names.chunks(1000) {
            pool.delete(&some.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
        }
        pool.wait_freed().await.unwrap();
        let (result, buf) =
            pool.volume(&format!("v@s{}", SNAPSHOTS - 1)).unwrap().read(0, Buf::zeroed(MIB as usize)).await;
        result.unwrap();
        assert!(buf.iter().all(|&byte| byte == 5));
        assert_whole(&pool).await;
        pool.delete(&[&format!("v@s{}", SNAPSHOTS - 1), "v"]).await.unwrap();
        pool.wait_freed().await.unwrap();
    });
    step(medium, 4, async move |pool| assert_empty(&pool, used.get()).await);
}
