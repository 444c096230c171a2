//! Verbs on a full pool: what is refused leaves nothing behind, what is accepted does not fail the pool.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{
    Attributes, CreateOptions, Device, Error, ErrorKind, FormatOptions, Mode, OpenOptions, OriginFull, OriginPlace,
    Pool, ProtectOptions, Runtime, SnapshotFlags, Volume, WriteFlags,
};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

/// A device that shows whether it is open, and how it was corked at each write.
#[derive(Clone)]
struct Watched {
    inner: MemoryDevice,
    open: Rc<()>,
    corked: Rc<Cell<bool>>,
    writes: Rc<RefCell<Vec<(bool, usize)>>>,
    tasks: Inline,
}

impl Watched {
    fn new(bytes: u64, tasks: &Inline) -> Watched {
        let (open, corked, writes) = Default::default();
        Watched { inner: MemoryDevice::new(bytes), open, corked, writes, tasks: tasks.clone() }
    }
}

impl Device for Watched {
    forkdisk::forward_device! { inner: len block_size flush discard set_len }
    forkdisk::plain_device! { buffer stripe allocate can_clone clone_range zero_range }

    fn cork(&self, more: bool) {
        self.corked.set(more);
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        let (pause, read) = (self.tasks.sleep(Duration::from_micros(100)), self.inner.read(buf, segments));
        async move {
            pause.await;
            read.await
        }
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.writes.borrow_mut().push((self.corked.get(), segments.iter().map(|s| s.len).sum()));
        self.inner.write(buf, segments, fua)
    }
}

fn pool(mib: u64, tasks: &Inline) -> (Pool<Watched>, Watched) {
    let device = Watched::new(mib * MIB, tasks);
    let options = FormatOptions::new(mib * MIB, [5; 16], 1).with_journal(MIB);
    tasks.run(Pool::format(&device, &options)).unwrap();
    let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
    (pool, device)
}

/// Writes until the pool is full.
fn fill(tasks: &Inline, volume: &Volume<Watched>) -> Error {
    let (mut at, mut len) = (0, MIB as usize);
    loop {
        match tasks.run(volume.write(at, Buf::zeroed(len), false)).0 {
            Ok(()) => at += len as u64,
            Err(_) if len > PAGE => len /= 2,
            Err(error) => return error,
        }
    }
}

/// The new volumes take the free slots of 900 directory pages, not slots of 113 new ones.
#[test]
fn volumes_that_were_admitted_into_scattered_slots_do_not_fail_the_pool() {
    let tasks = Inline::default();
    let (pool, _) = pool(64, &tasks);
    let names: Vec<String> = (0..8000).map(|i| format!("v{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    tasks.run(pool.create_all(&names, &CreateOptions::new(MIB, 1))).unwrap();
    let every_eighth: Vec<&str> = names.iter().step_by(8).copied().collect();
    tasks.run(pool.delete(&every_eighth)).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    tasks.run(pool.create("data", &CreateOptions::new(64 * MIB, 1))).unwrap();
    let data = pool.volume("data").unwrap();
    assert_eq!(fill(&tasks, &data).kind(), ErrorKind::NoSpace);
    tasks.run(data.discard(0, 400 * PAGE as u64)).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    let new: Vec<String> = (0..900).map(|i| format!("w{i}")).collect();
    let new: Vec<&str> = new.iter().map(String::as_str).collect();
    match tasks.run(pool.create_all(&new, &CreateOptions::new(MIB, 1))) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace),
    }
    let checkpoint = tasks.run(pool.checkpoint());
    assert!(checkpoint.is_ok() && pool.mode() != Mode::Failed, "{checkpoint:?}");
    drop(data);
    tasks.run(pool.close()).unwrap();
}

#[test]
fn a_refused_protect_closes_the_device() {
    let tasks = Inline::default();
    let (pool, _) = pool(8, &tasks);
    tasks.run(pool.create("data", &CreateOptions::new(64 * MIB, 1))).unwrap();
    fill(&tasks, &pool.volume("data").unwrap());
    for i in 0..1000 {
        let device = Watched::new(MIB, &tasks);
        let open = device.open.clone();
        let options = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1);
        let Err(error) = tasks.run(pool.protect(&format!("o{i}"), device, &options)) else { continue };
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(Rc::strong_count(&open), 1, "somebody still has the device open, though there is no such origin");
        return;
    }
    panic!("nothing is refused");
}

