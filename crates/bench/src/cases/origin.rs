//! An origin protected in place and its pool, on one disk or on two, under recording devices: the
//! common setup of the cases of W4 and of W1's origins, and the bound for both.
//!
//! The bound: everything that a first write needs by nature, and nothing else, in the best possible
//! order. All old data is read once, written once per copy, and the clients' writes are made; each
//! of these in one run, without a seek, a record or a flush in between. With one copy that is about
//! a third of the device's own speed. No order that survives a crash reaches it.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;
use forkdisk::testing::{
    DelayingDevice, DeviceModel, Recording, RecordingDevice, Request, RequestKind, zeroes_are_data,
};
use forkdisk::{FormatOptions, OpenOptions, OriginFull, OriginPlace, Pool, ProtectOptions, SnapshotFlags, Volume};
use forkdisk_uring::Rt;

use super::sparse::Sparse;
use crate::load::{self, Job};
use crate::model::Label;
use crate::part::Part;
use crate::rows::Row;

/// Default chunk of `forkdisk protect`.
pub const CHUNK: u64 = 64 << 10;
/// Default copy-ahead of `forkdisk protect`.
pub const COPY_AHEAD: u64 = 8 << 20;
/// Requests of the copier in flight: 8 MiB ahead, in pieces of 1 MiB.
const COPYING: usize = 8;
const PIECE: u64 = 1 << 20;
const NAME: &str = "o";

type Disk = RecordingDevice<DelayingDevice<Sparse>>;

/// An origin and its pool.
#[derive(Clone, Copy)]
pub struct Setup {
    /// Bytes of the origin.
    pub span: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Number of copies of the whole origin for which the pool has room.
    pub copies: u64,
    /// Whether the pool is on a second disk.
    pub second: bool,
}

/// The setup described above, running.
pub struct Bed {
    pub rt: Rt,
    pub pool: Pool<Part<Disk>>,
    pub origin: Volume<Part<Disk>>,
    disks: Vec<Disk>,
    setup: Setup,
}

/// Returns the options of `forkdisk protect --chunk`.
pub fn protection(chunk: u64) -> ProtectOptions {
    let when_full = OriginFull::Error;
    ProtectOptions::new(OriginPlace::at("disk", 0), 0)
        .with_chunk(chunk)
        .with_copy_ahead(COPY_AHEAD)
        .with_when_full(when_full)
}

/// Requests that reached the disks.
#[derive(Clone, Debug)]
pub struct Seen {
    /// One recording per disk.
    pub disks: Vec<Recording>,
    /// End of the origin on the first disk.
    pub boundary: u64,
}

impl Bed {
    /// Creates a new pool that protects an origin of zeroes.
    pub async fn new(rt: &Rt, setup: Setup) -> Result<Bed> {
        Bed::with_latency(rt, setup, Duration::ZERO).await
    }

    /// As [`new`](Self::new), on disks that complete each request after `latency`, any number side by side.
    pub async fn with_latency(rt: &Rt, setup: Setup, latency: Duration) -> Result<Bed> {
        let Setup { span, chunk, copies, second } = setup;
        let size = (span * copies * 5 / 4 + (1 << 30)).next_multiple_of(1 << 20);
        let slow = |bytes| DelayingDevice::new(Sparse::new(bytes), Rc::new(rt.clone()), latency);
        let disk = |bytes| RecordingDevice::new(slow(bytes), zeroes_are_data);
        let (disks, of_pool) = if second {
            let disks = vec![disk(span), disk(size)];
            let of_pool = Part::all(disks[1].clone());
            (disks, of_pool)
        } else {
            let disk = disk(span + size);
            (vec![disk.clone()], Part::new(disk, span, size)?)
        };
        disks.iter().for_each(|disk| disk.pause(true));
        let format = FormatOptions::new(size, *b"forkdisk-bench-4", 0);
        Pool::format(&of_pool, &format).await?;
        let pool = Pool::open(of_pool, Rc::new(rt.clone()), OpenOptions::default()).await?;
        pool.protect(NAME, Part::new(disks[0].clone(), 0, span)?, &protection(chunk)).await?;
        let origin = pool.volume(NAME)?;
        Ok(Bed { rt: rt.clone(), pool, origin, disks, setup })
    }

    /// Takes a snapshot of the origin, called `name`.
    pub async fn snapshot(&self, name: &str, independent: bool) -> Result<()> {
        let flags = SnapshotFlags::default().with_independent(independent);
        self.pool.snapshot_with(&[(NAME, name)], flags, 0).await?;
        Ok(())
    }

