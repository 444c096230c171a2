//! Removed files, origins and mounts on a full pool: what cannot be done is refused or done later, and nothing that was
//! there is lost or closed.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::{Inline, MemoryDevice};
use forkdisk::{
    Attributes, CreateOptions, Device, FormatOptions, OpenOptions, OriginPlace, Pool, ProtectOptions, Runtime, Volume,
    WhenFull,
};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
const NO_SPACE_ON_DEVICE: i32 = 28;

/// A device on a host file system that can be full until the pool discards something.
#[derive(Clone)]
struct Hosted {
    inner: MemoryDevice,
    is_full: Rc<Cell<bool>>,
    tasks: Inline,
    delay: Duration,
}

impl Hosted {
    fn new(bytes: u64, tasks: &Inline) -> Hosted {
        let (inner, is_full) = (MemoryDevice::new(bytes), Rc::default());
        Hosted { inner, is_full, tasks: tasks.clone(), delay: Duration::from_micros(100) }
    }
}

impl Device for Hosted {
    forkdisk::forward_device! { inner: len block_size flush set_len }
    forkdisk::plain_device! { buffer cork stripe allocate can_clone clone_range zero_range }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = std::io::Result<()>> + 'static {
        self.is_full.set(false);
        self.inner.discard(offset, len)
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        let (pause, read) = (self.tasks.sleep(self.delay), self.inner.read(buf, segments));
        async move {
            pause.await;
            read.await
        }
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        // The journal is allocated.
        let is_refused = self.is_full.get() && !(2 * MIB..3 * MIB).contains(&segments[0].offset);
        let (inner, pause) = (self.inner.clone(), self.tasks.sleep(self.delay));
        async move {
            pause.await;
            match is_refused {
                true => (Err(std::io::Error::from_raw_os_error(NO_SPACE_ON_DEVICE)), buf),
                false => inner.write(buf, segments, fua).await,
            }
        }
    }
}

fn fill(tasks: &Inline, volume: &Volume<Hosted>) {
    let (mut at, mut len) = (0, MIB as usize);
    loop {
        match tasks.run(volume.write(at, Buf::zeroed(len), false)).0 {
            Ok(()) => at += len as u64,
            Err(_) if len > PAGE => len /= 2,
            Err(_) => return,
        }
    }
}

/// A pool with a free slot in each of 1,000 pages of its directory, and the names of a volume in each of them.
fn scattered(tasks: &Inline, options: OpenOptions) -> (Pool<Hosted>, Hosted, Vec<String>) {
    let mut device = Hosted::new(64 * MIB, tasks);
    device.delay = Duration::from_millis(50);
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [5; 16], 1).with_journal(MIB))).unwrap();
    let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), options)).unwrap();
    let names: Vec<String> = (0..8000).map(|i| format!("v{i}")).collect();
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    tasks.run(pool.create_all(&all, &CreateOptions::new(MIB, 1))).unwrap();
    let every_eighth: Vec<&str> = all.iter().step_by(8).copied().collect();
    tasks.run(pool.delete(&every_eighth)).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    let left = names.iter().skip(1).step_by(8).cloned().collect();
    (pool, device, left)
}

fn fill_pool(tasks: &Inline, pool: &Pool<Hosted>) {
    for i in 0..8 {
        let name = format!("data{i}");
        // The last of them may not even be created.
        let _ = tasks.run(pool.create(&name, &CreateOptions::new(64 * MIB, 1)));
        if let Ok(volume) = pool.volume(&name) {
            fill(tasks, &volume);
        }
        tasks.run(pool.checkpoint()).unwrap();
    }
}

fn reopen(tasks: &Inline, device: Hosted) -> Pool<Hosted> {
    tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).unwrap()
}

