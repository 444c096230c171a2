//! Measures the cost of the engine per 4 KiB request beyond the ring itself.
//!
//! Random requests at a fixed depth go to the same pages of the same file in three variants:
//! through a bare io_uring loop (registered file and buffers), through [`UringDevice`], and through
//! a volume of a pool. Reported per request: CPU time of the process, allocations, requests to the
//! device. Rounds are interleaved; the figures are medians.
//!
//! `overhead [FILE] [--ops N] [--depth N] [--rounds N] [--only WAY] [--buffered]`; FILE (default in
//! /dev/shm) is created and removed. With `--buffered` requests go through the page cache: on a
//! file system whose reads do not block, no worker thread of the kernel distorts the figures.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use forkdisk::device::{Buf, Device, IoResult, Segment, Segments};
use forkdisk::{CreateOptions, Error, FormatOptions, Pool, Volume};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice, block_on};
use io_uring::squeue::Flags;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};

const PAGE: usize = 4096;
const POOL: u64 = 512 << 20;
const VOLUME: u64 = 256 << 20;
const FILL: usize = 1 << 20;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: forwards every call unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantees are those that `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A device that counts its requests.
#[derive(Clone)]
struct Counted {
    device: UringDevice,
    requests: Rc<Cell<u64>>,
}

impl Counted {
    fn add(&self, n: usize) {
        self.requests.set(self.requests.get() + n as u64);
    }
}

impl Device for Counted {
    forkdisk::forward_device! { device: len block_size buffer set_len }
    forkdisk::plain_device! { cork stripe allocate can_clone clone_range zero_range }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.add(segments.len());
        self.device.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.add(segments.len());
        self.device.write(buf, segments, fua)
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.add(1);
        self.device.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.add(1);
        self.device.discard(offset, len)
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

struct Args {
    file: PathBuf,
    ops: usize,
    depth: usize,
    rounds: usize,
    only: Option<String>,
    buffered: bool,
}

impl Args {
    fn parse() -> Result<Args, String> {
        let file = PathBuf::from(format!("/dev/shm/forkdisk-overhead-{}", std::process::id()));
        let mut args = Args { file, ops: 400_000, depth: 32, rounds: 5, only: None, buffered: false };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} takes a value"));
            let number = |text: String| text.parse().map_err(|e| format!("{text:?}: {e}"));
            match word.as_str() {
                "--ops" => args.ops = number(value()?)?,
                "--depth" => args.depth = number(value()?)?,
                "--rounds" => args.rounds = number(value()?)?,
                "--only" => args.only = Some(value()?),
                "--buffered" => args.buffered = true,
                _ => args.file = PathBuf::from(word),
            }
        }
        if args.depth == 0 || args.rounds == 0 || args.ops < args.depth {
            return Err("at least one round, a depth of one, and as many ops as the depth".to_owned());
        }
        Ok(args)
    }
}

/// Returns the CPU time of all threads of this process in nanoseconds: in total, and in user space.
fn cpu_time() -> (u64, u64) {
    // SAFETY: all zeroes is a valid rusage, and the call fills the one it is given.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let nanos = |t: libc::timeval| t.tv_sec as u64 * 1_000_000_000 + t.tv_usec as u64 * 1000;
    (nanos(usage.ru_utime) + nanos(usage.ru_stime), nanos(usage.ru_utime))
}

/// Cost per request.
#[derive(Clone, Copy)]
struct Cost {
    micros: f64,
    user: f64,
    allocations: f64,
    requests: f64,
}

/// Counters at the start of a measurement.
struct Start {
    cpu: (u64, u64),
    allocations: u64,
    requests: u64,
}

impl Start {
    fn now(requests: u64) -> Start {
        Start { cpu: cpu_time(), allocations: ALLOCATIONS.load(Ordering::Relaxed), requests }
    }

    fn cost(&self, requests: u64, ops: usize) -> Cost {
        let now = Start::now(requests);
        let per = |a: u64, b: u64| (a - b) as f64 / ops as f64;
        Cost {
            micros: per(now.cpu.0, self.cpu.0) / 1000.0,
            user: per(now.cpu.1, self.cpu.1) / 1000.0,
            allocations: per(now.allocations, self.allocations),
            requests: per(now.requests, self.requests),
        }
    }
}

/// A bare ring, without driver or executor.
struct Bare {
    ring: IoUring,
    buffers: Vec<Buf>,
    _file: fs::File,
}

impl Bare {
    fn new(path: &Path, depth: usize, direct: bool) -> io::Result<Bare> {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(depth.next_power_of_two() as u32)?;
        let mut buffers: Vec<Buf> = (0..depth).map(|_| Buf::copy_of(&[7; PAGE])).collect();
        let iovecs: Vec<libc::iovec> =
            buffers.iter_mut().map(|b| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: PAGE }).collect();
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        // SAFETY: the buffers live as long as the ring, in the same struct.
        unsafe { ring.submitter().register_buffers(&iovecs)? };
        Ok(Bare { ring, buffers, _file: file })
    }

    fn push(&mut self, slot: usize, offset: u64, write: bool) {
        let (base, len) = (self.buffers[slot].as_mut_ptr(), PAGE as u32);
        let entry = match write {
            true => opcode::WriteFixed::new(Fd(0), base, len, slot as u16).offset(offset).build(),
            false => opcode::ReadFixed::new(Fd(0), base, len, slot as u16).offset(offset).build(),
        };
        let entry = entry.flags(Flags::FIXED_FILE).user_data(slot as u64);
        // SAFETY: the buffer lives as long as the ring and is used by one request at a time.
        unsafe { self.ring.submission().push(&entry) }.expect("the ring has room for the depth");
    }

    fn run(&mut self, pages: &[u64], ops: usize, write: bool) -> io::Result<()> {
        let mut random = Random(0x9e37_79b9);
        let (mut started, mut ended) = (0, 0);
        let mut free: Vec<usize> = (0..self.buffers.len()).collect();
        while ended < ops {
            while started < ops
                && let Some(slot) = free.pop()
            {
                self.push(slot, pages[random.below(pages.len())], write);
                started += 1;
            }
            self.ring.submit_and_wait(1)?;
            for completion in self.ring.completion() {
                if completion.result() != PAGE as i32 {
                    return Err(io::Error::other(format!("a request returned {}", completion.result())));
                }
                free.push(completion.user_data() as usize);
                ended += 1;
            }
        }
        Ok(())
    }
}

/// Runs `ops` requests in `depth` tasks.
async fn tasks<F>(rt: &Rt, args: &Args, request: impl Fn(usize, Buf) -> F + Clone + 'static) -> forkdisk::Result<()>
where
    F: Future<Output = (forkdisk::Result<()>, Buf)> + 'static,
{
    let each = args.ops / args.depth;
    let all: Vec<_> = (0..args.depth)
        .map(|task| {
            let request = request.clone();
            let mut buf = rt.buffer(PAGE);
            let mut random = Random(0x9e37_79b9 + task as u64 * 0x1234_5678_9abc);
            rt.spawn(async move {
                for _ in 0..each {
                    let page = random.below(VOLUME as usize / PAGE);
                    let (result, back) = request(page, buf).await;
                    result?;
                    buf = back;
                }
                Ok::<_, Error>(())
            })
        })
        .collect();
    for task in all {
        task.await?;
    }
    Ok(())
}

async fn through_device(
    rt: &Rt,
    args: &Args,
    device: &Counted,
    pages: &Rc<Vec<u64>>,
    write: bool,
) -> forkdisk::Result<()> {
    let (device, pages) = (device.clone(), pages.clone());
    let request = move |page: usize, buf: Buf| {
        let segments: Segments = [Segment { offset: pages[page], at: 0, len: PAGE }].into_iter().collect();
        let device = device.clone();
        async move {
            let (result, buf) = match write {
                true => device.write(buf, segments, false).await,
                false => device.read(buf, segments).await,
            };
            (result.map_err(|e| Error::io("a request failed", e)), buf)
        }
    };
    tasks(rt, args, request).await
}

async fn through_volume(rt: &Rt, args: &Args, volume: &Volume<Counted>, write: bool) -> forkdisk::Result<()> {
    let volume = volume.clone();
    let request = move |page: usize, buf: Buf| {
        let volume = volume.clone();
        async move {
            let offset = (page * PAGE) as u64;
            match write {
                true => volume.write(offset, buf, false).await,
                false => volume.read(offset, buf).await,
            }
        }
    };
    tasks(rt, args, request).await
}

/// Creates a pool with a volume whose pages are all written.
async fn filled(rt: &Rt, device: &Counted) -> forkdisk::Result<(Pool<Counted>, Volume<Counted>, Vec<u64>)> {
    Pool::format(device, &FormatOptions::new(POOL, [7; 16], 0)).await?;
    let pool = Pool::open(device.clone(), Rc::new(rt.clone()), Default::default()).await?;
    pool.create("v", &CreateOptions::new(VOLUME, 0)).await?;
    let volume = pool.volume("v")?;
    for offset in (0..VOLUME).step_by(FILL) {
        let mut buf = rt.buffer(FILL);
        buf.fill(7);
        volume.write(offset, buf, false).await.0?;
    }
    pool.checkpoint().await?;
    let extents = volume.extents(0, VOLUME).await?;
    let pages = extents.iter().flat_map(|e| (e.physical..e.physical + e.len).step_by(PAGE)).collect();
    Ok((pool, volume, pages))
}

const WAYS: [&str; 3] = ["bare", "device", "volume"];

fn report(costs: &mut [Vec<Cost>; 3], what: &str) {
    let mut bare = f64::NAN;
    for (way, costs) in WAYS.iter().zip(costs) {
        if costs.is_empty() {
            continue;
        }
        costs.sort_by(|a, b| a.micros.total_cmp(&b.micros));
        let Cost { micros, user, allocations, requests } = costs[costs.len() / 2];
        if *way == "bare" {
            bare = micros;
        }
        let ratio = micros / bare;
        println!(
            "{what:<6} {way:<7} {micros:6.3} us CPU ({user:5.3} user)  {ratio:5.2} x  {allocations:6.3} allocations  \
             {requests:6.3} requests"
        );
    }
}

async fn measure(rt: Rt, args: Args) -> forkdisk::Result<()> {
    let options = DeviceOptions::default().with_direct(!args.buffered);
    let device = UringDevice::create(&rt, &args.file, POOL, true, &options)?;
    let direct = device.is_direct();
    let device = Counted { device, requests: Rc::default() };
    let (pool, volume, pages) = filled(&rt, &device).await?;
    let mut bare = Bare::new(&args.file, args.depth, direct).map_err(|e| Error::io("a bare ring", e))?;
    let pages = Rc::new(pages);
    println!(
        "depth {}, {} requests, direct I/O: {direct}, registered buffers: {}",
        args.depth,
        args.ops,
        rt.has_registered_buffers()
    );
    for (what, write) in [("read", false), ("write", true)] {
        let mut costs: [Vec<Cost>; 3] = Default::default();
        for _ in 0..args.rounds {
            for (way, costs) in WAYS.iter().zip(&mut costs) {
                if args.only.as_ref().is_some_and(|only| only != way) {
                    continue;
                }
                let start = Start::now(device.requests.get());
                let done = args.ops / args.depth * args.depth;
                match *way {
                    "bare" => {
                        bare.run(&pages, done, write).map_err(|e| Error::io("the bare ring", e))?;
                        device.add(done);
                    }
                    "device" => through_device(&rt, &args, &device, &pages, write).await?,
                    _ => through_volume(&rt, &args, &volume, write).await?,
                }
                costs.push(start.cost(device.requests.get(), done));
            }
        }
        report(&mut costs, what);
    }
    drop(volume);
    pool.close().await
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse()?;
    let file = args.file.clone();
    let result = block_on(Config::default(), |rt| measure(rt, args)).and_then(|result| result);
    fs::remove_file(&file)?;
    Ok(result?)
}
