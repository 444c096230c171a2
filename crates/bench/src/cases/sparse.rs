//! Pools of any size under a recording device, with clients that write only zeroes: only what
//! the engine writes for itself takes memory.

use std::future::Future;
use std::rc::Rc;

use anyhow::Result;
use forkdisk::device::{IoResult, Segments};
use forkdisk::testing::{MemoryDevice, Recording, RecordingDevice, zeroes_are_data};
use forkdisk::{Buf, CreateOptions, Device, FormatOptions, OpenOptions, Pool, Volume};
use forkdisk_uring::Rt;

use crate::load::{self, Job, sequential};

const PIECE: usize = 1 << 20;

/// A device in memory that treats a segment as zeroes if its first 4 KiB are.
#[derive(Clone)]
pub struct Sparse(MemoryDevice);

/// A recorded pool.
pub type SparsePool = Pool<RecordingDevice<Sparse>>;
/// A volume of it.
pub type SparseVolume = Volume<RecordingDevice<Sparse>>;

impl Sparse {
    /// Creates a device of `size` zero bytes.
    pub fn new(size: u64) -> Sparse {
        Sparse(MemoryDevice::new(size))
    }
}

impl Device for Sparse {
    forkdisk::forward_device! { 0: len block_size read flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let (zeroes, rest): (Segments, Segments) =
            segments.iter().copied().partition(|s| zeroes_are_data(&buf[s.at..s.at + s.len]));
        let discards: Vec<_> = zeroes.iter().map(|s| self.0.discard(s.offset, s.len as u64)).collect();
        let write = self.0.write(buf, rest, fua);
        async move {
            for discard in discards {
                if let Err(error) = discard.await {
                    return (Err(error), write.await.1);
                }
            }
            write.await
        }
    }
}

/// A pool and its only volume `v`.
#[derive(Clone)]
pub struct Bed {
    pub rt: Rt,
    pub pool: SparsePool,
    pub volume: SparseVolume,
}

impl Bed {
    /// Creates a pool of `size` bytes with an empty volume.
    pub async fn new(rt: &Rt, size: u64, volume: CreateOptions, options: OpenOptions) -> Result<Bed> {
        let device = RecordingDevice::new(Sparse::new(size), zeroes_are_data);
        Pool::format(&device, &FormatOptions::new(size, *b"forkdisk-bench-3", 0)).await?;
        let pool = Pool::open(device, Rc::new(rt.clone()), options).await?;
        pool.create("v", &volume).await?;
        let volume = pool.volume("v")?;
        Ok(Bed { rt: rt.clone(), pool, volume })
    }

    /// Writes the first `span` bytes in order, then settles.
    pub async fn fill(&self, span: u64) -> Result<()> {
        self.pool.device().pause(true);
        self.run(&Job { write: true, len: PIECE, depth: 8, offsets: sequential(span, PIECE) }).await?;
        self.settle().await?;
        self.pool.device().pause(false);
        Ok(())
    }

    /// Runs a job.
    pub async fn run(&self, job: &Job) -> Result<()> {
        load::run(&self.rt, &self.pool, &self.volume, job).await
    }

    /// Flushes and writes a checkpoint.
    pub async fn settle(&self) -> Result<()> {
        self.pool.flush().await?;
        Ok(self.pool.checkpoint().await?)
    }

    /// Records what reaches the device during a job, including a final flush and checkpoint.
    pub async fn record(&self, job: &Job) -> Result<Recording> {
        self.pool.device().take();
        self.run(job).await?;
        self.settle().await?;
        Ok(self.pool.device().take())
    }

    /// Takes a snapshot.
    pub async fn snapshot(&self, name: &str) -> Result<()> {
        self.pool.snapshot(&[("v", name)], 0).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forkdisk::device::Segment;
    use forkdisk_uring::{Config, block_on};

    use super::*;

    #[test]
    fn zeroes_take_no_memory_and_overwrite_what_was_there() {
        block_on(Config::default(), |_| async move {
            let device = Sparse(MemoryDevice::new(1 << 40));
            let at = |offset, at, len| Segment { offset, at, len };
            let mut buf = Buf::zeroed(3 * 4096);
            buf[4096..8192].fill(7);
            let segments = [at(0, 4096, 4096), at(4096, 0, 4096), at(1 << 30, 4096, 8192)];
            device.write(buf, segments.into_iter().collect(), false).await.0.unwrap();
            assert_eq!(device.0.resident(), 2 * 4096);
            device.write(Buf::zeroed(4096), [at(0, 0, 4096)].into_iter().collect(), false).await.0.unwrap();
            let (result, read) = device.read(Buf::zeroed(4096), [at(0, 0, 4096)].into_iter().collect()).await;
            result.unwrap();
            assert!(zeroes_are_data(&read) && device.0.resident() == 4096);
        })
        .unwrap();
    }
}
