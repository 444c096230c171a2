//! Whole stripes: how often an array with parity would have to read first, and that held ends cause no loss,
//! delay or reordering.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::{self, Buf, IoResult, Segment, Segments, StripedDevice};
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, Device, FormatOptions, OpenOptions, Pool, Runtime, WriteFlags};

use forkdisk::testing::Inline;

/// Three chunks of 512 KiB: RAID5 of four disks.
const STRIPE: u64 = 1536 << 10;
const LEN: u64 = 1 << 30;
/// Most bytes in flight.
const IN_FLIGHT: u64 = 16 << 20;
/// How long an array waits for the rest of a stripe before it reads what is missing.
const PATIENCE: Duration = Duration::from_micros(50);
const WRITE: Duration = Duration::from_millis(1);

/// RAID5 as modelled here: a stripe of which a part has arrived, and no more in time, is read first.
#[derive(Clone)]
struct Array {
    inner: MemoryDevice,
    tasks: Inline,
    state: Rc<State>,
}

#[derive(Default)]
struct State {
    /// Offset and end of each write, in order of arrival.
    writes: RefCell<Vec<(u64, u64)>>,
    flushes: Cell<usize>,
    fails: Cell<bool>,
    /// Bytes that have arrived and are not yet answered, and their maximum.
    in_flight: Cell<(u64, u64)>,
    /// Stripes that wait: their number, and bytes that have arrived.
    waiting: RefCell<Vec<(u64, u64)>>,
    reads_first: Cell<usize>,
}

impl Array {
    fn new(tasks: &Inline) -> Array {
        Array { inner: MemoryDevice::new(LEN), tasks: tasks.clone(), state: Rc::default() }
    }

    fn come(&self, offset: u64, end: u64) {
        self.state.writes.borrow_mut().push((offset, end));
        for stripe in offset / STRIPE..end.div_ceil(STRIPE) {
            let part = end.min((stripe + 1) * STRIPE) - offset.max(stripe * STRIPE);
            let mut waiting = self.state.waiting.borrow_mut();
            match waiting.iter().position(|&(number, _)| number == stripe) {
                Some(i) => {
                    waiting[i].1 += part;
                    if waiting[i].1 == STRIPE {
                        waiting.remove(i);
                    }
                }
                None if part < STRIPE => {
                    waiting.push((stripe, part));
                    let (this, wait) = (self.clone(), self.tasks.sleep(PATIENCE));
                    self.tasks.spawn(Box::pin(async move {
                        wait.await;
                        let mut waiting = this.state.waiting.borrow_mut();
                        if let Some(i) = waiting.iter().position(|&(number, _)| number == stripe) {
                            waiting.remove(i);
                            this.state.reads_first.set(this.state.reads_first.get() + 1);
                        }
                    }));
                }
                None => {}
            }
        }
    }
}

impl Device for Array {
    forkdisk::forward_device! { inner: len block_size read discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        segments.iter().for_each(|s| self.come(s.offset, s.offset + s.len as u64));
        let bytes: u64 = segments.iter().map(|s| s.len as u64).sum();
        let (now, most) = self.state.in_flight.get();
        self.state.in_flight.set((now + bytes, most.max(now + bytes)));
        let (write, pause, fails) =
            (self.inner.write(buf, segments, fua), self.tasks.sleep(WRITE), self.state.fails.get());
        let state = self.state.clone();
        async move {
            let (result, buf) = write.await;
            pause.await;
            let (now, most) = state.in_flight.get();
            state.in_flight.set((now - bytes, most));
            (if fails { Err(io::Error::other("the array is gone")) } else { result }, buf)
        }
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.state.flushes.set(self.state.flushes.get() + 1);
        self.inner.flush()
    }
}

/// Returns the byte at an offset.
fn at(offset: u64) -> u8 {
    (offset / 4096 % 251) as u8
}

fn pattern(offset: u64, len: u64) -> Buf {
    let mut buf = Buf::zeroed(len as usize);
    buf.chunks_mut(4096).enumerate().for_each(|(i, page)| page.fill(at(offset + i as u64 * 4096)));
    buf
}

