//! The copied contents: mixed sources, several destinations, bytes provided before and during the copy.

use proptest::prelude::*;

use super::super::ProvidedBytes;
use super::*;

#[test]
fn a_job_reaches_all_its_destinations_also_on_another_device() {
    let lab = Lab::new(scarce(), 71);
    let far = Rc::new(RecordingDevice::new(
        Jittery {
            inner: FailingDevice::new(MemoryDevice::new(1 << 20), |_| None),
            clock: lab.clock.clone(),
            random: Cell::new(5),
            reach: 9,
        },
        |_| true,
    ));
    let mut job = lab.job(4096, HALF, 128 * KIB);
    for i in 1..7 {
        job.destinations.push(lab.place(HALF + (i << 20)));
    }
    job.destinations.push(Place { device: far.clone(), offset: 512 * KIB });
    let ticket = lab.submit(job);
    lab.clock.run(ticket.wait_done()).expect("copied");
    for i in 0..7 {
        assert_eq!(lab.contents(HALF + (i << 20), 128 * KIB), pattern(4096, 128 * KIB));
    }
    let back = Job {
        source: vec![Piece { len: 128 * KIB, from: CopySource::Device(Place { device: far, offset: 512 * KIB }) }],
        ..lab.job(0, HALF + (20 << 20), 1)
    };
    lab.clock.run(lab.submit(back).wait_done()).expect("copied");
    assert_eq!(lab.contents(HALF + (20 << 20), 128 * KIB), pattern(4096, 128 * KIB));
    let (reads, writes) = (lab.client.stats().bytes_read, lab.client.stats().bytes_written);
    assert_eq!((reads, writes), (2 * 128 * KIB, 9 * 128 * KIB));
}

#[test]
fn bytes_that_come_too_late_are_refused() {
    let lab = Lab::new(scarce(), 81);
    let ticket = lab.submit(lab.job(0, HALF, 192 * KIB));
    let bytes = Rc::new(Buf::copy_of(&[7; 100]));
    let given = |at| ProvidedBytes { at, range: 0..100, bytes: bytes.clone() };
    assert!(ticket.give(given(50)), "nothing is written yet");
    while lab.client.stats().bytes_written < 64 * KIB {
        lab.clock.run_until_idle();
        lab.clock.advance();
    }
    assert!(!ticket.give(given(64 * KIB - 50)), "a part of it is written");
    assert!(ticket.give(given(191 * KIB)));
    lab.clock.run(ticket.wait_done()).expect("copied");
    assert!(!ticket.give(given(191 * KIB)), "it is over");
    let mut expected = pattern(0, 192 * KIB);
    expected[50..150].fill(7);
    expected[191 << 10..(191 << 10) + 100].fill(7);
    assert_eq!(lab.contents(HALF, 192 * KIB), expected);
    assert_eq!(lab.client.stats().bytes_given, 200);
}

