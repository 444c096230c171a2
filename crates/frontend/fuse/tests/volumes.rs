//! A pool in memory as a file system, with requests as the kernel sends them, without a kernel.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::testing::MemoryDevice;
use forkdisk::{Buf, FormatOptions, GatherPolicy, OpenOptions, Pool};
use forkdisk_fuse::codec::{Entry, Header, Operation, Reply, SetAttr};
use forkdisk_fuse::{Handler, MountRecord, Volumes, VolumesOptions};
use forkdisk_uring::{Config, Rt, block_on};

const ROOT: u64 = 1;

/// A mount without a kernel.
struct Mount {
    volumes: Rc<Volumes<MemoryDevice>>,
    pool: Pool<MemoryDevice>,
}

impl Mount {
    async fn open(rt: &Rt, device: &MemoryDevice) -> Mount {
        let pool = Pool::open(device.clone(), Rc::new(rt.clone()), OpenOptions::default()).await.unwrap();
        let options = VolumesOptions::new("/nowhere", 1, 2)
            .with_alone(true)
            .with_gather(GatherPolicy::Off)
            .with_show_snapshots(false)
            .with_syscall_helper(None);
        Mount { volumes: Volumes::new(pool.clone(), options), pool }
    }

    async fn ask(&self, node: u64, operation: Operation) -> Reply {
        let header = Header { unique: 1, node, uid: 1000, gid: 100, pid: 0, resent: false };
        self.volumes.clone().handle(header, operation).await
    }

    async fn errno(&self, node: u64, operation: Operation) -> i32 {
        match self.ask(node, operation).await {
            Reply::Error(errno) => errno,
            reply => panic!("not refused: {reply:?}"),
        }
    }

    async fn done(&self, node: u64, operation: Operation) {
        let reply = self.ask(node, operation).await;
        assert!(matches!(reply, Reply::Done), "{reply:?}");
    }

    async fn create(&self, folder: u64, name: &str) -> (Entry, u64) {
        match self.ask(folder, Operation::Create { name: name.into(), mode: 0o640, flags: 2 }).await {
            Reply::Created(entry, handle, _) => (entry, handle),
            reply => panic!("{reply:?}"),
        }
    }

    async fn find(&self, folder: u64, name: &str) -> Option<Entry> {
        match self.ask(folder, Operation::Lookup { name: name.into() }).await {
            Reply::Entry(entry) => Some(entry),
            Reply::NoEntry(_) | Reply::Error(libc::ENOENT) => None,
            reply => panic!("{reply:?}"),
        }
    }

    async fn make_folder(&self, folder: u64, name: &str) -> u64 {
        match self.ask(folder, Operation::MakeFolder { name: name.into(), mode: 0o750 }).await {
            Reply::Entry(entry) => entry.node,
            reply => panic!("{reply:?}"),
        }
    }

    async fn write(&self, handle: u64, offset: u64, bytes: &[u8]) {
        let data = Buf::copy_of(bytes);
        let reply = self.ask(0, Operation::Write { handle, offset, flags: 0, data }).await;
        assert!(matches!(&reply, Reply::Stored(data) if data.len() == bytes.len()), "{reply:?}");
    }

    async fn read(&self, handle: u64, offset: u64, len: usize) -> Vec<u8> {
        match self.ask(0, Operation::Read { handle, offset, flags: 0, buf: Buf::zeroed(len) }).await {
            Reply::Data(data) => data.to_vec(),
            reply => panic!("{reply:?}"),
        }
    }

    async fn seek(&self, handle: u64, offset: u64, whence: i32) -> Result<u64, i32> {
        match self.ask(0, Operation::Seek { handle, offset, whence: whence as u32 }).await {
            Reply::Position(position) => Ok(position),
            Reply::Error(errno) => Err(errno),
            reply => panic!("{reply:?}"),
        }
    }

    async fn rename(&self, from: (u64, &str), to: (u64, &str), flags: u32) -> Reply {
        let (name, new_name) = (from.1.into(), to.1.into());
        self.ask(from.0, Operation::Rename { name, folder: to.0, new_name, flags }).await
    }
}

