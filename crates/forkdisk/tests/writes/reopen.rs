//! What opening a pool reads after the worst crash: no more than the journal and as much as may be dirty.
//! By counts, with little memory for changed metadata.

use std::cell::Cell;
use std::future::{Future, pending};
use std::rc::Rc;

use forkdisk::device::{Buf, IoResult, Segment, Segments};
use forkdisk::testing::MemoryDevice;
use forkdisk::{BLOCK_SIZE, CreateOptions, Device, ErrorKind, FormatOptions, OpenOptions, PAGE_SIZE, Pool};

use forkdisk::testing::Inline;

const PAGE: u64 = PAGE_SIZE as u64;
const DIRTY: usize = 8 << 20;
const SUPERBLOCKS: [u64; 2] = [0, 128 * PAGE];

/// A device that counts bytes read, and on which, once it is held, no superblock is ever written: a running
/// checkpoint does not end.
#[derive(Clone)]
struct Held {
    inner: MemoryDevice,
    held: Rc<Cell<bool>>,
    waits: Rc<Cell<bool>>,
    read: Rc<Cell<u64>>,
}

impl Device for Held {
    forkdisk::forward_device! { inner: len block_size flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.read.set(self.read.get() + segments.iter().map(|s| s.len as u64).sum::<u64>());
        self.inner.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let held = self.held.get() && segments.iter().any(|s| SUPERBLOCKS.contains(&s.offset));
        self.waits.set(self.waits.get() || held);
        let request = (!held).then(|| self.inner.write(buf, segments, fua));
        async move {
            match request {
                Some(request) => request.await,
                None => pending().await,
            }
        }
    }
}

/// The state after a crash, and the cost of reading it.
#[derive(Debug)]
struct Reopened {
    /// Bytes.
    read: u64,
    journal: u64,
    /// Writes before the changed metadata reached its limit.
    writes: u64,
}

/// Creates `tables` tables of level 0 on the device, of which each of the writes changes another; the last
/// `vouched` MiB of new data come at the end, in one commit.
fn reopened(tables: u64, vouched: u64) -> Reopened {
    let tasks = Inline::default();
    let size = (tables + vouched) * 5 / 4 * BLOCK_SIZE + (256 << 20);
    let inner = MemoryDevice::new(size);
    let device = Held { inner: inner.clone(), held: Rc::default(), waits: Rc::default(), read: Rc::default() };
    let seen = device.clone();
    let writes = Rc::new(Cell::new(0));
    let (made, runtime) = (writes.clone(), tasks.clone());
    tasks.run(async move {
        let format = FormatOptions::new(size, [7; 16], 0).with_journal(Some(8 << 20));
        Pool::format(&device, &format).await.expect("a new pool");
        let options = OpenOptions::default().with_dirty(DIRTY);
        let pool = Pool::open(device.clone(), Rc::new(runtime.clone()), options).await.expect("it opens");
        pool.create("v", &CreateOptions::new(tables * BLOCK_SIZE, 0)).await.expect("a new volume");
        pool.create("new", &CreateOptions::new(1 << 30, 0)).await.expect("a new volume");
        let (volume, new) = (pool.volume("v").expect("just made"), pool.volume("new").expect("just made"));
        for table in 0..tables {
            volume.write(table * BLOCK_SIZE, Buf::copy_of(&[1; PAGE_SIZE]), false).await.0.expect("there is space");
        }
        pool.checkpoint().await.expect("it succeeds");
        device.held.set(true);
        let writer = runtime.start({
            let (pool, made) = (pool.clone(), made.clone());
            async move {
                for table in 0..tables {
                    let at = table * BLOCK_SIZE + PAGE;
                    volume.write(at, Buf::copy_of(&[2; PAGE_SIZE]), false).await.0.expect("there is space");
                    pool.flush().await.expect("it succeeds");
                    made.set(table + 1);
                }
            }
        });
        // Until it is done, or waits for the checkpoint for good.
        let mut before = u64::MAX;
        while made.get() != before {
            before = made.get();
            runtime_sleep(&runtime).await;
        }
        drop(writer);
        for at in 0..vouched {
            // Where a write is not allowed it waits for good, too.
            let new = new.clone();
            let write = runtime.start(async move { new.write(at << 20, Buf::copy_of(&[3; 1 << 20]), false).await.0 });
            runtime_sleep(&runtime).await;
            drop(write);
        }
        let flush = runtime.start(async move { pool.flush().await });
        runtime_sleep(&runtime).await;
        drop(flush);
    });
    seen.held.set(false);
    seen.read.set(0);
    let tasks = Inline::default();
    let (device, runtime) = (seen.clone(), tasks.clone());
    let journal = tasks.run(async move {
        let options = OpenOptions::default().with_dirty(DIRTY);
        let pool = Pool::open(device, Rc::new(runtime), options).await.expect("it opens");
        pool.info().journal_size
    });
    Reopened { read: seen.read.get(), journal, writes: writes.get() }
}

/// Lets every task continue that can.
async fn runtime_sleep(tasks: &Inline) {
    use forkdisk::Runtime as _;
    tasks.sleep(std::time::Duration::from_secs(10)).await;
}

#[test]
fn with_a_damaged_log_of_counts_data_can_be_read_and_nothing_else() {
    let tasks = Inline::default();
    let device = MemoryDevice::new(64 << 20);
    let runtime = Rc::new(tasks.clone());
    tasks.run(async move {
        let format = FormatOptions::new(64 << 20, [7; 16], 0);
        Pool::format(&device, &format).await.expect("a new pool");
        let open =
            |read_only| Pool::open(device.clone(), runtime.clone(), OpenOptions::default().with_read_only(read_only));
        let pool = open(false).await.expect("it opens");
        pool.create("v", &CreateOptions::new(8 << 20, 0)).await.expect("a new volume");
        let volume = pool.volume("v").expect("just made");
        volume.write(1 << 20, Buf::copy_of(&[5; 1 << 20]), false).await.0.expect("there is space");
        pool.close().await.expect("it closes");
        // Its first page lies behind the superblock.
        let at = || [Segment { offset: PAGE, at: 0, len: PAGE_SIZE }].into_iter().collect();
        let (_, mut page) = device.read(Buf::zeroed(PAGE_SIZE), at()).await;
        assert!(page[0] > 0, "there is a log");
        page[9] ^= 4;
        device.write(page, at(), false).await.0.expect("it writes");
        let refused = open(false).await.map(drop).expect_err("it is not to be written to");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.to_string().contains("log of counts") && refused.to_string().contains("forkdisk repair"));
        let pool = open(true).await.expect("it opens for reading");
        let (result, buf) = pool.volume("v").expect("listed").read(1 << 20, Buf::zeroed(1 << 20)).await;
        assert!(result.is_ok() && buf.iter().all(|&byte| byte == 5));
        let report = pool.check().await.expect("it walks over all maps");
        assert!(report.damage.iter().any(|flaw| flaw.contains("log of counts")), "{:?}", report.damage);
    });
}

#[test]
fn replay_reads_no_more_tables_than_may_be_dirty() {
    let seen = reopened(6000, 0);
    assert!(seen.writes < 2048, "tables that replay reads count as pages, whatever they take in memory: {seen:?}");
    assert!(seen.read <= seen.journal + DIRTY as u64, "{seen:?}");
    assert!(seen.read >= seen.writes * PAGE, "it reads the tables: {seen:?}");
}

#[test]
fn data_that_is_vouched_for_is_part_of_what_recovery_reads() {
    let seen = reopened(0, 16);
    assert!(seen.read <= seen.journal + DIRTY as u64, "{seen:?}");
}
