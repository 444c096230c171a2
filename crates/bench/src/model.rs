//! Comparison of recordings by the time that devices of three kinds would take for them.

use std::time::Duration;

use forkdisk::testing::{DeviceModel, Recording, Request, RequestKind};

use crate::rows::{Row, Samples};

/// Requests from which a sorting queue chooses.
const SORTED: usize = 32;

/// Requests that reached a device, and how many of them its clients keep in flight.
#[derive(Clone)]
pub struct Trace {
    pub recording: Recording,
    pub depth: usize,
}

impl Trace {
    /// Creates the trace of `ops` client requests, `clients` of them at a time. If a request reaches
    /// the device in pieces, all of these are in flight; an occasional split makes no difference.
    pub fn of(recording: Recording, ops: usize, clients: usize) -> Trace {
        let ops = ops.max(1) as u64;
        let written = recording.count(RequestKind::WriteData);
        // Without writes, reads are the work.
        let pieces = if written > 0 { written } else { recording.count(RequestKind::Read) };
        Trace { depth: clients * ((pieces + ops / 2) / ops).max(1) as usize, recording }
    }

    /// Returns the time if requests are served in the order of arrival.
    pub fn time(&self, model: &DeviceModel) -> Duration {
        model.time(&self.recording, self.depth)
    }

    /// Returns the time with a queue that always takes the next higher address of 32 waiting requests.
    pub fn sorted_time(&self, model: &DeviceModel) -> Duration {
        model.time(&sorted(&self.recording), self.depth)
    }

    /// Returns the bytes written, data and metadata.
    pub fn written(&self) -> u64 {
        self.recording.bytes(RequestKind::WriteData) + self.recording.bytes(RequestKind::WriteMetadata)
    }
}

/// Names of a group of rows.
#[derive(Clone, Copy)]
pub struct Label<'a> {
    pub workload: &'a str,
    pub case: &'a str,
    pub target: &'a str,
}

impl Label<'_> {
    /// Returns a row with one figure.
    pub fn row(&self, metric: &str, unit: &str, value: f64) -> Row {
        self.rows(metric, unit, &Samples::one(value))
    }

    /// Returns a row of several samples.
    pub fn rows(&self, metric: &str, unit: &str, samples: &Samples) -> Row {
        Row::new(self.workload, self.case, self.target, metric, unit, samples)
    }

    /// Returns time of `base` ÷ time of `ours` on a spindle with free flushes.
    pub fn flush_free(&self, base: &Trace, ours: &Trace) -> Row {
        let ratio = base.time(&FLUSH_FREE).as_secs_f64() / ours.time(&FLUSH_FREE).as_secs_f64();
        self.row("spindle_flush_free_ratio", "ratio", ratio)
    }

    /// Returns the milliseconds of `trace` per MiB of its clients' `bytes`, for each model.
    pub fn times(&self, trace: &Trace, bytes: u64) -> Vec<Row> {
        let per_mib = |m: &DeviceModel| trace.time(m).as_secs_f64() * 1e3 / (bytes as f64 / (1 << 20) as f64);
        let row = |m: &DeviceModel| self.row(&format!("{}_ms_per_mib", m.name), "ms", per_mib(m));
        DeviceModel::ALL.iter().map(row).collect()
    }

    /// Returns time of `base` ÷ time of `ours` for each model, and for the spindle with a sorting queue.
    pub fn ratios(&self, base: &Trace, ours: &Trace) -> Vec<Row> {
        let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
        let row = |m: &DeviceModel| self.row(&format!("{}_ratio", m.name), "ratio", ratio(base.time(m), ours.time(m)));
        let spindle = &DeviceModel::SPINDLE;
        let queue = ratio(base.sorted_time(spindle), ours.sorted_time(spindle));
        DeviceModel::ALL.iter().map(row).chain([self.row("spindle_sorted_ratio", "ratio", queue)]).collect()
    }
}

