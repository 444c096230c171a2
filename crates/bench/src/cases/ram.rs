//! Pools in memory under a recording device: the engine's requests to the device, exactly.

use std::rc::Rc;

use anyhow::Result;
use forkdisk::testing::{MemoryDevice, Recording, RecordingDevice, Request, RequestKind, zeroes_are_data};
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool};
use forkdisk_uring::{Config, Rt, block_on};

use crate::load::{self, Job, random, sequential};

/// Size of a pool, large enough that it has no effect.
pub const POOL: u64 = 64 << 30;
const SEED: u64 = 1;

/// A recorded pool in memory.
pub type RamPool = Pool<RecordingDevice<MemoryDevice>>;

/// Work on a volume.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Its name in reports.
    pub name: &'static str,
    /// Whether the volume is new; else it was completely written before.
    pub first: bool,
    /// Whether it writes.
    pub write: bool,
    /// Whether the order is random.
    pub random: bool,
    /// Bytes per request.
    pub len: usize,
    /// Requests in flight.
    pub depth: usize,
}

const fn work(name: &'static str, first: bool, write: bool, random: bool, len: usize, depth: usize) -> Work {
    Work { name, first, write, random, len, depth }
}

/// Work measured by `counts` and `modelled`.
pub const WORKS: [Work; 7] = [
    work("read-4k-random", false, false, true, 4096, 32),
    work("write-4k-random", false, true, true, 4096, 32),
    work("read-1m-seq", false, false, false, 1 << 20, 8),
    work("write-1m-seq", false, true, false, 1 << 20, 8),
    work("first-4k-random", true, true, true, 4096, 32),
    work("first-4k-seq", true, true, false, 4096, 32),
    work("first-1m-seq", true, true, false, 1 << 20, 8),
];

impl Work {
    /// Returns the clients' requests over `span` bytes, each place once.
    pub fn job(&self, span: u64) -> Job {
        let offsets = match self.random {
            true => random(span, self.len, (span / self.len as u64) as usize, SEED),
            false => sequential(span, self.len),
        };
        Job { write: self.write, len: self.len, depth: self.depth, offsets }
    }

    /// Returns the same requests on the raw device, with a flush if they write.
    pub fn raw(&self, span: u64) -> Recording {
        let kind = if self.write { RequestKind::WriteData } else { RequestKind::Read };
        let request = |&offset: &u64| Request { kind, offset, len: self.len as u64 };
        let flush = self.write.then_some(Request { kind: RequestKind::Flush, offset: 0, len: 0 });
        Recording { requests: self.job(span).offsets.iter().map(request).chain(flush).collect() }
    }

    /// Records what reaches the device when the work runs on a volume of a pool: with a final flush
    /// if it writes, and with a checkpoint if these are first writes.
    pub fn record(&self, span: u64) -> Result<Recording> {
        let (work, job) = (*self, self.job(span));
        block_on(Config::default(), |rt| async move {
            let pool = fresh(&rt, POOL, OpenOptions::default()).await?;
            pool.create("v", &CreateOptions::new(span, 0)).await?;
            let volume = pool.volume("v")?;
            if !work.first {
                let fill = Job { write: true, len: 1 << 20, depth: 8, offsets: sequential(span, 1 << 20) };
                load::run(&rt, &pool, &volume, &fill).await?;
                pool.flush().await?;
                pool.checkpoint().await?;
                pool.flush().await?;
            }
            pool.device().take();
            load::run(&rt, &pool, &volume, &job).await?;
            if work.write {
                pool.flush().await?;
            }
            if work.first {
                pool.checkpoint().await?;
            }
            Ok(pool.device().take())
        })?
    }
}

/// Creates a pool of `size` bytes in memory.
pub async fn fresh(rt: &Rt, size: u64, options: OpenOptions) -> Result<RamPool> {
    let device = RecordingDevice::new(MemoryDevice::new(size), zeroes_are_data);
    Pool::format(&device, &FormatOptions::new(size, *b"forkdisk-bench-1", 0)).await?;
    Ok(Pool::open(device, Rc::new(rt.clone()), options).await?)
}
