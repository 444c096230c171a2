//! A laboratory: an executor with virtual time, and a device that records what reaches it.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{
    CreateOptions, Device, FormatOptions, LocalFuture, OpenOptions, PAGE_SIZE, Pool, Result, Runtime, Volume,
};

const PAGE: u64 = PAGE_SIZE as u64;

/// A client's page as it reached the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Number of the device request.
    pub request: u64,
    /// Page number on the device.
    pub at: u64,
    /// Number that [`stamp`] wrote into it.
    pub stamp: u64,
}

/// A device in memory with a delay that records which stamped pages reach it, in order.
#[derive(Clone)]
pub struct Tape {
    inner: MemoryDevice,
    tasks: Inline,
    state: Rc<State>,
    read_time: Duration,
}

#[derive(Default)]
struct State {
    pages: RefCell<Vec<Page>>,
    requests: Cell<u64>,
    reads: Cell<u64>,
}

const MAGIC: u64 = 0x7374_616d_7065_6421;
const READ: Duration = Duration::from_micros(500);
const WRITE: Duration = Duration::from_micros(100);

/// Returns `pages` pages with ascending numbers from `first` on.
pub fn stamp(first: u64, pages: usize) -> Buf {
    let mut buf = Buf::zeroed(pages * PAGE_SIZE);
    for (i, page) in buf.chunks_mut(PAGE_SIZE).enumerate() {
        for sector in page.chunks_mut(512) {
            sector[..8].copy_from_slice(&MAGIC.to_le_bytes());
            sector[8..16].copy_from_slice(&(first + i as u64).to_le_bytes());
        }
    }
    buf
}

/// Returns the number in a page or sector that begins like this.
pub fn stamp_of(bytes: &[u8]) -> Option<u64> {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (word(0) == MAGIC).then(|| word(8))
}

impl Tape {
    pub fn new(len: u64, tasks: &Inline) -> Tape {
        Tape { inner: MemoryDevice::new(len), tasks: tasks.clone(), state: Rc::default(), read_time: READ }
    }

    /// Returns the same device for a process that runs other tasks; reads take `read_time`.
    pub fn on(&self, tasks: &Inline, read_time: Duration) -> Tape {
        Tape { inner: self.inner.clone(), tasks: tasks.clone(), state: Rc::default(), read_time }
    }

    /// Returns the stamped pages so far, and how many requests they came in; starts a new record.
    pub fn take(&self) -> (Vec<Page>, usize) {
        let pages = self.state.pages.take();
        let mut requests: Vec<u64> = pages.iter().map(|p| p.request).collect();
        requests.dedup();
        (pages, requests.len())
    }

    /// Returns the read requests so far.
    pub fn reads(&self) -> u64 {
        self.state.reads.get()
    }

    fn late<T>(&self, time: Duration, request: impl Future<Output = T> + 'static) -> impl Future<Output = T> + 'static {
        let pause = self.tasks.sleep(time);
        async move {
            let outcome = request.await;
            pause.await;
            outcome
        }
    }
}

impl Device for Tape {
    forkdisk::forward_device! { inner: len block_size set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.state.reads.set(self.state.reads.get() + 1);
        self.late(self.read_time, self.inner.read(buf, segments))
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        for s in &segments {
            let request = self.state.requests.replace(self.state.requests.get() + 1);
            for (i, page) in buf[s.at..s.at + s.len].chunks(PAGE_SIZE).enumerate() {
                if let Some(stamp) = stamp_of(page) {
                    self.state.pages.borrow_mut().push(Page { request, at: s.offset / PAGE + i as u64, stamp });
                }
            }
        }
        self.late(WRITE, self.inner.write(buf, segments, fua))
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.late(WRITE, self.inner.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.late(WRITE, self.inner.discard(offset, len))
    }
}

/// A pool on a tape.
#[derive(Clone)]
pub struct Lab {
    pub tasks: Inline,
    pub tape: Tape,
    pub pool: Pool<Tape>,
}

pub type Disk = Volume<Tape>;

impl Lab {
    /// Runs `test` on a new pool of `mib` MiB opened with `options`.
    pub fn run<T: 'static, F: Future<Output = T>>(
        mib: u64,
        options: OpenOptions,
        test: impl FnOnce(Lab) -> F + 'static,
    ) -> T {
        let tasks = Inline::default();
        let tape = Tape::new(mib << 20, &tasks);
        tasks.clone().run(async move {
            let format = FormatOptions::new(mib << 20, [7; 16], 0);
            Pool::format(&tape, &format).await.expect("a new pool");
            let pool = Pool::open(tape.clone(), Rc::new(tasks.clone()), options).await.expect("it opens");
            test(Lab { tasks, tape, pool }).await
        })
    }

    /// Creates a volume of `mib` MiB.
    pub async fn volume(&self, name: &str, mib: u64) -> Disk {
        self.pool.create(name, &CreateOptions::new(mib << 20, 0)).await.expect("a new volume");
        self.pool.volume(name).expect("just made")
    }

    /// Writes `pages` pages at page `at`, stamped from `first` on.
    pub fn write(&self, volume: &Disk, at: u64, pages: usize, first: u64) -> LocalFuture<Result<()>> {
        self.write_bytes(volume, at, pages * PAGE_SIZE, first)
    }

    /// As [`write`](Self::write), `len` bytes.
    pub fn write_bytes(&self, volume: &Disk, at: u64, len: usize, first: u64) -> LocalFuture<Result<()>> {
        let (volume, mut buf) = (volume.clone(), stamp(first, len.div_ceil(PAGE_SIZE)));
        buf.set_len(len);
        self.tasks.start(async move { volume.write(at * PAGE, buf, false).await.0 })
    }

    /// Makes `count` requests in order, of which `depth` are in flight.
    pub async fn at_depth(
        &self,
        depth: usize,
        count: u64,
        make: impl Fn(&Lab, u64) -> LocalFuture<Result<()>> + 'static,
    ) {
        let (next, make) = (Rc::new(Cell::new(0)), Rc::new(make));
        let client = |_| {
            let (lab, next, make) = (self.clone(), next.clone(), make.clone());
            self.tasks.start(async move {
                while next.get() < count {
                    make(&lab, next.replace(next.get() + 1)).await.expect("it is written");
                }
            })
        };
        let clients: Vec<_> = (0..depth).map(client).collect();
        for client in clients {
            client.await;
        }
    }

    /// Writes all of a volume in whole MiB, and a checkpoint.
    pub async fn fill(&self, volume: &Disk) {
        for at in (0..volume.size()).step_by(1 << 20) {
            volume.write(at, Buf::copy_of(&[1; 1 << 20]), false).await.0.expect("there is space");
        }
        self.pool.checkpoint().await.expect("it succeeds");
    }

    /// Returns the numbers in the pages `at..at + pages` of a volume.
    pub async fn stamps(&self, volume: &Disk, at: u64, pages: usize) -> Vec<Option<u64>> {
        let (result, buf) = volume.read(at * PAGE, Buf::zeroed(pages * PAGE_SIZE)).await;
        result.expect("a read");
        buf.chunks(PAGE_SIZE).map(stamp_of).collect()
    }
}
