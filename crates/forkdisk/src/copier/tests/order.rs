//! Jobs start, are written and end in the order of submission, whatever resource is scarce.

use super::*;

/// Submits 24 jobs of 192 KiB, each at the place behind the one before.
fn sequential(lab: &Lab, gap: u64) -> Vec<JobHandle> {
    let len = 192 * KIB;
    (0..24).map(|i| lab.submit(lab.job(i * (len + gap), HALF + i * (len + gap), len))).collect()
}

#[test]
fn device_order_is_arrival_order_also_without_buffers() {
    for (settings, seed) in [(scarce(), 3), (ample(), 4), (CopierSettings { split_count: 1, ..ample() }, 5)] {
        let lab = Lab::new(settings, seed);
        let tickets = sequential(&lab, 4 * KIB);
        lab.clock.run(async {
            for ticket in &tickets {
                ticket.wait_done().await.expect("copied");
            }
        });
        let seen = lab.disk.take();
        let (reads, writes) = (places(&seen, RequestKind::Read), places(&seen, RequestKind::WriteData));
        assert_eq!((reads.len(), writes.len()), (72, 72), "three sub-jobs each");
        assert!(reads.is_sorted() && writes.is_sorted(), "{settings:?}");
        assert!(lab.copier.0.is_idle());
        let stats = lab.client.stats();
        assert_eq!((stats.jobs, stats.failed, stats.bytes_written), (24, 0, 72 * 64 * KIB));
        assert_eq!(stats.buffer_waits > 0, settings.buffers < 1 << 20, "{stats:?}");
        assert_eq!(stats.buffer_wait > Duration::ZERO, stats.buffer_waits > 0);
    }
}

#[test]
fn jobs_that_lie_near_end_in_order_and_others_when_they_can() {
    let lab = Lab::with_pace(ample(), 77, 200);
    let near = |i: u64| i / 4 * 10..i / 4 * 10 + 2;
    let tickets: Vec<JobHandle> = (0..16)
        .map(|i| lab.submit(Job { near: near(i), ..lab.job(i * 128 * KIB, HALF + i * 128 * KIB, 64 * KIB) }))
        .collect();
    let mut ended: Vec<usize> = Vec::new();
    loop {
        lab.clock.run_until_idle();
        for (i, ticket) in tickets.iter().enumerate() {
            if ticket.progress.ended.get() && !ended.contains(&i) {
                ended.push(i);
            }
        }
        if !lab.clock.advance() {
            break;
        }
    }
    assert_eq!(ended.len(), 16);
    for group in 0..4 {
        assert!(ended.iter().filter(|&&i| i / 4 == group).is_sorted(), "{ended:?}");
    }
    assert!(!ended.is_sorted(), "with these times the groups overtake each other");
}

#[test]
fn clients_do_not_wait_for_the_order_of_others() {
    let lab = Lab::new(CopierSettings { split_count: 1, ..ample() }, 9);
    let other = Rc::new(Client::new(CopyClass::Break, Throttle::NONE));
    let long = lab.submit(lab.job(0, HALF, 4 << 20));
    let short = lab.copier.submit(&other, lab.job(8 << 20, HALF + (8 << 20), 64 * KIB), Vec::new());
    lab.clock.run(short.wait_done()).expect("copied");
    assert!(!long.progress.ended.get());
    lab.clock.run(long.wait_done()).expect("copied");
}

#[test]
fn every_kind_of_user_goes_on_while_another_holds_all_it_may() {
    let lab = Lab::new(scarce(), 13);
    let long = lab.submit(lab.job(0, HALF, 8 << 20));
    for (i, user) in
        [CopyClass::Gather, CopyClass::Origin, CopyClass::Transfer, CopyClass::Flatten].into_iter().enumerate()
    {
        let at = (10 + i as u64) << 20;
        let client = Rc::new(Client::new(user, Throttle::NONE));
        let ticket = lab.copier.submit(&client, lab.job(at, HALF + at, 256 * KIB), Vec::new());
        lab.clock.run(ticket.wait_done()).expect("copied");
        assert_eq!(client.stats().jobs, 1, "{}", user.name());
    }
    assert!(!long.progress.ended.get());
    lab.clock.run(long.wait_done()).expect("copied");
}

#[test]
fn neighbours_in_the_queue_become_one_request() {
    let lab = Lab::new(scarce(), 21);
    // The first holds the only buffer; those behind it continue where the one before ends.
    let first = lab.submit(lab.job(0, HALF, 64 * KIB));
    let small: Vec<JobHandle> = (0..8)
        .map(|i| lab.submit(lab.job((1 << 20) + i * 16 * KIB, HALF + (1 << 20) + i * 16 * KIB, 16 * KIB)))
        .collect();
    let apart = lab.submit(lab.job((1 << 20) + 512 * KIB, HALF + (1 << 20) + 128 * KIB, 16 * KIB));
    lab.clock.run(async {
        first.wait_done().await.expect("copied");
        for ticket in &small {
            ticket.wait_done().await.expect("copied");
        }
        apart.wait_done().await.expect("copied");
    });
    let seen = lab.disk.take();
    let mib = 1 << 20;
    let lens = [(0, 64 * KIB), (mib, 64 * KIB), (mib + 64 * KIB, 64 * KIB), (mib + 512 * KIB, 16 * KIB)];
    assert_eq!(places(&seen, RequestKind::Read), lens);
    let written = [(0, 64), (1024, 64), (1088, 64), (1152, 16)].map(|(at, len)| (HALF + at * KIB, len * KIB));
    assert_eq!(places(&seen, RequestKind::WriteData), written, "its source lies elsewhere");
    assert_eq!(lab.client.stats().merged, 6);
    assert_eq!(lab.contents(HALF + mib, 128 * KIB), pattern(mib, 128 * KIB));
}

/// Copies of 16 KiB from scattered places to adjoining ones, all submitted at once; returns what the disk saw.
fn scattered(user: CopyClass, count: u64) -> Recording {
    let mut lab = Lab::new(ample(), 5);
    lab.client = Rc::new(Client::new(user, Throttle::NONE));
    let from = |i: u64| (7 * i % count) * 128 * KIB;
    let tickets: Vec<JobHandle> =
        (0..count).map(|i| lab.submit(lab.job(from(i), HALF + i * 16 * KIB, 16 * KIB))).collect();
    lab.clock.run(async {
        for ticket in &tickets {
            ticket.wait_done().await.expect("copied");
        }
    });
    for i in 0..count {
        assert_eq!(lab.contents(HALF + i * 16 * KIB, 16 * KIB), pattern(from(i), 16 * KIB));
    }
    lab.idle();
    lab.disk.take()
}

#[test]
fn small_copies_for_an_origin_are_written_together_while_several_are_in_flight() {
    let of_origin = scattered(CopyClass::Origin, 12);
    let lens: Vec<u64> = places(&of_origin, RequestKind::WriteData).iter().map(|place| place.1 / KIB).collect();
    assert_eq!((lens[..4].to_vec(), of_origin.count(RequestKind::Read)), (vec![16; 4], 12), "{lens:?}");
    // Sub-jobs are of 64 KiB here.
    assert_eq!(lens[4..], [64, 64]);
    assert_eq!(scattered(CopyClass::Origin, 4).count(RequestKind::WriteData), 4);
    assert_eq!(scattered(CopyClass::Break, 12).count(RequestKind::WriteData), 12);
}
