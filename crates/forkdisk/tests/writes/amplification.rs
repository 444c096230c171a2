//! Write amplification of random first writes after a snapshot: everything written, per byte of the client.
//!
//! Large volumes are scaled down by 16 together with the memory for changed metadata: every write still meets
//! another table and another page of counts, and the tables above take the same share of the memory.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::{FailingDevice, MemoryDevice, RequestKind};
use forkdisk::{BLOCK_SIZE, CreateOptions, Device, FormatOptions, OpenOptions, PAGE_SIZE, Pool};

use forkdisk::testing::Inline;

const PAGE: u64 = PAGE_SIZE as u64;

/// A device that counts what is written, and stores only what does not begin with a page of zeroes: clients
/// write nothing else.
#[derive(Clone)]
struct Scale {
    inner: MemoryDevice,
    data: Rc<Cell<u64>>,
    metadata: Rc<Cell<u64>>,
}

impl Device for Scale {
    forkdisk::forward_device! { inner: len block_size read flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let is_data = |s: &forkdisk::device::Segment| buf[s.at..s.at + s.len.min(PAGE_SIZE)].iter().all(|&b| b == 0);
        let (data, metadata): (Segments, Segments) = segments.iter().copied().partition(is_data);
        let bytes = |segments: &Segments| segments.iter().map(|s| s.len as u64).sum::<u64>();
        self.data.set(self.data.get() + bytes(&data));
        self.metadata.set(self.metadata.get() + bytes(&metadata));
        self.inner.write(buf, metadata, fua)
    }
}

/// Device work for each of the client's writes.
#[derive(Debug)]
struct Cost {
    /// Bytes written per byte of the client, in total and of data.
    written: f64,
    data: f64,
}

/// A pseudo-random permutation of `0..span`, a power of two.
fn scattered(i: u64, span: u64) -> u64 {
    let (bits, mask) = (span.trailing_zeros(), span - 1);
    let mix = |x: u64| x.wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask;
    let fold = |x: u64| x ^ (x >> (bits / 2));
    mix(fold(mix(fold(mix(i)))))
}

/// Returns the cost of writing `count` pages of a full volume of `gib` GiB that a snapshot shares, in random
/// order, with `dirty` MiB for changed metadata; includes a flush and a checkpoint at the end.
fn cost(gib: u64, dirty: usize, count: u64) -> Cost {
    let tasks = Inline::default();
    let (size, span) = (gib << 30, (gib << 30) / PAGE);
    let device = Scale { inner: MemoryDevice::new(size * 5 / 2), data: Rc::default(), metadata: Rc::default() };
    let counters = device.clone();
    tasks.clone().run(async move {
        let format = FormatOptions::new(size * 5 / 2, [7; 16], 0);
        Pool::format(&device, &format).await.expect("a new pool");
        let options = OpenOptions::default().with_dirty(dirty << 20);
        let pool = Pool::open(device.clone(), Rc::new(tasks), options).await.expect("it opens");
        pool.create("v", &CreateOptions::new(size, 0)).await.expect("a new volume");
        let volume = pool.volume("v").expect("just made");
        let mut buf = Buf::zeroed(BLOCK_SIZE as usize);
        for at in (0..size).step_by(BLOCK_SIZE as usize) {
            let (result, again) = volume.write(at, buf, false).await;
            result.expect("there is space");
            buf = again;
        }
        pool.checkpoint().await.expect("it succeeds");
        pool.snapshot(&[("v", "s")], 0).await.expect("a snapshot");
        pool.checkpoint().await.expect("it succeeds");
        device.data.take();
        device.metadata.take();
        let mut buf = Buf::zeroed(PAGE_SIZE);
        for at in (0..count).map(|i| scattered(i, span)) {
            let (result, again) = volume.write(at * PAGE, buf, false).await;
            result.expect("there is space");
            buf = again;
        }
        pool.flush().await.expect("it succeeds");
        pool.checkpoint().await.expect("it succeeds");
    });
    let per_byte = |bytes: u64| bytes as f64 / (count * PAGE) as f64;
    let (data, metadata) = (counters.data.get(), counters.metadata.get());
    Cost { written: per_byte(data + metadata), data: per_byte(data) }
}

#[test]
fn a_small_volume_is_written_with_less_than_its_size_of_metadata() {
    let cost = cost(1, 64, 1 << 16);
    assert!(cost.data == 1.0 && cost.written <= 1.25, "{cost:?}");
}

#[test]
fn on_a_large_volume_a_write_costs_its_table_and_its_counts_and_little_more() {
    let cost = cost(64, 64 / 16, (1 << 18) / 16);
    assert!(cost.data == 1.0 && cost.written <= 3.3, "{cost:?}");
}

#[test]
fn with_memory_for_it_many_writes_share_a_table() {
    let cost = cost(64, 2048 / 16, (1 << 20) / 16);
    assert!(cost.data == 1.0 && cost.written <= 1.9, "{cost:?}");
}

const SIZE: u64 = 512 << 20;

/// Creates a full volume `0` of [`SIZE`] bytes.
async fn full_volume<D: Device>(pool: &Pool<D>) {
    pool.create("0", &CreateOptions::new(SIZE, 0)).await.expect("a new volume");
    let first = pool.volume("0").expect("just made");
    for at in (0..SIZE).step_by(BLOCK_SIZE as usize) {
        first.write(at, Buf::zeroed(BLOCK_SIZE as usize), false).await.0.expect("there is space");
    }
    pool.checkpoint().await.expect("it succeeds");
}

