//! The disks of a guest, served inside it over NBD to the guest's own kernel: memory, each under a
//! recording device, and optionally a pool on the first of them.
//!
//! The export `control` receives marks from a scenario: reading its page N runs action N of
//! `ACTIONS`, and the read ends when that is done. So marks and requests have a common order.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use forkdisk::device::Segment;
use forkdisk::testing::{DelayingDevice, MemoryDevice, RecordingDevice};
use forkdisk::{
    Buf, CreateOptions, Device, Error, ErrorKind, FormatOptions, OpenOptions, Pool, Result as Answer, WriteFlags,
    WriteIntent,
};
use forkdisk_nbd::codec::StatusExtent;
use forkdisk_nbd::{Export, ExportInfo, Exports, Server, ServerOptions};
use forkdisk_uring::{Config, Rt, UnixListener, block_on};

use super::trace;
use crate::cases::origin::protection;
use crate::part::Part;

type Disk = RecordingDevice<DelayingDevice<MemoryDevice>>;

const PAGE: u64 = 4096;
/// Actions by the page of the control export that starts them.
const ACTIONS: [Action; 5] = [Action::Begin, Action::End, Action::Snapshot, Action::Delete, Action::Settle];
const VOLUME: &str = "v";
const SNAPSHOT: &str = "v@s";

#[derive(Clone, Copy)]
enum Action {
    /// Start of a measurement.
    Begin,
    /// End of the client's work: writes a checkpoint of the pool, if there is one, and ends the measurement.
    End,
    /// Takes a snapshot of the pool's volume.
    Snapshot,
    /// Deletes the snapshot and waits until its space is free.
    Delete,
    /// Writes a checkpoint of the pool.
    Settle,
}

/// `SOCKET TRACE DISKS BYTES LATENCY [VOLUME_BYTES [ORIGIN_CHUNK]]`: serves until it is killed. Every
/// request of the disks is delayed by the latency, in milliseconds, any number concurrently: memory
/// would answer at once, while the guest's only processor is busy with it, so that no other requests
/// could arrive meanwhile as they do with a real disk. With a volume's size the first disk has a pool
/// with one volume, `v`; with a chunk as well, `v` is an origin in front of the pool on that disk.
pub fn run(arguments: &[OsString]) -> Result<()> {
    let [socket, trace, numbers @ ..] = arguments else { bail!("a socket and a file for the trace are needed") };
    let (socket, trace) = (PathBuf::from(socket), PathBuf::from(trace));
    let parse = |text: &OsString| text.to_str().and_then(|t| t.parse::<u64>().ok()).context("a number is needed");
    let numbers: Vec<u64> = numbers.iter().map(parse).collect::<Result<_>>()?;
    let [disks, bytes, latency, ref volume @ ..] = numbers[..] else {
        bail!("the number, size and latency of disks is needed")
    };
    let (volume, chunk) = (volume.first().copied(), volume.get(1).copied());
    block_on(Config::default(), |rt| async move {
        let slow =
            || DelayingDevice::new(MemoryDevice::new(bytes), Rc::new(rt.clone()), Duration::from_millis(latency));
        let make = |_| RecordingDevice::new(slow(), all_zero);
        let disks: Vec<Disk> = (0..disks).map(make).collect();
        let pool = match volume {
            Some(size) => Some(make_pool(&rt, &disks[0], size, chunk).await?),
            None => None,
        };
        let out = BufWriter::new(File::create(&trace).with_context(|| trace.display().to_string())?);
        let world = World(Rc::new(State { disks, pool, out: RefCell::new(out) }));
        let listener = UnixListener::bind(&rt, &socket)?;
        Server::new(&rt, world, ServerOptions::default()).serve(listener).await;
        Ok(())
    })?
}

async fn make_pool(rt: &Rt, disk: &Disk, size: u64, chunk: Option<u64>) -> Result<Pool<Part<Disk>>> {
    let start = if chunk.is_some() { size } else { 0 };
    let part = Part::new(disk.clone(), start, disk.len().saturating_sub(start))?;
    let options = FormatOptions::new(part.len(), *b"forkdisk-bench-5", 0);
    Pool::format(&part, &options).await?;
    let pool = Pool::open(part, Rc::new(rt.clone()), OpenOptions::default()).await?;
    match chunk {
        None => pool.create(VOLUME, &CreateOptions::new(size, 0)).await?,
        Some(chunk) => pool.protect(VOLUME, Part::new(disk.clone(), 0, size)?, &protection(chunk)).await?,
    };
    Ok(pool)
}

/// Returns whether a write is data: clients of a guest's disks write zeroes, metadata is never all zero.
fn all_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&b| b == 0)
}

#[derive(Clone)]
struct World(Rc<State>);

struct State {
    disks: Vec<Disk>,
    pool: Option<Pool<Part<Disk>>>,
    out: RefCell<BufWriter<File>>,
}

impl State {
    async fn act(&self, action: Action) -> Result<()> {
        match (action, &self.pool) {
            (Action::Begin, _) => self.mark(trace::BEGIN)?,
            (Action::End, pool) => {
                self.mark(trace::ANSWERED)?;
                if let Some(pool) = pool {
                    pool.flush().await?;
                    pool.checkpoint().await?;
                }
                self.mark(trace::END)?;
            }
            (Action::Snapshot, Some(pool)) => {
                pool.snapshot(&[(VOLUME, "s")], 0).await?;
            }
            (Action::Delete, Some(pool)) => {
                pool.delete(&[SNAPSHOT]).await?;
                pool.wait_freed().await?;
            }
            (Action::Settle, Some(pool)) => pool.checkpoint().await?,
            (_, None) => bail!("there is no pool"),
        }
        Ok(())
    }

