//! Throttling: a share of the time, and bytes per second. Time comes from the caller.

use std::time::Duration;

use crate::format::Throttle;

/// Times beyond this are halved, so that older activity counts for less and less.
const WINDOW: Duration = Duration::from_secs(1);
/// Shortest wait worth a timer.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// Measures activity and tells when more may start.
pub struct Meter {
    limit: Throttle,
    /// Sub-jobs in flight.
    in_flight: usize,
    /// Up to when `busy` and `total` are counted.
    until: Duration,
    /// Of the time `total`, how long anything was in flight.
    busy: Duration,
    total: Duration,
    /// When the bytes so far are paid for.
    due: Duration,
}

impl Meter {
    /// Creates a meter that enforces `limit`.
    pub fn new(limit: Throttle) -> Meter {
        let zero = Duration::ZERO;
        Meter { limit, in_flight: 0, until: zero, busy: zero, total: zero, due: zero }
    }

    /// Returns the limit.
    pub fn limit(&self) -> Throttle {
        self.limit
    }

    /// Sets a new limit and forgets earlier activity.
    pub fn set(&mut self, limit: Throttle) {
        *self = Meter { in_flight: self.in_flight, until: self.until, ..Meter::new(limit) };
    }

    /// Returns how long to wait before the next sub-job may start; `None`: not at all.
    pub fn wait(&mut self, now: Duration) -> Option<Duration> {
        self.count(now);
        let bytes = self.due.saturating_sub(now);
        let share = match self.limit.percent {
            100 => Duration::ZERO,
            percent => (self.busy * 100 / u32::from(percent)).saturating_sub(self.total),
        };
        let wait = bytes.max(share);
        (!wait.is_zero()).then_some(wait.max(MIN_WAIT))
    }

    /// A sub-job of `bytes` bytes starts.
    pub fn start(&mut self, bytes: u64, now: Duration) {
        self.count(now);
        self.in_flight += 1;
        self.owe(bytes, now);
    }

    /// Charges `bytes` that a transfer outside of sub-jobs moved in the time `took`.
    pub fn charge(&mut self, bytes: u64, took: Duration, now: Duration) {
        self.count(now);
        self.busy += took.min(WINDOW);
        self.owe(bytes, now);
    }

    fn owe(&mut self, bytes: u64, now: Duration) {
        if let Some(rate) = std::num::NonZero::new(self.limit.bytes_per_second) {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.get());
            self.due = self.due.max(now) + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        }
    }

    /// A sub-job ends.
    pub fn end(&mut self, now: Duration) {
        self.count(now);
        self.in_flight -= 1;
    }

    fn count(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.until);
        self.until = self.until.max(now);
        self.total += passed;
        if self.in_flight > 0 {
            self.busy += passed;
        }
        while self.total > WINDOW {
            (self.busy, self.total) = (self.busy / 2, self.total / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Runs sub-jobs of `bytes` and `time` in sequence for `span`; returns how many there were.
    fn run(meter: &mut Meter, bytes: u64, time: Duration, from: Duration, span: Duration) -> u32 {
        let (mut now, mut jobs) = (from, 0);
        while now < from + span {
            if let Some(wait) = meter.wait(now) {
                now += wait;
                continue;
            }
            meter.start(bytes, now);
            now += time;
            meter.end(now);
            jobs += 1;
        }
        jobs
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let mut meter = Meter::new(Throttle::NONE);
        assert_eq!(run(&mut meter, 1 << 20, MS(10), MS(0), MS(1000)), 100);
    }

    #[test]
    fn a_share_of_the_time_is_kept_to() {
        for (percent, jobs) in [(50, 500), (10, 100), (1, 10)] {
            let mut meter = Meter::new(Throttle { percent, bytes_per_second: 0 });
            let done = run(&mut meter, 4096, MS(10), MS(5000), MS(10_000));
            // Idle time before the start may be made up for, within the window.
            assert!((jobs..=jobs + 60).contains(&done), "{done} at {percent}%");
        }
    }

    #[test]
    fn bytes_per_second_are_kept_to_and_idle_time_is_not_saved_up() {
        let mut meter = Meter::new(Throttle { percent: 100, bytes_per_second: 1 << 20 });
        assert_eq!(run(&mut meter, 256 << 10, MS(1), MS(7000), MS(10_000)), 40);
        assert_eq!(run(&mut meter, 256 << 10, MS(1), MS(90_000), MS(1000)), 4);
    }

    #[test]
    fn what_was_moved_without_being_in_flight_is_paid_for_by_who_comes_next() {
        let mut meter = Meter::new(Throttle { percent: 100, bytes_per_second: 1 << 20 });
        meter.charge(512 << 10, MS(10), MS(1000));
        assert_eq!(meter.wait(MS(1000)), Some(MS(500)));
        let (mut meter, mut now, mut moves) = (Meter::new(Throttle { percent: 10, bytes_per_second: 0 }), MS(5000), 0);
        while now < MS(15_000) {
            match meter.wait(now) {
                Some(wait) => now += wait,
                None => {
                    now += MS(10);
                    meter.charge(4096, MS(10), now);
                    moves += 1;
                }
            }
        }
        assert!((100..=160).contains(&moves), "{moves}");
    }

    #[test]
    fn both_limits_hold_at_once_and_a_new_one_counts_from_then_on() {
        let mut meter = Meter::new(Throttle { percent: 50, bytes_per_second: 1 << 20 });
        assert_eq!(run(&mut meter, 64 << 10, MS(1), MS(0), MS(1000)), 16, "the bytes");
        meter.set(Throttle { percent: 50, bytes_per_second: 1 << 40 });
        let done = run(&mut meter, 64 << 10, MS(10), MS(1000), MS(1000));
        assert!((50..=60).contains(&done), "the time: {done}");
        meter.set(Throttle::NONE);
        assert_eq!(run(&mut meter, 1 << 30, MS(10), MS(2000), MS(100)), 10);
    }
}
