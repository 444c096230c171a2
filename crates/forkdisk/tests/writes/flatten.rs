//! Flattening: a clone of an origin's snapshot reads the same before, during and after it, and then depends
//! on nothing.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::MemoryDevice;
use forkdisk::{
    Device, ErrorKind, FormatOptions, OpenOptions, OriginFull, OriginPlace, PAGE_SIZE, Pool, ProtectOptions, Runtime,
    SnapshotFlags,
};

use crate::lab::{Tape, stamp};
use forkdisk::testing::Inline;

const PAGE: u64 = PAGE_SIZE as u64;
const MIB: u64 = 1 << 20;
/// Its last page is not whole.
const SIZE: u64 = 4 * MIB + 512;

/// Offset and data.
type Writes = Vec<(u64, Vec<u8>)>;

/// A device that records every write, from the request to record on.
#[derive(Clone)]
struct Noted {
    inner: Tape,
    writes: Rc<RefCell<Writes>>,
}

impl Noted {
    fn new(len: u64, tasks: &Inline) -> Noted {
        Noted { inner: Tape::new(len, tasks), writes: Rc::default() }
    }
}

impl Device for Noted {
    forkdisk::forward_device! { inner: len block_size read flush discard set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        for s in &segments {
            self.writes.borrow_mut().push((s.offset, buf[s.at..s.at + s.len].to_vec()));
        }
        self.inner.write(buf, segments, fua)
    }
}

/// A pool that protects an origin as `disk`, with the snapshot `disk@a` and its clone `c`.
#[derive(Clone)]
struct Lab {
    tasks: Inline,
    pool: Pool<Noted>,
    disks: [Noted; 2],
}

async fn contents<D: Device>(pool: &Pool<D>, name: &str) -> Vec<u8> {
    let volume = pool.volume(name).expect("it is there");
    let (result, buf) = volume.read(0, Buf::zeroed(volume.size() as usize)).await;
    result.expect("a read");
    buf.to_vec()
}

async fn assert_clean<D: Device>(pool: &Pool<D>) {
    let report = pool.check().await.expect("it can be checked");
    assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
}

/// Continues to the end.
fn on(_: u64, _: u64) -> bool {
    true
}

impl Lab {
    /// Runs `test` on a pool of `mib` MiB; the origin holds stamps except in its second MiB, the first half
    /// of which is copied out for the snapshot, which is taken with `flags`.
    fn run<F: Future<Output = ()>>(mib: u64, flags: SnapshotFlags, test: impl FnOnce(Lab) -> F + 'static) {
        let tasks = Inline::default();
        let disks = [mib << 20, SIZE].map(|len| Noted::new(len, &tasks));
        tasks.clone().run(async move {
            let format = FormatOptions::new(mib << 20, [7; 16], 0);
            Pool::format(&disks[0], &format).await.expect("a new pool");
            let pool = Pool::open(disks[0].clone(), Rc::new(tasks.clone()), OpenOptions::default()).await;
            let lab = Lab { tasks, pool: pool.expect("it opens"), disks: disks.clone() };
            let mut first = stamp(1, 1025);
            first[MIB as usize..2 * MIB as usize].fill(0);
            first.set_len(SIZE as usize);
            let whole: Segments =
                [forkdisk::device::Segment { offset: 0, at: 0, len: SIZE as usize }].into_iter().collect();
            disks[1].write(first, whole, false).await.0.expect("memory");
            let (place, when_full) = (OriginPlace::at("/dev/x", 0), OriginFull::Error);
            let protect =
                ProtectOptions::new(place, 1).with_chunk(64 << 10).with_copy_ahead(0).with_when_full(when_full);
            lab.pool.protect("disk", disks[1].clone(), &protect).await.expect("it can be protected");
            lab.pool.snapshot_with(&[("disk", "a")], flags, 1).await.expect("a snapshot");
            lab.write("disk", 512 << 10, stamp(5000, 256)).await;
            if flags.writable {
                lab.write("disk@a", 3 * MIB, stamp(7000, 3)).await;
            }
            lab.pool.clone_volume("disk@a", "c", 1).await.expect("a clone");
            lab.write("disk", 2 * MIB, stamp(6000, 64)).await;
            test(lab).await;
        });
    }