/// A removed volume from which 900 others were cloned: its deletion changes the records of all of them.
fn removed_base(is_killed: bool) {
    let tasks = Inline::default();
    let (pool, device, _) = scattered(&tasks, OpenOptions::default());
    tasks.run(pool.create("base", &CreateOptions::new(MIB, 1))).unwrap();
    let base = pool.volume("base").unwrap();
    tasks.run(base.write(0, Buf::zeroed(MIB as usize), false)).0.unwrap();
    let clones: Vec<String> = (0..900).map(|i| format!("c{i}")).collect();
    let clones: Vec<&str> = clones.iter().map(String::as_str).collect();
    tasks.run(pool.clone_all("base", &clones, 1)).unwrap();
    fill_pool(&tasks, &pool);
    // Refused or not, the pool goes on.
    let _ = pool.remove_file("base");
    tasks.run(pool.flush()).unwrap();
    if is_killed {
        std::mem::forget((base, pool));
    } else {
        drop(base);
        tasks.run(pool.checkpoint()).unwrap();
        tasks.run(pool.close()).unwrap();
    }
    reopen(&tasks, device);
}

#[test]
fn a_removed_volume_with_many_clones_does_not_keep_a_full_pool_from_being_opened() {
    removed_base(false);
    removed_base(true);
}

#[test]
fn removed_files_that_were_open_do_not_keep_a_full_pool_from_being_opened() {
    let tasks = Inline::default();
    let (pool, device, names) = scattered(&tasks, OpenOptions::default());
    fill_pool(&tasks, &pool);
    let mut open = Vec::new();
    for name in &names[..30] {
        open.push(pool.volume(name).unwrap());
        tasks.run(pool.prepare_verb());
        pool.remove_file(name).unwrap();
    }
    tasks.run(pool.flush()).unwrap();
    tasks.run(pool.checkpoint()).unwrap();
    std::mem::forget((open, pool));
    reopen(&tasks, device);
}

#[test]
fn the_space_of_a_removed_file_is_freed_after_its_last_close_on_a_full_pool() {
    let tasks = Inline::default();
    let (pool, ..) = scattered(&tasks, OpenOptions::default());
    tasks.run(pool.create("base", &CreateOptions::new(MIB, 1))).unwrap();
    let base = pool.volume("base").unwrap();
    let id = base.id();
    let clones: Vec<String> = (0..40).map(|i| format!("c{i}")).collect();
    let clones: Vec<&str> = clones.iter().map(String::as_str).collect();
    tasks.run(pool.clone_all("base", &clones, 1)).unwrap();
    tasks.run(base.write(0, Buf::zeroed(MIB as usize), false)).0.unwrap();
    fill_pool(&tasks, &pool);
    pool.remove_file("base").unwrap();
    tasks.run(pool.flush()).unwrap();
    tasks.run(pool.checkpoint()).unwrap();
    drop(base);
    tasks.run(pool.delete(&["data0"])).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    tasks.run(pool.checkpoint()).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    assert!(pool.volume_by_id(id).is_err(), "it is deleted");
}

#[test]
fn a_name_is_not_changed_after_a_wait_for_a_full_host_without_end() {
    let tasks = Inline::default();
    let options = OpenOptions::default().with_when_full(WhenFull::Wait(Duration::from_secs(1)));
    let (pool, device, names) = scattered(&tasks, options);
    fill_pool(&tasks, &pool);
    device.is_full.set(true);
    let pool = Rc::new(pool);
    let attributes = Attributes { mode: 0o600, ..Attributes::of_no_owner(1) };
    for name in names.iter().take(100) {
        let is_done = Rc::new(Cell::new(false));
        let (prepared, done) = (pool.clone(), is_done.clone());
        let _task = tasks.start(async move {
            prepared.prepare_verb().await;
            done.set(true);
        });
        for _ in 0..2000 {
            tasks.run_until_idle();
            if is_done.get() {
                break;
            }
            tasks.advance();
        }
        assert!(is_done.get(), "it waits at {:?}", tasks.now());
        // Refused or not.
        let _ = pool.set_attributes(pool.volume(name).unwrap().id(), attributes);
    }
}

