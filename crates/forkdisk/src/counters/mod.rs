//! Counters since the pool was opened. They are never stored.
//!
//! Counting is an addition to a cell: no allocation, no lock, no search. A volume's block of counters is
//! behind an `Rc` in its handles and is created when the volume is first opened, so that a pool of ten
//! thousand snapshots does not pay for unused ones. The engine has no clock: the front end that answers a
//! request reports its duration.

mod pool;

use std::cell::Cell;

use crate::device::Segment;

pub(crate) use pool::PoolCounters;
pub use pool::{PoolStatistics, Requests, Traffic};

/// A counter that only increases.
#[derive(Default)]
pub(crate) struct Counter(Cell<u64>);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.set(self.0.get().wrapping_add(n));
    }

    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Requests of one direction, with their bytes.
#[derive(Default)]
pub(crate) struct RequestCounters {
    count: Counter,
    bytes: Counter,
}

impl RequestCounters {
    /// Adds one request per segment.
    pub fn add(&self, segments: &[Segment]) {
        self.count.add(segments.len() as u64);
        self.bytes.add(segments.iter().map(|s| s.len as u64).sum());
    }

    /// Adds one request of `bytes` bytes.
    pub fn add_one(&self, bytes: u64) {
        self.count.add(1);
        self.bytes.add(bytes);
    }

    pub fn read(&self) -> Requests {
        Requests { count: self.count.get(), bytes: self.bytes.get() }
    }
}

/// The operation of a request to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Makes acknowledged writes durable.
    Flush,
    /// Frees space.
    Discard,
    /// Zeroes a range.
    Zero,
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 5] =
        [Operation::Read, Operation::Write, Operation::Flush, Operation::Discard, Operation::Zero];

    /// Returns its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
            Operation::Zero => "zero",
        }
    }
}

/// Returns the operations of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationStatistics {
    /// Operations that have ended, with any outcome.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Operations that have begun and not ended.
    pub in_flight: u64,
    /// Nanoseconds from admission to reply, as far as a front end reported them.
    pub latency: Histogram,
}

/// First writes that needed a new page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Faults {
    /// Runs of pages where nothing was mapped before.
    pub provision: Requests,
    /// Runs of pages that were shared before.
    pub r#break: Requests,
}

/// Counters of a volume since the pool was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VolumeStatistics {
    /// Operations, in the order of [`Operation::ALL`].
    pub operations: [OperationStatistics; 5],
    /// First writes.
    pub faults: Faults,
}

impl VolumeStatistics {
    /// Returns the operations of one kind.
    pub fn of(&self, operation: Operation) -> &OperationStatistics {
        &self.operations[operation as usize]
    }

    /// Adds the counters of another volume.
    pub fn merge(&mut self, other: &VolumeStatistics) {
        for (a, b) in self.operations.iter_mut().zip(&other.operations) {
            a.operations += b.operations;
            a.bytes += b.bytes;
            a.errors += b.errors;
            a.in_flight += b.in_flight;
            a.latency.merge(&b.latency);
        }
        self.faults.provision.merge(&other.faults.provision);
        self.faults.r#break.merge(&other.faults.r#break);
    }
}

#[derive(Default)]
struct OperationCounters {
    begun: Counter,
    ended: Counter,
    bytes: Counter,
    errors: Counter,
    latency: HistogramCounter,
}

/// The counters of one volume.
#[derive(Default)]
pub(crate) struct VolumeCounters {
    operations: [OperationCounters; 5],
    provision: RequestCounters,
    r#break: RequestCounters,
}

impl VolumeCounters {
    /// Begins an operation on `bytes` bytes. It ends when the returned value is dropped.
    pub fn begin(&self, operation: Operation, bytes: u64) -> RunningOperation<'_> {
        let counters = &self.operations[operation as usize];
        counters.begun.add(1);
        RunningOperation { counters, bytes, ok: false }
    }

    /// Counts a first write of `bytes` bytes that was published; `shared`: the old page had other references.
    pub fn fault(&self, shared: bool, bytes: u64) {
        if shared { &self.r#break } else { &self.provision }.add_one(bytes);
    }

    /// Records the latency of an operation, in nanoseconds.
    pub fn record_latency(&self, operation: Operation, nanoseconds: u64) {
        self.operations[operation as usize].latency.observe(nanoseconds);
    }

    pub fn read(&self) -> VolumeStatistics {
        let one = |c: &OperationCounters| OperationStatistics {
            operations: c.ended.get(),
            bytes: c.bytes.get(),
            errors: c.errors.get(),
            in_flight: c.begun.get() - c.ended.get(),
            latency: c.latency.read(),
        };
        let operations = std::array::from_fn(|i| one(&self.operations[i]));
        VolumeStatistics {
            operations,
            faults: Faults { provision: self.provision.read(), r#break: self.r#break.read() },
        }
    }
}

/// An operation that has begun. One that is dropped without [`end`](Self::end) has failed.
pub(crate) struct RunningOperation<'a> {
    counters: &'a OperationCounters,
    bytes: u64,
    ok: bool,
}

impl RunningOperation<'_> {
    /// Ends the operation.
    pub fn end(mut self, ok: bool) {
        self.ok = ok;
    }
}

impl Drop for RunningOperation<'_> {
    fn drop(&mut self) {
        self.counters.ended.add(1);
        match self.ok {
            true => self.counters.bytes.add(self.bytes),
            false => self.counters.errors.add(1),
        }
    }
}

/// Number of buckets.
pub const HISTOGRAM_BUCKETS: usize = 48;

