//! A pool and an origin on disks that count requests.

use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;

use forkdisk::{Buf, FormatOptions, OpenOptions, OriginFull, OriginPlace, Pool, ProtectOptions, SnapshotFlags};
use forkdisk_sim::disk::{Config, Counts, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;

pub const PATIENCE_STEPS: u64 = 100_000_000;
pub const CHUNK: u64 = 64 << 10;
pub const MIB: u64 = 1 << 20;
pub const CHAINED: SnapshotFlags = SnapshotFlags::NONE;

/// A pool and an origin on separate disks.
#[derive(Clone)]
pub struct World {
    pub pool: Pool<SimDisk>,
    pub disks: [SimDisk; 2],
    pub exec: Executor,
}

impl World {
    /// Returns the requests of both disks while `work` ran: the pool's, the origin's.
    pub async fn counts(&self, work: impl Future<Output = ()>) -> (Counts, Counts) {
        let before = self.disks.each_ref().map(SimDisk::counts);
        work.await;
        let after = self.disks.each_ref().map(SimDisk::counts);
        let difference = |i: usize| Counts {
            reads: after[i].reads - before[i].reads,
            writes: after[i].writes - before[i].writes,
            fua_writes: after[i].fua_writes - before[i].fua_writes,
            flushes: after[i].flushes - before[i].flushes,
            discards: after[i].discards - before[i].discards,
            set_lens: after[i].set_lens - before[i].set_lens,
            clones: after[i].clones - before[i].clones,
            bytes_read: after[i].bytes_read - before[i].bytes_read,
            bytes_written: after[i].bytes_written - before[i].bytes_written,
        };
        (difference(0), difference(1))
    }

    pub async fn write(&self, name: &str, offset: u64, len: u64, byte: u8) {
        let volume = self.pool.volume(name).unwrap();
        volume.write(offset, Buf::copy_of(&vec![byte; len as usize]), false).await.0.unwrap();
    }

    /// Returns the one byte that all of a range holds.
    pub async fn byte(&self, name: &str, offset: u64, len: u64) -> u8 {
        let volume = self.pool.volume(name).unwrap();
        let (result, buf) = volume.read(offset, Buf::zeroed(len as usize)).await;
        result.unwrap();
        assert!(buf.iter().all(|&b| b == buf[0]), "{name} at {offset} is not of one kind");
        buf[0]
    }

    pub async fn snapshot(&self, name: &str, flags: SnapshotFlags) {
        self.pool.snapshot_with(&[("org", name)], flags, 1).await.unwrap();
    }
}

pub fn options(copy_ahead: u64, when_full: OriginFull) -> ProtectOptions {
    ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1)
        .with_chunk(CHUNK)
        .with_copy_ahead(copy_ahead)
        .with_when_full(when_full)
}

/// Runs `test` on a pool of `pool` bytes that protects an origin of `origin` bytes as "org".
pub fn run<F>(pool: u64, origin: u64, protect: ProtectOptions, test: impl FnOnce(World) -> F)
where
    F: Future<Output = ()> + 'static,
{
    run_with(OpenOptions::default(), pool, origin, protect, test);
}

/// As [`run`], with other open options.
pub fn run_with<F>(open: OpenOptions, pool: u64, origin: u64, protect: ProtectOptions, test: impl FnOnce(World) -> F)
where
    F: Future<Output = ()> + 'static,
{
    run_seeded(3, open, pool, origin, protect, test);
}

/// As [`run_with`], with another seed for the order of events.
pub fn run_seeded<F>(
    seed: u64,
    open: OpenOptions,
    pool: u64,
    origin: u64,
    protect: ProtectOptions,
    test: impl FnOnce(World) -> F,
) where
    F: Future<Output = ()> + 'static,
{
    let exec = Executor::new(seed);
    let config = Config { sector: 512, cache: Volatile::Yes };
    let disks = [pool, origin].map(|len| SimDisk::new(Medium::blank(config, len), &exec, len));
    let (device, other, runtime) = (disks[0].clone(), disks[1].clone(), Rc::new(exec.clone()));
    let opened = exec.run(PATIENCE_STEPS, async move {
        let options = FormatOptions::new(pool, [7; 16], 1);
        Pool::format(&device, &options).await.unwrap();
        let pool = Pool::open(device, runtime, open).await.unwrap();
        pool.protect("org", other, &protect).await.unwrap();
        pool
    });
    let world = World { pool: opened.unwrap(), disks: disks.clone(), exec: exec.clone() };
    let pool = world.pool.clone();
    exec.run(PATIENCE_STEPS, test(world)).unwrap();
    let report = exec.run(PATIENCE_STEPS, async move { pool.check().await }).unwrap().unwrap();
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    assert_eq!(disks.iter().find_map(SimDisk::misuse), None);
    exec.halt();
}

/// Returns a restarted machine with the disks that a crash left.
pub fn restarted(media: [Medium; 2], seed: u64) -> (Executor, [SimDisk; 2], Rc<Executor>) {
    let exec = Executor::new(seed);
    let disks = media.map(|medium| SimDisk::new(medium, &exec, seed));
    let runtime = Rc::new(exec.clone());
    (exec, disks, runtime)
}

/// Resolves when the executor has run `step` steps.
pub async fn at_step(exec: &Executor, step: u64) {
    poll_fn(|cx| match exec.steps() >= step {
        true => Poll::Ready(()),
        false => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}
