//! `dd` over an origin with 1 to 1,000 snapshots: chained ones, of which only the newest gets a
//! copy, and independent ones, each of which gets a copy.

use anyhow::Result;
use forkdisk::testing::DeviceModel;
use forkdisk_uring::{Config, block_on};

use crate::clock::Stopwatch;
use crate::load::{Job, random, sequential};
use crate::rows::Row;
use crate::runner::Context;

use super::super::origin::{self, Bed, CHUNK, Seen, Setup};
use super::label;

const PIECE: usize = 1 << 20;
/// Random pages written after each snapshot except the last.
const BETWEEN: usize = 32;

/// Returns the requests of `dd bs=1M oflag=direct`: one at a time, in order.
fn dd(span: u64) -> Job {
    Job { write: true, len: PIECE, depth: 1, offsets: sequential(span, PIECE) }
}

/// Cost with one snapshot, as the base of comparisons.
struct First {
    times: Vec<f64>,
    cpu: f64,
}

pub fn chained(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(128 << 20, 512 << 20, 1 << 30);
    let counts: &[usize] =
        context.scale.pick(&[1, 16, 256, 1000], &[1, 2, 4, 8, 16, 64, 256, 1000], &[1, 2, 4, 8, 16, 64, 256, 1000]);
    let mut first: Option<First> = None;
    let mut rows = Vec::new();
    for &count in counts {
        context.say(&format!("  {count} chained"));
        let setup = Setup { span, chunk: CHUNK, copies: 1, second: false };
        let (seen, cpu) = measure(&setup, count, false)?;
        let case = format!("chained/{count}");
        let label = label(&case);
        rows.extend(origin::rows(&label, &dd(span), &setup, &seen));
        let phases = &seen.phases(1)[0];
        let times: Vec<f64> = DeviceModel::ALL.iter().map(|model| origin::seconds(model, phases)).collect();
        let one = first.get_or_insert_with(|| First { times: times.clone(), cpu });
        for (model, (a, b)) in DeviceModel::ALL.iter().zip(one.times.iter().zip(&times)) {
            rows.push(label.row(&format!("{}_ratio_to_one_snapshot", model.name), "ratio", a / b));
        }
        rows.push(label.row("cpu_ratio_to_one_snapshot", "ratio", one.cpu / cpu));
    }
    Ok(rows)
}

pub fn independent(context: &Context<'_>) -> Result<Vec<Row>> {
    let most = context.scale.pick(512 << 20, 2 << 30, 8 << 30);
    let counts: &[usize] =
        context.scale.pick(&[1, 4, 16], &[1, 2, 4, 8, 16, 64, 256], &[1, 2, 4, 8, 16, 64, 256, 1000]);
    let mut rows = Vec::new();
    for &count in counts {
        context.say(&format!("  {count} independent"));
        // Each snapshot gets a separate copy.
        let span = (most / count as u64).clamp(8 << 20, 128 << 20).next_multiple_of(PIECE as u64);
        let setup = Setup { span, chunk: CHUNK, copies: count as u64, second: false };
        let (seen, _) = measure(&setup, count, true)?;
        let case = format!("independent/{count}");
        rows.extend(origin::rows(&label(&case), &dd(span), &setup, &seen));
    }
    Ok(rows)
}

/// Records what reaches the disk, with the seconds of CPU.
fn measure(setup: &Setup, snapshots: usize, independent: bool) -> Result<(Seen, f64)> {
    let setup = *setup;
    block_on(Config::default(), |rt| async move {
        // Includes room for the chunks kept because of the writes in between.
        let between = (snapshots * BETWEEN) as u64 * CHUNK / setup.span;
        let bed = Bed::new(&rt, Setup { copies: setup.copies + 1 + between, ..setup }).await?;
        for i in 1..snapshots {
            bed.snapshot(&format!("s{i}"), independent).await?;
            if !independent {
                let offsets = random(setup.span, 4096, BETWEEN, i as u64);
                bed.run(&Job { write: true, len: 4096, depth: 8, offsets }).await?;
            }
        }
        bed.snapshot("last", independent).await?;
        bed.settle().await?;
        let watch = Stopwatch::start();
        let seen = bed.record(&dd(setup.span)).await?;
        Ok((seen, watch.stop().cpu))
    })?
}