/// Returns the bytes of metadata that each of `rounds` wrote, beginning with a full volume of that number:
/// for pages of a clone in random order, for the checkpoint behind them separately, and for the deletion of
/// the clone's source.
async fn rounds_of_clones<D: Device>(pool: &Pool<D>, metadata: &Cell<u64>, rounds: Range<u64>) -> Vec<[u64; 3]> {
    let mut out = Vec::new();
    for round in rounds {
        let (old, new) = (round.to_string(), (round + 1).to_string());
        pool.clone_volume(&old, &new, 0).await.expect("a clone");
        pool.checkpoint().await.expect("it succeeds");
        let volume = pool.volume(&new).expect("just made");
        metadata.take();
        for i in 0..8000 {
            let at = scattered(round * 8000 + i, SIZE / PAGE) % (SIZE / PAGE) * PAGE;
            volume.write(at, Buf::zeroed(PAGE_SIZE), false).await.0.expect("there is space");
        }
        pool.flush().await.expect("it succeeds");
        let written = metadata.take();
        pool.checkpoint().await.expect("it succeeds");
        let synced = metadata.take();
        pool.delete(&[&old]).await.expect("it is deleted");
        pool.checkpoint().await.expect("it succeeds");
        pool.checkpoint().await.expect("it succeeds");
        out.push([written, synced, metadata.take()]);
    }
    out
}

/// Runs `test` on a pool with a [`full_volume`] on `device`, and checks the pool, also after reopening it.
fn on_full_pool<D: Device + Clone + 'static>(tasks: &Inline, device: D, test: impl AsyncFnOnce(&Pool<D>) + 'static) {
    let (runtime, size) = (Rc::new(tasks.clone()), device.len());
    tasks.run(async move {
        let format = FormatOptions::new(size, [7; 16], 0);
        Pool::format(&device, &format).await.expect("a new pool");
        let open = || Pool::open(device.clone(), runtime.clone(), OpenOptions::default());
        let pool = open().await.expect("it opens");
        full_volume(&pool).await;
        test(&pool).await;
        let report = pool.check().await.expect("a check");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
        pool.close().await.expect("it closes");
        let report = open().await.expect("it opens").check().await.expect("a check");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    });
}

/// Returns the number of `rounds` in which pages of counts were written beside the pages of the clone;
/// `usual` is the amount without.
fn emptied(rounds: &[[u64; 3]], usual: u64) -> usize {
    rounds.iter().filter(|round| round[0] > usual + 64 * PAGE).count()
}

#[test]
fn the_log_of_counts_is_emptied_beside_writes_and_not_when_somebody_waits() {
    let (tasks, metadata) = (Inline::default(), Rc::new(Cell::new(0)));
    let device = Scale { inner: MemoryDevice::new(2 << 30), data: Rc::default(), metadata: metadata.clone() };
    on_full_pool(&tasks, device, async move |pool| {
        let rounds = rounds_of_clones(pool, &metadata, 0..40).await;
        let most = |part: usize| rounds.iter().skip(1).map(|round| round[part]).max().unwrap();
        let first = rounds[0];
        assert!(most(1) as f64 <= first[1] as f64 * 1.05 && most(2) <= first[2] + 16 * PAGE, "{rounds:?}");
        assert!((5..20).contains(&emptied(&rounds, first[0])), "{rounds:?}");
    });
}

#[test]
fn if_a_count_page_cannot_be_written_the_log_is_emptied_later_and_no_write_waits() {
    let (tasks, metadata) = (Inline::default(), Rc::new(Cell::new(0)));
    let scale = Scale { inner: MemoryDevice::new(2 << 30), data: Rc::default(), metadata: metadata.clone() };
    let left = Rc::new(Cell::new(0));
    let to_refuse = left.clone();
    // Leaves lie behind the first eight pages of block 1.
    let leaves = BLOCK_SIZE + 8 * PAGE..2 * BLOCK_SIZE;
    let device = FailingDevice::new(scale, move |request| {
        let is_leaf = request.kind == RequestKind::WriteData && leaves.contains(&request.offset);
        let refused = is_leaf && to_refuse.get() > 0;
        to_refuse.set(to_refuse.get() - u32::from(refused));
        refused.then(|| io::ErrorKind::StorageFull.into())
    });
    on_full_pool(&tasks, device, async move |pool| {
        let before = rounds_of_clones(pool, &metadata, 0..4).await;
        left.set(2);
        let rounds = rounds_of_clones(pool, &metadata, 4..40).await;
        assert_eq!(left.get(), 0, "{rounds:?}");
        assert!((2..20).contains(&emptied(&rounds, before[0][0])), "{rounds:?}");
    });
    assert!(tasks.now().is_zero(), "somebody waited for room");
}

/// An import writes to a volume that has no name yet: its error said "writing  at 0".
#[test]
fn the_error_of_a_volume_without_a_name_says_so() {
    let (tasks, fails) = (Inline::default(), Rc::new(Cell::new(false)));
    let (memory, is_armed) = (MemoryDevice::new(64 << 20), fails.clone());
    let device = FailingDevice::new(memory, move |request| {
        (is_armed.get() && request.kind == RequestKind::WriteData).then(|| std::io::Error::other("planned"))
    });
    tasks.clone().run(async move {
        let format = FormatOptions::new(64 << 20, [7; 16], 0);
        Pool::format(&device, &format).await.expect("a new pool");
        let pool = Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default()).await.expect("it opens");
        let volume = pool.create_unnamed(&CreateOptions::new(1 << 20, 0)).expect("a volume");
        fails.set(true);
        let error = volume.write(0, Buf::zeroed(PAGE_SIZE), false).await.0.expect_err("the device fails");
        assert!(error.to_string().contains("writing a volume without a name at "), "{error}");
        let error = volume.read(1 << 20, Buf::zeroed(512)).await.0.expect_err("beyond the end");
        assert!(error.to_string().contains("past the end of a volume without a name"), "{error}");
    });
}
