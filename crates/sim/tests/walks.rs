//! Walks over whole maps while writers continue: `check`, and what deleting would free.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{Buf, CreateOptions, FormatOptions, OpenOptions, Pool, Runtime};
use forkdisk_sim::disk::{Config, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;
use forkdisk_sim::rng::Rng;

/// More tables of level 0 than are kept in memory.
const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 1 << 20;
const PATIENCE_STEPS: u64 = 50_000_000;
const WALKS: u64 = 12;

/// Creates a pool in which changed metadata goes into a checkpoint soon.
async fn pool(disk: SimDisk, runtime: Rc<dyn Runtime>, size: u64) -> Pool<SimDisk> {
    let options = FormatOptions::new(size, [7; 16], 1);
    Pool::format(&disk, &options).await.unwrap();
    let options = OpenOptions::default().with_dirty(16 << 10).with_cache(64 << 10);
    let pool = Pool::open(disk, runtime, options).await.unwrap();
    pool.create("a", &CreateOptions::new(SIZE, 1)).await.unwrap();
    let volume = pool.volume("a").unwrap();
    for at in (0..SIZE).step_by(BLOCK as usize) {
        volume.write(at, Buf::copy_of(&[1; 4096]), false).await.0.unwrap();
    }
    pool
}

/// Progress of the writers, and whether they continue.
#[derive(Default)]
struct Writers {
    done: Cell<u64>,
    running: Cell<usize>,
    stop: Cell<bool>,
}

/// Writes single pages all over the volume, and sometimes replaces its snapshot, so that tables are copied
/// and released all the time. Ends on request, or when there is no space.
async fn write_on(pool: Pool<SimDisk>, writers: Rc<Writers>, seed: u64) {
    writers.running.set(writers.running.get() + 1);
    let volume = pool.volume("a").unwrap();
    let mut rng = Rng::new(seed);
    let mut snapshot = None;
    while !writers.stop.get() {
        let at = rng.below(SIZE / BLOCK) * BLOCK + rng.below(16) * 4096;
        volume.write(at, Buf::copy_of(&[seed as u8; 4096]), false).await.0.unwrap();
        writers.done.set(writers.done.get() + 1);
        if rng.one_in(20) {
            let name = format!("{seed}-{}", writers.done.get());
            pool.snapshot(&[("a", &name)], 2).await.unwrap();
            if let Some(old) = snapshot.replace(format!("a@{name}")) {
                pool.delete(&[&old]).await.unwrap();
            }
        }
    }
    writers.running.set(writers.running.get() - 1);
}

/// Runs `walk` several times beside two writers; returns how often they wrote during walks.
async fn beside_writers(exec: Executor, pool: Pool<SimDisk>, walk: impl AsyncFn(&Pool<SimDisk>)) -> Vec<u64> {
    let writers = Rc::new(Writers::default());
    for seed in 1..=2 {
        exec.spawn(Box::pin(write_on(pool.clone(), writers.clone(), seed)));
    }
    let mut beside = Vec::new();
    for _ in 0..WALKS {
        let before = writers.done.get();
        walk(&pool).await;
        beside.push(writers.done.get() - before);
        exec.sleep(std::time::Duration::from_millis(1)).await;
    }
    writers.stop.set(true);
    while writers.running.get() > 0 {
        exec.sleep(std::time::Duration::from_millis(1)).await;
    }
    beside
}

fn run<F: Future + 'static>(seed: u64, size: u64, f: impl FnOnce(Executor, SimDisk) -> F)
where
    F::Output: 'static,
{
    let exec = Executor::new(seed);
    let disk = SimDisk::new(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, size), &exec, seed);
    exec.run(PATIENCE_STEPS, f(exec.clone(), disk.clone())).unwrap();
    assert_eq!(disk.misuse(), None, "seed {seed}");
}

/// A walk may find everything in memory: then it ends before any request of a writer does. But some walks
/// must wait for the disk.
fn assert_writers_went_on(beside: &[u64]) {
    assert!(beside.iter().filter(|&&writes| writes > 0).count() >= beside.len() / 4, "{beside:?}");
}

async fn assert_whole(pool: &Pool<SimDisk>) {
    let report = pool.check().await.unwrap();
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

#[test]
fn a_check_ends_while_writers_go_on_and_finds_nothing_wrong() {
    for seed in 0..4 {
        run(seed, 64 << 20, async move |exec, disk| {
            let pool = pool(disk, Rc::new(exec.clone()), 64 << 20).await;
            let beside = beside_writers(exec, pool.clone(), assert_whole).await;
            assert_writers_went_on(&beside);
            assert_whole(&pool).await;
        });
    }
}

#[test]
fn what_a_deletion_would_free_is_told_while_writers_go_on() {
    run(5, 64 << 20, async move |exec, disk| {
        let pool = pool(disk, Rc::new(exec.clone()), 64 << 20).await;
        pool.create("still", &CreateOptions::new(SIZE, 1)).await.unwrap();
        let still = pool.volume("still").unwrap();
        still.write(0, Buf::copy_of(&vec![9; 3 << 20]), false).await.0.unwrap();
        let expected = pool.freed_by(&["still"]).await.unwrap();
        assert!(expected >= 3 << 20);
        let walk = async |pool: &Pool<SimDisk>| {
            let lists = [vec!["still"], vec!["a"], vec!["a", "still"]];
            let freed = pool.freed_by_each(&lists).await.unwrap();
            assert_eq!(freed[0], expected);
            assert_eq!(freed[2], freed[0] + freed[1], "all of one moment");
        };
        let beside = beside_writers(exec, pool.clone(), walk).await;
        assert_writers_went_on(&beside);
        assert_whole(&pool).await;
    });
}

#[test]
fn what_a_check_held_back_is_free_when_it_has_ended() {
    run(6, 64 << 20, async move |exec, disk| {
        let pool = pool(disk, Rc::new(exec.clone()), 64 << 20).await;
        pool.wait_freed().await.unwrap();
        let before = pool.info().used;
        beside_writers(exec, pool.clone(), assert_whole).await;
        let names: Vec<String> = pool.list().into_iter().map(|volume| volume.name).collect();
        pool.delete(&names.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
        pool.wait_freed().await.unwrap();
        let after = pool.info();
        assert!(after.used < before && after.freeing == 0, "{after:?}, {before} with a volume");
    });
}

#[test]
fn no_write_fails_for_want_of_the_space_that_a_check_holds_back() {
    // Two snapshots and the volume fit in, but not much more: withheld space is missed soon.
    run(7, 28 << 20, async move |exec, disk| {
        let pool = pool(disk, Rc::new(exec.clone()), 28 << 20).await;
        let walk = async |pool: &Pool<SimDisk>| match pool.check().await {
            Ok(report) => assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}"),
            Err(error) => assert_eq!(error.kind(), forkdisk::ErrorKind::Busy, "{error}"),
        };
        // Writers fail the test if they get ENOSPC.
        beside_writers(exec, pool.clone(), walk).await;
        assert_whole(&pool).await;
    });
}