/// Runs `work` on a new pool, with its device so that it can be opened again.
fn with_pool(work: impl AsyncFnOnce(Rt, MemoryDevice)) {
    block_on(Config::default().with_buffers(Vec::new()), |rt| async move {
        let device = MemoryDevice::new(64 << 20);
        let options = FormatOptions::new(64 << 20, [7; 16], 1);
        Pool::format(&device, &options).await.unwrap();
        work(rt, device).await;
    })
    .unwrap();
}

#[test]
fn files_grow_as_they_are_written_and_reads_end_with_them() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let (entry, handle) = mount.create(ROOT, "a").await;
        assert_eq!((entry.attr.size, entry.attr.mode, entry.attr.uid, entry.attr.gid), (0, 0o640, 1000, 100));
        mount.write(handle, 5000, b"hello").await;
        assert_eq!(mount.read(handle, 4998, 100).await, b"\0\0hello");
        assert!(mount.read(handle, 5005, 10).await.is_empty() && mount.read(handle, 1 << 40, 10).await.is_empty());
        let found = mount.find(ROOT, "a").await.unwrap();
        assert_eq!((found.attr.size, found.attr.blocks, found.node), (5005, 8, entry.node));
        assert_eq!(mount.seek(handle, 0, libc::SEEK_DATA).await, Ok(4096));
        assert_eq!(mount.seek(handle, 4096, libc::SEEK_HOLE).await, Ok(5005));
        assert_eq!(mount.seek(handle, 5005, libc::SEEK_HOLE).await, Err(libc::ENXIO));
        let set = SetAttr { size: Some(5001), ..SetAttr::default() };
        mount.ask(entry.node, Operation::SetAttr(set)).await;
        mount.ask(entry.node, Operation::SetAttr(SetAttr { size: Some(6000), ..set })).await;
        assert_eq!(mount.read(handle, 5000, 10).await, b"h\0\0\0\0\0\0\0\0\0");
    });
}

#[test]
fn what_is_removed_while_open_lives_until_its_last_close_or_the_next_opening() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        for name in ["a", "b"] {
            let (_, handle) = mount.create(ROOT, name).await;
            mount.write(handle, 0, name.as_bytes()).await;
            mount.done(ROOT, Operation::Unlink { name: name.into() }).await;
            assert!(mount.find(ROOT, name).await.is_none());
            assert_eq!(mount.read(handle, 0, 1).await, name.as_bytes());
            if name == "a" {
                mount.done(0, Operation::Release { handle }).await;
            }
        }
        mount.pool.wait_freed().await.unwrap();
        let used = mount.pool.info().used;
        // The process ends with one of them open; its flushed contents exist, without a name.
        mount.done(0, Operation::SyncFolder).await;
        let again = Mount::open(&rt, &device).await;
        assert!(again.pool.list().is_empty());
        again.pool.wait_freed().await.unwrap();
        assert!(again.pool.info().used < used, "the page of b has come back");
        assert!(again.pool.check().await.unwrap().damage.is_empty());
    });
}

#[test]
fn names_and_attributes_are_found_again() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let folder = mount.make_folder(ROOT, "d").await;
        let (entry, handle) = mount.create(folder, "a").await;
        mount.write(handle, 0, b"one").await;
        let set = SetAttr { mode: Some(0o4711), uid: Some(5), ..SetAttr::default() };
        mount.ask(entry.node, Operation::SetAttr(set)).await;
        assert!(matches!(mount.rename((ROOT, "d"), (ROOT, "e"), 0).await, Reply::Done));
        assert_eq!(mount.find(folder, "a").await.unwrap().node, entry.node, "the kernel's number goes along");
        mount.done(0, Operation::SyncFolder).await;
        let again = Mount::open(&rt, &device).await;
        assert!(again.find(ROOT, "d").await.is_none());
        let folder = again.find(ROOT, "e").await.unwrap();
        let found = again.find(folder.node, "a").await.unwrap();
        assert_eq!((folder.attr.mode, found.attr.mode, found.attr.uid, found.attr.size), (0o750, 0o4711, 5, 3));
    });
}

