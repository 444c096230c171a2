//! A device and a memory that note everything that is written to them, and the pools that a crash at any of these
//! moments would leave.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::rc::Rc;

use forkdisk::device::{Buf, IoResult, Segment, Segments};
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{Device, FormatOptions, OpenOptions, Pool, VolatileLog, VolatileMemory};

const PAGE: usize = 4096;

/// What a crash can come between.
#[derive(Clone)]
pub enum Event {
    /// A page of a write: its offset and contents.
    Page(u64, Vec<u8>),
    /// The memory before a store to it.
    Store(Rc<Vec<u8>>),
}

#[derive(Default)]
struct Notes {
    events: RefCell<Vec<Event>>,
    writes: Cell<u64>,
    flushes: Cell<u64>,
}

/// A device in memory that notes writes.
#[derive(Clone)]
pub struct Noting(MemoryDevice, Rc<Notes>);

impl Device for Noting {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    fn buffer(&self, len: usize) -> Buf {
        self.0.buffer(len)
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.0.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.1.writes.set(self.1.writes.get() + 1);
        for segment in &segments {
            let pages = buf[segment.at..segment.at + segment.len].chunks(PAGE).enumerate();
            let event = |(i, page): (usize, &[u8])| Event::Page(segment.offset + (i * PAGE) as u64, page.to_vec());
            self.1.events.borrow_mut().extend(pages.map(event));
        }
        self.0.write(buf, segments, fua)
    }

    fn cork(&self, _: bool) {}

    fn stripe(&self) -> Option<u64> {
        None
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.1.flushes.set(self.1.flushes.get() + 1);
        self.0.flush()
    }

    fn discard(&self, _: u64, _: u64) -> impl Future<Output = io::Result<()>> + 'static {
        std::future::ready(Ok(()))
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.0.allocate(offset, len)
    }

    fn can_clone(&self, _: &Self) -> bool {
        false
    }

    fn clone_range(&self, _: &Self, _: u64, _: u64, _: u64) -> impl Future<Output = io::Result<()>> + 'static {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn zero_range(&self, _: u64, _: u64) -> impl Future<Output = io::Result<()>> + 'static {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.0.set_len(len)
    }
}

/// Memory that notes what it held before each store.
struct NotingMemory(Vec<u8>, Rc<Notes>);

impl AsMut<[u8]> for NotingMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        self.1.events.borrow_mut().push(Event::Store(Rc::new(self.0.clone())));
        &mut self.0
    }
}

/// Requests of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub writes: u64,
    pub flushes: u64,
}

/// A pool, and what has been written to it.
pub struct Lab {
    pub tasks: Inline,
    pub pool: Pool<Noting>,
    notes: Rc<Notes>,
    device: MemoryDevice,
    size: u64,
    /// The device at the last [`mark`](Self::mark).
    image: BTreeMap<u64, Vec<u8>>,
}

fn volatile(memory: VolatileMemory) -> Option<VolatileLog> {
    Some(VolatileLog::new(memory, [3; 32]))
}

impl Lab {
    /// Creates a pool of `mib` MiB, with a volatile log of `memory` bytes unless that is 0.
    pub fn new(mib: u64, memory: usize) -> Lab {
        let (tasks, size) = (Inline::default(), mib << 20);
        let (device, notes) = (MemoryDevice::new(size), Rc::<Notes>::default());
        let options = FormatOptions::new(size, [5; 16], 1).with_journal(1 << 20);
        tasks.run(Pool::format(&device, &options)).unwrap();
        let memory = (memory > 0).then(|| VolatileMemory::new(NotingMemory(vec![0; memory], notes.clone())));
        let options = OpenOptions::default().with_volatile(memory.and_then(volatile));
        let noting = Noting(device.clone(), notes.clone());
        let pool = tasks.run(Pool::open(noting, Rc::new(tasks.clone()), options)).unwrap();
        let mut lab = Lab { tasks, pool, notes, device, size, image: BTreeMap::new() };
        // The first commit of a pool marks it as open.
        lab.tasks.run(lab.pool.checkpoint()).unwrap();
        lab.mark();
        lab
    }

    /// Begins a period.
    pub fn mark(&mut self) {
        self.notes.events.borrow_mut().clear();
        self.notes.writes.set(0);
        self.notes.flushes.set(0);
        self.image.clear();
        for offset in (0..self.size).step_by(PAGE) {
            let segment = Segment { offset, at: 0, len: PAGE };
            let (result, page) = self.tasks.run(self.device.read(Buf::zeroed(PAGE), [segment].into_iter().collect()));
            result.unwrap();
            if page.iter().any(|&byte| byte != 0) {
                self.image.insert(offset, page.to_vec());
            }
        }
    }

    /// The requests of the period.
    pub fn cost(&self) -> Cost {
        Cost { writes: self.notes.writes.get(), flushes: self.notes.flushes.get() }
    }

    /// Calls `judge` with the pool that each crash of the period leaves: of the machine after each page that was
    /// written, and with a volatile log of the process before each store to it. The last call is that of a crash of
    /// the machine after the period.
    pub fn crashes(&self, mut judge: impl FnMut(&Inline, &Pool<MemoryDevice>)) -> usize {
        let (events, mut image) = (self.notes.events.borrow(), self.image.clone());
        for event in events.iter() {
            match event {
                Event::Page(offset, page) => {
                    judge_one(self.size, &image, None, &mut judge);
                    image.insert(*offset, page.clone());
                }
                Event::Store(memory) => judge_one(self.size, &image, Some(memory), &mut judge),
            }
        }
        judge_one(self.size, &image, None, &mut judge);
        events.len() + 1
    }
}

fn judge_one(
    size: u64,
    image: &BTreeMap<u64, Vec<u8>>,
    memory: Option<&Vec<u8>>,
    judge: &mut impl FnMut(&Inline, &Pool<MemoryDevice>),
) {
    let (tasks, device) = (Inline::default(), MemoryDevice::new(size));
    for (&offset, page) in image {
        let segment = Segment { offset, at: 0, len: page.len() };
        tasks.run(device.write(Buf::copy_of(page), [segment].into_iter().collect(), false)).0.unwrap();
    }
    let memory = memory.map(|memory| VolatileMemory::new(memory.clone()));
    let options = OpenOptions::default().with_volatile(memory.and_then(volatile));
    let pool = tasks.run(Pool::open(device, Rc::new(tasks.clone()), options)).expect("it opens");
    judge(&tasks, &pool);
}
