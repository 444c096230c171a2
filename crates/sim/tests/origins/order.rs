//! A stream's writes reach the origin in the order of arrival, whichever of them waited for a copy out.

use std::rc::Rc;

use forkdisk::testing::{RecordingDevice, RequestKind, zeroes_are_data};
use forkdisk::{Buf, FormatOptions, OpenOptions, OriginFull, Pool};
use forkdisk_sim::disk::{Config, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::Executor;

use crate::in_order;
use crate::lab::{MIB, PATIENCE_STEPS, at_step, options};

/// Requests of a file of zeroes, nearly of maximum size and not aligned to chunks.
const WRITES: usize = 20;
const SEEDS: u64 = 12;
const LEN: u64 = MIB - 12 * 4096;

/// Returns how many of the writes of a stream reach the origin behind a later one; each arrives `pause` steps
/// of the executor after the one before it.
fn shuffled(seed: u64, pause: u64) -> usize {
    let exec = Executor::new(seed);
    let config = Config { sector: 512, cache: Volatile::Yes };
    let [pool, origin] = [64 * MIB, 32 * MIB]
        .map(|len| RecordingDevice::new(SimDisk::new(Medium::blank(config, len), &exec, seed), zeroes_are_data));
    let (runtime, device, record) = (Rc::new(exec.clone()), origin.clone(), origin.clone());
    let clock = exec.clone();
    let recording = exec.run(PATIENCE_STEPS, async move {
        let format = FormatOptions::new(64 * MIB, [7; 16], 1);
        Pool::format(&pool, &format).await.unwrap();
        let pool = Pool::open(pool, runtime, OpenOptions::default()).await.unwrap();
        pool.protect("org", device, &options(8 * MIB, OriginFull::Error)).await.unwrap();
        pool.snapshot(&[("org", "s")], 1).await.unwrap();
        record.take();
        let (pool, clock, start) = (&pool, &clock, clock.steps());
        let writes: [_; WRITES] = std::array::from_fn(|i| async move {
            at_step(clock, start + pause * i as u64).await;
            let volume = pool.volume("org").unwrap();
            volume.write(i as u64 * LEN, Buf::zeroed(LEN as usize), false).await.0.unwrap();
        });
        in_order(writes).await;
        record.take()
    });
    let mut latest = 0;
    let is_late = |offset: &u64| {
        let before = latest;
        latest = latest.max(*offset);
        *offset < before
    };
    let writes = recording.unwrap().requests.into_iter().filter(|request| request.kind == RequestKind::WriteData);
    writes.map(|write| write.offset).filter(is_late).count()
}

#[test]
fn those_that_wait_for_different_copies_go_on_in_the_order_in_which_they_came() {
    let pauses = [0, 1, 3, 10, 20, 50, 100, 200];
    let all = SEEDS as usize * pauses.len() * WRITES;
    let late: usize = (0..SEEDS).flat_map(|seed| pauses.map(|pause| shuffled(seed, pause))).sum();
    println!("{late} of {all}");
    // Writes that are released at the same time continue in any order.
    assert!(late <= all / 480, "{late} of {all}");
}
