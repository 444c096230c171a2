//! A gate holds writes back until everything is read, and never blocks other jobs.

use super::*;
use crate::copier::WriteGate;

const LEN: u64 = 192 * KIB;

fn held(lab: &Lab, gate: &WriteGate, at: u64) -> JobHandle {
    lab.submit(Job { hold: Some(gate.hold()), ..lab.job(at, HALF + at, LEN) })
}

fn all_read(lab: &Lab, tickets: &[JobHandle]) {
    lab.clock.run(async {
        for ticket in tickets {
            ticket.wait_read().await;
        }
    });
}

fn all_done(lab: &Lab, tickets: &[JobHandle]) {
    lab.clock.run(async {
        for ticket in tickets {
            ticket.wait_done().await.expect("copied");
        }
    });
    for at in (0..tickets.len() as u64).map(|i| i * LEN) {
        assert_eq!(lab.contents(HALF + at, LEN), pattern(at, LEN));
    }
}

#[test]
fn all_of_it_is_read_before_any_of_it_is_written() {
    let lab = Lab::new(ample(), 11);
    let gate = lab.copier.gate();
    let mut tickets = Vec::new();
    for at in (0..8).map(|i| i * LEN) {
        tickets.push(held(&lab, &gate, at));
        all_read(&lab, &tickets);
    }
    let seen = lab.disk.take();
    assert_eq!((seen.count(RequestKind::Read), seen.count(RequestKind::WriteData)), (24, 0));
    drop(gate);
    all_done(&lab, &tickets);
    assert_eq!(lab.disk.take().count(RequestKind::WriteData), 24);
    assert!(lab.copier.0.is_idle());
}

#[test]
fn it_does_not_hold_while_anything_waits_to_be_started() {
    let throttled = CopierSettings { throttle: Throttle { percent: 20, bytes_per_second: 0 }, ..ample() };
    for settings in [scarce(), CopierSettings { split_count: 1, ..ample() }, throttled] {
        let lab = Lab::new(settings, 12);
        let gate = lab.copier.gate();
        let tickets: Vec<JobHandle> = (0..8).map(|i| held(&lab, &gate, i * LEN)).collect();
        all_read(&lab, &tickets);
        // Another client, which needs the buffers that the last of them holds.
        let other = Rc::new(Client::new(CopyClass::Break, Throttle::NONE));
        let more = lab.copier.submit(&other, lab.job(0, HALF + (20 << 20), 4 << 20), Vec::new());
        lab.clock.run(more.wait_done()).expect("copied");
        drop(gate);
        all_done(&lab, &tickets);
    }
}

#[test]
fn what_cannot_be_read_is_not_waited_for() {
    let lab = Lab::new(ample(), 13);
    lab.refuse(|request| request.kind == RequestKind::Read && request.offset == LEN);
    let gate = lab.copier.gate();
    let tickets: Vec<JobHandle> = (0..3).map(|i| held(&lab, &gate, i * LEN)).collect();
    all_read(&lab, &tickets);
    drop(gate);
    let ends: Vec<bool> = tickets.iter().map(|ticket| lab.clock.run(ticket.wait_done()).is_ok()).collect();
    assert_eq!(ends, [true, false, true]);
}

#[test]
fn what_is_cloned_by_the_device_passes_as_well() {
    let lab = Lab::new(CopierSettings { offload: true, ..ample() }, 14);
    let gate = lab.copier.gate();
    let tickets = [held(&lab, &gate, 0)];
    all_read(&lab, &tickets);
    drop(gate);
    all_done(&lab, &tickets);
}

#[test]
fn what_is_cancelled_ends_behind_a_closed_gate() {
    let lab = Lab::new(ample(), 15);
    let gate = lab.copier.gate();
    let ticket = held(&lab, &gate, 0);
    all_read(&lab, std::slice::from_ref(&ticket));
    ticket.cancel();
    lab.clock.run(ticket.wait_done()).expect_err("cancelled");
    assert!(lab.copier.0.is_idle());
    drop(gate);
}