#[test]
fn renaming_refuses_what_no_file_system_does() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let folder = mount.make_folder(ROOT, "d").await;
        mount.make_folder(folder, "e").await;
        mount.create(ROOT, "a").await;
        mount.create(ROOT, "b").await;
        let cases = [
            ((ROOT, "a"), (ROOT, "d"), 0, libc::EISDIR),
            ((ROOT, "d"), (ROOT, "a"), 0, libc::ENOTDIR),
            ((ROOT, "a"), (ROOT, "b"), libc::RENAME_NOREPLACE, libc::EEXIST),
            ((ROOT, "a"), (ROOT, "b"), libc::RENAME_EXCHANGE | libc::RENAME_NOREPLACE, libc::EINVAL),
            ((ROOT, "a"), (ROOT, "none"), libc::RENAME_EXCHANGE, libc::ENOENT),
            ((ROOT, "d"), (folder, "e"), libc::RENAME_EXCHANGE, libc::EINVAL),
            ((ROOT, "none"), (ROOT, "b"), 0, libc::ENOENT),
            ((ROOT, "d"), (folder, "x"), 0, libc::EINVAL),
            ((ROOT, "a"), (ROOT, "no%good"), 0, libc::EINVAL),
            ((ROOT, ".snapshots"), (ROOT, "x"), 0, libc::EPERM),
        ];
        for (from, to, flags, errno) in cases {
            let reply = mount.rename(from, to, flags).await;
            assert!(matches!(reply, Reply::Error(e) if e == errno), "{from:?} {to:?}: {reply:?}");
        }
        assert_eq!(mount.errno(ROOT, Operation::RemoveFolder { name: "d".into() }).await, libc::ENOTEMPTY);
        assert_eq!(mount.errno(99, Operation::Lookup { name: "a".into() }).await, libc::ENOTDIR);
        assert_eq!(mount.errno(98, Operation::Lookup { name: "a".into() }).await, libc::ESTALE);
        assert_eq!(
            mount.errno(0, Operation::Read { handle: 77, offset: 0, flags: 0, buf: Buf::zeroed(1) }).await,
            libc::EBADF
        );
    });
}

#[test]
fn a_whole_copy_shares_everything_and_takes_the_place_of_what_was_there() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let (_, a) = mount.create(ROOT, "a").await;
        let (_, b) = mount.create(ROOT, "b").await;
        mount.write(a, 0, &[7; 300_000]).await;
        mount.write(b, 0, &[8; 100_000]).await;
        let used = mount.pool.info().used;
        let copy =
            |wide| Operation::CopyRange { handle: a, offset: 0, to_handle: b, to_offset: 0, len: u64::MAX, wide };
        assert!(matches!(mount.ask(0, copy(true)).await, Reply::Copied(300_000)));
        assert_eq!(mount.read(b, 0, 400_000).await, [7; 300_000]);
        mount.write(b, 10, &[9]).await;
        assert_eq!((mount.read(a, 10, 1).await, mount.read(b, 10, 1).await), (vec![7], vec![9]));
        mount.pool.wait_freed().await.unwrap();
        assert!(mount.pool.info().used < used, "what b had is free, and b has one page of its own");
        assert!(matches!(mount.ask(0, copy(false)).await, Reply::Written(300_000)));
        assert_eq!(mount.read(b, 10, 1).await, [7]);
        assert!(mount.pool.check().await.unwrap().damage.is_empty());
    });
}

#[test]
fn that_a_name_is_not_there_may_be_believed_where_only_the_kernel_makes_names() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let look = async |folder: u64, name: &str| mount.ask(folder, Operation::Lookup { name: name.into() }).await;
        let folder = mount.make_folder(ROOT, "f").await;
        for folder in [ROOT, folder] {
            assert!(matches!(look(folder, "v").await, Reply::NoEntry(valid) if valid > 0));
        }
        // Folders of snapshots exist for existing volumes only.
        let snapshots = mount.find(ROOT, ".snapshots").await.expect("always there").node;
        assert!(matches!(look(snapshots, "v").await, Reply::Error(libc::ENOENT)));
        mount.create(ROOT, "v").await;
        assert!(mount.find(ROOT, "v").await.is_some() && mount.find(snapshots, "v").await.is_some());
    });
}

