//! The table on an origin protected in place: through a file system in a guest next to dm-snapshot with
//! the same chunk, and `dd` on the origin itself with its pool on the same disk and on a second one.

use anyhow::{Context as _, Result};
use forkdisk::testing::{DeviceModel, RequestKind};
use forkdisk_uring::{Config, block_on};

use crate::load::{Job, sequential};
use crate::model::Label;
use crate::peers::Measured;
use crate::rows::Row;
use crate::runner::Context;

use super::super::origin::{self, Bed, Phases, Setup};
use super::ext4::{self, Pair, Peer, Table, WRITEBACK};

const PIECE: usize = 1 << 20;

pub fn small(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, "8", "origin-8k")
}

pub fn medium(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, "64", "origin-64k")
}

pub fn large(context: &Context<'_>) -> Result<Vec<Row>> {
    run(context, "512", "origin-512k")
}

/// Runs the case; `chunk` in KiB.
fn run(context: &Context<'_>, chunk: &str, case: &str) -> Result<Vec<Row>> {
    let bytes = chunk.parse::<u64>().context("the KiB of a chunk")? << 10;
    let mut rows = Vec::new();
    for (name, second) in [("same-device", false), ("second-device", true)] {
        rows.extend(alone(context, &format!("{case}/{name}"), bytes, second)?);
    }
    if context.options.peers {
        match through_ext4(context, chunk, bytes, case) {
            Ok(more) => rows.extend(more),
            Err(error) => context.say(&format!("  no rows through a file system: {error:#}")),
        }
    }
    Ok(rows)
}

/// Runs `dd bs=1M oflag=direct` on the origin.
fn alone(context: &Context<'_>, case: &str, chunk: u64, second: bool) -> Result<Vec<Row>> {
    let span = context.scale.pick(256 << 20, 1000 << 20, 1000 << 20);
    let job = Job { write: true, len: PIECE, depth: 1, offsets: sequential(span, PIECE) };
    let setup = Setup { span, chunk, copies: 1, second };
    let seen = {
        let job = job.clone();
        block_on(Config::default(), |rt| async move {
            let bed = Bed::new(&rt, setup).await?;
            bed.snapshot("s", false).await?;
            bed.settle().await?;
            bed.record(&job).await
        })??
    };
    Ok(origin::rows(&label(case, "forkdisk"), &job, &setup, &seen))
}

fn label<'a>(case: &'a str, target: &'a str) -> Label<'a> {
    Label { workload: "w1", case, target }
}

fn through_ext4(context: &Context<'_>, chunk: &str, bytes: u64, case: &str) -> Result<Vec<Row>> {
    let lab = context.lab()?;
    let ours = Table::measure(context, &lab, Peer::Origin, &[chunk])?;
    let theirs = Table::measure(context, &lab, Peer::Kernel, &[chunk])?;
    let setup = Setup { span: ours.span, chunk: bytes, copies: 1, second: false };
    let mut rows = Vec::new();
    for (pair, peer) in ours.pairs(chunk)?.iter().zip(&theirs.pairs(chunk)?) {
        let case = format!("{case}/{}", pair.line);
        let label = label(&case, "forkdisk");
        rows.extend(ext4::compare(&label, pair.alone, pair.shared));
        rows.extend(ext4::compare(&self::label(&case, "dm-snapshot"), peer.alone, peer.shared));
        for model in &DeviceModel::ALL {
            let ratio = time(model, &bound(pair.alone, &setup)) / time(model, &as_it_was(pair.shared));
            rows.push(label.row(&format!("{}_of_bound", model.name), "ratio", ratio));
            let ahead = speed(model, pair) - speed(model, peer);
            rows.push(label.row(&format!("{}_ahead_of_dm_snapshot", model.name), "ratio", ahead));
        }
    }
    Ok(rows)
}

fn time(model: &DeviceModel, phases: &Phases) -> f64 {
    origin::seconds(model, phases)
}

/// Returns what the disk received until the client had synced.
fn as_it_was(measured: &Measured) -> Phases {
    vec![(measured.disk(), WRITEBACK)]
}

/// Returns time without a snapshot ÷ with one.
fn speed(model: &DeviceModel, pair: &Pair<'_>) -> f64 {
    time(model, &as_it_was(pair.alone)) / time(model, &as_it_was(pair.shared))
}

/// Returns the bound: the same file without a snapshot, plus reading and writing what it overwrote.
fn bound(alone: &Measured, setup: &Setup) -> Phases {
    let disk = alone.disk();
    let written = |kind| matches!(kind, RequestKind::WriteData | RequestKind::WriteMetadata);
    let writes = disk.requests.iter().filter(|r| written(r.kind) && r.offset < setup.span);
    let copying = origin::copying(writes.map(|r| (r.offset, r.len)), setup);
    copying.into_iter().chain(as_it_was(alone)).collect()
}
