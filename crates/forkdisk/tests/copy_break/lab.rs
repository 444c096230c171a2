//! A pool on a device in memory that counts, delays and refuses, with a clock that is set by hand.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::Buf;
use forkdisk::testing::Inline;
use forkdisk::testing::{
    DelayingDevice, FailingDevice, MemoryDevice, Recording, RecordingDevice, Request, RequestKind,
};
use forkdisk::{BreakPolicy, CreateOptions, FormatOptions, OpenOptions, Pool, Result, Runtime, Volume};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
/// Latency of every request.
pub const LATENCY: Duration = Duration::from_millis(5);

pub type Disk = RecordingDevice<DelayingDevice<FailingDevice<MemoryDevice>>>;
type Verdict = Rc<RefCell<Box<dyn FnMut(&Request) -> bool>>>;

/// The writes in the order of their ends: number and result.
pub type Ended = Rc<RefCell<Vec<(usize, Result<()>)>>>;

/// A pool, and what is below it.
pub struct Lab {
    pub clock: Inline,
    pub disk: Disk,
    pub pool: Pool<Disk>,
    refuse: Verdict,
}

impl Lab {
    /// A pool of 256 MiB.
    pub fn new() -> Lab {
        let (clock, refuse): (Inline, Verdict) =
            (Inline::default(), Rc::new(RefCell::new(Box::new(|_: &Request| false))));
        let verdict = refuse.clone();
        let failing = FailingDevice::new(MemoryDevice::new(256 * MIB), move |request| {
            verdict.borrow_mut()(request).then(|| io::Error::other("refused"))
        });
        let delaying = DelayingDevice::new(failing, Rc::new(clock.clone()), LATENCY);
        let disk = RecordingDevice::new(delaying, |_| true);
        let options = FormatOptions::new(256 * MIB, [1; 16], 1);
        clock.run(Pool::format(&disk, &options)).expect("formatted");
        let pool = Lab::open(&clock, &disk);
        Lab { clock, disk, pool, refuse }
    }

    fn open(clock: &Inline, disk: &Disk) -> Pool<Disk> {
        clock.run(Pool::open(disk.clone(), Rc::new(clock.clone()), OpenOptions::default())).expect("opened")
    }

    /// Opens the pool again, after a clean close or as after a crash.
    pub fn reopen(&mut self, close: bool) {
        if close {
            self.clock.run(self.pool.close()).expect("closed");
        }
        self.pool = Lab::open(&self.clock, &self.disk);
    }

    /// Fails every request for which `verdict` returns true.
    pub fn refuse(&self, verdict: impl FnMut(&Request) -> bool + 'static) {
        *self.refuse.borrow_mut() = Box::new(verdict);
    }

    /// Creates a volume `v` of `size` bytes, all of them written as `fill`, with the snapshot `v@s`.
    pub fn shared(&self, size: u64, chunk: u64, policy: BreakPolicy, fill: u8) -> Volume<Disk> {
        let options = CreateOptions::new(size, 1).with_chunk(chunk).with_break_policy(policy);
        self.clock.run(self.pool.create("v", &options)).expect("created");
        let volume = self.pool.volume("v").expect("there");
        for at in (0..size).step_by(MIB as usize) {
            self.write(&volume, at, MIB.min(size - at), fill).expect("written");
        }
        self.clock.run(self.pool.snapshot(&[("v", "s")], 1)).expect("taken");
        self.clock.run(self.pool.checkpoint()).expect("written");
        self.disk.take();
        volume
    }

    pub fn write(&self, volume: &Volume<Disk>, at: u64, len: u64, fill: u8) -> Result<()> {
        self.clock.run(volume.write(at, filled(len, fill), false)).0
    }

    /// Starts writes without waiting for them; the list collects how each ends.
    pub fn write_all(&self, volume: &Volume<Disk>, writes: &[(u64, u64, u8)]) -> Ended {
        let ended = Ended::default();
        for (i, &(at, len, fill)) in writes.iter().enumerate() {
            let (volume, list) = (volume.clone(), ended.clone());
            self.clock.spawn(Box::pin(async move {
                let (result, _) = volume.write(at, filled(len, fill), false).await;
                list.borrow_mut().push((i, result));
            }));
            self.clock.run_until_idle();
        }
        ended
    }

    /// Waits until `n` of them have ended.
    pub fn await_all(&self, ended: &Ended, n: usize) {
        while ended.borrow().len() < n {
            assert!(self.clock.advance(), "a write waits for ever");
            self.clock.run_until_idle();
        }
    }

    pub fn read(&self, volume: &Volume<Disk>, at: u64, len: u64) -> Vec<u8> {
        let (result, buf) = self.clock.run(volume.read(at, Buf::zeroed(len as usize)));
        result.expect("read");
        buf.to_vec()
    }

    /// Returns bytes read, bytes written (of any kind), and number of flushes.
    pub fn counts(&self) -> (u64, u64, u64) {
        let seen = self.disk.take();
        (seen.bytes(RequestKind::Read), seen.bytes(RequestKind::WriteData), seen.count(RequestKind::Flush))
    }

    pub fn assert_sound(&self) {
        let report = self.clock.run(self.pool.check()).expect("checked");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    }
}

/// Returns a buffer of one byte repeated.
pub fn filled(len: u64, fill: u8) -> Buf {
    let mut buf = Buf::zeroed(len as usize);
    buf.fill(fill);
    buf
}

/// Returns offset and length of the requests of a kind.
pub fn places(seen: &Recording, kind: RequestKind) -> Vec<(u64, u64)> {
    seen.requests.iter().filter(|r| r.kind == kind).map(|r| (r.offset, r.len)).collect()
}
