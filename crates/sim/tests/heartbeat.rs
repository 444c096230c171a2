//! Hosts that share a pool's storage: one of them at a time has it open.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;
use std::time::Duration;

use forkdisk::{
    Buf, CreateOptions, Error, ErrorKind, FormatOptions, HostIdentity, OpenOptions, Pool, Runtime, set_heartbeat,
};
use forkdisk_sim::disk::{Config, Crash, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
const PATIENCE_STEPS: u64 = 3_000_000;
const SECOND: Duration = Duration::from_secs(1);

fn host(number: u8, open: u8) -> OpenOptions {
    let host = HostIdentity::new(format!("host{number}"), [number; 16], [open; 16]);
    OpenOptions::default().with_host(Some(host))
}

async fn open(disk: &SimDisk, exec: &Executor, options: OpenOptions) -> Result<Pool<SimDisk>, Error> {
    Pool::open(disk.clone(), Rc::new(exec.clone()), options).await
}

/// Runs `test` on a pool with a beat each second.
fn run<F: Future<Output = ()> + 'static>(seed: u64, test: impl FnOnce(SimDisk, Executor) -> F) {
    let exec = Executor::new(seed);
    let disk = SimDisk::new(Medium::blank(Config { sector: 512, cache: Volatile::Yes }, 16 * MIB), &exec, seed);
    let (device, runtime) = (disk.clone(), exec.clone());
    exec.run(PATIENCE_STEPS, async move {
        let options = FormatOptions::new(16 * MIB, [1; 16], 1);
        Pool::format(&device, &options).await.unwrap();
        for bad in [Duration::from_millis(99), Duration::from_secs(61), Duration::from_micros(150_500)] {
            assert_eq!(set_heartbeat(&device, bad).await.unwrap_err().kind(), ErrorKind::Invalid);
        }
        set_heartbeat(&device, SECOND).await.unwrap();
        let unnamed = open(&device, &runtime, OpenOptions::default()).await.map(drop).unwrap_err();
        assert_eq!(unnamed.kind(), ErrorKind::Unsupported);
    })
    .unwrap();
    exec.run(PATIENCE_STEPS, test(disk, exec.clone())).unwrap();
    exec.halt();
}

/// Returns how long `work` takes.
async fn time<T>(exec: &Executor, work: impl Future<Output = T>) -> (T, Duration) {
    let start = Runtime::now(exec);
    let value = work.await;
    (value, Runtime::now(exec) - start)
}

#[test]
fn another_host_is_refused_while_the_pool_is_open_and_not_when_it_was_closed() {
    for read_only in [false, true] {
        run(1, move |disk, exec| async move {
            let pool = open(&disk, &exec, host(1, 1)).await.unwrap();
            pool.create("v", &CreateOptions::new(MIB, 1)).await.unwrap();
            let (refused, time_taken) = time(&exec, open(&disk, &exec, host(2, 2).with_read_only(read_only))).await;
            let refused = refused.map(drop).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy);
            assert!(refused.to_string().contains("in use on another host, \"host1\""), "{refused}");
            assert!(time_taken < 3 * SECOND, "{time_taken:?}");
            // That did no harm to its owner.
            pool.create("w", &CreateOptions::new(MIB, 1)).await.unwrap();
            pool.close().await.unwrap();
            let (opened, time_taken) = time(&exec, open(&disk, &exec, host(2, 3).with_read_only(read_only))).await;
            assert_eq!(opened.unwrap().list().len(), 2);
            assert!(time_taken < 3 * SECOND, "{time_taken:?}");
        });
    }
}

