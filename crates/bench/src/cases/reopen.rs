//! What opening a pool reads after a crash, with many volumes and as much metadata changed since the
//! last checkpoint as there ever is.

use std::rc::Rc;

use anyhow::Result;
use forkdisk::device::{MemoryDevice, RecordingDevice, RequestKind, zeroes_are_data};
use forkdisk::{CreateOptions, OpenOptions, Pool};
use forkdisk_uring::{Config, block_on};

use crate::clock::Stopwatch;
use crate::load::{self, Job, random};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::ram;

const VOLUMES: usize = 10_000;
/// Written in random order until enough is dirty.
const SPAN: u64 = 16 << 30;
const BATCH: usize = 256;
/// Of the budget or the journal, before a checkpoint starts by itself.
const ENOUGH: f64 = 0.45;

/// What lay on the device at the crash.
struct Crashed {
    device: MemoryDevice,
    /// Journal that has to be replayed, and metadata that was dirty, in bytes.
    journal: u64,
    dirty: u64,
}

pub fn run(_: &Context<'_>) -> Result<Vec<Row>> {
    let crashed = block_on(Config::default(), |rt| async move {
        let pool = ram::fresh(&rt, ram::POOL, OpenOptions::default()).await?;
        fill(&rt, &pool).await?;
        pool.flush().await?;
        let info = pool.info();
        Ok::<_, anyhow::Error>(Crashed {
            device: pool.device().inner().clone(),
            journal: info.journal_used,
            dirty: info.dirty,
        })
    })??;
    let options = OpenOptions::default();
    let budget = options.dirty as u64;
    let (seen, took, info) = block_on(Config::default(), |rt| async move {
        let device = RecordingDevice::new(crashed.device, zeroes_are_data);
        let watch = Stopwatch::start();
        let pool = Pool::open(device, Rc::new(rt), options).await?;
        Ok::<_, anyhow::Error>((pool.device().take(), watch.stop(), pool.info()))
    })??;
    let read = seen.bytes(RequestKind::Read) as f64;
    let case = format!("reopen/{VOLUMES}-volumes");
    let row = |metric, unit, value| Row::engine(&case, metric, unit, &Samples::one(value));
    Ok(vec![
        row("volumes", "count", info.volumes as f64),
        row("read_to_bound", "ratio", read / (info.journal_size + budget) as f64),
        row("read_to_replayed", "ratio", read / (crashed.journal + crashed.dirty) as f64),
        row("read", "bytes", read),
        row("requests", "count", seen.count(RequestKind::Read) as f64),
        row("journal_replayed", "bytes", crashed.journal as f64),
        row("dirty_at_crash", "bytes", crashed.dirty as f64),
        row("cpu", "s", took.cpu),
    ])
}

async fn fill(rt: &forkdisk_uring::Rt, pool: &ram::RamPool) -> Result<()> {
    for i in 0..VOLUMES {
        pool.create(&format!("v{i}"), &CreateOptions::new(1 << 30, 0)).await?;
        let mut buf = pool.buffer(4096);
        buf.fill(0);
        pool.volume(&format!("v{i}"))?.write(0, buf, false).await.0?;
    }
    pool.create("big", &CreateOptions::new(SPAN, 0)).await?;
    pool.checkpoint().await?;
    let (big, offsets) = (pool.volume("big")?, random(SPAN, 4096, usize::MAX, 2));
    for batch in offsets.chunks(BATCH) {
        let info = pool.info();
        let dirty = info.dirty as f64 / OpenOptions::default().dirty as f64;
        if dirty.max(info.journal_used as f64 / info.journal_size as f64) > ENOUGH {
            break;
        }
        load::run(rt, pool, &big, &Job { write: true, len: 4096, depth: 32, offsets: batch.into() }).await?;
        pool.flush().await?;
    }
    Ok(())
}