fn write(
    device: &StripedDevice<Array>,
    offset: u64,
    len: u64,
) -> impl Future<Output = io::Result<()>> + 'static + use<> {
    let segments = Segments::from_elem(Segment { offset, at: 0, len: len as usize }, 1);
    let write = device.write(pattern(offset, len), segments, false);
    let write: std::pin::Pin<Box<dyn Future<Output = IoResult>>> = Box::pin(write);
    async move { write.await.0 }
}

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Inline, Array, StripedDevice<Array>) -> F + 'static) {
    let tasks = Inline::default();
    let array = Array::new(&tasks);
    let wants = device::Array { stripe: STRIPE, in_flight: IN_FLIGHT };
    let device = StripedDevice::new(array.clone(), Rc::new(tasks.clone()), wants);
    tasks.clone().run(test(tasks, array, device));
}

/// Makes requests of 5 MiB in order, `gap` apart, without waiting for them.
async fn stream(tasks: &Inline, device: &StripedDevice<Array>, count: u64, gap: Duration) {
    let mut all = Vec::new();
    for i in 0..count {
        all.push(tasks.start(write(device, i * (5 << 20), 5 << 20)));
        tasks.sleep(gap).await;
    }
    for done in all {
        done.await.expect("it is written");
    }
}

async fn assert_read(device: &StripedDevice<Array>, len: u64) {
    for offset in (0..len).step_by(1 << 20) {
        let segments = Segments::from_elem(Segment { offset, at: 0, len: 1 << 20 }, 1);
        let (result, buf) = device.read(Buf::zeroed(1 << 20), segments).await;
        result.expect("it can be read");
        assert!(buf[..] == pattern(offset, 1 << 20)[..], "at {offset}");
    }
}

#[test]
fn a_stream_of_requests_that_end_anywhere_comes_in_whole_stripes() {
    for (corked, most) in [(true, 1), (false, 1000)] {
        run(move |tasks, array, device| async move {
            device.cork(corked);
            // The stream ends in the middle of a stripe.
            stream(&tasks, &device, 30, Duration::from_millis(3)).await;
            let reads = array.state.reads_first.get();
            assert!(reads <= most, "{reads} stripes were read first");
            assert!(corked || reads > 15, "{reads}: without holding back nearly all ends are");
            assert_read(&device, 30 * (5 << 20)).await;
        });
    }
}

#[test]
fn each_byte_is_written_once_and_in_order() {
    run(|tasks, array, device| async move {
        device.cork(true);
        stream(&tasks, &device, 20, Duration::from_millis(2)).await;
        let writes = array.state.writes.take();
        assert!(writes.windows(2).all(|pair| pair[0].1 == pair[1].0), "{writes:?}");
        assert_eq!((writes[0].0, writes[writes.len() - 1].1), (0, 20 * (5 << 20)));
    });
}

#[test]
fn no_more_is_on_its_way_than_the_array_can_hold_and_what_waits_keeps_its_order() {
    run(|tasks, array, device| async move {
        device.cork(true);
        // All at once, and awaited in reverse order.
        let mut all: Vec<_> = (0..20).map(|i| write(&device, i * (5 << 20), 5 << 20)).collect();
        while let Some(last) = all.pop() {
            last.await.expect("it is written");
        }
        let writes = array.state.writes.take();
        assert!(writes.windows(2).all(|pair| pair[0].1 == pair[1].0), "{writes:?}");
        assert_eq!(writes[writes.len() - 1].1, 20 * (5 << 20));
        let (now, most) = array.state.in_flight.get();
        assert!(now == 0 && most > IN_FLIGHT / 2 && most <= IN_FLIGHT, "{most} bytes on their way at once");
        // A larger request passes alone.
        write(&device, 512 << 20, 2 * IN_FLIGHT).await.expect("it is written");
        assert_read(&device, 20 * (5 << 20)).await;
        assert!(tasks.now() < Duration::from_secs(1), "{:?}", tasks.now());
    });
}

#[test]
fn nothing_is_acknowledged_before_it_is_written_nor_held_for_long() {
    run(|tasks, array, device| async move {
        device.cork(true);
        write(&device, 0, 5 << 20).await.expect("it is written");
        tasks.sleep(Duration::from_secs(4)).await;
        let before = tasks.now();
        write(&device, 5 << 20, 5 << 20).await.expect("it is written");
        let took = tasks.now() - before;
        assert_eq!(array.state.writes.borrow().last().unwrap().1, 10 << 20, "it was written before that");
        let limit = Duration::from_secs(2) + WRITE;
        assert!((limit - Duration::from_millis(3)..=limit).contains(&took), "as long as may be: {took:?}");
        tasks.sleep(Duration::from_secs(100)).await;
        let before = tasks.now();
        // Of the ends after two misses every fourth is held.
        let mut longest = Duration::ZERO;
        for i in 2..10 {
            let before = tasks.now();
            write(&device, i * (5 << 20), 5 << 20).await.expect("it is written");
            longest = longest.max(tasks.now() - before);
        }
        assert!(longest <= Duration::from_secs(2) + WRITE * 2, "{longest:?}");
        assert!(tasks.now() - before < Duration::from_secs(5), "whoever waits for answers is held less often");
    });
}