/// A distribution over powers of two.
///
/// Bucket 0 counts values of 0 and 1, bucket `i` those above 2^(i-1) and up to 2^i, the last one
/// everything larger than the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Number of values in each bucket.
    pub buckets: [u64; HISTOGRAM_BUCKETS],
    /// Sum of all values.
    pub sum: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: [0; HISTOGRAM_BUCKETS], sum: 0 }
    }
}

impl Histogram {
    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the largest value that bucket `i` takes.
    pub fn bound(i: usize) -> u64 {
        1 << i
    }

    /// Returns a value that the fraction `q` (0 to 1) of all values does not exceed, to the power of two; 0
    /// if there are none.
    pub fn quantile(&self, q: f64) -> u64 {
        let (count, mut seen) = (self.count(), 0);
        if count == 0 {
            return 0;
        }
        let wanted = ((count as f64 * q).ceil() as u64).clamp(1, count);
        let at = self.buckets.iter().position(|&n| {
            seen += n;
            seen >= wanted
        });
        Histogram::bound(at.unwrap_or(HISTOGRAM_BUCKETS - 1))
    }

    /// Adds the counts of another one.
    pub fn merge(&mut self, other: &Histogram) {
        self.buckets.iter_mut().zip(other.buckets).for_each(|(a, b)| *a += b);
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// Returns what was counted since `earlier`, an earlier state of the same distribution.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let buckets = std::array::from_fn(|i| self.buckets[i].saturating_sub(earlier.buckets[i]));
        Histogram { buckets, sum: self.sum.saturating_sub(earlier.sum) }
    }
}

fn bucket(value: u64) -> usize {
    let rounded_up = u64::BITS - value.saturating_sub(1).leading_zeros();
    (rounded_up as usize).min(HISTOGRAM_BUCKETS - 1)
}

/// A histogram that is being counted.
pub(crate) struct HistogramCounter {
    buckets: [Cell<u64>; HISTOGRAM_BUCKETS],
    sum: Cell<u64>,
}

impl Default for HistogramCounter {
    fn default() -> HistogramCounter {
        HistogramCounter { buckets: [const { Cell::new(0) }; HISTOGRAM_BUCKETS], sum: Cell::new(0) }
    }
}

impl HistogramCounter {
    pub fn observe(&self, value: u64) {
        let bucket = &self.buckets[bucket(value)];
        bucket.set(bucket.get() + 1);
        self.sum.set(self.sum.get().wrapping_add(value));
    }

    pub fn read(&self) -> Histogram {
        Histogram { buckets: std::array::from_fn(|i| self.buckets[i].get()), sum: self.sum.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_in_flight_until_it_ends_and_failed_if_nobody_says_otherwise() {
        let counters = VolumeCounters::default();
        let running = counters.begin(Operation::Write, 100);
        let dropped = counters.begin(Operation::Write, 10);
        assert_eq!(counters.read().of(Operation::Write).in_flight, 2);
        running.end(true);
        drop(dropped);
        let write = *counters.read().of(Operation::Write);
        assert_eq!((write.operations, write.bytes, write.errors, write.in_flight), (2, 100, 1, 0));
        assert_eq!(*counters.read().of(Operation::Read), OperationStatistics::default());
    }

    #[test]
    fn volumes_add_up() {
        let (a, b) = (VolumeCounters::default(), VolumeCounters::default());
        a.begin(Operation::Zero, 5).end(true);
        b.begin(Operation::Zero, 7).end(true);
        b.record_latency(Operation::Zero, 900);
        a.fault(true, 4096);
        b.fault(true, 8192);
        b.fault(false, 4096);
        let mut sum = a.read();
        sum.merge(&b.read());
        let zero = sum.of(Operation::Zero);
        assert_eq!((zero.operations, zero.bytes, zero.latency.count(), zero.latency.sum), (2, 12, 1, 900));
        assert_eq!(sum.faults.r#break, Requests { count: 2, bytes: 12288 });
        assert_eq!(sum.faults.provision, Requests { count: 1, bytes: 4096 });
    }
}

#[cfg(test)]
mod histogram_tests {
    use super::*;

    #[test]
    fn every_value_lies_within_the_bound_of_its_bucket_and_above_the_one_before() {
        for value in (0..2000).chain([u64::from(u32::MAX), 1 << 46, (1 << 46) + 1]) {
            let i = bucket(value);
            assert!(value <= Histogram::bound(i), "{value}");
            assert!(i == 0 || value > Histogram::bound(i - 1), "{value}");
        }
        assert_eq!(bucket(u64::MAX), HISTOGRAM_BUCKETS - 1, "what is larger than all bounds is counted last");
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let counter = HistogramCounter::default();
        assert_eq!(counter.read().quantile(0.5), 0);
        (0..90).for_each(|_| counter.observe(100));
        (0..10).for_each(|_| counter.observe(5000));
        let h = counter.read();
        assert_eq!((h.count(), h.sum), (100, 59_000));
        assert_eq!([0.0, 0.5, 0.9, 0.91, 1.0].map(|q| h.quantile(q)), [128, 128, 128, 8192, 8192]);
    }

    #[test]
    fn differences_and_sums_are_bucket_by_bucket() {
        let counter = HistogramCounter::default();
        counter.observe(3);
        let first = counter.read();
        counter.observe(70);
        let second = counter.read();
        let new = second.since(&first);
        assert_eq!((new.count(), new.sum, new.quantile(1.0)), (1, 70, 128));
        let mut again = first;
        again.merge(&new);
        assert_eq!(again, second);
    }
}
