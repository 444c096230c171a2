//! Failures and cancellation: each reaches its own job and no other.

use super::super::CopyError;
use super::*;

/// Runs three jobs of five sub-jobs each, of which the request at `bad` fails; returns how each ended.
fn three(bad: u64, seed: u64, settings: CopierSettings) -> (Lab, Vec<Result<(), CopyError>>) {
    let lab = Lab::new(settings, seed);
    lab.refuse(move |request| (request.offset..request.offset + request.len).contains(&bad));
    let len = 320 * KIB;
    let tickets: Vec<JobHandle> = (0..3).map(|i| lab.submit(lab.job(i << 20, HALF + (i << 20), len))).collect();
    let results = lab.clock.run(async {
        let mut results = Vec::new();
        for ticket in &tickets {
            results.push(ticket.wait_done().await);
        }
        results
    });
    lab.idle();
    (lab, results)
}

#[test]
fn an_error_at_any_sub_job_fails_its_job_only() {
    for settings in [scarce(), ample()] {
        for sub in 0..15 {
            let (job, at) = (sub / 5, sub / 5 * (1 << 20) + sub % 5 * 64 * KIB);
            for (bad, read) in [(at, true), (HALF + at, false)] {
                let (lab, results) = three(bad, 100 + sub, settings);
                for (i, result) in results.iter().enumerate() {
                    match result {
                        Ok(()) => assert_ne!(i as u64, job, "the failure of sub-job {sub} was lost"),
                        Err(error) => {
                            assert_eq!(i as u64, job);
                            assert_eq!(matches!(error, CopyError::Read(_)), read, "{error:?}");
                        }
                    }
                    if result.is_ok() {
                        let at = (i as u64) << 20;
                        assert_eq!(lab.contents(HALF + at, 320 * KIB), pattern(at, 320 * KIB));
                    }
                }
                let stats = lab.client.stats();
                assert_eq!((stats.jobs, stats.failed, stats.cancelled, stats.in_flight, stats.queued), (3, 1, 0, 0, 0));
            }
        }
    }
}

#[test]
fn in_a_merged_request_an_error_finds_the_job_it_belongs_to() {
    for (bad, read) in [(1, true), (0, true), (3, true), (2, false), (0, false)] {
        let lab = Lab::new(scarce(), 31);
        let at = (1 << 20) + bad * 16 * KIB + if read { 0 } else { HALF };
        lab.refuse(move |request| (request.offset..request.offset + request.len).contains(&at));
        let first = lab.submit(lab.job(0, HALF, 64 * KIB));
        let tickets: Vec<JobHandle> =
            (0..4).map(|i| (1 << 20) + i * 16 * KIB).map(|at| lab.submit(lab.job(at, HALF + at, 16 * KIB))).collect();
        lab.clock.run(async {
            first.wait_done().await.expect("copied");
            for (i, ticket) in tickets.iter().enumerate() {
                assert_eq!(ticket.wait_done().await.is_err(), i as u64 == bad, "job {i}, bad {bad}");
            }
        });
        lab.idle();
        assert_eq!(lab.client.stats().merged, 3);
        for i in (0..4).filter(|&i| i != bad) {
            let at = (1 << 20) + i * 16 * KIB;
            assert_eq!(lab.contents(HALF + at, 16 * KIB), pattern(at, 16 * KIB));
        }
    }
}

#[test]
fn a_job_cancelled_in_the_queue_does_nothing_and_one_in_flight_stops() {
    let lab = Lab::new(scarce(), 41);
    let flying = lab.submit(lab.job(0, HALF, 1 << 20));
    let queued = lab.submit(lab.job(2 << 20, HALF + (2 << 20), 1 << 20));
    let behind = lab.submit(lab.job(4 << 20, HALF + (4 << 20), 64 * KIB));
    lab.clock.run_until_idle();
    flying.cancel();
    queued.cancel();
    lab.clock.run(async {
        assert!(matches!(flying.wait_done().await, Err(CopyError::Cancelled)));
        assert!(matches!(queued.wait_done().await, Err(CopyError::Cancelled)));
        behind.wait_done().await.expect("copied");
    });
    lab.idle();
    let seen = lab.disk.take();
    assert_eq!(places(&seen, RequestKind::Read), [(0, 64 * KIB), (4 << 20, 64 * KIB)]);
    assert_eq!(places(&seen, RequestKind::WriteData), [(HALF + (4 << 20), 64 * KIB)], "what was read is not written");
    let stats = lab.client.stats();
    assert_eq!((stats.jobs, stats.cancelled, stats.failed), (3, 2, 0));
    behind.cancel();
    assert_eq!(lab.client.stats().cancelled, 2, "it is over");
}

#[test]
fn a_job_that_fails_holds_up_nobody_behind_it() {
    let lab = Lab::new(ample(), 51);
    lab.refuse(|request| request.kind == RequestKind::Read && request.offset < 1 << 20);
    let tickets: Vec<JobHandle> = (0..20).map(|i| lab.submit(lab.job(i << 20, HALF + (i << 20), 512 * KIB))).collect();
    lab.clock.run(async {
        for (i, ticket) in tickets.iter().enumerate() {
            assert_eq!(ticket.wait_done().await.is_err(), i == 0);
        }
    });
    assert!(places(&lab.disk.take(), RequestKind::WriteData).is_sorted());
}
