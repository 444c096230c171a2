//! The cost of range clones, and that what they share stays isolated.

use std::future::Future;
use std::rc::Rc;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::{MemoryDevice, Recording, RecordingDevice, RequestKind, zeroes_are_data};
use forkdisk::{BLOCK_SIZE, CreateOptions, Device, DiffClass, FormatOptions, OpenOptions, PAGE_SIZE, Pool, Volume};

use crate::lab::Lab;
use forkdisk::testing::Inline;

const PAGE: u64 = PAGE_SIZE as u64;
const GIB: u64 = 1 << 30;
/// Bytes that one entry of a table of level 2 covers.
const TABLE: u64 = 256 << 20;

/// A device that drops everything that begins with a page of zeroes: clients write nothing else.
#[derive(Clone)]
struct Sparse(MemoryDevice);

impl Device for Sparse {
    forkdisk::forward_device! { 0: len block_size read flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let kept = segments.iter().copied().filter(|s| !zeroes_are_data(&buf[s.at..s.at + s.len])).collect();
        self.0.write(buf, kept, fua)
    }
}

type Watched = RecordingDevice<Sparse>;

struct Bench {
    device: Watched,
    pool: Pool<Watched>,
}

/// Runs `test` on a pool of `gib` GiB that is reopened, with nothing in memory, after `prepare`.
fn run<A, B>(gib: u64, prepare: impl FnOnce(Pool<Watched>) -> A + 'static, test: impl FnOnce(Bench) -> B + 'static)
where
    A: Future<Output = ()>,
    B: Future<Output = ()>,
{
    let (tasks, size) = (Inline::default(), gib * GIB);
    let device = RecordingDevice::new(Sparse(MemoryDevice::new(size)), zeroes_are_data);
    tasks.clone().run(async move {
        let format = FormatOptions::new(size, [7; 16], 0);
        Pool::format(&device, &format).await.expect("a new pool");
        let open = || Pool::open(device.clone(), Rc::new(tasks.clone()), OpenOptions::default());
        let pool = open().await.expect("it opens");
        prepare(pool.clone()).await;
        pool.close().await.expect("closed in order");
        let pool = open().await.expect("it opens again");
        device.take();
        test(Bench { device, pool: pool.clone() }).await;
        pool.wait_freed().await.expect("it settles");
        let report = pool.check().await.expect("it can be checked");
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    });
}

async fn volume(pool: &Pool<Watched>, name: &str, size: u64) -> Volume<Watched> {
    pool.create(name, &CreateOptions::new(size, 0)).await.expect("a new volume");
    pool.volume(name).expect("just made")
}

async fn write(volume: &Volume<Watched>, at: u64, len: u64) {
    volume.write(at, Buf::zeroed(len as usize), false).await.0.expect("there is space");
}

async fn fill(volume: &Volume<Watched>, from: u64, to: u64) {
    let mut buf = Buf::zeroed(BLOCK_SIZE as usize);
    for at in (from..to).step_by(BLOCK_SIZE as usize) {
        let (result, again) = volume.write(at, buf, false).await;
        result.expect("there is space");
        buf = again;
    }
}

/// Returns the pages of metadata read and written for a range clone, including a flush and a checkpoint.
async fn cost(bench: &Bench, work: impl AsyncFnOnce()) -> (u64, u64) {
    bench.pool.checkpoint().await.expect("it succeeds");
    bench.device.take();
    work().await;
    bench.pool.flush().await.expect("it succeeds");
    bench.pool.checkpoint().await.expect("it succeeds");
    let seen: Recording = bench.device.take();
    assert_eq!(seen.count(RequestKind::WriteData), 0, "nothing is copied");
    (seen.bytes(RequestKind::Read) / PAGE, seen.bytes(RequestKind::WriteMetadata) / PAGE)
}

/// Returns the bytes that "source" and "target" share.
async fn shared(pool: &Pool<Watched>) -> u64 {
    let runs = pool.diff("source", "target").await.expect("compared");
    runs.iter().filter(|run| run.class == DiffClass::Same).map(|run| run.len).sum()
}

