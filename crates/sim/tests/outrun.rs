//! Changes of names faster than commits: what did not fit into the volatile log is not acknowledged yet.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::{
    Attributes, Buf, Child, CreateOptions, FormatOptions, MIN_VOLATILE_BYTES, OpenOptions, Pool, VolatileLog,
    VolatileMemory,
};
use forkdisk_sim::disk::{Config, Crash, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
const PATIENCE_STEPS: u64 = 3_000_000;
/// Far too many changes for the volatile log.
const MANY: u32 = 1000;

fn attributes(mark: u32) -> Attributes {
    Attributes { mode: 0o750, uid: mark, gid: mark, accessed: 0, modified: 0, changed: 0 }
}

fn options(memory: &VolatileMemory) -> OpenOptions {
    let log = VolatileLog::new(memory.clone(), [1; 32]);
    OpenOptions::default().with_volatile(Some(log))
}

/// Opens a pool with a volume `v`, runs `work`, kills the process as soon as that has ended, and runs `look`
/// on what is left.
fn killed<W: Future<Output = ()> + 'static, L: Future<Output = ()> + 'static>(
    work: impl FnOnce(Pool<SimDisk>) -> W + 'static,
    look: impl FnOnce(Pool<SimDisk>) -> L + 'static,
) {
    let exec = Executor::new(1);
    let disk = SimDisk::new(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, 64 * MIB), &exec, 1);
    let memory = VolatileMemory::new(vec![0; MIN_VOLATILE_BYTES]);
    let (device, runtime, options_now) = (disk.clone(), exec.clone(), options(&memory));
    exec.run(PATIENCE_STEPS, async move {
        let format = FormatOptions::new(64 * MIB, [7; 16], 1);
        Pool::format(&device, &format).await.unwrap();
        let pool = Pool::open(device, Rc::new(runtime), options_now).await.unwrap();
        pool.create("v", &CreateOptions::new(8 * MIB, 1)).await.unwrap();
        work(pool).await;
    })
    .unwrap();
    let (medium, left) = (disk.freeze(Crash::Kill).crash(u64::MAX), memory.copy());
    exec.halt();
    let exec = Executor::new(2);
    let (device, runtime) = (SimDisk::new(medium, &exec, 2), exec.clone());
    exec.run(PATIENCE_STEPS, async move {
        look(Pool::open(device, Rc::new(runtime), options(&left)).await.unwrap()).await;
    })
    .unwrap();
    exec.halt();
}

fn change_names(pool: &Pool<SimDisk>) {
    (1..=MANY).for_each(|mark| pool.set_folder_attributes("", attributes(mark), 1).unwrap());
}

fn assert_names(pool: &Pool<SimDisk>) {
    let Ok(Child::Folder(found, _)) = pool.child("") else { panic!("the root is no folder") };
    assert_eq!(found, Some(attributes(MANY)));
}

async fn write(pool: &Pool<SimDisk>, at: u64) {
    pool.volume("v").unwrap().write(at, Buf::copy_of(&[9; 4096]), false).await.0.unwrap();
}

async fn assert_written(pool: &Pool<SimDisk>, at: u64) {
    let (result, buf) = pool.volume("v").unwrap().read(at, Buf::zeroed(4096)).await;
    result.unwrap();
    assert!(buf.iter().all(|&byte| byte == 9), "an acknowledged write at {at} is lost");
}

#[test]
fn names_that_outrun_the_volatile_log_are_kept_before_they_are_acknowledged() {
    killed(
        |pool| async move {
            change_names(&pool);
            assert!(!pool.is_process_safe(), "the log is too long for this test");
            pool.wait_process_safe().await.unwrap();
            assert!(pool.is_process_safe());
        },
        |pool| async move { assert_names(&pool) },
    );
}

#[test]
fn a_write_behind_names_that_outrun_the_volatile_log_is_durable_when_acknowledged() {
    killed(
        |pool| async move {
            // It is admitted before the names change.
            let volume = pool.volume("v").unwrap();
            let mut early = Box::pin(volume.write(MIB, Buf::copy_of(&[9; 4096]), false));
            assert!(std::future::poll_fn(|cx| std::task::Poll::Ready(early.as_mut().poll(cx).is_pending())).await);
            change_names(&pool);
            early.await.0.unwrap();
        },
        |pool| async move {
            assert_names(&pool);
            assert_written(&pool, MIB).await;
        },
    );
}

#[test]
fn what_comes_behind_the_commit_of_a_full_volatile_log_is_kept() {
    killed(
        |pool| async move {
            change_names(&pool);
            pool.flush().await.unwrap();
            write(&pool, 2 * MIB).await;
        },
        |pool| async move {
            assert_names(&pool);
            assert_written(&pool, 2 * MIB).await;
        },
    );
}