#[derive(Clone, Debug)]
enum Step {
    /// A job: pieces of (sectors, kind, source sector).
    Job(Vec<(u64, u8, u64)>),
    /// Bytes for one of the jobs so far: which job, the position in it, how many.
    Give(usize, u64, usize),
    /// Time passes.
    Wait(u8),
    /// Other settings: sub-job in 64 KiB, split count, whether the device clones.
    Set(u32, u32, bool),
    /// The device cannot clone from now on.
    Refuse,
    /// One of the jobs is cancelled.
    Cancel(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let piece = (1u64..200, 0u8..3, 0u64..1000);
    prop_oneof![
        4 => prop::collection::vec(piece, 1..6).prop_map(Step::Job),
        4 => (any::<usize>(), any::<u64>(), 1usize..200_000).prop_map(|(a, b, c)| Step::Give(a, b, c)),
        4 => (1u8..20).prop_map(Step::Wait),
        1 => (1u32..=16, 1u32..=8, any::<bool>()).prop_map(|(a, b, c)| Step::Set(a, b, c)),
        1 => Just(Step::Refuse),
        1 => any::<usize>().prop_map(Step::Cancel),
    ]
}

/// A job and what its destination must hold in the end, unless it was cancelled.
struct Expected {
    ticket: JobHandle,
    to: u64,
    bytes: Vec<u8>,
    cancelled: bool,
}

fn submit(lab: &Lab, pieces: &[(u64, u8, u64)], to: u64) -> Expected {
    let (mut source, mut bytes) = (Vec::new(), Vec::new());
    let mut given = Vec::new();
    for &(sectors, kind, from) in pieces {
        let (len, from) = (sectors * 4096, from * 4096);
        let at = bytes.len() as u64;
        let from = match kind {
            0 => {
                bytes.extend(pattern(from, len));
                CopySource::Device(lab.place(from))
            }
            1 => {
                bytes.resize(bytes.len() + len as usize, 0);
                CopySource::Zeroes
            }
            _ => {
                let own = Buf::copy_of(&vec![from as u8 ^ 0x5a; len as usize]);
                bytes.extend_from_slice(&own);
                given.push(ProvidedBytes { at, range: 0..len as usize, bytes: Rc::new(own) });
                CopySource::Given
            }
        };
        source.push(Piece { len, from });
    }
    let job = Job {
        source,
        destinations: smallvec![lab.place(to)],
        near: to / (1 << 20)..to / (1 << 20) + 2,
        group: JobGroup::default(),
        checksums: Vec::new(),
        hold: None,
    };
    Expected { ticket: lab.copier.submit(&lab.client, job, given), to, bytes, cancelled: false }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_copied_arrives(steps in prop::collection::vec(step(), 1..40), seed in any::<u64>()) {
        let lab = Lab::new(CopierSettings { offload: seed % 2 == 0, ..scarce() }, seed);
        let (mut jobs, mut next): (Vec<Expected>, u64) = (Vec::new(), HALF);
        for (i, step) in steps.into_iter().enumerate() {
            match step {
                Step::Job(pieces) => {
                    let len: u64 = pieces.iter().map(|p| p.0 * 4096).sum();
                    if next + len > 2 * HALF {
                        continue;
                    }
                    jobs.push(submit(&lab, &pieces, next));
                    next += len;
                }
                Step::Give(which, at, len) if !jobs.is_empty() => {
                    let n = jobs.len();
                    let job = &mut jobs[which % n];
                    let at = at % job.bytes.len() as u64;
                    let len = len.min(job.bytes.len() - at as usize);
                    let bytes = Rc::new(Buf::copy_of(&vec![i as u8; len]));
                    if job.ticket.give(ProvidedBytes { at, range: 0..len, bytes }) {
                        job.bytes[at as usize..at as usize + len].fill(i as u8);
                    }
                }
                Step::Wait(ticks) => (0..ticks).for_each(|_| {
                    lab.clock.run_until_idle();
                    lab.clock.advance();
                }),
                Step::Set(size, split_count, offload) => {
                    let (subjob_size, buffers) = (size << 16, 5 << 20);
                    lab.copier.set(CopierSettings { subjob_size, split_count, buffers, offload, ..scarce() });
                }
                Step::Refuse => lab.refuse_to_clone(),
                Step::Cancel(which) if !jobs.is_empty() => {
                    let n = jobs.len();
                    jobs[which % n].ticket.cancel();
                    jobs[which % n].cancelled = true;
                }
                Step::Give(..) | Step::Cancel(_) => {}
            }
        }
        lab.idle();
        for job in &jobs {
            let result = lab.clock.run(job.ticket.wait_done());
            prop_assert!(result.is_ok() || job.cancelled);
            if result.is_ok() {
                prop_assert!(lab.contents(job.to, job.bytes.len() as u64) == job.bytes);
            }
        }
        prop_assert_eq!(lab.client.stats().jobs, jobs.len() as u64);
    }
}
