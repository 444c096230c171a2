//! A sample of an origin's contents, by which its device is recognised.
//!
//! The device is divided into zones, and some pages of each are sampled: most of them at the beginning, where
//! partition tables and file systems have their identity, and some at the end. Each zone has a hash of its
//! own, so that something remains to compare after a crash: before the first write to a zone's sample the
//! pool records durably that this zone proves nothing any more (`Origin::note_written`).

use std::cell::Cell;
use std::ops::Range;

use smallvec::smallvec;
use xxhash_rust::xxh3::Xxh3;

use crate::device::{Device, Segment};
use crate::error::{Error, Result};
use crate::format::ZONES;
use crate::types::PAGE_BYTES;

/// Ends of the first zones, in pages; all of their pages are sampled.
const HEAD: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Pages at the end that are one zone; all are sampled.
const TAIL_PAGES: u64 = 32;
/// Samples of each zone in between, and pages of each sample.
const SAMPLES_PER_ZONE: u64 = 4;
const SAMPLE_PAGES: u64 = 4;
/// Zones recorded together for a sequential writer: each record costs a commit that the write waits for.
const AHEAD_ZONES: u32 = 8;

/// Sampled pages of a device with the number of their zone, in ascending order.
type Runs = Vec<(Range<u64>, usize)>;

/// Zones whose sample may have been written since the origin was stamped.
pub struct Sample {
    runs: Runs,
    /// Zones of the device, a bit each.
    all: u32,
    written: Cell<u32>,
}

/// What is sampled on a device of `len` bytes.
fn runs(len: u64) -> Runs {
    let pages = len.div_ceil(PAGE_BYTES);
    let head = HEAD[HEAD.len() - 1];
    let mut all: Runs = Vec::new();
    let mut add = |from: u64, to: u64, zone: usize| {
        let to = to.min(pages);
        if from < to {
            all.push((from..to, zone));
        }
    };
    let mut from = 0;
    for (zone, &to) in HEAD.iter().enumerate() {
        add(from, to, zone);
        from = to;
    }
    let tail = pages.saturating_sub(TAIL_PAGES).max(head);
    let zones = (ZONES - HEAD.len() - 1) as u64;
    let edge = |i: u64| head + (u128::from(tail - head) * u128::from(i) / u128::from(zones)) as u64;
    for i in 0..zones {
        let (begin, end) = (edge(i), edge(i + 1));
        let step = (end - begin).div_ceil(SAMPLES_PER_ZONE).max(1);
        for place in 0..SAMPLES_PER_ZONE {
            let at = begin + place * step;
            add(at, (at + SAMPLE_PAGES.min(step)).min(end), HEAD.len() + 1 + i as usize);
        }
    }
    add(tail, pages, HEAD.len());
    all
}

/// Zones of a device of `len` bytes, a bit each.
pub fn zones(len: u64) -> u32 {
    runs(len).iter().fold(0, |bits, (_, zone)| bits | 1 << zone)
}

/// Hash of each zone's sample in the device's first `len` bytes.
pub async fn hashes<D: Device>(device: &D, len: u64) -> Result<[u16; ZONES]> {
    let mut zones: [Option<Xxh3>; ZONES] = Default::default();
    let runs = runs(len);
    for together in runs.chunk_by(|a, b| a.0.end == b.0.start) {
        let (from, to) = (together[0].0.start * PAGE_BYTES, (together[together.len() - 1].0.end * PAGE_BYTES).min(len));
        let n = (to - from) as usize;
        let (result, buf) = device.read(device.buffer(n), smallvec![Segment { offset: from, at: 0, len: n }]).await;
        result.map_err(|e| Error::io(format!("reading the origin at {from}"), e))?;
        for (pages, zone) in together {
            let (begin, end) = (pages.start * PAGE_BYTES - from, (pages.end * PAGE_BYTES).min(len) - from);
            zones[*zone].get_or_insert_with(|| Xxh3::with_seed(len)).update(&buf[begin as usize..end as usize]);
        }
    }
    Ok(zones.map(|zone| zone.map_or(0, |hash| hash.digest() as u16)))
}

impl Sample {
    /// State for a device of `len` bytes with these zones written.
    pub fn new(len: u64, written: u32) -> Sample {
        Sample { runs: runs(len), all: zones(len), written: Cell::new(written) }
    }

