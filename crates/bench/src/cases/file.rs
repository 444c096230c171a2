//! A pool in a file and a plain file with the same bytes: timed work, alternating between both.

use std::fs::File;
use std::path::Path;
use std::process;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool, Volume};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice, block_on};

use crate::bare::Bare;
use crate::clock::{Stopwatch, Took};
use crate::load::{self, Job, sequential};

/// Name of the volume.
pub const VOLUME: &str = "v";
const PIECE: usize = 1 << 20;

/// An open pool in a file.
pub type FilePool = Pool<UringDevice>;

/// Creates a pool of `size` bytes in a new file and opens it.
pub async fn make(rt: &Rt, path: &Path, size: u64) -> Result<FilePool> {
    let device = UringDevice::create(rt, path, size, false, &DeviceOptions::default())?;
    Pool::format(&device, &FormatOptions::new(size, identity(), 0)).await?;
    Ok(Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await?)
}

/// Returns an identity that no other pool of this machine has: two of them can be served at a time.
fn identity() -> [u8; 16] {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let mut identity = *b"forkdisk........";
    identity[8..12].copy_from_slice(&process::id().to_be_bytes());
    identity[12..].copy_from_slice(&MADE.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    identity
}

/// Creates a pool with one volume of `span` bytes, completely written.
pub async fn filled(rt: &Rt, path: &Path, span: u64) -> Result<(FilePool, Volume<UringDevice>)> {
    let pool = make(rt, path, span + span / 4 + (256 << 20)).await?;
    pool.create(VOLUME, &CreateOptions::new(span, 0)).await?;
    let volume = pool.volume(VOLUME)?;
    let fill = Job { write: true, len: PIECE, depth: 8, offsets: sequential(span, PIECE) };
    load::run(rt, &pool, &volume, &fill).await?;
    pool.checkpoint().await?;
    Ok((pool, volume))
}

/// Creates a plain file of `span` bytes, completely written.
pub fn plain(path: &Path, span: u64) -> Result<()> {
    let file = File::create_new(path).with_context(|| path.display().to_string())?;
    file.set_len(span)?;
    // With direct I/O, as the pool's file: pages in the page cache would slow direct I/O down.
    Bare::open(path, 8, PIECE)?.run(&Job { write: true, len: PIECE, depth: 8, offsets: sequential(span, PIECE) })?;
    Ok(file.sync_all()?)
}

/// Times of one job, run by a bare loop on the plain file and then by the engine on the pool.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// The bare loop.
    pub raw: Took,
    /// The engine.
    pub ours: Took,
}

/// Parameters of a comparison.
pub struct Comparison<'a> {
    /// Path of the pool.
    pub pool: &'a Path,
    /// Path of the plain file.
    pub plain: &'a Path,
    /// Bytes of the volume and of the plain file.
    pub span: u64,
    /// Timed runs of each job; an additional first run is not counted.
    pub times: usize,
    /// Cost for which the bare loop is tuned; `None`: it processes each completion at once.
    pub cost: Option<fn(&Took) -> f64>,
}

/// Runs each of `jobs`, alternating between both sides.
pub fn compare(what: &Comparison<'_>, jobs: &[Job]) -> Result<Vec<Vec<Pair>>> {
    plain(what.plain, what.span)?;
    block_on(Config::default(), |rt| async move {
        let (pool, volume) = filled(&rt, what.pool, what.span).await?;
        let mut results = Vec::new();
        for job in jobs {
            let mut bare = Bare::open(what.plain, job.depth, job.len)?;
            if let Some(cost) = what.cost {
                bare.tune(job, cost)?;
            }
            let mut pairs = Vec::new();
            for round in 0..=what.times {
                let raw_first = round % 2 == 0;
                let before = if raw_first { Some(timed_bare(&mut bare, job)?) } else { None };
                let watch = Stopwatch::start();
                load::run(&rt, &pool, &volume, job).await?;
                let ours = watch.stop();
                let raw = match before {
                    Some(raw) => raw,
                    None => timed_bare(&mut bare, job)?,
                };
                if round > 0 {
                    pairs.push(Pair { raw, ours });
                }
            }
            results.push(pairs);
        }
        drop(volume);
        pool.close().await?;
        Ok(results)
    })?
}

fn timed_bare(bare: &mut Bare, job: &Job) -> Result<Took> {
    let watch = Stopwatch::start();
    bare.run(job)?;
    Ok(watch.stop())
}