#[test]
fn a_range_of_64_gib_is_one_entry() {
    let prepare = |pool: Pool<Watched>| async move {
        let source = volume(&pool, "source", 256 * GIB).await;
        fill(&source, 64 * GIB, 128 * GIB).await;
        // Scattered pages, too: a table of level 0 for each.
        for i in 0..512 {
            write(&source, 64 * GIB + i * 128 * BLOCK_SIZE + 5 * PAGE, PAGE).await;
        }
        pool.snapshot(&[("source", "s")], 0).await.expect("a snapshot");
        for i in 0..512 {
            write(&source, 64 * GIB + i * 128 * BLOCK_SIZE + 9 * PAGE, PAGE).await;
        }
        pool.create("target", &CreateOptions::new(256 * GIB, 0)).await.expect("a new volume");
    };
    run(80, prepare, |bench| async move {
        let (source, target) =
            (bench.pool.volume("source").expect("there"), bench.pool.volume("target").expect("there"));
        let (read, written) = cost(&bench, async || {
            target.clone_range(&source, 64 * GIB, 192 * GIB, 64 * GIB).await.expect("shared");
        })
        .await;
        // Cold: the tables down to the source's entry and below it, to count what it maps; the counts that change.
        assert!(read <= 8 && written <= 16, "{read} read, {written} written");
        assert_eq!(bench.pool.find("target").expect("there").referenced, 64 * GIB);
        let (read, written) = cost(&bench, async || {
            target.clone_range(&source, 64 * GIB, 0, 64 * GIB).await.expect("shared");
        })
        .await;
        assert!(read == 0 && written <= 12, "{read} read, {written} written");
        assert_eq!(bench.pool.find("target").expect("there").referenced, 128 * GIB);
    });
}

#[test]
fn edges_that_do_not_cover_a_table_descend() {
    let prepare = |pool: Pool<Watched>| async move {
        let source = volume(&pool, "source", 2 * GIB).await;
        fill(&source, 0, 2 * GIB).await;
        pool.create("target", &CreateOptions::new(2 * GIB, 0)).await.expect("a new volume");
    };
    run(3, prepare, |bench| async move {
        let (source, target) =
            (bench.pool.volume("source").expect("there"), bench.pool.volume("target").expect("there"));
        // A page, blocks, six tables, blocks and a page.
        let (from, to) = (TABLE - 2 * BLOCK_SIZE - PAGE, 7 * TABLE + 3 * BLOCK_SIZE + PAGE);
        target.clone_range(&source, from, from, to - from).await.expect("shared");
        assert_eq!(bench.pool.find("target").expect("there").referenced, to - from);
        assert_eq!(shared(&bench.pool).await, to - from);
        // A table in the middle is written on both sides: each gets its own copy.
        write(&target, 3 * TABLE, PAGE).await;
        write(&source, 4 * TABLE, PAGE).await;
        assert_eq!(bench.pool.find("target").expect("there").referenced, to - from);
        assert_eq!(shared(&bench.pool).await, to - from - 2 * PAGE);
    });
}

#[test]
fn what_a_table_takes_the_place_of_is_given_back() {
    let prepare = |pool: Pool<Watched>| async move {
        for name in ["source", "target"] {
            let one = volume(&pool, name, GIB).await;
            fill(&one, 0, GIB).await;
        }
    };
    run(3, prepare, |bench| async move {
        let (source, target) =
            (bench.pool.volume("source").expect("there"), bench.pool.volume("target").expect("there"));
        let before = bench.pool.info().unused;
        target.clone_range(&source, 0, 0, GIB).await.expect("shared");
        bench.pool.wait_freed().await.expect("it settles");
        let more = bench.pool.info().unused - before;
        assert!((GIB..GIB + 64 * PAGE).contains(&more), "{more} bytes came back");
        // Repeating it changes nothing, and a hole is shared like anything else.
        target.clone_range(&source, 0, 0, GIB).await.expect("shared");
        source.discard(0, 2 * TABLE).await.expect("a hole");
        target.clone_range(&source, 0, 2 * TABLE, 2 * TABLE).await.expect("shared");
        assert_eq!(bench.pool.find("target").expect("there").referenced, 2 * TABLE);
    });
}

