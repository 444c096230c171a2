//! A pool gets another UUID: after any interruption it is a whole pool with the old one or the new one.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::{Buf, CreateOptions, ErrorKind, FormatOptions, OpenOptions, PAGE_SIZE, Pool, SUPERBLOCK_AT, set_uuid};
use forkdisk_sim::disk::{Config, Crash, Fault, Medium, ReadDamage, Request, SimDisk, Volatile, When};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
const PATIENCE_STEPS: u64 = 3_000_000;

fn machine(medium: Medium, seed: u64) -> (Executor, SimDisk) {
    let exec = Executor::new(seed);
    let disk = SimDisk::new(medium, &exec, seed);
    (exec, disk)
}

async fn open(disk: &SimDisk, exec: &Executor) -> Pool<SimDisk> {
    Pool::open(disk.clone(), Rc::new(exec.clone()), OpenOptions::default()).await.unwrap()
}

/// Creates a pool with a volume and a snapshot, closed cleanly.
fn pool() -> Medium {
    let (exec, disk) = machine(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, 16 * MIB), 1);
    let (made, runtime) = (disk.clone(), exec.clone());
    let work = async move {
        let options = FormatOptions::new(16 * MIB, [1; 16], 1);
        Pool::format(&made, &options).await.unwrap();
        let pool = open(&made, &runtime).await;
        pool.create("v", &CreateOptions::new(4 * MIB, 1)).await.unwrap();
        let volume = pool.volume("v").unwrap();
        volume.write(0, Buf::copy_of(&vec![5; MIB as usize]), false).await.0.unwrap();
        pool.snapshot(&[("v", "s")], 1).await.unwrap();
        volume.write(0, Buf::copy_of(&vec![6; 4096]), false).await.0.unwrap();
        drop(volume);
        pool.close().await.unwrap();
    };
    exec.run(PATIENCE_STEPS, work).unwrap();
    let medium = disk.freeze(Crash::Kill).crash(u64::MAX);
    exec.halt();
    medium
}

/// Returns the UUID of a pool after checking that it is whole, writable, and has its old contents.
fn verified(medium: Medium, seed: u64) -> u8 {
    let (exec, disk) = machine(medium, seed);
    let runtime = exec.clone();
    let uuid = exec.run(PATIENCE_STEPS, async move {
        let pool = open(&disk, &runtime).await;
        let volume = pool.volume("v").unwrap();
        let (result, buf) = volume.read(0, Buf::zeroed(8192)).await;
        result.unwrap();
        assert_eq!((buf[0], buf[4096]), (6, 5));
        volume.write(MIB, Buf::copy_of(&vec![7; MIB as usize]), false).await.0.unwrap();
        volume.flush().await.unwrap();
        let report = pool.check().await.unwrap();
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
        let uuid = pool.info().uuid;
        drop(volume);
        pool.close().await.unwrap();
        // Data written meanwhile is found again, by its journal and by its checkpoint.
        let pool = open(&disk, &runtime).await;
        let (result, buf) = pool.volume("v@s").unwrap().read(0, Buf::zeroed(4096)).await;
        result.unwrap();
        assert_eq!((buf[0], pool.info().uuid), (5, uuid));
        uuid[0]
    });
    exec.halt();
    uuid.unwrap()
}

#[test]
fn a_crash_at_any_moment_leaves_the_old_uuid_or_the_new_one() {
    let medium = pool();
    let mut found = [0; 2];
    for steps in 0..200 {
        let (exec, disk) = machine(medium.clone(), 2);
        let renewed = disk.clone();
        let ended = Rc::new(std::cell::Cell::new(false));
        let end = ended.clone();
        exec.spawn(Box::pin(async move {
            set_uuid(&renewed, [2; 16]).await.unwrap();
            end.set(true);
        }));
        (0..steps).for_each(|_| {
            exec.step();
        });
        let frozen = disk.freeze(Crash::Power);
        for mask in 0..frozen.masks().min(16) {
            let uuid = verified(frozen.crash(mask), steps + mask);
            assert!(uuid == 2 || uuid == 1 && !ended.get(), "{uuid} after {steps} steps, mask {mask}");
            found[usize::from(uuid) - 1] += 1;
        }
        exec.halt();
        if ended.get() {
            assert!(found[0] > 0 && found[1] > 0, "{found:?}");
            return;
        }
    }
    panic!("it does not end");
}

#[test]
fn a_pool_that_was_not_closed_is_opened_first_and_a_failed_write_changes_nothing() {
    let (exec, disk) = machine(pool(), 3);
    let (runtime, device) = (exec.clone(), disk.clone());
    exec.run(PATIENCE_STEPS, async move {
        let pool = open(&device, &runtime).await;
        pool.create("w", &CreateOptions::new(MIB, 1)).await.unwrap();
        assert_eq!(set_uuid(&device, [2; 16]).await.unwrap_err().kind(), ErrorKind::Busy);
        pool.close().await.unwrap();
        let within = Some(0..SUPERBLOCK_AT[0] + PAGE_SIZE as u64);
        device.arm(Fault { on: Request::Write, harm: ReadDamage::Eio, when: When::From(1), within });
        let _ = set_uuid(&device, [2; 16]).await.unwrap_err();
    })
    .unwrap();
    let medium = disk.freeze(Crash::Kill).crash(u64::MAX);
    exec.halt();
    assert!([1, 2].contains(&verified(medium, 4)));
}