    /// Deletes a snapshot and waits until its space is free.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.pool.delete(&[&format!("{NAME}@{name}")]).await?;
        self.pool.wait_freed().await?;
        Ok(())
    }

    /// Opens a snapshot.
    pub fn open(&self, name: &str) -> Result<Volume<Part<Disk>>> {
        Ok(self.pool.volume(&format!("{NAME}@{name}"))?)
    }

    /// Runs a job on the origin.
    pub async fn run(&self, job: &Job) -> Result<()> {
        load::run(&self.rt, &self.pool, &self.origin, job).await
    }

    /// Flushes the origin and the pool, and writes a checkpoint.
    pub async fn settle(&self) -> Result<()> {
        self.origin.flush().await?;
        self.pool.flush().await?;
        Ok(self.pool.checkpoint().await?)
    }

    /// Starts recording, until [`taken`](Self::taken).
    pub fn watch(&self) {
        for disk in &self.disks {
            disk.take();
            disk.pause(false);
        }
    }

    /// Returns what reached the disks since [`watch`](Self::watch).
    pub fn taken(&self) -> Seen {
        let take = |disk: &Disk| {
            disk.pause(true);
            disk.take()
        };
        Seen { disks: self.disks.iter().map(take).collect(), boundary: self.setup.span }
    }

    /// Records what reaches the disks during a job, including a final flush and checkpoint.
    pub async fn record(&self, job: &Job) -> Result<Seen> {
        self.watch();
        self.run(job).await?;
        self.settle().await?;
        Ok(self.taken())
    }
}

/// Consecutive pieces of work, each with its number of requests in flight.
pub type Phases = Vec<(Recording, usize)>;

/// Returns the seconds that a device of this kind takes for them.
pub fn seconds(model: &DeviceModel, phases: &Phases) -> f64 {
    model.time_of_phases(phases.iter().map(|(recording, depth)| (recording, *depth))).as_secs_f64()
}

impl Seen {
    /// Returns the bytes of all requests of this kind, on all disks.
    pub fn bytes(&self, kind: RequestKind) -> u64 {
        self.disks.iter().map(|disk| disk.bytes(kind)).sum()
    }

    /// Returns the number of requests of this kind, on all disks.
    pub fn count(&self, kind: RequestKind) -> u64 {
        self.disks.iter().map(|disk| disk.count(kind)).sum()
    }

    /// Returns the bytes written, data and metadata.
    pub fn written(&self) -> u64 {
        self.bytes(RequestKind::WriteData) + self.bytes(RequestKind::WriteMetadata)
    }

    /// Returns each disk's work. A client with one request at a time waits for the copies before its write
    /// begins, so these are separate phases; with several clients there is one phase, as deep as their number.
    pub fn phases(&self, clients: usize) -> Vec<Phases> {
        let of_disk = |(number, disk): (usize, &Recording)| -> Phases {
            if clients > 1 {
                return vec![(disk.clone(), clients.max(COPYING))];
            }
            let by_client = |r: &Request| {
                let written = matches!(r.kind, RequestKind::WriteData | RequestKind::WriteMetadata);
                written && number == 0 && r.offset < self.boundary
            };
            let mut phases: Phases = Vec::new();
            for &request in &disk.requests {
                let depth = match (request.kind.is_transfer(), phases.last()) {
                    (false, Some(&(_, depth))) => depth,
                    _ if by_client(&request) => clients,
                    _ => COPYING,
                };
                match phases.last_mut() {
                    Some((recording, of)) if *of == depth => recording.requests.push(request),
                    _ => phases.push((Recording { requests: vec![request] }, depth)),
                }
            }
            phases
        };
        self.disks.iter().enumerate().map(of_disk).collect()
    }
}

/// Returns the clients' own requests on the raw device, and a flush.
pub fn raw(job: &Job) -> Phases {
    let kind = if job.write { RequestKind::WriteData } else { RequestKind::Read };
    let request = |&offset: &u64| Request { kind, offset, len: job.len as u64 };
    let flush = job.write.then_some(Request { kind: RequestKind::Flush, offset: 0, len: 0 });
    vec![(Recording { requests: job.offsets.iter().map(request).chain(flush).collect() }, job.depth)]
}

/// Returns the bound for a job on an origin, for each disk; the first is that of the origin.
pub fn bound(job: &Job, setup: &Setup) -> Vec<Phases> {
    let [reads, copies] = copying(job.offsets.iter().map(|&offset| (offset, job.len as u64)), setup);
    if setup.second {
        return vec![[vec![reads], raw(job)].concat(), vec![copies]];
    }
    vec![[vec![reads, copies], raw(job)].concat()]
}

/// Returns the reads and copies of the bound for writes (offset, length) to an origin.
pub fn copying(writes: impl Iterator<Item = (u64, u64)>, setup: &Setup) -> [(Recording, usize); 2] {
    let chunk = setup.chunk;
    let chunks: BTreeSet<u64> = writes.flat_map(|(at, len)| at / chunk..(at + len).div_ceil(chunk)).collect();
    let bytes = chunks.len() as u64 * chunk;
    // Adjacent chunks are read in one request.
    let mut reads: Vec<Request> = Vec::new();
    for at in chunks.iter().map(|c| c * chunk) {
        match reads.last_mut() {
            Some(last) if last.offset + last.len == at && last.len + chunk <= PIECE => last.len += chunk,
            _ => reads.push(Request { kind: RequestKind::Read, offset: at, len: chunk }),
        }
    }
    let start = if setup.second { 0 } else { setup.span };
    let write = |i: u64, start: u64| {
        let offset = start + i * PIECE;
        Request { kind: RequestKind::WriteData, offset, len: PIECE.min(start + bytes - offset) }
    };
    let copy = |n: u64| (0..bytes.div_ceil(PIECE)).map(move |i| write(i, start + n * bytes));
    let copies = (0..setup.copies).flat_map(copy).collect();
    [(Recording { requests: reads }, COPYING), (Recording { requests: copies }, COPYING)]
}

