//! Throttles, by simulated time, changed while copies run.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Returns the time to copy 16 MiB with requests of exactly 1 ms.
fn time(lab: &Lab) -> Duration {
    let (from, ticket) = (lab.clock.now(), lab.submit(lab.job(0, HALF, 16 << 20)));
    lab.clock.run(ticket.wait_done()).expect("copied");
    lab.clock.now() - from
}

fn lab(throttle: Throttle) -> Lab {
    Lab::with_pace(CopierSettings { split_count: 1, throttle, ..ample() }, 1, 1)
}

#[test]
fn bytes_per_second_hold_for_the_pool_and_for_a_client() {
    let limit = Throttle { percent: 100, bytes_per_second: 4 << 20 };
    let close =
        |took: Duration| assert!(took > 4 * SECOND - SECOND / 50 && took < 4 * SECOND + SECOND / 50, "{took:?}");
    close(time(&lab(limit)));
    let one = lab(Throttle::NONE);
    let free = time(&one);
    assert_eq!(free, Duration::from_millis(512), "256 reads and 256 writes of 1 ms");
    assert_eq!(one.client.stats().throttle_waits, 0);
    one.client.set_throttle(limit);
    close(time(&one));
    assert!(one.client.stats().throttle_waits > 0);
}

#[test]
fn a_share_of_the_time_holds() {
    for percent in [50, 25] {
        let lab = lab(Throttle { percent, bytes_per_second: 0 });
        let (took, least) = (time(&lab), Duration::from_millis(51_200 / u64::from(percent)));
        assert!(took > least * 9 / 10 && took < least * 11 / 10, "{took:?} at {percent}%");
    }
}

#[test]
fn a_new_limit_counts_at_once_for_what_is_under_way() {
    let slow = Throttle { percent: 100, bytes_per_second: 64 << 10 };
    let lab = lab(slow);
    let ticket = lab.submit(lab.job(0, HALF, 16 << 20));
    while lab.clock.now() < 3 * SECOND {
        lab.clock.run_until_idle();
        assert!(lab.clock.advance());
    }
    assert!(lab.client.stats().bytes_written <= 4 * 64 * KIB, "one sub-job a second");
    lab.copier.set(CopierSettings { throttle: Throttle::NONE, ..lab.copier.settings() });
    let from = lab.clock.now();
    lab.clock.run(ticket.wait_done()).expect("copied");
    assert!(lab.clock.now() - from < SECOND);
    assert_eq!(lab.contents(HALF, 16 << 20), pattern(0, 16 << 20));
}

#[test]
fn a_client_that_is_held_up_holds_up_no_other() {
    let lab = lab(Throttle::NONE);
    let slow = Rc::new(Client::new(CopyClass::Break, Throttle { percent: 1, bytes_per_second: 1024 }));
    let jobs: Vec<JobHandle> =
        (0..4).map(|i| lab.copier.submit(&slow, lab.job(i << 20, HALF + (i << 20), 64 * KIB), Vec::new())).collect();
    assert!(time(&lab) < SECOND);
    assert_eq!(slow.stats().queued, 3);
    slow.set_throttle(Throttle::NONE);
    lab.copier.throttle_changed();
    lab.clock.run(async {
        for job in &jobs {
            job.wait_done().await.expect("copied");
        }
    });
    assert!(lab.clock.now() < 2 * SECOND);
}

#[test]
fn settings_change_while_copies_run() {
    let lab = Lab::new(ample(), 61);
    let tickets: Vec<JobHandle> = (0..6).map(|i| lab.submit(lab.job(i << 22, HALF + (i << 22), 4 << 20))).collect();
    for (i, size) in [(1, 1 << 20), (2, 64 << 10), (3, 512 << 10), (4, 128 << 10)] {
        for _ in 0..10 {
            lab.clock.run_until_idle();
            lab.clock.advance();
        }
        let settings = CopierSettings { subjob_size: size, split_count: i, buffers: 5 << 20, ..ample() };
        assert_eq!(settings.flaw(), None);
        lab.copier.set(settings);
    }
    lab.clock.run(async {
        for ticket in &tickets {
            ticket.wait_done().await.expect("copied");
        }
    });
    assert!(lab.copier.0.is_idle());
    assert_eq!(lab.contents(HALF, 24 << 20), pattern(0, 24 << 20));
}
