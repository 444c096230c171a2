//! A sparse pool whose file system becomes full behaves like a full pool: nothing breaks, and deleting frees
//! space.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Buf, CreateOptions, ErrorKind, FormatOptions, Mode, OpenOptions, Pool, Runtime, WhenFull};
use forkdisk_sim::disk::{Config, Crash, Fault, Medium, ReadDamage, Request, SimDisk, Volatile, When};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
const PATIENCE_STEPS: u64 = 5_000_000;

fn run<F: Future + 'static>(seed: u64, f: impl FnOnce(Executor, SimDisk) -> F)
where
    F::Output: 'static,
{
    let exec = Executor::new(seed);
    let disk = SimDisk::new(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, 64 * MIB), &exec, seed);
    exec.run(PATIENCE_STEPS, f(exec.clone(), disk.clone())).unwrap();
    assert_eq!(disk.misuse(), None, "seed {seed}");
}

async fn open(exec: &Executor, disk: SimDisk, when_full: WhenFull) -> Pool<SimDisk> {
    let options = OpenOptions::default().with_when_full(when_full);
    Pool::open(disk, Rc::new(exec.clone()), options).await.unwrap()
}

/// A pool of 64 MiB with volume `a`, of which 8 MiB are written.
async fn pool(exec: &Executor, disk: &SimDisk, when_full: WhenFull) -> Pool<SimDisk> {
    let options = FormatOptions::new(64 * MIB, [7; 16], 1).with_journal(Some(MIB));
    Pool::format(disk, &options).await.unwrap();
    let pool = open(exec, disk.clone(), when_full).await;
    pool.create("a", &CreateOptions::new(32 * MIB, 1)).await.unwrap();
    for piece in 0..8 {
        write(&pool, "a", piece, 1).await.unwrap();
    }
    pool
}

async fn write(pool: &Pool<SimDisk>, name: &str, piece: u64, byte: u8) -> Result<(), ErrorKind> {
    let volume = pool.volume(name).unwrap();
    volume.write(piece * MIB, Buf::copy_of(&vec![byte; MIB as usize]), false).await.0.map_err(|e| e.kind())
}

/// Writes to `b` where the host has room, or gets some. The executor may let the time pass that a write waits before a
/// request to the disk ends: then a later write finds the room.
async fn write_with_room(pool: &Pool<SimDisk>, piece: u64, when_full: WhenFull) {
    let tries = if when_full == WhenFull::Error { 1 } else { 4 };
    for _ in 0..tries {
        if write(pool, "b", piece, 4).await.is_ok() {
            return;
        }
    }
    panic!("piece {piece} found no room in {tries} tries");
}

async fn assert_whole(pool: &Pool<SimDisk>) {
    let report = pool.check().await.unwrap();
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

const POLICIES: [WhenFull; 2] = [WhenFull::Error, WhenFull::Wait(Duration::from_secs(5))];

#[test]
fn what_is_removed_makes_room_on_a_full_host() {
    for (seed, when_full) in (0..6).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
        for checkpointed in [false, true] {
            run(seed, async move |exec, disk| {
                let pool = pool(&exec, &disk, when_full).await;
                pool.create("b", &CreateOptions::new(32 * MIB, 1)).await.unwrap();
                write(&pool, "b", 0, 2).await.unwrap();
                if checkpointed {
                    pool.checkpoint().await.unwrap();
                }
                disk.leave_room(0);
                assert_eq!(write(&pool, "b", 1, 3).await, Err(ErrorKind::NoSpace));
                pool.delete(&["a"]).await.unwrap();
                for piece in 1..5 {
                    write_with_room(&pool, piece, when_full).await;
                }
                pool.flush().await.unwrap();
                assert_ne!(pool.info().mode, Mode::Failed);
                pool.close().await.unwrap();
                let pool = open(&exec, disk, when_full).await;
                let volume = pool.volume("b").unwrap();
                let (result, found) = volume.read(0, Buf::zeroed(5 * MIB as usize)).await;
                result.unwrap();
                assert!(found[..MIB as usize].iter().all(|&b| b == 2) && found[MIB as usize..].iter().all(|&b| b == 4));
                assert_whole(&pool).await;
            });
        }
    }
}

#[test]
fn metadata_that_finds_no_room_fails_nothing_and_is_written_when_there_is_some() {
    for (seed, when_full) in (0..4).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
        run(seed, async move |exec, disk| {
            let pool = pool(&exec, &disk, when_full).await;
            disk.leave_room(0);
            match when_full {
                WhenFull::Error => assert_eq!(pool.checkpoint().await.unwrap_err().kind(), ErrorKind::NoSpace),
                _ => {
                    let waiting = pool.clone();
                    exec.spawn(Box::pin(async move { drop(waiting.checkpoint().await) }));
                    exec.sleep(Duration::from_secs(3)).await;
                }
            }
            // Writes in place, reads, flushes and verbs continue.
            write(&pool, "a", 2, 9).await.unwrap();
            pool.flush().await.unwrap();
            pool.snapshot(&[("a", "s")], 2).await.unwrap();
            assert_ne!(pool.info().mode, Mode::Failed);
            disk.leave_room(1000);
            exec.sleep(Duration::from_secs(3)).await;
            pool.checkpoint().await.unwrap();
            assert_whole(&pool).await;
            pool.close().await.unwrap();
        });
    }
}

