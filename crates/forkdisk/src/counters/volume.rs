//! Counters of one volume.

use super::histogram::{Histogram, HistogramCounter};
use super::{Counter, Requests};

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
    provision: super::RequestCounters,
    r#break: super::RequestCounters,
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
