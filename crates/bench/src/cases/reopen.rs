//! Reads at the opening of a pool after the worst crash: many volumes, and the maximum of metadata
//! changed since the last checkpoint, all of it in tables on the device.

use std::cell::Cell;
use std::future::{Future, pending};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Result, ensure};
use forkdisk::device::{Buf, Device, IoResult, Segments};
use forkdisk::testing::{MemoryDevice, RecordingDevice, RequestKind, zeroes_are_data};
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool, Volume};
use forkdisk_uring::{Config, Rt, block_on};

use crate::clock::Stopwatch;
use crate::load::{self, Job};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::ram;

const VOLUMES: usize = 10_000;
/// Bytes that a table of the lowest level maps, and the number of changed tables: more than fit in
/// the dirty budget.
const TABLE_SPAN: u64 = 1 << 20;
const TABLES: u64 = 40_000;
const BATCH: u64 = 256;
/// Time without progress after which writers are known to wait for the checkpoint.
const STALL: Duration = Duration::from_secs(2);
/// Offsets of the superblocks; see docs/format.md.
const SUPERBLOCKS: [u64; 2] = [0, 128 * 4096];

/// State of the device at the crash.
struct Crashed {
    device: MemoryDevice,
    /// Bytes of the journal to replay, and of dirty metadata.
    journal: u64,
    dirty: u64,
}

/// A device that, once held, never writes a superblock: a running checkpoint does not end.
#[derive(Clone)]
struct Held {
    memory: MemoryDevice,
    held: Rc<Cell<bool>>,
}

impl Device for Held {
    forkdisk::forward_device! { memory: len block_size read flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let held = self.held.get() && segments.iter().any(|s| SUPERBLOCKS.contains(&s.offset));
        let request = (!held).then(|| self.memory.write(buf, segments, fua));
        async move {
            match request {
                Some(request) => request.await,
                None => pending().await,
            }
        }
    }
}

pub fn run(_: &Context<'_>) -> Result<Vec<Row>> {
    let crashed = block_on(Config::default(), crash)??;
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

async fn crash(rt: Rt) -> Result<Crashed> {
    let size = ram::POOL;
    let device = Held { memory: MemoryDevice::new(size), held: Rc::default() };
    Pool::format(&device, &FormatOptions::new(size, *b"forkdisk-bench-1", 0)).await?;
    let pool = Pool::open(device.clone(), Rc::new(rt.clone()), OpenOptions::default()).await?;
    for i in 0..VOLUMES {
        pool.create(&format!("v{i}"), &CreateOptions::new(1 << 30, 0)).await?;
        touch(&rt, &pool, pool.volume(&format!("v{i}"))?, 0..1, 0).await?;
    }
    pool.create("big", &CreateOptions::new(TABLES * TABLE_SPAN, 0)).await?;
    let big = pool.volume("big")?;
    touch(&rt, &pool, big.clone(), 0..TABLES, 0).await?;
    pool.checkpoint().await?;
    let before = pool.info().generation;
    device.held.set(true);
    for first in (0..TABLES).step_by(BATCH as usize) {
        let (runtime, pool, big) = (rt.clone(), pool.clone(), big.clone());
        let batch = rt.spawn(async move {
            touch(&runtime, &pool, big, first..TABLES.min(first + BATCH), 4096).await?;
            anyhow::Ok(pool.flush().await?)
        });
        match rt.timeout(STALL, batch).await {
            Ok(done) => done?,
            Err(_) => break,
        }
    }
    let info = pool.info();
    ensure!(info.generation == before, "a checkpoint ended although no superblock could be written");
    Ok(Crashed { device: device.memory, journal: info.journal_used, dirty: info.dirty })
}

/// Writes one page, `within` each of these tables' spans.
async fn touch(
    rt: &Rt,
    pool: &Pool<Held>,
    volume: Volume<Held>,
    tables: std::ops::Range<u64>,
    within: u64,
) -> Result<()> {
    let offsets = tables.map(|i| i * TABLE_SPAN + within).collect();
    load::run(rt, pool, &volume, &Job { write: true, len: 4096, depth: 32, offsets }).await
}
