//! Requests that fail.

use crate::disk::{Fault, ReadDamage, Request, When};
use crate::driver::{Op, Operation};
use crate::history::fault::now;
use crate::history::op::Profile;
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::rng::Rng;

pub static FAULT: Operation<Volumes> = Operation {
    name: "fault",
    weight: |profile| match profile {
        Hosts => 9,
        Faults => 7,
        Copies => 3,
        Gathering | Names => 1,
        _ => 0,
    },
    launch: |run, op| {
        arm(run, op);
        Ok(())
    },
};

/// Arms the fault of an operation.
fn arm(run: &mut Run, op: &Op) {
    let mut rng = Rng::new(op.draws[0]);
    if run.setup.profile == Profile::Hosts && !rng.one_in(8) {
        return fill_host(run, &mut rng);
    }
    let on = *rng.pick(&[
        Request::Read,
        Request::Read,
        Request::Write,
        Request::Write,
        Request::Write,
        Request::Flush,
        Request::Flush,
        Request::Discard,
        Request::SetLen,
    ]);
    let harm = match on {
        Request::Flush | Request::Discard | Request::SetLen => ReadDamage::Eio,
        Request::Read => *rng.pick(&[ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Short]),
        Request::Write => {
            *rng.pick(&[ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Eio, ReadDamage::Short, ReadDamage::Enospc])
        }
    };
    let reach = *rng.pick(&[1, 8, 40]);
    let n = 1 + rng.below(reach);
    let when = *rng.pick(&[When::Once(n), When::Once(n), When::From(n), When::Every(n + 1)]);
    run.say(|| format!("from now on {on:?} requests fail: {harm:?}, {when:?}"));
    run.session.disk.arm(Fault { on, harm, when, within: None });
    run.armed(now(run), 4 + rng.below(20) as u32);
}

/// Leaves the file system under the pool little space or none, until faults are disarmed.
fn fill_host(run: &mut Run, rng: &mut Rng) {
    let reach = *rng.pick(&[1, 4, 30, 200]);
    let pages = rng.below(reach);
    run.say(|| format!("from now on the host has room for {pages} pages"));
    run.session.disk.leave_room(pages);
    run.armed(now(run), 8 + rng.below(50) as u32);
}