/// A hint that more follows would hold the end of the last write back.
#[test]
fn merged_writes_are_corked_as_the_last_of_them() {
    let tasks = Inline::default();
    let (pool, device) = pool(16, &tasks);
    tasks.run(pool.create("a", &CreateOptions::new(MIB, 1))).unwrap();
    let volume = Rc::new(pool.volume("a").unwrap());
    tasks.run(volume.write(0, Buf::zeroed(PAGE), false)).0.unwrap();
    tasks.run(pool.snapshot(&[("a", "s")], 1)).unwrap();
    device.writes.borrow_mut().clear();
    let start = |at: usize, len: usize, more: bool| {
        let volume = volume.clone();
        let flags = WriteFlags::from(false).with_more(more);
        tasks.start(async move { volume.write(at as u64, Buf::zeroed(len), flags).await.0 })
    };
    // The first completes a page that it reads; the others queue behind it meanwhile and are merged.
    let first = start(0, 512, true);
    tasks.run_until_idle();
    let others = [(1, true), (2, true), (3, false)].map(|(page, more)| start(page * PAGE, PAGE, more));
    for write in others.into_iter().chain([first]) {
        tasks.run(write).unwrap();
    }
    let writes = device.writes.borrow();
    assert_eq!(writes[..], [(true, PAGE), (false, 3 * PAGE)], "(corked, bytes)");
}

/// The task that rolls an origin back keeps the pool open, but nothing frees what it drops.
#[test]
fn a_rollback_that_outlives_the_pool_drops_no_more_snapshots_than_it_has_to() {
    let left = |is_dropped: bool| {
        let tasks = Inline::default();
        let (pool, device) = pool(32, &tasks);
        let options = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1)
            .with_when_full(OriginFull::DropOldest)
            .with_copy_ahead(0);
        tasks.run(pool.protect("o", Watched::new(16 * MIB, &tasks), &options)).unwrap();
        let origin = pool.volume("o").unwrap();
        tasks.run(pool.snapshot(&[("o", "base")], 1)).unwrap();
        let flags = SnapshotFlags::NONE.with_droppable(true).with_independent(true);
        for i in 0..8 {
            tasks.run(origin.write(i * MIB, Buf::copy_of(&[1 + i as u8; MIB as usize]), false)).0.unwrap();
            tasks.run(pool.snapshot_with(&[("o", &format!("s{i}"))], flags, 1)).unwrap();
        }
        drop(origin);
        tasks.run(pool.create("data", &CreateOptions::new(64 * MIB, 1))).unwrap();
        fill(&tasks, &pool.volume("data").unwrap());
        tasks.run(pool.rollback("o", "base")).unwrap();
        if is_dropped {
            drop(pool);
            while Rc::strong_count(&device.open) > 1 {
                tasks.run_until_idle();
                tasks.advance();
            }
        } else {
            tasks.run(pool.wait_rollback("o", |_, _| true)).unwrap();
            tasks.run(pool.close()).unwrap();
        }
        let pool = tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
        assert_eq!(pool.origins()[0].rolling, None, "the rollback has ended");
        pool.snapshots_of("o").unwrap().into_iter().map(|info| info.name).collect::<Vec<_>>()
    };
    assert_eq!(left(true), left(false));
}

/// A full pool with volumes in many pages of the directory, and a folder.
fn full_pool(tasks: &Inline, options: OpenOptions) -> (Pool<Watched>, Vec<String>) {
    let device = Watched::new(64 * MIB, tasks);
    let format = FormatOptions::new(64 * MIB, [5; 16], 1).with_journal(MIB);
    tasks.run(Pool::format(&device, &format)).unwrap();
    let pool = tasks.run(Pool::open(device, Rc::new(tasks.clone()), options)).unwrap();
    let names: Vec<String> = (0..8000).map(|i| format!("folder/v{i}")).collect();
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    tasks.run(pool.create_all(&all, &CreateOptions::new(MIB, 1))).unwrap();
    // One in each page of the directory.
    let scattered: Vec<String> = names.into_iter().step_by(8).collect();
    for name in &scattered {
        let volume = pool.volume(name).unwrap();
        tasks.run(volume.write(0, Buf::copy_of(&[7; PAGE]), false)).0.unwrap();
    }
    // Each checkpoint leaves what the one before it needed.
    for i in 0..8 {
        let name = format!("data{i}");
        tasks.run(pool.create(&name, &CreateOptions::new(64 * MIB, 1))).unwrap();
        assert_eq!(fill(tasks, &pool.volume(&name).unwrap()).kind(), ErrorKind::NoSpace);
        tasks.run(pool.checkpoint()).unwrap();
    }
    (pool, scattered)
}