#[test]
fn a_flush_a_read_and_a_write_nearby_let_go_what_is_held() {
    for way in 0..4 {
        run(move |tasks, array, device| async move {
            device.cork(true);
            write(&device, 0, 5 << 20).await.expect("it is written");
            tasks.sleep(Duration::from_secs(10)).await;
            let held = tasks.start(write(&device, 5 << 20, 5 << 20));
            tasks.sleep(WRITE * 2).await;
            assert_eq!(array.state.writes.borrow().last().unwrap().1, 9 << 20, "a whole number of stripes");
            match way {
                0 => device.flush().await.expect("it succeeds"),
                1 => {
                    let segments = Segments::from_elem(Segment { offset: 9 << 20, at: 0, len: 4096 }, 1);
                    let (result, buf) = device.read(Buf::zeroed(4096), segments).await;
                    result.expect("it can be read");
                    assert_eq!(buf[0], at(9 << 20), "what is held is read");
                }
                2 => write(&device, 20 << 20, 4096).await.expect("it is written"),
                _ => device.discard(100 << 20, 4096).await.expect("it succeeds"),
            }
            assert!(array.state.writes.borrow().contains(&(9 << 20, 10 << 20)), "way {way}");
            if way == 2 {
                let writes = array.state.writes.borrow();
                assert_eq!(
                    writes[writes.len() - 2..],
                    [(9 << 20, 10 << 20), (20 << 20, (20 << 20) + 4096)],
                    "in order"
                );
            }
            held.await.expect("it is written");
            assert!(tasks.now() < Duration::from_millis(10_220), "{:?}", tasks.now());
        });
    }
}

#[test]
fn a_held_end_that_cannot_be_written_fails_all_who_have_a_part_in_it() {
    run(|tasks, array, device| async move {
        device.cork(true);
        write(&device, 0, 5 << 20).await.expect("it is written");
        tasks.sleep(Duration::from_secs(10)).await;
        array.state.fails.set(true);
        let first = tasks.start(write(&device, 5 << 20, 64 << 10));
        let second = tasks.start(write(&device, (5 << 20) + (64 << 10), 64 << 10));
        assert!(first.await.is_err() && second.await.is_err());
    });
}

#[test]
fn a_pipelining_client_is_written_in_whole_stripes_and_the_journal_never_waits() {
    run(|tasks, array, device| async move {
        let format = FormatOptions::new(LEN, [7; 16], 0);
        Pool::format(&device, &format).await.expect("a new pool");
        let pool = Pool::open(device.clone(), Rc::new(tasks.clone()), OpenOptions::default()).await.expect("it opens");
        pool.create("v", &CreateOptions::new(256 << 20, 0)).await.expect("a new volume");
        let volume = pool.volume("v").expect("just made");
        array.state.reads_first.set(0);
        array.state.writes.take();
        let mut all = Vec::new();
        for i in 0..39_u64 {
            let volume = volume.clone();
            let offset = i * (5 << 20);
            all.push(tasks.start(async move {
                volume.write(offset, pattern(offset, 5 << 20), WriteFlags::default().with_more(true)).await.0
            }));
            tasks.sleep(Duration::from_millis(3)).await;
        }
        for done in all {
            done.await.expect("it is written");
        }
        let reads = array.state.reads_first.get();
        assert_eq!(reads, 0, "stripes that were read first");
        let first = array.state.writes.borrow().iter().map(|w| w.0).find(|&at| at >= 1 << 20);
        assert!(first.is_some_and(|at| at.is_multiple_of(STRIPE)), "the stream begins at {first:?}");
        for _ in 0..20 {
            volume.write(0, pattern(0, 4096), false).await.0.expect("it is written");
            let before = tasks.now();
            pool.flush().await.expect("it succeeds");
            assert!(tasks.now() - before <= WRITE * 4, "{:?}", tasks.now() - before);
        }
        let (result, buf) = volume.read(7 << 20, Buf::zeroed(1 << 20)).await;
        result.expect("a read");
        assert!(buf[..] == pattern(7 << 20, 1 << 20)[..]);
    });
}
