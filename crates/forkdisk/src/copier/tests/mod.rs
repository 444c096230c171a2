//! The copier on devices that complete late and out of order, with a clock that is set by hand.

mod contents;
mod errors;
mod gate;
mod offload;
mod order;
mod pace;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use smallvec::smallvec;

use crate::device::{Buf, Device, IoResult, Segment, Segments};
use crate::format::{CopierSettings, Throttle};
use crate::runtime::{LocalFuture, Runtime};
use crate::testing::Inline;
use crate::testing::{FailingDevice, MemoryDevice, Recording, RecordingDevice, Request, RequestKind};

use super::{Client, Copier, CopyClass, CopySource, Job, JobGroup, JobHandle, Piece, Place};

const KIB: u64 = 1 << 10;

/// A device whose requests take effect at once and end after individual delays.
pub struct Jittery<D> {
    inner: D,
    clock: Inline,
    random: Cell<u64>,
    /// Most milliseconds that a request takes.
    reach: u64,
}

impl<D> Jittery<D> {
    fn pause(&self) -> LocalFuture<()> {
        let mut x = self.random.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random.set(x);
        self.clock.sleep(Duration::from_millis(1 + (x >> 33) % self.reach))
    }
}

impl<D: Device> Device for Jittery<D> {
    crate::forward_device! { inner: len block_size buffer cork stripe flush discard allocate can_clone set_len }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        let (request, pause) = (self.inner.read(buf, segments), self.pause());
        async move {
            pause.await;
            request.await
        }
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let (request, pause) = (self.inner.write(buf, segments, fua), self.pause());
        async move {
            pause.await;
            request.await
        }
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let (request, pause) = (self.inner.clone_range(&source.inner, from, to, len), self.pause());
        async move {
            pause.await;
            request.await
        }
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let (request, pause) = (self.inner.zero_range(offset, len), self.pause());
        async move {
            pause.await;
            request.await
        }
    }
}

type Disk = RecordingDevice<Jittery<FailingDevice<MemoryDevice>>>;
type Verdict = Rc<RefCell<Box<dyn FnMut(&Request) -> bool>>>;

/// A copier and its disk of 64 MiB: the first half is the source, where every 8 bytes hold their
/// own offset; the second is free.
pub struct Lab {
    pub clock: Inline,
    pub disk: Rc<Disk>,
    pub copier: Copier<Disk>,
    pub client: Rc<Client>,
    refuse: Verdict,
    /// Refused requests fail with this error.
    with: Rc<Cell<io::ErrorKind>>,
    memory: MemoryDevice,
}

pub const HALF: u64 = 32 << 20;

/// Sub-jobs of 64 KiB, and no buffers but the reserves.
pub fn scarce() -> CopierSettings {
    CopierSettings { subjob_size: 64 << 10, split_count: 8, buffers: 5 * (64 << 10), ..CopierSettings::default() }
}

/// Sub-jobs of 64 KiB and plenty of buffers.
pub fn ample() -> CopierSettings {
    CopierSettings { buffers: 64 << 20, ..scarce() }
}

impl Lab {
    pub fn new(settings: CopierSettings, seed: u64) -> Lab {
        Lab::with_pace(settings, seed, 20)
    }

    /// Creates a lab in which requests take 1 to `reach` ms.
    pub fn with_pace(settings: CopierSettings, seed: u64, reach: u64) -> Lab {
        let (clock, memory) = (Inline::default(), MemoryDevice::new(2 * HALF));
        let refuse: Verdict = Rc::new(RefCell::new(Box::new(|_: &Request| false)));
        let (verdict, with) = (refuse.clone(), Rc::new(Cell::new(io::ErrorKind::Other)));
        let error = with.clone();
        let failing = FailingDevice::new(memory.clone(), move |request| {
            verdict.borrow_mut()(request).then(|| io::Error::new(error.get(), "refused"))
        });
        let random = Cell::new(seed | 1);
        let jittery = Jittery { inner: failing, clock: clock.clone(), random, reach };
        let disk = Rc::new(RecordingDevice::new(jittery, |_| true));
        let copier = Copier::new(disk.clone(), Rc::new(clock.clone()), settings);
        let client = Rc::new(Client::new(CopyClass::Break, Throttle::NONE));
        let lab = Lab { clock, disk, copier, client, refuse, with, memory };
        lab.fill();
        lab
    }

    fn fill(&self) {
        for offset in (0..HALF).step_by(1 << 20) {
            let buf = Buf::copy_of(&pattern(offset, 1 << 20));
            self.clock
                .run(self.memory.write(buf, smallvec![Segment { offset, at: 0, len: 1 << 20 }], false))
                .0
                .unwrap();
        }
    }

    /// Fails every request for which `verdict` returns true.
    pub fn refuse(&self, verdict: impl FnMut(&Request) -> bool + 'static) {
        *self.refuse.borrow_mut() = Box::new(verdict);
    }

    /// Makes every clone fail although the device reported that it can clone.
    pub fn refuse_to_clone(&self) {
        self.with.set(io::ErrorKind::Unsupported);
        self.refuse(|request| matches!(request.kind, RequestKind::Clone | RequestKind::Zero));
    }

    pub fn place(&self, offset: u64) -> Place<Disk> {
        Place { device: self.disk.clone(), offset }
    }

    /// Returns a copy job of `len` bytes; all such jobs are near each other.
    pub fn job(&self, from: u64, to: u64, len: u64) -> Job<Disk> {
        let source = vec![Piece { len, from: CopySource::Device(self.place(from)) }];
        Job {
            source,
            destinations: smallvec![self.place(to)],
            near: 0..1,
            group: JobGroup::default(),
            checksums: Vec::new(),
            hold: None,
        }
    }

    pub fn submit(&self, job: Job<Disk>) -> JobHandle {
        self.copier.submit(&self.client, job, Vec::new())
    }

    pub fn contents(&self, offset: u64, len: u64) -> Vec<u8> {
        let segment = smallvec![Segment { offset, at: 0, len: len as usize }];
        let (result, buf) = self.clock.run(self.memory.read(Buf::zeroed(len as usize), segment));
        result.unwrap();
        buf.to_vec()
    }

    /// Waits until the copier has nothing to do.
    pub fn idle(&self) {
        self.clock.run_until_idle();
        while !self.copier.0.is_idle() {
            assert!(self.clock.advance(), "the copier waits for ever");
            self.clock.run_until_idle();
        }
    }
}

/// Returns the contents of the source.
pub fn pattern(offset: u64, len: u64) -> Vec<u8> {
    static ALL: OnceLock<Vec<u8>> = OnceLock::new();
    let all = ALL.get_or_init(|| (0..HALF / 8).flat_map(|word| (word * 8).to_le_bytes()).collect());
    all[offset as usize..(offset + len) as usize].to_vec()
}

/// Returns where requests of a kind began, in the order in which they reached the device.
pub fn places(recording: &Recording, kind: RequestKind) -> Vec<(u64, u64)> {
    recording.requests.iter().filter(|r| r.kind == kind).map(|r| (r.offset, r.len)).collect()
}