#[test]
fn what_is_given_back_early_is_not_asked_for_after_a_power_cut() {
    for seed in 0..40 {
        run(seed, async move |exec, disk| {
            let pool = pool(&exec, &disk, WhenFull::Error).await;
            // The tables of a snapshot and of the volume differ, and the checkpoint has both.
            pool.snapshot(&[("a", "s")], 2).await.unwrap();
            write(&pool, "a", 1, 5).await.unwrap();
            pool.checkpoint().await.unwrap();
            pool.create("b", &CreateOptions::new(4 * MIB, 1)).await.unwrap();
            disk.leave_room(seed % 4);
            pool.delete(&["a@s"]).await.unwrap();
            let _ = pool.checkpoint().await;
            exec.sleep(Duration::from_millis(seed * 97)).await;
            let crashed = disk.freeze(Crash::Power).crash(seed);
            let disk = SimDisk::new(crashed, &exec, seed);
            let pool = open(&exec, disk, WhenFull::Error).await;
            assert_whole(&pool).await;
            let (result, buf) = pool.volume("a").unwrap().read(0, Buf::zeroed(2 * MIB as usize)).await;
            result.unwrap();
            assert!(buf[..MIB as usize].iter().all(|&b| b == 1) && buf[MIB as usize..].iter().all(|&b| b == 5));
        });
    }
}

#[test]
fn a_write_that_the_host_had_no_room_for_keeps_neither_space_nor_room() {
    for seed in 0..6 {
        run(seed, async move |exec, disk| {
            let pool = pool(&exec, &disk, WhenFull::Error).await;
            pool.create("b", &CreateOptions::new(32 * MIB, 1)).await.unwrap();
            pool.wait_freed().await.unwrap();
            let used = pool.info().used;
            let volume = pool.volume("b").unwrap();
            disk.leave_room(100);
            for _ in 0..100 {
                assert_eq!(write(&pool, "b", 0, 2).await, Err(ErrorKind::NoSpace));
            }
            // The space of a part of them suffices for one that fits, also where it was discarded early
            // before.
            pool.delete(&["a"]).await.unwrap();
            for size in [20, 20, 6, 1] {
                let _ = volume.write(8 * MIB, Buf::copy_of(&vec![2; size << 20]), false).await;
            }
            volume.write(0, Buf::copy_of(&[3; 64 << 10]), false).await.0.unwrap();
            disk.leave_room(10_000);
            for piece in 0..30 {
                write(&pool, "b", piece, 4).await.unwrap();
            }
            pool.wait_freed().await.unwrap();
            assert!(pool.info().used <= used + 31 * MIB, "{} {used}", pool.info().used);
            assert_whole(&pool).await;
        });
    }
}

#[test]
fn who_waits_for_space_waits_for_the_host_too() {
    run(3, async move |exec, disk| {
        let pool = pool(&exec, &disk, WhenFull::Wait(Duration::from_secs(60))).await;
        pool.create("b", &CreateOptions::new(32 * MIB, 1)).await.unwrap();
        disk.leave_room(0);
        let (began, other) = (exec.now(), disk.clone());
        let later = exec.clone();
        exec.spawn(Box::pin(async move {
            // The executor sometimes expires the next timer early: there is always one that is near.
            for second in 0..200 {
                later.sleep(Duration::from_secs(1)).await;
                if second == 10 {
                    other.leave_room(10_000);
                }
            }
        }));
        write(&pool, "b", 0, 2).await.unwrap();
        let waited = exec.now() - began;
        assert!((10..30).contains(&waited.as_secs()), "{waited:?}");
        disk.leave_room(0);
        assert_eq!(write(&pool, "b", 5, 2).await, Err(ErrorKind::NoSpace), "a minute later");
        disk.leave_room(10_000);
        write(&pool, "b", 5, 2).await.unwrap();
        pool.close().await.unwrap();
    });
}

#[test]
fn who_waits_for_room_goes_on_when_the_first_commit_has_found_it() {
    for (seed, when_full) in (0..6).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
        run(seed, async move |exec, disk| {
            pool(&exec, &disk, when_full).await.close().await.unwrap();
            let pool = open(&exec, disk.clone(), when_full).await;
            let superblocks = Some(0..2 * 4096);
            disk.arm(Fault { on: Request::Write, harm: ReadDamage::Enospc, when: When::Once(1), within: superblocks });
            pool.snapshot(&[("a", "s")], 2).await.unwrap();
            exec.sleep(Duration::from_secs(3)).await;
            // Both check whether an operation waits for space.
            pool.gather("a", |_, _| true).await.unwrap();
            pool.checkpoint().await.unwrap();
            assert_whole(&pool).await;
            pool.close().await.unwrap();
        });
    }
}
