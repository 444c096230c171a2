//! How much time of the server's thread clients may take that have not chosen an export yet.
//!
//! A list of many exports is thousands of options, each of which takes the thread for some microseconds. As long as other
//! clients have requests under way, all handshakes together leave them most of the time, so that their requests wait for
//! one option at most, and the operating system does not take the thread for one that only computes.

use std::cell::Cell;
use std::time::{Duration, Instant};

use forkdisk_uring::Rt;

/// How many times as long as the last option took none is answered, beside requests.
const REST: u32 = 3;
/// What receiving an option and sending its answer takes beside the answer itself, roughly.
const TRANSFER: Duration = Duration::from_micros(30);
/// For how long a request that began counts as under way.
const RECENT: Duration = Duration::from_millis(20);
/// The longest rest. What took longer was not only the thread's time.
const MOST: Duration = Duration::from_millis(5);

/// See the module.
pub(super) struct Pacing {
    /// No option is answered before.
    next: Cell<Instant>,
    /// Requests begun when that was looked at last, and when there were more of them than before.
    seen: Cell<u64>,
    active: Cell<Option<Instant>>,
}

impl Pacing {
    pub(super) fn new() -> Pacing {
        Pacing { next: Cell::new(Instant::now()), seen: Cell::new(0), active: Cell::new(None) }
    }

    /// Waits until an option may be answered.
    pub(super) async fn wait(&self, rt: &Rt) {
        loop {
            let left = self.next.get().saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            rt.sleep_for(left).await;
        }
    }

    /// One has been answered, which took the thread for `took`; `requests` have begun so far.
    pub(super) fn answered(&self, now: Instant, took: Duration, requests: u64) {
        if self.seen.replace(requests) != requests {
            self.active.set(Some(now));
        }
        if self.active.get().is_some_and(|since| now.saturating_duration_since(since) < RECENT) {
            self.next.set(now + ((took + TRANSFER) * REST).min(MOST));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_rest_beside_requests_only() {
        let pacing = Pacing::new();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let rest = |now: Instant| pacing.next.get().saturating_duration_since(now);
        pacing.answered(at(1), Duration::from_micros(100), 0);
        assert_eq!(rest(at(1)), Duration::ZERO, "no other client");
        pacing.answered(at(2), Duration::from_micros(100), 1);
        assert_eq!(rest(at(2)), Duration::from_micros(390));
        pacing.answered(at(10), Duration::from_micros(50), 1);
        assert_eq!(rest(at(10)), Duration::from_micros(240), "it still counts");
        pacing.answered(at(30), Duration::from_micros(100), 1);
        assert_eq!(rest(at(30)), Duration::ZERO, "the other client has gone");
        pacing.answered(at(40), Duration::from_secs(1), 2);
        assert_eq!(rest(at(40)), MOST, "an answer that a client took slowly");
    }
}