    /// Writes what the disks received until now, and the mark, to the trace.
    fn mark(&self, mark: &str) -> Result<()> {
        let mut out = self.out.borrow_mut();
        let begins = mark == trace::BEGIN;
        for (number, disk) in self.disks.iter().enumerate() {
            let seen = disk.take();
            if !begins {
                trace::write(&mut *out, number, &seen)?;
            }
        }
        writeln!(out, "{mark}")?;
        Ok(out.flush()?)
    }
}

impl Exports for World {
    type Export = Served;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        let first = after.parse().map_or(0, |last: usize| last + 1);
        (first..self.0.disks.len()).take(most).map(|i| (i.to_string(), "disk".to_string())).collect()
    }

    fn open(&self, name: &str) -> Answer<Served> {
        let none = || Error::new(ErrorKind::NotFound, format!("no disk {name:?}"));
        match name {
            "control" => Ok(Served::Control(self.clone())),
            VOLUME => Ok(Served::Volume(Exports::open(self.0.pool.as_ref().ok_or_else(none)?, VOLUME)?)),
            number => {
                let disk = number.parse().ok().and_then(|i: usize| self.0.disks.get(i)).ok_or_else(none)?;
                Ok(Served::Disk(disk.clone(), name.to_string()))
            }
        }
    }

    fn buffer(&self, len: usize) -> Buf {
        Buf::zeroed(len)
    }
}

/// An open export of one of three kinds.
enum Served {
    Control(World),
    Disk(Disk, String),
    Volume(<Pool<Part<Disk>> as Exports>::Export),
}

fn whole(offset: u64, len: usize) -> forkdisk::device::Segments {
    [Segment { offset, at: 0, len }].into_iter().collect()
}

fn refused() -> Error {
    Error::new(ErrorKind::Invalid, "this disk is for reading single pages")
}

impl Export for Served {
    type Context = ();

    fn size(&self) -> u64 {
        self.info().size
    }

    fn zeroing_is_fast(&self, offset: u64, len: u64) -> bool {
        matches!(self, Served::Volume(volume) if volume.zeroing_is_fast(offset, len))
    }

    fn contexts(&self) -> Vec<String> {
        Vec::new()
    }

    fn context(&self, _name: &str) -> Option<()> {
        None
    }

    async fn status(&self, _context: &(), _offset: u64, len: u64, _looks: usize) -> Answer<Vec<StatusExtent>> {
        Ok(vec![StatusExtent { len, flags: 0 }])
    }

    fn info(&self) -> ExportInfo {
        let size_of_control = ACTIONS.len() as u64 * PAGE;
        match self {
            Served::Volume(volume) => volume.info(),
            Served::Disk(disk, name) => ExportInfo {
                name: name.clone(),
                description: String::new(),
                size: disk.len(),
                read_only: false,
                multi_conn: true,
            },
            Served::Control(_) => {
                let (name, description) = ("control".to_string(), String::new());
                ExportInfo { name, description, size: size_of_control, read_only: false, multi_conn: true }
            }
        }
    }

    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent> {
        match self {
            Served::Volume(volume) => volume.announce_write(offset, len),
            _ => None,
        }
    }

    async fn read(&self, offset: u64, mut buf: Buf) -> (Answer<()>, Buf) {
        match self {
            Served::Volume(volume) => volume.read(offset, buf).await,
            Served::Disk(disk, _) => {
                let len = buf.len();
                let (result, buf) = disk.read(buf, whole(offset, len)).await;
                (result.map_err(|e| Error::io("read", e)), buf)
            }
            Served::Control(world) => {
                buf.fill(0);
                let Some(&action) = ACTIONS.get((offset / PAGE) as usize) else { return (Err(refused()), buf) };
                let outcome = world.0.act(action).await;
                (outcome.map_err(|e| Error::new(ErrorKind::Invalid, format!("{e:#}"))), buf)
            }
        }
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Answer<()>, Buf) {
        match self {
            Served::Volume(volume) => volume.write(offset, buf, flags).await,
            Served::Disk(disk, _) => {
                let len = buf.len();
                let (result, buf) = disk.write(buf, whole(offset, len), false).await;
                // As a disk without forced unit access does.
                let result = match (result, flags.fua) {
                    (Ok(()), true) => disk.flush().await,
                    (result, _) => result,
                };
                (result.map_err(|e| Error::io("write", e)), buf)
            }
            Served::Control(_) => (Err(refused()), buf),
        }
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> Answer<()> {
        match self {
            Served::Volume(volume) => volume.write_zeroes(offset, len, fua, no_hole).await,
            Served::Disk(..) => self.write(offset, Buf::zeroed(len as usize), fua.into()).await.0,
            Served::Control(_) => Err(refused()),
        }
    }

    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Answer<()> {
        match self {
            Served::Volume(volume) => volume.trim(offset, len, fua).await,
            Served::Disk(disk, _) => disk.discard(offset, len).await.map_err(|e| Error::io("discard", e)),
            Served::Control(_) => Err(refused()),
        }
    }

    async fn flush(&self) -> Answer<()> {
        match self {
            Served::Volume(volume) => volume.flush().await,
            Served::Disk(disk, _) => disk.flush().await.map_err(|e| Error::io("flush", e)),
            Served::Control(_) => Ok(()),
        }
    }
}