/// Requests that the kernel sends again to another process, after they were carried out.
#[test]
fn a_resent_request_whose_effect_is_there_is_answered_once_more() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        mount.volumes.keep(MountRecord::new().unwrap()).unwrap();
        let again = |node, unique: u64, operation| {
            let header = Header { unique: unique | 1 << 63, node, uid: 0, gid: 0, pid: 0, resent: true };
            mount.volumes.clone().handle(header, operation)
        };
        let (entry, handle) = mount.create(ROOT, "a").await;
        let create = || Operation::Create { name: "a".into(), mode: 0o640, flags: 2 };
        match again(ROOT, 1, create()).await {
            Reply::Created(same, known, _) => assert_eq!((same.node, known), (entry.node, handle)),
            reply => panic!("{reply:?}"),
        }
        match again(ROOT, 7, create()).await {
            Reply::Created(same, new, _) => assert!(same.node == entry.node && new != handle),
            reply => panic!("{reply:?}"),
        }
        match again(entry.node, 1, Operation::Open { flags: 2 }).await {
            Reply::Opened(known, _) => assert_eq!(known, handle, "it was recorded with the request"),
            reply => panic!("{reply:?}"),
        }
        let folder = mount.make_folder(ROOT, "d").await;
        match again(ROOT, 1, Operation::MakeFolder { name: "d".into(), mode: 0o750 }).await {
            Reply::Entry(same) => assert_eq!(same.node, folder),
            reply => panic!("{reply:?}"),
        }
        let rename = || {
            let (name, new_name) = ("a".into(), "b".into());
            Operation::Rename { name, folder, new_name, flags: 0 }
        };
        mount.done(ROOT, rename()).await;
        assert_eq!(mount.errno(ROOT, rename()).await, libc::ENOENT);
        assert!(matches!(again(ROOT, 1, rename()).await, Reply::Done));
        let unlink = || Operation::Unlink { name: "b".into() };
        mount.done(folder, unlink()).await;
        assert_eq!(mount.errno(folder, unlink()).await, libc::ENOENT);
        assert!(matches!(again(folder, 1, unlink()).await, Reply::Done));
        // Neither is there: it was not carried out, and cannot be.
        assert!(matches!(again(ROOT, 1, rename()).await, Reply::Error(libc::ENOENT)));
    });
}

#[test]
fn another_process_continues_with_the_record_of_a_killed_one() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let record = MountRecord::new().unwrap();
        let files = record.files().map(|file| file.try_clone_to_owned().unwrap());
        mount.volumes.keep(record).unwrap();
        let folder = mount.make_folder(ROOT, "d").await;
        let (entry, handle) = mount.create(folder, "a").await;
        let (_, released) = mount.create(folder, "b").await;
        mount.write(handle, 0, b"hello").await;
        mount.done(folder, Operation::Unlink { name: "a".into() }).await;
        mount.done(entry.node, Operation::Release { handle: released }).await;
        let moved = Operation::Rename { name: "d".into(), folder: ROOT, new_name: "e".into(), flags: 0 };
        mount.done(ROOT, moved).await;
        mount.pool.flush().await.unwrap();
        // The process ends here; the next one opens what is on the device.
        let options = OpenOptions::default().with_keep_removed(true);
        let pool = Pool::open(device.clone(), Rc::new(rt.clone()), options).await.unwrap();
        let left = MountRecord::read(files).unwrap();
        let volumes = Volumes::take_over(pool.clone(), VolumesOptions::new("/nowhere", 1, 2), left).unwrap();
        let next = Mount { volumes, pool };
        assert_eq!(next.read(handle, 0, 5).await, b"hello", "a removed file that is open");
        assert_eq!(
            next.errno(0, Operation::Read { handle: released, offset: 0, flags: 0, buf: Buf::zeroed(1) }).await,
            libc::EBADF
        );
        assert!(next.find(folder, "b").await.is_some(), "the folder has its number, under its new name");
        assert!(next.find(folder, "a").await.is_none());
    });
}

