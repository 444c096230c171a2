//! Exports in memory that record every call, and delay or fail requests on command.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use forkdisk::{Buf, Error, ErrorKind, Result, WriteFlags, WriteIntent};
use forkdisk_nbd::codec::StatusExtent;
use forkdisk_nbd::memory::{MemoryExport, MemoryExports};
use forkdisk_nbd::server::ALLOCATION;
use forkdisk_nbd::{Export, ExportInfo, Exports};
use forkdisk_uring::Rt;

/// The test's handle: recorded calls and control of requests.
#[derive(Clone, Default)]
pub struct Probe {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    calls: Mutex<Vec<String>>,
    hints: Mutex<Vec<String>>,
    called: Condvar,
    /// Requests at an offset that is a multiple of 64 KiB wait while this is set.
    hold: AtomicBool,
    fail: Mutex<Option<ErrorKind>>,
    /// Offset of a byte that cannot be read.
    fault: Mutex<Option<u64>>,
    /// Size that all exports report.
    size: Mutex<Option<u64>>,
    flight: Mutex<Flight>,
}

#[derive(Clone, Copy, Default)]
pub struct Flight {
    now: (usize, usize),
    /// Most requests and most bytes in the exports at a time.
    pub most: (usize, usize),
}

impl Probe {
    pub fn new() -> Probe {
        Probe::default()
    }

    /// Returns all recorded calls, such as `write 4096 512 fua`.
    pub fn calls(&self) -> Vec<String> {
        self.shared.calls.lock().unwrap().clone()
    }

    /// Returns the recorded hints about writes to come, such as `coming: 4096 512` and `more: true`.
    pub fn hints(&self) -> Vec<String> {
        self.shared.hints.lock().unwrap().clone()
    }

    /// Waits until `count` calls have arrived.
    pub fn wait_for(&self, count: usize) {
        let calls = self.shared.calls.lock().unwrap();
        let short = |calls: &mut Vec<String>| calls.len() < count;
        let patience = Duration::from_secs(60);
        let (calls, waited) = self.shared.called.wait_timeout_while(calls, patience, short).unwrap();
        assert!(!waited.timed_out(), "{} of {count} calls came", calls.len());
    }

    /// Delays requests at multiples of 64 KiB, or releases them.
    pub fn hold(&self, hold: bool) {
        self.shared.hold.store(hold, Ordering::SeqCst);
    }

    /// Makes all requests fail, with `Some`.
    pub fn fail(&self, kind: Option<ErrorKind>) {
        *self.shared.fail.lock().unwrap() = kind;
    }

    /// Makes reads of this byte fail.
    pub fn fault(&self, at: Option<u64>) {
        *self.shared.fault.lock().unwrap() = at;
    }

    /// Makes all exports report this size.
    pub fn resize(&self, size: u64) {
        *self.shared.size.lock().unwrap() = Some(size);
    }

    pub fn flight(&self) -> Flight {
        *self.shared.flight.lock().unwrap()
    }
}

/// The server's side.
pub struct ProbeExports {
    rt: Rt,
    shared: Arc<Shared>,
    disks: MemoryExports,
    vast: u64,
}

pub struct ProbeExport {
    rt: Rt,
    shared: Arc<Shared>,
    disk: Option<MemoryExport>,
    vast: u64,
}

impl ProbeExports {
    pub fn new(rt: &Rt, probe: &Probe) -> ProbeExports {
        let shared = probe.shared.clone();
        ProbeExports { rt: rt.clone(), shared, disks: MemoryExports::new(), vast: 0 }
    }

    pub fn with(mut self, name: &str, size: usize, read_only: bool) -> ProbeExports {
        self.disks = self.disks.with(name, size, read_only);
        self
    }

    /// Adds an export `vast` of `size` bytes that stores nothing.
    pub fn with_vast(mut self, size: u64) -> ProbeExports {
        self.vast = size;
        self
    }
}

impl Exports for ProbeExports {
    type Export = ProbeExport;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        self.disks.list(after, most)
    }

    fn open(&self, name: &str) -> Result<ProbeExport> {
        let vast = name == "vast" && self.vast > 0;
        let disk = if vast { None } else { Some(self.disks.open(name)?) };
        let (rt, shared) = (self.rt.clone(), self.shared.clone());
        Ok(ProbeExport { rt, shared, disk, vast: self.vast })
    }

    fn buffer(&self, len: usize) -> Buf {
        self.disks.buffer(len)
    }
}

