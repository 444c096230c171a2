//! A pool on a device in memory that counts, delays and refuses, by a clock that is moved by hand.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use forkdisk::device::{
    Buf, DelayingDevice, FailingDevice, MemoryDevice, Recording, RecordingDevice, Request, RequestKind,
};
use forkdisk::{BreakPolicy, CreateOptions, FormatOptions, LocalFuture, OpenOptions, Pool, Result, Runtime, Volume};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
/// What every request takes.
pub const LATENCY: Duration = Duration::from_millis(5);

/// Tasks, and time that passes when nothing else can happen.
#[derive(Clone, Default)]
pub struct Clock(Rc<Inner>);

#[derive(Default)]
struct Inner {
    tasks: RefCell<Vec<LocalFuture<()>>>,
    now: Cell<Duration>,
    alarms: RefCell<Vec<Duration>>,
}

impl Runtime for Clock {
    fn spawn(&self, task: LocalFuture<()>) {
        self.0.tasks.borrow_mut().push(task);
    }

    fn sleep(&self, time: Duration) -> LocalFuture<()> {
        let (inner, end) = (self.0.clone(), self.0.now.get() + time);
        inner.alarms.borrow_mut().push(end);
        let until = move |_: &mut Context<'_>| if inner.now.get() >= end { Poll::Ready(()) } else { Poll::Pending };
        Box::pin(std::future::poll_fn(until))
    }

    fn now(&self) -> Duration {
        self.0.now.get()
    }
}

impl Clock {
    /// Polls everything until nothing happens any more at this moment.
    pub fn settle(&self) {
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..12 {
            let mut tasks = self.0.tasks.take();
            tasks.retain_mut(|task| task.as_mut().poll(&mut context).is_pending());
            self.0.tasks.borrow_mut().append(&mut tasks);
        }
    }

    fn tick(&self) -> bool {
        let mut alarms = self.0.alarms.borrow_mut();
        let Some(&next) = alarms.iter().min() else { return false };
        alarms.retain(|&alarm| alarm > next);
        self.0.now.set(self.0.now.get().max(next));
        true
    }

    /// Runs `future` to its end.
    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        let mut quiet = 0;
        // A long walk gives way again and again without asking for the time.
        while quiet < 1024 {
            self.settle();
            if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                return value;
            }
            quiet = if self.tick() { 0 } else { quiet + 1 };
        }
        panic!("nothing will ever happen any more")
    }
}

pub type Disk = RecordingDevice<DelayingDevice<FailingDevice<MemoryDevice>>>;
type Verdict = Rc<RefCell<Box<dyn FnMut(&Request) -> bool>>>;

/// How writes have ended, in that order: which, and its result.
pub type Ended = Rc<RefCell<Vec<(usize, Result<()>)>>>;

/// A pool, and what is beneath it.
pub struct Lab {
    pub clock: Clock,
    pub disk: Disk,
    pub pool: Pool<Disk>,
    refuse: Verdict,
}

impl Lab {
    /// A pool of 256 MiB.
    pub fn new() -> Lab {
        let (clock, refuse): (Clock, Verdict) =
            (Clock::default(), Rc::new(RefCell::new(Box::new(|_: &Request| false))));
        let verdict = refuse.clone();
        let failing = FailingDevice::new(MemoryDevice::new(256 * MIB), move |request| {
            verdict.borrow_mut()(request).then(|| io::Error::other("refused"))
        });
        let delaying = DelayingDevice::new(failing, Rc::new(clock.clone()), LATENCY);
        let disk = RecordingDevice::new(delaying, |_| true);
        let options = FormatOptions { size: 256 * MIB, uuid: [1; 16], now: 1, journal: None };
        clock.run(Pool::format(&disk, &options)).expect("formatted");
        let pool = Lab::open(&clock, &disk);
        Lab { clock, disk, pool, refuse }
    }

    fn open(clock: &Clock, disk: &Disk) -> Pool<Disk> {
        clock.run(Pool::open(disk.clone(), Rc::new(clock.clone()), OpenOptions::default())).expect("opened")
    }

    /// Opens the pool again, after a clean close or as after a crash.
    pub fn reopen(&mut self, close: bool) {
        if close {
            self.clock.run(self.pool.close()).expect("closed");
        }
        self.pool = Lab::open(&self.clock, &self.disk);
    }

    /// Fails every request of which this is true.
    pub fn refuse(&self, verdict: impl FnMut(&Request) -> bool + 'static) {
        *self.refuse.borrow_mut() = Box::new(verdict);
    }

    /// A volume `v` of `size` bytes, all of them written as `fill`, with the snapshot `v@s`.
    pub fn shared(&self, size: u64, chunk: u64, policy: BreakPolicy, fill: u8) -> Volume<Disk> {
        let options = CreateOptions { chunk, break_policy: policy, ..CreateOptions::new(size, 1) };
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

    /// Starts writes without waiting for them; how each ends is in the list.
    pub fn write_all(&self, volume: &Volume<Disk>, writes: &[(u64, u64, u8)]) -> Ended {
        let ended = Ended::default();
        for (i, &(at, len, fill)) in writes.iter().enumerate() {
            let (volume, list) = (volume.clone(), ended.clone());
            self.clock.spawn(Box::pin(async move {
                let (result, _) = volume.write(at, filled(len, fill), false).await;
                list.borrow_mut().push((i, result));
            }));
            self.clock.settle();
        }
        ended
    }

    /// Waits until `n` of them have ended.
    pub fn await_all(&self, ended: &Ended, n: usize) {
        while ended.borrow().len() < n {
            assert!(self.clock.tick(), "a write waits for ever");
            self.clock.settle();
        }
    }

    pub fn read(&self, volume: &Volume<Disk>, at: u64, len: u64) -> Vec<u8> {
        let (result, buf) = self.clock.run(volume.read(at, Buf::zeroed(len as usize)));
        result.expect("read");
        buf.to_vec()
    }

    /// Bytes read, bytes written (whatever they are), number of flushes.
    pub fn counts(&self) -> (u64, u64, u64) {
        let seen = self.disk.take();
        (seen.bytes(RequestKind::Read), seen.bytes(RequestKind::WriteData), seen.count(RequestKind::Flush))
    }

    pub fn assert_sound(&self) {
        let report = self.clock.run(self.pool.check()).expect("checked");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    }
}

/// A buffer of one byte repeated.
pub fn filled(len: u64, fill: u8) -> Buf {
    let mut buf = Buf::zeroed(len as usize);
    buf.fill(fill);
    buf
}

/// Requests of a kind: where and how long.
pub fn places(seen: &Recording, kind: RequestKind) -> Vec<(u64, u64)> {
    seen.requests.iter().filter(|r| r.kind == kind).map(|r| (r.offset, r.len)).collect()
}