fn protect_at_once(tasks: &Inline, pool: &Rc<Pool<Hosted>>, count: usize) {
    let protects: Vec<_> = (0..count)
        .map(|i| {
            let (pool, device) = (pool.clone(), Hosted::new(MIB, tasks));
            tasks.start(async move {
                let options = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1);
                pool.protect(&format!("o{i}"), device, &options).await.map(drop)
            })
        })
        .collect();
    for protect in protects {
        // Refused or not.
        let _ = tasks.run(protect);
    }
}

#[test]
fn origins_that_are_protected_at_once_on_a_full_pool_stay_open() {
    let tasks = Inline::default();
    let (pool, ..) = scattered(&tasks, OpenOptions::default());
    fill_pool(&tasks, &pool);
    let pool = Rc::new(pool);
    protect_at_once(&tasks, &pool, 40);
    assert!(pool.origins().iter().all(|origin| origin.open));
}

#[test]
fn an_origin_whose_unprotect_is_refused_stays_open() {
    let tasks = Inline::default();
    let (pool, ..) = scattered(&tasks, OpenOptions::default());
    let options = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1);
    tasks.run(pool.protect("o", Hosted::new(MIB, &tasks), &options)).unwrap();
    let names: Vec<String> = (0..900).map(|i| format!("s{i}")).collect();
    let snapshots: Vec<(&str, &str)> = names.iter().map(|name| ("o", name.as_str())).collect();
    tasks.run(pool.snapshot(&snapshots, 1)).unwrap();
    fill_pool(&tasks, &pool);
    assert!(tasks.run(pool.unprotect("o", true)).is_err(), "there is no space for 900 deletions at once");
    assert!(pool.origins().iter().all(|origin| origin.open));
}

#[test]
fn an_open_origin_is_not_recorded_as_closed_by_a_detach_that_waited() {
    for count in 20..27 {
        let tasks = Inline::default();
        let (pool, ..) = scattered(&tasks, OpenOptions::default());
        let device = Hosted::new(MIB, &tasks);
        let options = ProtectOptions::new(OriginPlace::at("/dev/p", 0), 1);
        tasks.run(pool.protect("p", device.clone(), &options)).unwrap();
        let volume = pool.volume("p").unwrap();
        tasks.run(volume.write(0, Buf::zeroed(PAGE), false)).0.unwrap();
        drop(volume);
        tasks.run(pool.flush()).unwrap();
        fill_pool(&tasks, &pool);
        tasks.run(pool.checkpoint()).unwrap();
        let pool = Rc::new(pool);
        protect_at_once(&tasks, &pool, count);
        let closing = pool.clone();
        let detached = tasks.start(async move { closing.detach_origin("p", || 5).await });
        let (opening, clock) = (pool.clone(), tasks.clone());
        let attached = tasks.start(async move {
            for _ in 0..500 {
                if opening.attach_origin("p", device.clone(), &OriginPlace::at("/dev/p", 0)).await.is_ok() {
                    let volume = opening.volume("p").unwrap();
                    return volume.write(8192, Buf::zeroed(PAGE), false).await.0.is_ok();
                }
                clock.sleep(Duration::from_millis(1)).await;
            }
            false
        });
        // Refused or not.
        let _ = tasks.run(detached);
        if tasks.run(attached) {
            let origin = pool.origins().into_iter().find(|origin| origin.name == "p").unwrap();
            assert!(origin.open && !origin.clean, "beside {count} others");
        }
    }
}