#[test]
fn after_a_crash_the_same_host_opens_it_at_once_and_another_one_after_some_beats() {
    run(2, |disk, exec| async move {
        let pool = open(&disk, &exec, host(1, 1)).await.unwrap();
        pool.create("v", &CreateOptions::new(MIB, 1)).await.unwrap();
        exec.sleep(10 * SECOND).await;
        let medium = disk.freeze(Crash::Kill).crash(u64::MAX);
        for (number, at_least, at_most) in [(1, Duration::ZERO, SECOND), (2, 6 * SECOND, 9 * SECOND)] {
            let disk = SimDisk::new(medium.clone(), &exec, 7);
            let (opened, time_taken) = time(&exec, open(&disk, &exec, host(number, 9))).await;
            assert_eq!(opened.unwrap().list().len(), 1);
            assert!((at_least..at_most).contains(&time_taken), "{number}: {time_taken:?}");
        }
    });
}

#[test]
fn of_two_hosts_at_once_one_opens_the_pool() {
    for seed in 0..40 {
        run(seed, move |disk, exec| async move {
            // One of them has had it before, or neither.
            if seed % 3 == 0 {
                open(&disk, &exec, host(1, 9)).await.unwrap().close().await.unwrap();
            }
            let opened: Rc<std::cell::RefCell<Vec<_>>> = Rc::default();
            for number in [1, 2, 3] {
                let (disk, runtime, out) = (disk.clone(), exec.clone(), opened.clone());
                exec.spawn(Box::pin(async move {
                    let pool = open(&disk, &runtime, host(number, number)).await;
                    out.borrow_mut().push(pool);
                }));
            }
            while opened.borrow().len() < 3 {
                exec.sleep(SECOND / 10).await;
            }
            // An owner that was overtaken between check and claim has noticed by its next beat.
            exec.sleep(2 * SECOND).await;
            let mut writable = 0;
            for pool in opened.take().into_iter().flatten() {
                writable += usize::from(pool.create("v", &CreateOptions::new(MIB, 1)).await.is_ok());
            }
            assert!(writable <= 1, "seed {seed}: {writable}");
        });
    }
}

#[test]
fn an_owner_that_was_overtaken_writes_no_more_and_says_by_whom() {
    run(3, |disk, exec| async move {
        let pool = open(&disk, &exec, host(1, 1)).await.unwrap();
        pool.create("v", &CreateOptions::new(MIB, 1)).await.unwrap();
        let volume = pool.volume("v").unwrap();
        volume.write(0, Buf::copy_of(&[1; 4096]), true).await.0.unwrap();
        // It was stopped while another host waited: that one's beat is on the disk.
        let medium = disk.freeze(Crash::Kill).crash(u64::MAX);
        let elsewhere = SimDisk::new(medium, &exec, 5);
        let other = open(&elsewhere, &exec, host(2, 2)).await.unwrap();
        let mut beat = vec![0; 4096];
        elsewhere.freeze(Crash::Kill).crash(u64::MAX).image().read(255 * 4096, &mut beat);
        let at = forkdisk::device::Segment { offset: 255 * 4096, at: 0, len: 4096 };
        forkdisk::Device::write(&disk, Buf::copy_of(&beat), [at].into_iter().collect(), true).await.0.unwrap();
        exec.sleep(2 * SECOND).await;
        let failed = volume.write(0, Buf::copy_of(&[2; 4096]), false).await.0.unwrap_err();
        assert!(failed.to_string().contains("another host, \"host2\", has opened the pool"), "{failed}");
        assert!(pool.close().await.is_err());
        other.close().await.unwrap();
    });
}

#[test]
fn a_beat_costs_a_read_and_a_write_and_a_pool_without_one_nothing() {
    run(4, |disk, exec| async move {
        for (beat, requests) in [(SECOND, 10), (Duration::ZERO, 0)] {
            set_heartbeat(&disk, beat).await.unwrap();
            let pool = open(&disk, &exec, host(1, 1)).await.unwrap();
            let before = disk.counts();
            exec.sleep(10 * SECOND + SECOND / 2).await;
            let after = disk.counts();
            assert_eq!((after.reads - before.reads, after.writes - before.writes), (requests, requests));
            assert_eq!(after.flushes, before.flushes);
            pool.close().await.unwrap();
        }
    });
}
