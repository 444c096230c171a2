//! Requests that fail.

use super::delete::{Victim, delete};
use super::flush::flush;
use super::snapshot::{Sources, is_crowded, snapshot};
use super::target::wait_for_controls;
use super::upkeep::checkpoint;
use crate::disk::{Fault, ReadDamage, Request, When};
use crate::driver::{Op, Operation, Violation};
use crate::origins::op::{DRAWS_COUNT, Focus::*};
use crate::origins::run::{Origins, Run};
use crate::rng::Rng;

/// Arms an I/O error on one of the disks.
pub static FAULT: Operation<Origins> = Operation {
    name: "fault",
    weight: |focus| match focus {
        Plain => 8,
        Strikes => 3,
        _ => 0,
    },
    launch: |run, op| {
        arm(run, op);
        Ok(())
    },
};

/// A flush of one of the disks fails while a snapshot, a checkpoint and flushes are running.
pub static STRIKE: Operation<Origins> = Operation {
    name: "strike",
    weight: |focus| match focus {
        Strikes => 36,
        _ => 0,
    },
    launch: strike,
};

/// Arms the fault of an operation, on one of the disks.
fn arm(run: &mut Run, op: &Op) {
    let mut rng = Rng::new(op.draws[0]);
    if op.draws[1].is_multiple_of(5) {
        let pages = rng.below(*rng.clone().pick(&[1, 4, 30]));
        run.say(|| format!("from now on the host has room for {pages} pages of the pool"));
        run.session.disks[0].leave_room(pages);
        run.armed(run.step, 4 + rng.below(30) as u32);
        return;
    }
    let disk = rng.index(2);
    let on = *rng.pick(&[Request::Read, Request::Read, Request::Write, Request::Write, Request::Flush]);
    let harm = match on {
        Request::Write => *rng.pick(&[ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Short]),
        _ => ReadDamage::Eio,
    };
    let n = 1 + rng.below(*rng.clone().pick(&[1, 8, 40]));
    let when = *rng.pick(&[When::Once(n), When::Once(n), When::From(n), When::Every(n + 1)]);
    run.say(|| format!("from now on {on:?} requests of disk {disk} fail: {harm:?}, {when:?}"));
    run.session.disks[disk].arm(Fault { on, harm, when, within: None });
    run.armed(run.step, 4 + rng.below(20) as u32);
}

/// Makes the n-th flush of a disk from now on fail.
pub fn arm_flush(run: &mut Run, disk: usize, n: u64) {
    run.say(|| format!("flush {n} of disk {disk} from now on fails"));
    run.session.disks[disk].arm(Fault { on: Request::Flush, harm: ReadDamage::Eio, when: When::Once(n), within: None });
    run.armed(run.step, 6);
}

/// What runs while a flush fails.
enum Struck {
    Snapshot,
    Checkpoint,
    Flush,
}

/// Of several running flushes of one disk for the same changes, one fails.
pub fn strike(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[3]);
    if !wait_for_controls(run)? || run.trouble.armed.is_some() {
        return Ok(());
    }
    if is_crowded(run) {
        delete(run, op, Victim::Oldest)?;
        wait_for_controls(run)?;
    }
    arm_flush(run, usize::from(!rng.one_in(4)), 1 + rng.below(4));
    let mut all = vec![Struck::Snapshot, Struck::Checkpoint];
    all.extend([Struck::Flush, Struck::Flush].into_iter().filter(|_| rng.one_in(3)));
    if rng.one_in(4) {
        rng.shuffle(&mut all);
    }
    for struck in all {
        let op = Op { draws: std::array::from_fn(|i| if i < DRAWS_COUNT { rng.next() } else { 0 }), ..*op };
        match struck {
            Struck::Snapshot if rng.one_in(4) => snapshot(run, &op, Sources::Group)?,
            Struck::Snapshot => snapshot(run, &op, Sources::One)?,
            Struck::Flush => flush(run, &op)?,
            Struck::Checkpoint => checkpoint(run)?,
        }
        let reach = *rng.pick(&[1, 8, 40, 80]);
        for _ in 0..rng.below(reach) {
            run.step()?;
        }
    }
    Ok(())
}
