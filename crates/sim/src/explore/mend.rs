//! Damaged counts lose no data: everything the maps reach can be read, and a repair restores the pool.

use std::collections::BTreeSet;
use std::rc::Rc;

use forkdisk::{OpenOptions, Pool};

use super::damage::{DamagedDisk, PATIENCE_STEPS, Verdict, compare, reported, truths};
use crate::disk::{Crash, LyingDevice, Medium, SimDisk};
use crate::executor::Executor;
use crate::history::{PoolImage, Session, Violation, open_options};
use crate::rng::mix;

/// The pages of block 0, of which two are superblocks and the others the log of counts, and those of block 1, which
/// count the blocks of the first region.
const COUNTS: std::ops::Range<u64> = 0..512;
const SUPERBLOCKS: [u64; 2] = [0, 128];

/// Whether only counts are damaged.
fn is_of_counts(harmed: &DamagedDisk) -> bool {
    let is_count = |page: &u64| COUNTS.contains(page) && !SUPERBLOCKS.contains(page);
    harmed.read.is_none() && harmed.pages.iter().all(is_count)
}

fn violation(what: String) -> Violation {
    Violation::new("P7", what)
}

/// Reads the damaged pool, repairs it, and reads it again.
pub fn examine(image: &PoolImage, harmed: &DamagedDisk, older: bool, number: u64) -> Result<(), Violation> {
    let is_of_counts = is_of_counts(harmed);
    // A repair walks all maps and meets damage elsewhere.
    if harmed.read.is_some() || !is_of_counts && !number.is_multiple_of(16) {
        return Ok(());
    }
    let truths = truths(image, older);
    if is_of_counts {
        let read_only = open_options(&image.setup, None).with_read_only(true);
        let session = open(&harmed.medium, read_only, number)?
            .map_err(|e| violation(format!("damaged counts, and the pool cannot be opened for reading: {e}")))?;
        if compare(&session, &truths, &BTreeSet::new())? == Verdict::Reported {
            return Err(violation("damaged counts, and what maps reach cannot be read".into()));
        }
    }
    let repaired = match repair(&harmed.medium, number)? {
        Ok(medium) => medium,
        Err(e) if is_of_counts => return Err(violation(format!("only counts are damaged, and no repair: {e}"))),
        Err(e) => return reported(&e).map(drop),
    };
    let session = match open(&repaired, open_options(&image.setup, None), number)? {
        Ok(session) => session,
        Err(e) if is_of_counts => return Err(violation(format!("repaired, and the pool does not open: {e}"))),
        Err(e) => return reported(&e).map(drop),
    };
    let verdict = compare(&session, &truths, &BTreeSet::new())?;
    let pool = session.pool.clone();
    let checked = session.exec.run(PATIENCE_STEPS, async move { pool.check().await })?;
    match checked {
        Ok(report)
            if is_of_counts && (verdict == Verdict::Reported || !report.damage.is_empty() || report.leaked > 0) =>
        {
            Err(violation(format!("repaired, and `check` finds {report:?}")))
        }
        Ok(_) => Ok(()),
        Err(e) => reported(&e).map(drop),
    }
}

type Outcome<T> = Result<Result<T, forkdisk::Error>, Violation>;

fn open(medium: &Medium, options: OpenOptions, number: u64) -> Outcome<Session> {
    let exec = Executor::new(mix(&[number, 23]));
    let disk = SimDisk::new(medium.clone(), &exec, number);
    let (device, runtime) = (LyingDevice::of_pool(disk.clone()), Rc::new(exec.clone()));
    let opened = exec.run(PATIENCE_STEPS, Pool::open(device, runtime, options))?;
    if opened.is_err() {
        exec.halt();
    }
    Ok(opened.map(|pool| Session::plain(exec, disk, pool)))
}

/// Repairs the pool, sometimes after a first attempt that a power cut ended.
fn repair(medium: &Medium, number: u64) -> Outcome<Medium> {
    let mut medium = medium.clone();
    for is_cut in [number.is_multiple_of(3), false] {
        let exec = Executor::new(mix(&[number, 24]));
        let disk = SimDisk::new(medium.clone(), &exec, number);
        let (device, runtime) = (disk.clone(), Rc::new(exec.clone()));
        let work = async move { Pool::plan_repair(device, runtime).await?.apply().await };
        if is_cut {
            exec.spawn(Box::pin(async move { drop(work.await) }));
            for _ in 0..number % 600 {
                exec.step();
            }
            medium = disk.freeze(Crash::Power).crash(mix(&[number, 25]));
        } else {
            let outcome = exec.run(PATIENCE_STEPS, work)?;
            medium = disk.freeze(Crash::Power).crash(0);
            exec.halt();
            if let Err(e) = outcome {
                return Ok(Err(e));
            }
            continue;
        }
        exec.halt();
    }
    Ok(Ok(medium))
}