    async fn write(&self, name: &str, offset: u64, buf: Buf) {
        self.pool.volume(name).expect("it is there").write(offset, buf, false).await.0.expect("there is space");
    }

    async fn read(&self, name: &str) -> Vec<u8> {
        contents(&self.pool, name).await
    }
}

const PLAIN: SnapshotFlags = SnapshotFlags::NONE;

#[test]
fn a_flattened_clone_reads_the_same_and_holds_nothing() {
    Lab::run(64, PLAIN, |lab| async move {
        lab.write("c", 100, Buf::copy_of(&[9; 5000])).await;
        let before = lab.read("c").await;
        assert_eq!(lab.pool.delete(&["disk@a"]).await.unwrap_err().kind(), ErrorKind::Busy);
        let mut told = Vec::new();
        let report = lab.pool.flatten("c", |done, of| {
            told.push((done, of));
            true
        });
        let report = report.await.expect("there is room");
        assert!(report.independent && report.copied > 2 * MIB && report.copied < 3 * MIB + PAGE, "{report:?}");
        assert!(told.is_sorted() && told.last() == Some(&(SIZE, SIZE)), "{told:?}");
        assert!(lab.read("c").await == before);
        let again = lab.pool.flatten("c", on).await.unwrap_err();
        assert!(again.to_string().contains("depends on no origin"), "{again}");

        lab.pool.delete(&["disk@a"]).await.expect("nobody holds it");
        lab.write("disk", 0, stamp(9000, 1024)).await;
        lab.pool.unprotect("disk", false).await.expect("nothing of it is left");
        lab.pool.wait_freed().await.expect("it can be waited for");
        assert!(lab.read("c").await == before);
        assert_clean(&lab.pool).await;
        lab.pool.close().await.expect("it closes");
        let pool = Pool::open(lab.disks[0].clone(), Rc::new(lab.tasks.clone()), OpenOptions::default()).await.unwrap();
        assert!(contents(&pool, "c").await == before);
        assert_clean(&pool).await;
    });
}

#[test]
fn pages_of_zeroes_stay_holes_and_holes_are_made_only_afterwards() {
    Lab::run(64, PLAIN, |lab| async move {
        let c = lab.pool.volume("c").expect("it is there");
        c.discard(0, MIB).await.expect("it does nothing");
        let before = lab.read("c").await;
        assert!(c.has_backing() && before[0] != 0);
        lab.pool.flatten("c", on).await.expect("there is room");
        assert!(!c.has_backing());
        let extents = c.extents(0, SIZE).await.expect("in memory");
        let data: Vec<(u64, bool)> = extents.iter().map(|e| (e.len, e.data)).collect();
        assert_eq!(data, [(MIB, true), (MIB, false), (2 * MIB + 512, true)]);
        c.discard(0, 2 * MIB).await.expect("it makes holes");
        let after = lab.read("c").await;
        assert!(
            after[..2 * MIB as usize].iter().all(|&b| b == 0)
                && after[2 * MIB as usize..] == before[2 * MIB as usize..]
        );
        c.set_size(MIB).await.expect("it can be made smaller");
    });
}

#[test]
fn what_was_copied_before_it_was_stopped_is_not_copied_again() {
    Lab::run(64, PLAIN, |lab| async move {
        let before = lab.read("c").await;
        let part = lab.pool.flatten("c", |done, _| done < 3 * MIB).await.expect("there is room");
        assert_eq!((part.independent, part.copied), (false, 2 * MIB));
        assert_eq!(lab.pool.delete(&["disk@a"]).await.unwrap_err().kind(), ErrorKind::Busy);
        assert!(lab.read("c").await == before);
        let rest = lab.pool.flatten("c", on).await.expect("there is room");
        assert_eq!((rest.independent, rest.copied), (true, MIB + 512));
        assert!(lab.read("c").await == before);
    });
}