#[test]
fn a_lower_volume_becomes_one_entry_of_a_higher_one() {
    let prepare = |pool: Pool<Watched>| async move {
        let source = volume(&pool, "source", TABLE).await;
        fill(&source, 0, TABLE).await;
        pool.create("target", &CreateOptions::new(200 * GIB, 0)).await.expect("a new volume");
    };
    run(1, prepare, |bench| async move {
        let (source, target) =
            (bench.pool.volume("source").expect("there"), bench.pool.volume("target").expect("there"));
        let (_, written) = cost(&bench, async || {
            target.clone_range(&source, 0, 101 * TABLE, TABLE).await.expect("shared");
        })
        .await;
        assert!(written <= 16, "{written}");
        assert_eq!(bench.pool.find("target").expect("there").referenced, TABLE);
    });
}

#[test]
fn a_volume_that_was_removed_while_open_keeps_its_writes_to_itself() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (source, copy) = (lab.volume("source", 16).await, lab.volume("copy", 16).await);
        lab.write(&source, 0, 16, 100).await.expect("written");
        lab.pool.remove_file("source").expect("removed while it is open");
        copy.clone_range(&source, 0, 0, 16 * PAGE).await.expect("shared");
        let whole = lab.volume("whole", 1).await;
        whole.replace_with(&source).await.expect("shared");
        lab.write(&source, 0, 16, 200).await.expect("written");
        for shared in [&copy, &whole] {
            assert_eq!(lab.stamps(shared, 0, 2).await, [Some(100), Some(101)]);
        }
        assert_eq!(lab.stamps(&source, 0, 2).await, [Some(200), Some(201)]);
        // And as the target, which continues to share what it got.
        lab.pool.remove_file("copy").expect("removed while it is open");
        lab.write(&copy, 0, 4, 300).await.expect("written");
        whole.clone_range(&copy, 0, 0, 4 * PAGE).await.expect("shared");
        lab.write(&copy, 0, 4, 400).await.expect("written");
        assert_eq!(lab.stamps(&whole, 0, 2).await, [Some(300), Some(301)]);
        assert_eq!(lab.stamps(&copy, 3, 2).await, [Some(403), Some(104)]);
    });
}

/// The other owner of the pages lost them to another range clone, which is not durable yet: whatever happens
/// to the tables above them meanwhile, the old bytes stay.
#[test]
fn pages_that_a_crash_would_share_again_are_not_written_in_place() {
    Lab::run(64, OpenOptions::default(), |lab| async move {
        let (source, copy, empty) =
            (lab.volume("source", 16).await, lab.volume("copy", 16).await, lab.volume("empty", 16).await);
        lab.write(&source, 0, 16, 100).await.expect("written");
        let old = lab.tape.take().0.iter().find(|page| page.stamp == 105).expect("on the device").at;
        copy.clone_range(&source, 0, 0, BLOCK_SIZE).await.expect("shared");
        lab.pool.checkpoint().await.expect("it succeeds");
        copy.clone_range(&empty, 0, 0, BLOCK_SIZE).await.expect("holes");
        // Takes a copy of the table.
        lab.write(&source, 1, 1, 300).await.expect("written");
        lab.tape.take();
        lab.write(&source, 5, 1, 400).await.expect("written");
        let new = lab.tape.take().0[0].at;
        assert_ne!(new, old, "the copy still has it after a crash now");
        lab.pool.flush().await.expect("it succeeds");
        lab.write(&source, 6, 1, 500).await.expect("written");
        assert_eq!(lab.stamps(&source, 5, 2).await, [Some(400), Some(500)]);
    });
}
