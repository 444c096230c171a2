//! The tables of ARCHITECTURE.md, "The copier": exactly what a recording device counts, and how long
//! breaks take on a device with a latency of 5 ms.

use std::fmt::Write as _;

use forkdisk::testing::RequestKind::{Flush, Read, WriteData};
use forkdisk::testing::{DeviceModel, Recording, Request};
use forkdisk::{BreakPolicy, CopierSettings};

use crate::lab::{KIB, Lab, MIB};

const DOCUMENT: &str = include_str!("../../../../ARCHITECTURE.md");
/// Chunk and sizes of the writes, in KiB: the cells of W2.
const CELLS: [(u64, &[u64]); 4] = [
    (1024, &[256, 512]),
    (2048, &[256, 512, 1024]),
    (4096, &[256, 512, 1024, 2048]),
    (8192, &[256, 512, 1024, 2048, 4096]),
];
/// Bytes overwritten in each cell.
const SIZE: u64 = 16 * MIB;

/// Overwrites a shared volume from front to back, one write at a time. Returns bytes read and written
/// per byte of the volume, modelled times in ms by device, and the time at 5 ms per request.
fn overwrite(chunk: u64, io: u64, subjob: u64) -> (f64, f64, Vec<f64>, f64) {
    let lab = Lab::new();
    let settings = CopierSettings::default().with_subjob_size(subjob as u32).with_buffers(16 * MIB);
    lab.clock.run(lab.pool.set_copier(settings)).expect("set");
    let v = lab.shared(SIZE, chunk, BreakPolicy::Copy, 1);
    let from = lab.clock.now();
    for at in (0..SIZE).step_by(io as usize) {
        lab.write(&v, at, io, 0).expect("written");
    }
    let took = (lab.clock.now() - from).as_secs_f64() * 1e3;
    let seen = lab.disk.take();
    let per_byte = |kind| seen.bytes(kind) as f64 / SIZE as f64;
    assert_eq!(seen.count(Flush), 0, "a break needs none");
    let times = DeviceModel::ALL.iter().map(|model| model.time(&seen, 8).as_secs_f64() * 1e3).collect();
    (per_byte(Read), per_byte(WriteData), times, took)
}

#[track_caller]
fn assert_documented(table: &str) {
    for line in table.lines() {
        assert!(DOCUMENT.lines().any(|l| l == line), "ARCHITECTURE.md lacks the line\n{line}\nof\n{table}");
    }
}

#[test]
fn the_counts_are_those_of_the_document() {
    let mut table = String::new();
    for (chunk, ios) in CELLS {
        for &io in ios {
            let (read, written, ..) = overwrite(chunk * KIB, io * KIB, 512 * KIB);
            // Of each chunk everything except the first write is read; all of it is written, then the other
            // writes in place.
            let covered = io as f64 / chunk as f64;
            assert_eq!((read, written), (1.0 - covered, 2.0 - covered), "{chunk} {io}");
            writeln!(table, "| {}M | {io}K | {read:.3} | {written:.3} |", chunk / 1024).expect("a string");
        }
        let (read, written, ..) = overwrite(chunk * KIB, chunk * KIB, 512 * KIB);
        assert_eq!((read, written), (0.0, 1.0), "a write that covers the chunk copies nothing");
    }
    assert_documented(&table);
}

#[test]
fn the_effect_of_the_size_of_a_sub_job_is_that_of_the_document() {
    let mut table = String::new();
    for (chunk, ios) in CELLS {
        for &io in ios {
            let times: Vec<f64> = [64, 512, 1024].map(|s| overwrite(chunk * KIB, io * KIB, s * KIB).3).to_vec();
            assert!(times.is_sorted_by(|a, b| a >= b), "larger sub-jobs are never slower here: {times:?}");
            let rate = |ms: f64| SIZE as f64 / 1e6 / (ms / 1e3);
            let [a, b, c] = [rate(times[0]), rate(times[1]), rate(times[2])];
            writeln!(table, "| {}M | {io}K | {a:.0} | {b:.0} | {c:.0} |", chunk / 1024).expect("a string");
        }
    }
    assert_documented(&table);
}

/// Returns the cost of a break that copies the whole chunk first and writes the client's bytes afterwards (1
/// read and 2 written per byte), in the same places, with sub-jobs of 512 KiB of which 8 are in flight.
fn copy_then_write(chunk: u64, io: u64) -> Recording {
    let mut requests = Vec::new();
    let mut add = |kind, from: u64, to: u64, step: u64| {
        requests.extend((from..to).step_by(step as usize).map(|offset| Request { kind, offset, len: step }));
    };
    let (source, target) = (8 * MIB, 32 * MIB);
    for at in (0..SIZE).step_by(chunk as usize) {
        for part in (at..at + chunk).step_by(4 << 20) {
            let end = (part + 4 * MIB).min(at + chunk);
            add(Read, source + part, source + end, 512 * KIB);
            add(WriteData, target + part, target + end, 512 * KIB);
        }
        add(WriteData, target + at, target + at + chunk, io);
    }
    Recording { requests }
}

#[test]
fn a_copying_break_is_faster_than_copying_then_writing_on_every_modelled_device() {
    for (chunk, ios) in CELLS {
        for &io in ios {
            let (_, _, times, _) = overwrite(chunk * KIB, io * KIB, 512 * KIB);
            let other = copy_then_write(chunk * KIB, io * KIB);
            for (model, took) in DeviceModel::ALL.iter().zip(times) {
                let theirs = model.time(&other, 8).as_secs_f64() * 1e3;
                assert!(took < theirs, "{} {chunk}K {io}K: {took} ms, the other way {theirs} ms", model.name);
            }
        }
    }
}
