//! The copier keeps the order of submission when buffers run out, whatever the disk does; and with the
//! historical bug (the job that gets no buffer goes to the end of the queue) it does not.

use std::cell::RefCell;
use std::rc::Rc;

use forkdisk::copier::{Client, Copier, CopyClass, CopySource, Job, JobGroup, Piece, Place};
use forkdisk::testing::{RecordingDevice, RequestKind};
use forkdisk::{CopierSettings, Throttle};
use forkdisk_sim::disk::{Config, Medium, SimDisk, Volatile};
use forkdisk_sim::executor::{Executor, Step};
use forkdisk_sim::planted::{self, Bug};

const KIB: u64 = 1 << 10;
const JOBS: u64 = 24;
const LEN: u64 = 192 * KIB;

/// Where reads and writes began, in the order in which they reached the disk, and which jobs ended.
struct Seen {
    reads: Vec<u64>,
    writes: Vec<u64>,
    ended: Vec<u64>,
}

impl Seen {
    fn is_in_order(&self) -> bool {
        self.reads.is_sorted() && self.writes.is_sorted()
    }

    /// Whether every job was carried out completely.
    fn is_complete(&self) -> bool {
        [self.reads.len(), self.writes.len()] == [JOBS as usize * 3; 2] && self.ended.len() == JOBS as usize
    }
}

/// Copies a range in jobs that do not touch, with buffers for one sub-job at a time. `near`: whether the jobs
/// lie near each other; `gated`: nothing is written before all is read, for which there are not enough
/// buffers.
fn copy(seed: u64, near: bool, gated: bool) -> Seen {
    let exec = Executor::new(seed);
    let config = Config { sector: 512, cache: Volatile::Yes };
    let sim = SimDisk::new(Medium::blank(config, 32 << 20), &exec, seed);
    let disk = Rc::new(RecordingDevice::new(sim, |_| true));
    let settings = CopierSettings::default().with_subjob_size(64 << 10).with_buffers(5 * (64 << 10));
    let copier = Copier::new(disk.clone(), Rc::new(exec.clone()), settings);
    let client = Rc::new(Client::new(CopyClass::Break, Throttle::NONE));
    let ended = Rc::<RefCell<Vec<u64>>>::default();
    let gate = copier.gate();
    let mut tickets = Vec::new();
    for i in 0..JOBS {
        let at = i * (LEN + 4 * KIB);
        let place = |offset| Place { device: disk.clone(), offset };
        let source = vec![Piece { len: LEN, from: CopySource::Device(place(at)) }];
        let job = Job {
            source,
            destinations: [place((16 << 20) + at)].into_iter().collect(),
            near: i..i + if near { 2 } else { 1 },
            group: JobGroup::default(),
            checksums: Vec::new(),
            hold: gated.then(|| gate.hold()),
        };
        let (ticket, list) = (Rc::new(copier.submit(&client, job, Vec::new())), ended.clone());
        tickets.push(ticket.clone());
        exec.spawn(Box::pin(async move {
            ticket.wait_done().await.expect("nothing fails");
            list.borrow_mut().push(i);
        }));
    }
    exec.spawn(Box::pin(async move {
        for ticket in tickets {
            ticket.wait_read().await;
        }
        drop(gate);
    }));
    while exec.step() == Step::Ran {}
    exec.halt();
    let seen = disk.take();
    let of = |kind| seen.requests.iter().filter(|r| r.kind == kind).map(|r| r.offset).collect();
    Seen { reads: of(RequestKind::Read), writes: of(RequestKind::WriteData), ended: ended.take() }
}

#[test]
fn device_order_is_arrival_order_when_buffers_run_out() {
    for seed in 0..40 {
        let seen = copy(seed, false, seed % 2 == 0);
        assert!(seen.is_complete() && seen.is_in_order(), "seed {seed}");
        let seen = copy(seed, true, seed % 2 == 0);
        assert!(seen.is_complete() && seen.is_in_order(), "seed {seed}, near");
    }
}

#[test]
fn a_starved_job_at_the_end_of_the_queue_would_be_noticed() {
    planted::set(Some(Bug::StarvedJobGoesLast));
    let bad = (0..10).filter(|&seed| !copy(seed, false, false).is_in_order()).count();
    planted::set(None);
    assert_eq!(bad, 10, "with the mistake the disk gets the copies shuffled, for every seed");
}