    /// Zones that a write from `offset` to `end` is the first to reach. If the zone before one of them was
    /// written, a sequential writer is assumed, and the next zones are included.
    pub fn reached(&self, offset: u64, end: u64) -> u32 {
        let written = self.written.get();
        if written == u32::MAX {
            return 0;
        }
        let (first, last) = (offset / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
        let from = self.runs.partition_point(|(pages, _)| pages.end <= first);
        let zones = self.runs[from..].iter().take_while(|(pages, _)| pages.start < last);
        let reached = zones.fold(0, |bits, (_, zone)| bits | 1 << zone) & !written;
        // From this number on, zones lie on the device in the order of their numbers.
        let behind_written =
            (HEAD.len() + 2..ZONES).filter(|zone| reached >> zone & 1 == 1 && written >> (zone - 1) & 1 == 1);
        let next = behind_written.fold(0, |bits, zone| bits | ((1 << AHEAD_ZONES) - 1) << zone);
        (reached | next) & self.all & !written
    }

    /// Marks these zones as written.
    pub fn note(&self, zones: u32) {
        self.written.set(self.written.get() | zones);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_in_order_within_the_device_and_reach_both_ends() {
        for pages in [1, 2, 3, 8, 100, 128, 129, 140, 160, 161, 200, 1000, 4096, 1 << 18, (1 << 30) + 7] {
            let all = runs(pages * PAGE_BYTES - 512);
            assert!(all.iter().all(|(run, zone)| run.start < run.end && run.end <= pages && *zone < ZONES), "{pages}");
            assert!(all.windows(2).all(|two| two[0].0.end <= two[1].0.start), "{pages}: {all:?}");
            assert_eq!((all[0].0.start, all[all.len() - 1].0.end), (0, pages));
            assert!(all.iter().map(|(run, _)| run.end - run.start).sum::<u64>() <= 128 + 32 + 23 * 16);
        }
        let zones: std::collections::BTreeSet<usize> = runs(1 << 30).into_iter().map(|(_, zone)| zone).collect();
        assert_eq!(zones.len(), ZONES);
    }

    #[test]
    fn a_sequential_writer_waits_for_few_notes() {
        let len = 1 << 30;
        let notes = |offsets: &mut dyn Iterator<Item = u64>| {
            let sample = Sample::new(len, 0);
            let reached = |offset| Some(sample.reached(offset, offset + (1 << 20))).filter(|&zones| zones > 0);
            let notes: Vec<u32> = offsets.filter_map(reached).inspect(|&zones| sample.note(zones)).collect();
            (notes.len(), sample.written.get())
        };
        assert_eq!(notes(&mut (0..len >> 20).map(|i| i << 20)), (5, u32::MAX), "10 at the beginning, 8, 8, 6, the end");
        // A single write adds no other zone.
        assert_eq!(notes(&mut [300 << 20].into_iter()).1.count_ones(), 1);
        let (n, written) = notes(&mut (0..len >> 20).rev().map(|i| i << 20));
        assert_eq!((n, written), (25, u32::MAX), "backwards");
        // A small device has fewer zones.
        let sample = Sample::new(150 * PAGE_BYTES, 1 << 9);
        assert_eq!(sample.reached(0, 150 * PAGE_BYTES) & !zones(150 * PAGE_BYTES), 0);
    }

    #[test]
    fn a_write_reaches_a_zone_once() {
        let sample = Sample::new(1 << 30, 0);
        assert_eq!(sample.reached(0, 1), 1);
        assert_eq!(sample.reached(4095, 8193), 0b111);
        sample.note(0b10);
        assert_eq!(sample.reached(4095, 8193), 0b101);
        assert_eq!(sample.reached((1 << 30) - 512, 1 << 30), 1 << HEAD.len());
        assert_eq!(sample.reached(0, 1 << 30), !0b10);
        // Between two samples.
        assert_eq!(sample.reached(128 * PAGE_BYTES + 4 * PAGE_BYTES, 128 * PAGE_BYTES + 5 * PAGE_BYTES), 0);
        sample.note(u32::MAX);
        assert_eq!(sample.reached(0, 1 << 30), 0);
    }
}