/// Overlap of the work of two disks.
#[derive(Clone, Copy)]
pub enum Overlap {
    /// Complete: the time of the slower disk.
    Whole,
    /// None: one disk never works while the other does.
    None,
}

fn of_disks(model: &DeviceModel, disks: &[Phases], overlap: Overlap) -> f64 {
    let times = disks.iter().map(|phases| seconds(model, phases));
    match overlap {
        Overlap::Whole => times.fold(0.0, f64::max),
        Overlap::None => times.sum(),
    }
}

/// Returns raw ÷ ours and bound ÷ ours for each model, and the bytes read and written per client byte.
pub fn rows(label: &Label<'_>, job: &Job, setup: &Setup, seen: &Seen) -> Vec<Row> {
    let (ours, bound, raw) = (seen.phases(job.depth), bound(job, setup), [raw(job)]);
    let mut rows = Vec::new();
    for model in &DeviceModel::ALL {
        let time = |disks: &[Phases]| of_disks(model, disks, Overlap::Whole);
        rows.push(label.row(&format!("{}_ratio", model.name), "ratio", time(&raw) / time(&ours)));
        rows.push(label.row(&format!("{}_of_bound", model.name), "ratio", time(&bound) / time(&ours)));
        if setup.second {
            let time = |disks: &[Phases]| of_disks(model, disks, Overlap::None);
            let metric = format!("{}_of_bound_without_overlap", model.name);
            rows.push(label.row(&metric, "ratio", time(&bound) / time(&ours)));
        }
    }
    let per_byte = |bytes: u64| bytes as f64 / job.bytes() as f64;
    let per_op = |n: u64| n as f64 / job.offsets.len() as f64;
    rows.extend([
        label.row("written_bytes_per_byte", "ratio", per_byte(seen.written())),
        label.row("read_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::Read))),
        label.row("metadata_bytes_per_byte", "ratio", per_byte(seen.bytes(RequestKind::WriteMetadata))),
        label.row("requests_per_op", "ratio", per_op(seen.disks.iter().map(Recording::transfers).sum())),
        label.row("flushes", "count", seen.count(RequestKind::Flush) as f64),
    ]);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{random, sequential};

    const MIB: u64 = 1 << 20;

    fn setup(copies: u64, second: bool) -> Setup {
        Setup { span: 64 * MIB, chunk: CHUNK, copies, second }
    }

    #[test]
    fn the_bound_of_one_copy_is_a_third_of_raw() {
        let job = Job { write: true, len: MIB as usize, depth: 1, offsets: sequential(64 * MIB, MIB as usize) };
        let spindle = &DeviceModel { flush: std::time::Duration::ZERO, ..DeviceModel::SPINDLE };
        let time = |disks: &[Phases]| of_disks(spindle, disks, Overlap::Whole);
        let alone = time(&[raw(&job)]);
        let of = |copies, second| alone / time(&bound(&job, &setup(copies, second)));
        assert!((of(1, false) - 1.0 / 3.0).abs() < 0.003, "{}", of(1, false));
        assert!((of(4, false) - 1.0 / 6.0).abs() < 0.003, "{}", of(4, false));
        assert!((of(1, true) - 0.5).abs() < 0.003, "the origin's disk reads and writes: {}", of(1, true));
    }

    #[test]
    fn a_chunk_is_copied_once_in_the_bound_however_often_it_is_written() {
        let offsets = random(MIB, 4096, 256, 1);
        let job = Job { write: true, len: 4096, depth: 1, offsets };
        let bound = &bound(&job, &setup(1, false))[0];
        assert_eq!(bound[0].0.bytes(RequestKind::Read), MIB);
        assert_eq!(bound[1].0.bytes(RequestKind::WriteData), MIB);
        assert_eq!(bound[2].0.count(RequestKind::WriteData), 256);
    }

    #[test]
    fn copying_is_deeper_than_the_one_client_that_waits_for_it() {
        let request = |kind, offset| Request { kind, offset, len: 4096 };
        let requests = vec![
            request(RequestKind::Read, 0),
            request(RequestKind::WriteData, 64 * MIB),
            request(RequestKind::Flush, 0),
            request(RequestKind::WriteData, 0),
            request(RequestKind::Flush, 0),
        ];
        let seen = Seen { disks: vec![Recording { requests }], boundary: 64 * MIB };
        let lens = |clients| seen.phases(clients)[0].iter().map(|(r, d)| (r.requests.len(), *d)).collect::<Vec<_>>();
        assert_eq!(lens(1), [(3, COPYING), (2, 1)]);
        assert_eq!(lens(32), [(5, 32)]);
    }
}
