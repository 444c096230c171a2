//! Limits the CPU time of handshakes while other clients have requests in flight.
//!
//! Listing many exports takes thousands of options, each of which occupies the thread for some microseconds. While
//! other clients have requests in flight, all handshakes together get at most a quarter of the thread's time. A request
//! then waits for one option at most, and the thread does not use up its time slice.

use std::cell::Cell;
use std::time::{Duration, Instant};

use forkdisk_uring::Rt;

/// Pause after an option while other clients have requests in flight, in multiples of the time that it took.
const REST_PER_OPTION: u32 = 3;
/// Estimated time to receive an option and send its reply, which is added to the measured time.
const TRANSFER: Duration = Duration::from_micros(30);
/// How long requests count as in flight after the last one began.
const RECENT: Duration = Duration::from_millis(20);
/// Longest pause. A longer time includes waiting for the client, not only CPU time.
const MOST: Duration = Duration::from_millis(5);

/// Limiter of handshakes, as described above.
pub(super) struct Pacing {
    /// The earliest time of the next option.
    next: Cell<Instant>,
    /// Count of begun requests at the last option, and the last time at which it had risen.
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

    /// Records that an option was answered in `took`, when `requests` had started.
    pub(super) fn answered(&self, now: Instant, took: Duration, requests: u64) {
        if self.seen.replace(requests) != requests {
            self.active.set(Some(now));
        }
        if self.active.get().is_some_and(|since| now.saturating_duration_since(since) < RECENT) {
            self.next.set(now + ((took + TRANSFER) * REST_PER_OPTION).min(MOST));
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