#[test]
fn a_clone_of_a_writable_snapshot_keeps_what_was_written_there() {
    let flags = PLAIN.with_writable(true);
    Lab::run(64, flags, |lab| async move {
        let before = lab.read("c").await;
        lab.write("disk@a", 0, stamp(8000, 1000)).await;
        lab.pool.flatten("c", on).await.expect("there is room");
        lab.pool.delete(&["disk@a"]).await.expect("nobody holds it");
        lab.pool.wait_freed().await.expect("it can be waited for");
        assert!(lab.read("c").await == before);
        assert_clean(&lab.pool).await;
    });
}

#[test]
fn only_a_clone_of_an_origins_snapshot_is_flattened() {
    Lab::run(64, PLAIN, |lab| async move {
        lab.pool.create("plain", &forkdisk::CreateOptions::new(MIB, 1)).await.expect("a volume");
        lab.pool.snapshot(&[("c", "s")], 1).await.expect("a snapshot");
        for (name, why) in [
            ("plain", "depends on no origin"),
            ("disk", "is an origin"),
            ("disk@a", "is a snapshot"),
            ("c@s", "is a snapshot"),
            ("none", "there is no"),
        ] {
            let refused = lab.pool.flatten(name, on).await.unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    });
}

#[test]
fn snapshots_and_clones_of_the_clone_rest_where_they_did() {
    Lab::run(64, PLAIN, |lab| async move {
        lab.write("c", MIB, stamp(300, 5)).await;
        let before = lab.read("c").await;
        lab.pool.snapshot(&[("c", "s")], 1).await.expect("a snapshot");
        lab.pool.clone_volume("c", "d", 1).await.expect("a clone");
        lab.write("c", MIB + PAGE, stamp(400, 9)).await;
        let now = lab.read("c").await;
        lab.pool.flatten("c", on).await.expect("there is room");
        let held = lab.pool.delete(&["disk@a"]).await.unwrap_err().to_string();
        assert!(held.contains("c@s") || held.contains("\"d\""), "{held}");
        assert!(lab.read("c").await == now && lab.read("c@s").await == before && lab.read("d").await == before);

        // A new hole does not show the snapshot's data.
        let c = lab.pool.volume("c").expect("it is there");
        c.discard(3 * MIB, MIB).await.expect("it makes holes");
        let runs = lab.pool.diff("c@s", "c").await.expect("it can be compared");
        assert!(runs.iter().any(|run| run.offset <= 3 * MIB && run.class == forkdisk::DiffClass::LeftOnly), "{runs:?}");
        drop(c);
        // After a rollback the backing is visible again.
        lab.pool.rollback("c", "s").await.expect("it is not in use");
        assert!(lab.read("c").await == before);
        lab.pool.delete(&["c@s", "d"]).await.expect("not in use");
        assert_eq!(lab.pool.delete(&["disk@a"]).await.unwrap_err().kind(), ErrorKind::Busy);
        lab.pool.flatten("c", on).await.expect("there is room");
        lab.pool.delete(&["disk@a"]).await.expect("nobody holds it");
        lab.pool.wait_freed().await.expect("it can be waited for");
        assert!(lab.read("c").await == before);
        assert_clean(&lab.pool).await;
    });
}

#[test]
fn without_space_the_clone_is_as_before() {
    Lab::run(16, PLAIN, |lab| async move {
        let before = lab.read("c").await;
        lab.pool.set_quota("c", MIB).await.expect("it can be set");
        let over = lab.pool.flatten("c", on).await.unwrap_err();
        assert!(over.kind() == ErrorKind::NoSpace && over.to_string().contains("quota"), "{over}");
        assert!(lab.read("c").await == before);
        lab.pool.set_quota("c", 0).await.expect("it can be set");

        lab.pool.create("fill", &forkdisk::CreateOptions::new(16 * MIB, 1)).await.expect("a volume");
        let fill = lab.pool.volume("fill").expect("it is there");
        let mut at = 0;
        while fill.write(at, Buf::copy_of(&[1; 64 << 10]), false).await.0.is_ok() {
            at += 64 << 10;
        }
        let full = lab.pool.flatten("c", on).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert!(lab.read("c").await == before);
        assert_eq!(lab.pool.delete(&["disk@a"]).await.unwrap_err().kind(), ErrorKind::Busy);
        drop(fill);
        lab.pool.delete(&["fill"]).await.expect("not in use");
        lab.pool.wait_freed().await.expect("it can be waited for");
        assert!(lab.pool.flatten("c", on).await.expect("there is room").independent);
        assert!(lab.read("c").await == before);
        assert_clean(&lab.pool).await;
    });
}

/// Sectors of 512 bytes of a page, each with a separate writer.
const WRITERS: u64 = 4;

/// Writes its own sector of pages near the copying, and checks that it never changes otherwise; returns the
/// last values, by page.
async fn keep_writing(lab: Lab, writer: u64, mut draw: u64, at: Rc<Cell<u64>>, before: Rc<Vec<u8>>) -> Vec<Option<u8>> {
    let c = lab.pool.volume("c").expect("it is there");
    let mut last = vec![None; 1024];
    // Some rounds behind the end, too.
    let mut left = 40;
    while left > 0 {
        left -= u64::from(at.get() >= SIZE);
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        lab.tasks.sleep(Duration::from_micros(draw >> 33 & 511)).await;
        // Here, or where the copying will be when the write is running.
        let page = (at.get() / PAGE + [0, 1, 255, 256, 257, 512][(draw >> 50) as usize % 6]).min(1023);
        let (byte, offset) = ((draw >> 56) as u8, page * PAGE + writer * 512);
        if draw >> 40 & 1 == 0 {
            let (result, found) = c.read(offset, Buf::zeroed(512)).await;
            result.expect("a read");
            let expected = last[page as usize].map_or(before[offset as usize..][..512].to_vec(), |b| vec![b; 512]);
            assert!(found[..] == expected, "writer {writer} finds another one's sector in page {page}");
        }
        c.write(offset, Buf::copy_of(&[byte; 512]), false).await.0.expect("there is space");
        last[page as usize] = Some(byte);
    }
    last
}

/// Reads what is never written, near the copying.
async fn keep_reading(lab: Lab, at: Rc<Cell<u64>>, before: Rc<Vec<u8>>) {
    let c = lab.pool.volume("c").expect("it is there");
    let mut round = 0;
    while at.get() < SIZE {
        round += 1;
        let page = (at.get() / PAGE + round * 31 % 256).min(1023);
        let (result, buf) = c.read(page * PAGE, Buf::zeroed(PAGE_SIZE)).await;
        result.expect("a read");
        let (rest, at) = ((WRITERS * 512) as usize, (page * PAGE) as usize);
        assert!(buf[rest..] == before[at + rest..at + PAGE_SIZE], "page {page}");
    }
}

#[test]
fn writes_meanwhile_are_not_lost_and_readers_see_no_difference() {
    for seed in 0..24 {
        Lab::run(64, PLAIN, move |lab| async move {
            let (before, at) = (Rc::new(lab.read("c").await), Rc::new(Cell::new(0)));
            let start = |writer| {
                let work = keep_writing(lab.clone(), writer, seed * WRITERS + writer, at.clone(), before.clone());
                lab.tasks.start(work)
            };
            let writers: Vec<_> = (0..WRITERS).map(start).collect();
            let reader = lab.tasks.start(keep_reading(lab.clone(), at.clone(), before.clone()));
            let report = lab.pool.flatten("c", |done, _| {
                at.set(done);
                true
            });
            assert!(report.await.expect("there is room").independent);
            reader.await;
            lab.pool.delete(&["disk@a"]).await.expect("nobody holds it");
            let mut expected = before.to_vec();
            for (writer, client) in writers.into_iter().enumerate() {
                for (page, byte) in client.await.into_iter().enumerate() {
                    let at = page * PAGE_SIZE + writer * 512;
                    byte.into_iter().for_each(|byte| expected[at..at + 512].fill(byte));
                }
            }
            assert!(lab.read("c").await == expected);
            assert_clean(&lab.pool).await;
        });
    }
}

/// Returns the contents of `device`.
async fn image(device: &impl Device) -> Vec<u8> {
    let len = device.len() as usize;
    let whole: Segments = [forkdisk::device::Segment { offset: 0, at: 0, len }].into_iter().collect();
    device.read(Buf::zeroed(len), whole).await.1.to_vec()
}

/// Returns a device that holds `bytes`.
async fn device_of(bytes: &[u8]) -> MemoryDevice {
    let device = MemoryDevice::new(bytes.len() as u64);
    let whole: Segments = [forkdisk::device::Segment { offset: 0, at: 0, len: bytes.len() }].into_iter().collect();
    device.write(Buf::copy_of(bytes), whole, false).await.0.expect("memory");
    device
}

#[test]
fn after_a_crash_at_any_moment_the_clone_reads_the_same() {
    Lab::run(16, PLAIN, |lab| async move {
        lab.write("c", 0, stamp(77, 20)).await;
        let before = lab.read("c").await;
        let c = lab.pool.volume("c").expect("it is there");
        c.flush().await.expect("it is durable");
        drop(c);
        let mut now = image(&lab.disks[0]).await;
        let origin = image(&lab.disks[1]).await;
        lab.disks[0].writes.borrow_mut().clear();
        // Each call commits what it copied.
        let mut until = 0;
        while !lab.pool.flatten("c", |done, _| done < until).await.expect("there is room").independent {
            until += MIB / 2;
        }
        lab.pool.delete(&["disk@a"]).await.expect("nobody holds it");
        let writes = lab.disks[0].writes.take();
        assert!(writes.len() > 8, "{}", writes.len());
        let mut seen = [false; 2];
        for (offset, bytes) in writes {
            now[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
            let (disk, other) = (device_of(&now).await, device_of(&origin).await);
            let pool = Pool::open(disk, Rc::new(lab.tasks.clone()), OpenOptions::default()).await.expect("it recovers");
            let holds = pool.find("disk@a").is_ok() && pool.delete(&["disk@a"]).await.is_err();
            if holds {
                pool.attach_origin("disk", other, &OriginPlace::at("/dev/x", 0)).await.expect("it is the same");
            }
            seen[usize::from(holds)] = true;
            assert!(contents(&pool, "c").await == before);
            pool.wait_freed().await.expect("it can be waited for");
            assert_clean(&pool).await;
            assert!(contents(&pool, "c").await == before);
            if holds {
                assert!(pool.flatten("c", on).await.expect("there is room").independent);
                assert!(contents(&pool, "c").await == before);
            }
        }
        assert_eq!(seen, [true, true]);
    });
}

/// The error names the origin, which is looked up where the volume is opened.
#[test]
fn a_volume_whose_origin_is_not_open_is_refused() {
    Lab::run(64, PLAIN, |lab| async move {
        lab.pool.detach_origin("disk", || 0).await.expect("it is not in use");
        for name in ["disk", "disk@a", "c"] {
            let Err(error) = lab.pool.volume(name) else { panic!("{name} was opened") };
            assert!(error.to_string().contains("the device of \"disk\" is not open"), "{error}");
        }
    });
}