/// What page 100 has after a write that waits for a full host and a later request on the same page.
fn after_a_waiting_write<F>(when_full: WhenFull, change: impl FnOnce(Rc<Volume<Hosted>>) -> F) -> Option<u8>
where
    F: Future<Output = ()> + 'static,
{
    let tasks = Inline::default();
    let options = OpenOptions::default().with_when_full(when_full);
    let device = Hosted::new(64 * MIB, &tasks);
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [5; 16], 1).with_journal(MIB))).unwrap();
    let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), options)).unwrap();
    tasks.run(pool.create_all(&["v", "old"], &CreateOptions::new(MIB, 1))).unwrap();
    let volume = Rc::new(pool.volume("v").unwrap());
    let at = 100 * PAGE as u64;
    // There is freed space, for which a write waits.
    let old = pool.volume("old").unwrap();
    tasks.run(old.write(0, Buf::copy_of(&[3; PAGE]), true)).0.unwrap();
    tasks.run(pool.checkpoint()).unwrap();
    tasks.run(old.discard(0, PAGE as u64)).unwrap();
    device.is_full.set(true);
    let writer = volume.clone();
    let write = tasks.start(async move { writer.write(at, Buf::copy_of(&[7; PAGE]), false).await.0 });
    // The device has refused the write.
    tasks.run(tasks.sleep(Duration::from_micros(150)));
    let change = tasks.start(change(volume.clone()));
    tasks.run(tasks.sleep(Duration::from_millis(300)));
    device.is_full.set(false);
    // Refused, or done before the change.
    let _ = tasks.run(write);
    tasks.run(change);
    let (result, read) = tasks.run(volume.read(at, Buf::zeroed(PAGE)));
    result.ok().map(|()| read[PAGE - 1])
}

#[test]
fn a_write_that_waits_for_a_full_host_does_not_overwrite_later_requests() {
    for when_full in [WhenFull::Error, WhenFull::Wait(Duration::from_secs(60))] {
        let at = 100 * PAGE as u64;
        let zeroes = async move |v: Rc<Volume<Hosted>>| v.write_zeroes(at, PAGE as u64, false).await.unwrap();
        assert_eq!(after_a_waiting_write(when_full, zeroes), Some(0));
        let holes = async move |v: Rc<Volume<Hosted>>| v.discard(at, PAGE as u64).await.unwrap();
        assert_eq!(after_a_waiting_write(when_full, holes), Some(0));
        let write = async move |v: Rc<Volume<Hosted>>| v.write(at, Buf::copy_of(&[9; PAGE]), false).await.0.unwrap();
        assert_eq!(after_a_waiting_write(when_full, write), Some(9));
        // Page 0 is a hole.
        let clone = async move |v: Rc<Volume<Hosted>>| v.clone_range(&v, 0, at, PAGE as u64).await.unwrap();
        assert_eq!(after_a_waiting_write(when_full, clone), Some(0));
        let shorten = async move |v: Rc<Volume<Hosted>>| v.set_size(at).await.unwrap();
        assert_eq!(after_a_waiting_write(when_full, shorten), None);
        let empty = async move |v: Rc<Volume<Hosted>>| {
            v.set_size(0).await.unwrap();
            v.set_size(MIB).await.unwrap();
        };
        assert_eq!(after_a_waiting_write(when_full, empty), Some(0));
    }
}

#[test]
fn a_write_behind_a_shortening_is_refused_beyond_the_end() {
    let tasks = Inline::default();
    let device = Hosted::new(64 * MIB, &tasks);
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [5; 16], 1).with_journal(MIB))).unwrap();
    let pool = tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
    tasks.run(pool.create("v", &CreateOptions::new(MIB, 1))).unwrap();
    let volume = Rc::new(pool.volume("v").unwrap());
    let at = 100 * PAGE as u64;
    let write = || {
        let writer = volume.clone();
        tasks.start(async move { writer.write(at, Buf::copy_of(&[7; PAGE]), false).await.0 })
    };
    for size in [at, 0] {
        let before = write();
        let shortened = volume.clone();
        let shorten = tasks.start(async move { shortened.set_size(size).await });
        let behind = write();
        let (before, shorten, behind) = (tasks.run(before), tasks.run(shorten), tasks.run(behind));
        assert!(before.is_ok() && shorten.is_ok(), "{before:?}, {shorten:?}");
        assert!(behind.is_err(), "a write of page 100 of a volume with {size} bytes was acknowledged");
        tasks.run(volume.set_size(MIB)).unwrap();
        let (result, read) = tasks.run(volume.read(at, Buf::zeroed(PAGE)));
        result.unwrap();
        assert_eq!(read[0], 0);
    }
}