/// Every call either succeeds or is refused for lack of space; after each of them a checkpoint finds its space.
fn check_each(what: &str, names: &[String], verb: impl Fn(&Inline, &Pool<Watched>, &str) -> forkdisk::Result<()>) {
    let tasks = Inline::default();
    let (pool, scattered) = full_pool(&tasks, OpenOptions::default());
    let names = if names.is_empty() { &scattered } else { names };
    let refused = names.iter().filter_map(|name| verb(&tasks, &pool, name).err());
    for error in refused.collect::<Vec<_>>() {
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{what}: {error}");
    }
    let checkpoint = tasks.run(pool.checkpoint());
    assert!(checkpoint.is_ok() && pool.mode() != Mode::Failed, "{what}: {checkpoint:?}");
    tasks.run(pool.delete(&["data0"])).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    tasks.run(pool.close()).unwrap();
}

#[test]
fn no_verb_of_one_record_fails_a_full_pool() {
    let new: Vec<String> = (0..4000).map(|i| format!("new{i}")).collect();
    let attributes = Attributes { mode: 0o600, ..Attributes::of_no_owner(1) };
    check_each("snapshot", &[], |tasks, pool, name| tasks.run(pool.snapshot(&[(name, "s")], 1)).map(drop));
    check_each("clone", &[], |tasks, pool, name| {
        tasks.run(pool.clone_volume(name, &name.replace("folder/v", "c"), 1)).map(drop)
    });
    check_each("create", &new, |tasks, pool, name| tasks.run(pool.create(name, &CreateOptions::new(MIB, 1))).map(drop));
    check_each("rename", &[], |tasks, pool, name| tasks.run(pool.rename(name, &format!("{name}x"))));
    check_each("set", &[], |tasks, pool, name| tasks.run(pool.set_chunk(name, 8192)));
    check_each("resize", &[], |tasks, pool, name| tasks.run(pool.resize(name, 2 * MIB)));
    check_each("rename of a folder", &new[..200], |_, pool, name| {
        pool.rename_folder("folder", name).or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
    });
    check_each("new file", &new, |_, pool, name| {
        pool.create_file(name, &CreateOptions::new(MIB, 1), attributes).map(drop)
    });
    check_each("new folder", &new, |_, pool, name| pool.create_folder(name, attributes, 1));
    check_each("attributes", &[], |_, pool, name| {
        let id = pool.volume(name).unwrap().id();
        pool.set_attributes(id, attributes)
    });
    check_each("replaced file", &[], |_, pool, name| {
        let other = name.replace("folder/v", "folder/v1");
        pool.rename_file(name, &other, true).or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
    });
}

#[test]
fn volumes_and_files_are_deleted_from_a_full_pool_one_by_one() {
    deleted_one_by_one(OpenOptions::default());
}

#[test]
fn volumes_are_deleted_from_a_full_pool_that_discards_at_once_or_never() {
    deleted_one_by_one(OpenOptions::default().with_discard(true));
    deleted_one_by_one(OpenOptions::default().with_discard(false));
}

fn deleted_one_by_one(options: OpenOptions) {
    let tasks = Inline::default();
    let (pool, names) = full_pool(&tasks, options);
    let (half, rest) = names.split_at(names.len() / 2);
    for name in half {
        tasks.run(pool.delete(&[name])).unwrap();
    }
    for name in rest {
        pool.remove_file(name).unwrap();
        tasks.run(pool.flush()).unwrap();
    }
    tasks.run(pool.wait_freed()).unwrap();
    tasks.run(pool.close()).unwrap();
}

/// Writes in place take no space; the times of their volumes must not either.
#[test]
fn times_of_writes_in_place_do_not_fail_a_full_pool() {
    let tasks = Inline::default();
    let (pool, names) = full_pool(&tasks, OpenOptions::default().with_clock(Some(|| 7)));
    let volumes: Vec<_> = names.iter().map(|name| pool.volume(name).unwrap()).collect();
    for volume in &volumes {
        tasks.run(volume.write(0, Buf::copy_of(&[8; PAGE]), false)).0.unwrap();
    }
    tasks.run(pool.create("a", &CreateOptions::new(MIB, 1))).unwrap();
    let checkpoint = tasks.run(pool.checkpoint());
    assert!(checkpoint.is_ok() && pool.mode() != Mode::Failed, "{checkpoint:?}");
    drop(volumes);
    tasks.run(pool.close()).unwrap();
}

#[test]
fn what_a_refused_verb_needs_is_more_than_what_the_pool_has() {
    let tasks = Inline::default();
    let (pool, names) = full_pool(&tasks, OpenOptions::default());
    let refused = names.iter().find_map(|name| tasks.run(pool.snapshot(&[(name, "s")], 1)).err()).unwrap();
    let message = refused.to_string();
    let number = |after: &str| -> u64 {
        let digits = message.split(after).nth(1).unwrap_or_else(|| panic!("no {after:?} in {message:?}"));
        digits.trim_start().chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    };
    assert!(number("needs ") > number("the pool has "), "{message}");
}