/// A spindle with free flushes, as in published comparisons of the kernel's targets.
const FLUSH_FREE: DeviceModel = DeviceModel { flush: Duration::ZERO, ..DeviceModel::SPINDLE };

/// Returns the order in which a queue of 32 that takes the next higher address passes requests on.
/// A flush waits for everything before it.
fn sorted(recording: &Recording) -> Recording {
    let (mut waiting, mut out, mut head) = (Vec::with_capacity(SORTED), Vec::new(), 0);
    let mut pop = |waiting: &mut Vec<Request>, out: &mut Vec<Request>| {
        let nearest = (0..waiting.len()).min_by_key(|&i| waiting[i].offset.wrapping_sub(head)).unwrap_or(0);
        let next = waiting.swap_remove(nearest);
        head = next.offset + next.len;
        out.push(next);
    };
    for request in &recording.requests {
        match request.kind {
            kind if !kind.is_transfer() => {
                while !waiting.is_empty() {
                    pop(&mut waiting, &mut out);
                }
                out.push(*request);
            }
            _ => {
                if waiting.len() == SORTED {
                    pop(&mut waiting, &mut out);
                }
                waiting.push(*request);
            }
        }
    }
    while !waiting.is_empty() {
        pop(&mut waiting, &mut out);
    }
    Recording { requests: out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_their_cost_flushes_make_no_difference() {
        let write = Request { kind: RequestKind::WriteData, offset: 0, len: 400_000 };
        let flush = Request { kind: RequestKind::Flush, offset: 0, len: 0 };
        let trace = |requests| Trace { recording: Recording { requests }, depth: 1 };
        let (base, ours) = (trace(vec![write]), trace(vec![write, flush]));
        let label = Label { workload: "w1", case: "a", target: "forkdisk" };
        assert_eq!(label.flush_free(&base, &ours).median, Some(1.0));
        let spindle = label.ratios(&base, &ours)[0].median.expect("a figure");
        assert!((spindle - 10.0 / 18.0).abs() < 1e-9, "{spindle}");
    }

    fn write(offset: u64) -> Request {
        Request { kind: RequestKind::WriteData, offset, len: 4096 }
    }

    const FLUSH: Request = Request { kind: RequestKind::Flush, offset: 0, len: 0 };

    #[test]
    fn a_sorting_queue_goes_upwards_and_a_flush_empties_it() {
        let requests = vec![write(1 << 20), write(8192), write(0), write(4096), FLUSH, write(0)];
        let offsets: Vec<u64> = sorted(&Recording { requests }).requests.iter().map(|r| r.offset).collect();
        assert_eq!(offsets, [0, 4096, 8192, 1 << 20, 0, 0]);
    }

    #[test]
    fn a_sorting_queue_looks_no_further_than_it_is_deep() {
        let requests: Vec<Request> = (0..40).rev().map(|i| write(i << 20)).collect();
        let first = sorted(&Recording { requests }).requests[0].offset;
        assert_eq!(first, 8 << 20, "the lowest of the first 32");
    }

    #[test]
    fn the_pieces_of_one_read_are_in_flight_together() {
        let read = |offset| Request { kind: RequestKind::Read, ..write(offset) };
        let requests = vec![read(0), read(8192), read(1 << 20), read(1 << 30)];
        assert_eq!(Trace::of(Recording { requests: requests.clone() }, 2, 8).depth, 16);
        let copies = requests.into_iter().chain([write(0)]).collect();
        assert_eq!(Trace::of(Recording { requests: copies }, 1, 8).depth, 8, "what is read for a write is its own");
    }

    #[test]
    fn the_pieces_of_one_request_are_in_flight_together() {
        let recording = Recording { requests: vec![write(0), write(8192), write(1 << 20), write(1 << 30)] };
        assert_eq!(Trace::of(recording.clone(), 2, 1).depth, 2);
        assert_eq!(Trace::of(recording.clone(), 4, 32).depth, 32);
        assert_eq!(Trace::of(recording, 3, 1).depth, 1, "one of three was cut");
    }
}
