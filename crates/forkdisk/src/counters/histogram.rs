//! Distribution of a quantity, in powers of two.

use std::cell::Cell;

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