impl ProbeExport {
    /// Records a call, delays it, and makes it fail, as the test has set.
    async fn enter(&self, call: String, offset: u64, bytes: usize) -> Result<()> {
        self.count(|now| (now.0 + 1, now.1 + bytes));
        self.shared.calls.lock().unwrap().push(call);
        self.shared.called.notify_all();
        while offset.is_multiple_of(65536) && self.shared.hold.load(Ordering::SeqCst) {
            self.rt.sleep_for(Duration::from_millis(1)).await;
        }
        self.count(|now| (now.0 - 1, now.1 - bytes));
        let is_faulty =
            self.shared.fault.lock().unwrap().is_some_and(|at| (offset..offset + bytes as u64).contains(&at));
        match *self.shared.fail.lock().unwrap() {
            _ if is_faulty => Err(Error::new(ErrorKind::Io, "the test wants it so")),
            Some(kind) => Err(Error::new(kind, "the test wants it so")),
            None => Ok(()),
        }
    }

    fn count(&self, f: impl Fn((usize, usize)) -> (usize, usize)) {
        let mut flight = self.shared.flight.lock().unwrap();
        flight.now = f(flight.now);
        flight.most = (flight.most.0.max(flight.now.0), flight.most.1.max(flight.now.1));
    }
}

fn fua_word(fua: bool) -> &'static str {
    if fua { " fua" } else { "" }
}

impl Export for ProbeExport {
    type Context = ();

    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent> {
        self.shared.hints.lock().unwrap().push(format!("coming: {offset} {len}"));
        None
    }

    fn size(&self) -> u64 {
        self.shared.size.lock().unwrap().unwrap_or_else(|| self.disk.as_ref().map_or(self.vast, Export::size))
    }

    async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let len = buf.len();
        match (self.enter(format!("sparse read {offset} {len}"), offset, len).await, &self.disk) {
            (Ok(()), Some(disk)) => disk.read_sparse(offset, buf).await,
            (result, _) => (result.map(|()| vec![]), buf),
        }
    }

    fn zeroing_is_fast(&self, offset: u64, _len: u64) -> bool {
        offset.is_multiple_of(4096)
    }

    async fn cache(&self, offset: u64, len: u64) -> Result<()> {
        self.enter(format!("cache {offset} {len}"), offset, 0).await
    }

    fn contexts(&self) -> Vec<String> {
        self.disk.as_ref().map_or_else(|| vec![ALLOCATION.to_owned()], Export::contexts)
    }

    fn context(&self, name: &str) -> Option<()> {
        (name == ALLOCATION).then_some(())
    }

    async fn status(&self, context: &(), offset: u64, len: u64, looks: usize) -> Result<Vec<StatusExtent>> {
        self.enter(format!("status {offset} {len}"), offset, 0).await?;
        match &self.disk {
            Some(disk) => disk.status(context, offset, len, looks).await,
            None => Ok(vec![StatusExtent { len, flags: 3 }]),
        }
    }

    fn info(&self) -> ExportInfo {
        let vast = || ExportInfo {
            name: "vast".to_owned(),
            description: String::new(),
            size: self.vast,
            read_only: false,
            multi_conn: true,
        };
        self.disk.as_ref().map_or_else(vast, Export::info)
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let len = buf.len();
        match (self.enter(format!("read {offset} {len}"), offset, len).await, &self.disk) {
            (Ok(()), Some(disk)) => disk.read(offset, buf).await,
            (result, _) => (result, buf),
        }
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        self.shared.hints.lock().unwrap().push(format!("more: {}", flags.more));
        let len = buf.len();
        let call = format!("write {offset} {len}{}", fua_word(flags.fua));
        match (self.enter(call, offset, len).await, &self.disk) {
            (Ok(()), Some(disk)) => disk.write(offset, buf, flags).await,
            (result, _) => (result, buf),
        }
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> Result<()> {
        let hole = if no_hole { " no-hole" } else { "" };
        self.enter(format!("zero {offset} {len}{}{hole}", fua_word(fua)), offset, 0).await?;
        match &self.disk {
            Some(disk) => disk.write_zeroes(offset, len, fua, no_hole).await,
            None => Ok(()),
        }
    }

    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.enter(format!("trim {offset} {len}{}", fua_word(fua)), offset, 0).await?;
        match &self.disk {
            Some(disk) => disk.trim(offset, len, fua).await,
            None => Ok(()),
        }
    }

    async fn flush(&self) -> Result<()> {
        self.enter("flush".to_owned(), 1, 0).await
    }
}