fn exchange(name: &str, new_name: &str) -> Operation {
    Operation::Rename { name: name.into(), folder: ROOT, new_name: new_name.into(), flags: libc::RENAME_EXCHANGE }
}

#[test]
fn two_names_are_exchanged_with_what_is_below_them() {
    with_pool(async |rt, device| {
        let mount = Mount::open(&rt, &device).await;
        let folder = mount.make_folder(ROOT, "d").await;
        let (inner, _) = mount.create(folder, "x").await;
        let (file, handle) = mount.create(ROOT, "a").await;
        mount.write(handle, 0, b"one").await;
        mount.pool.snapshot(&[("a", "s")], 1).await.unwrap();
        mount.done(ROOT, exchange("a", "a")).await;
        mount.done(ROOT, exchange("a", "d")).await;
        let there = async |folder: u64, name: &str| mount.find(folder, name).await.map(|entry| entry.node);
        assert_eq!((there(ROOT, "a").await, there(ROOT, "d").await), (Some(folder), Some(file.node)));
        assert_eq!(there(folder, "x").await, Some(inner.node));
        assert_eq!(mount.read(handle, 0, 3).await, b"one", "the open file is the same");
        let snapshots = mount.pool.children_of_snapshot("", "s");
        assert_eq!(snapshots.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a"], "as it was");
        mount.done(0, Operation::SyncFolder).await;
        let again = Mount::open(&rt, &device).await;
        let names = again.pool.children("").into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names, ["a", "d"]);
        assert!(again.pool.find("a/x").is_ok() && again.pool.find("d").is_ok());
    });
}

/// The kernel requests an exchange again after a kill: before it took place, before that was recorded, and after.
#[test]
fn a_resent_exchange_takes_place_once() {
    with_pool(async |rt, device| {
        for (is_done, is_recorded) in [(false, false), (true, false), (true, true)] {
            let mount = Mount::open(&rt, &device).await;
            let one = mount.make_folder(ROOT, "one").await;
            mount.make_folder(ROOT, "two").await;
            mount.create(one, "first").await;
            let first = mount.pool.number_of("one").unwrap().0;
            let mut passed = serde_json::to_value(mount.volumes.pass_on()).unwrap();
            passed["swaps"] = serde_json::json!([{ "request": 9, "first": first, "has_ended": is_recorded }]);
            if is_done {
                mount.pool.swap_files("one", "two").unwrap();
            }
            if is_recorded {
                mount.done(ROOT, exchange("one", "two")).await;
                passed["nodes"] = serde_json::to_value(mount.volumes.pass_on()).unwrap()["nodes"].take();
                mount.pool.swap_files("one", "two").unwrap();
            }
            let passed = serde_json::from_value(passed).unwrap();
            let options = VolumesOptions::new("/nowhere", 1, 2);
            let volumes = Volumes::resume(mount.pool.clone(), options, &passed).unwrap();
            let header = Header { unique: 9 | 1 << 63, node: ROOT, uid: 0, gid: 0, pid: 0, resent: true };
            let next = Mount { volumes, pool: mount.pool.clone() };
            for _ in 0..2 {
                let reply = next.volumes.clone().handle(header, exchange("one", "two")).await;
                assert!(matches!(reply, Reply::Done), "{is_done} {is_recorded}: {reply:?}");
                assert!(next.pool.find("two/first").is_ok(), "{is_done} {is_recorded}");
                let found = next.find(ROOT, "two").await.unwrap().node;
                assert_eq!(found, one, "{is_done} {is_recorded}: the number goes along");
            }
            next.pool.swap_files("one", "two").unwrap();
            next.pool.remove_file("one/first").unwrap();
            ["one", "two"].into_iter().for_each(|name| next.pool.remove_folder(name).unwrap());
        }
    });
}
