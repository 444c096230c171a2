//! Lifetimes, labels and the time of the last use: what is deleted by itself, and what stays.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::device::{Buf, Segment};
use forkdisk::testing::{Inline, MemoryDevice};
use forkdisk::{
    Changes, CreateOptions, Device, ErrorKind, ExtensionChanges, FormatOptions, Lease, OpenOptions, OriginPlace, Pool,
    ProtectOptions, SnapshotFlags, VolumeInfo,
};

const MIB: u64 = 1 << 20;

thread_local! {
    static SECONDS: Cell<i64> = const { Cell::new(0) };
}

struct Lab {
    tasks: Inline,
    device: MemoryDevice,
    pool: Pool<MemoryDevice>,
}

fn options() -> OpenOptions {
    OpenOptions::default().with_clock(Some(|| SECONDS.get() * 1_000_000_000))
}

fn lab() -> Lab {
    let (tasks, device) = (Inline::new(), MemoryDevice::new(64 * MIB));
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [1; 16], 0))).unwrap();
    let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), options())).unwrap();
    Lab { tasks, device, pool }
}

fn expiring(expires: u64) -> Changes {
    Changes::default().with_extension(ExtensionChanges::default().with_expires(expires))
}

impl Lab {
    fn create(&self, name: &str) {
        self.tasks.run(self.pool.create(name, &CreateOptions::new(MIB, 1))).unwrap();
    }

    fn snapshot(&self, volume: &str, name: &str) {
        self.tasks.run(self.pool.snapshot(&[(volume, name)], 1)).unwrap();
    }

    fn expire(&self, name: &str, at: u64) {
        self.tasks.run(self.pool.set(name, &expiring(at))).unwrap();
    }

    /// Deletes what has expired; returns the names.
    fn delete_expired(&self, now: u64) -> Vec<String> {
        let gone = self.tasks.run(self.pool.delete_expired(now, |_| false)).unwrap();
        gone.into_iter().map(|expired| expired.name).collect()
    }

    fn names(&self) -> Vec<String> {
        self.pool.list().into_iter().map(|v| v.name).collect()
    }

    fn find(&self, name: &str) -> VolumeInfo {
        self.pool.find(name).unwrap()
    }

    /// Closes the pool and opens it again.
    fn reopen(&mut self) {
        self.tasks.run(self.pool.close()).unwrap();
        self.open();
    }

    fn open(&mut self) {
        let opened = Pool::open(self.device.clone(), Rc::new(self.tasks.clone()), options());
        self.pool = self.tasks.run(opened).unwrap();
    }

    /// The incompatible features that the superblock has.
    fn features(&self) -> u64 {
        let segment = Segment { offset: 0, at: 0, len: 4096 };
        let (read, buf) = self.tasks.run(self.device.read(Buf::zeroed(4096), [segment].into_iter().collect()));
        read.unwrap();
        u64::from_le_bytes(buf[40..48].try_into().unwrap())
    }
}

#[test]
fn a_volume_stays_for_its_snapshots_and_users_and_goes_with_them() {
    let lab = lab();
    lab.create("v");
    lab.snapshot("v", "a");
    lab.snapshot("v", "b");
    lab.expire("v", 10);
    lab.expire("v@a", 10);
    let held = lab.pool.volume("v@a").unwrap();
    assert_eq!((lab.delete_expired(10).len(), lab.pool.has_expired(10, |_| false)), (0, true));
    drop(held);
    assert_eq!(lab.delete_expired(9), [""; 0], "not yet");
    assert_eq!(lab.delete_expired(10), ["v@a"]);
    lab.expire("v@b", 20);
    let held = lab.pool.volume("v").unwrap();
    assert_eq!(lab.delete_expired(20), ["v@b"]);
    drop(held);
    assert_eq!((lab.pool.next_expiry(5), lab.pool.next_expiry(10)), (Some(10), None));
    assert_eq!(lab.delete_expired(20), ["v"]);
    assert!(lab.names().is_empty() && !lab.pool.has_expired(99, |_| true));
}

#[test]
fn a_snapshot_of_an_origin_stays_for_its_clones() {
    let lab = lab();
    let protect = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1);
    lab.tasks.run(lab.pool.protect("o", MemoryDevice::new(4 * MIB), &protect)).unwrap();
    lab.snapshot("o", "s");
    lab.tasks.run(lab.pool.clone_volume("o@s", "c", 1)).unwrap();
    lab.expire("o@s", 10);
    assert_eq!(lab.delete_expired(10), [""; 0], "c shows it");
    lab.expire("c", 20);
    let mut gone = lab.delete_expired(20);
    gone.sort();
    assert_eq!(gone, ["c", "o@s"]);
    let refused = lab.tasks.run(lab.pool.set("o", &expiring(9))).unwrap_err();
    assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("is an origin"), "{refused}");
    let label = ExtensionChanges::default().with_labels([("a".to_string(), Some("b".to_string()))].into());
    lab.tasks.run(lab.pool.set("o", &Changes::default().with_extension(label))).unwrap();
    assert_eq!(lab.find("o").labels.len(), 1);
}

#[test]
fn a_volume_keeps_its_lifetime_whatever_happens_to_its_name_and_contents() {
    let mut lab = lab();
    lab.create("v");
    lab.create("w");
    lab.expire("v", 10);
    lab.snapshot("v", "s");
    assert_eq!(lab.find("v@s").expires, 0, "a snapshot inherits nothing");
    lab.tasks.run(lab.pool.rename("v", "x")).unwrap();
    lab.tasks.run(lab.pool.rollback("x", "s")).unwrap();
    lab.tasks.run(lab.pool.swap("x", "w")).unwrap();
    lab.pool.keep_snapshots("w", 2).unwrap();
    lab.tasks.run(lab.pool.clone_volume("w", "c", 1)).unwrap();
    lab.reopen();
    let expires: Vec<(String, u64)> = lab.pool.list().into_iter().map(|v| (v.name, v.expires)).collect();
    let of_w = expires.iter().filter(|(_, expires)| *expires > 0).collect::<Vec<_>>();
    assert_eq!(of_w, [&("w".to_string(), 10)], "{expires:?}");
    assert_eq!(lab.delete_expired(10), ["w"]);
    lab.open();
    assert!(lab.pool.find("w").is_err() && lab.pool.find("x").is_ok());
}

#[test]
fn older_versions_open_a_pool_again_when_nothing_has_an_extension() {
    let mut lab = lab();
    lab.create("v");
    lab.reopen();
    assert_eq!(lab.features() & 64, 0, "nothing has one");
    lab.expire("v", 10);
    assert_ne!(lab.features() & 64, 0, "the pool is open");
    lab.reopen();
    assert_ne!(lab.features() & 64, 0, "one has it");
    lab.expire("v", 0);
    lab.reopen();
    assert_eq!(lab.features() & 64, 0);
}

#[test]
fn the_last_use_is_recorded_along_with_other_changes() {
    let mut lab = lab();
    let by = ExtensionChanges::default().with_created_by("test".to_string());
    let options = CreateOptions::new(MIB, 1).with_extension(by);
    lab.tasks.run(lab.pool.create_all(&["v"], &options)).unwrap();
    lab.create("plain");
    let flushes = || lab.pool.statistics().flushes;
    let before = flushes();
    for (now, expected) in [(100, 100), (130, 100), (160, 160)] {
        SECONDS.set(now);
        drop(lab.pool.volume("v").unwrap());
        drop(lab.pool.volume("plain").unwrap());
        assert_eq!((lab.find("v").last_used, lab.find("plain").last_used), (expected, 0));
    }
    assert_eq!(flushes(), before, "it costs none");
    lab.reopen();
    SECONDS.set(500);
    drop(lab.pool.volume("v").unwrap());
    assert_eq!((lab.find("v").last_used, lab.find("v").created_by.as_str()), (160, "test"), "nothing was written");
    lab.create("w");
    let volume = lab.pool.volume("v").unwrap();
    SECONDS.set(600);
    drop(volume);
    lab.reopen();
    assert_eq!(lab.find("v").last_used, 600);
}

#[test]
fn leases_end_by_what_the_caller_says() {
    let lab = lab();
    let leases = [Lease::Connection(4), Lease::Process { pid: 7, start: 8, boot: [9; 16] }];
    for (name, lease) in ["c", "p"].into_iter().zip(leases) {
        let extension = ExtensionChanges::default().with_lease(Some(Some(lease)));
        let options = CreateOptions::new(MIB, 1).with_extension(extension);
        lab.tasks.run(lab.pool.create_all(&[name], &options)).unwrap();
    }
    assert_eq!((lab.find("c").lease.as_str(), lab.find("p").lease.as_str()), ("connection", "7"));
    assert_eq!(lab.pool.leases().into_iter().collect::<Vec<_>>(), leases);
    let gone = lab.tasks.run(lab.pool.delete_expired(u64::MAX, |lease| *lease == leases[1])).unwrap();
    assert_eq!((gone.len(), gone[0].name.as_str(), gone[0].lease), (1, "p", Some(leases[1])));
    let kept = Changes::default().with_extension(ExtensionChanges::default().with_lease(Some(None)));
    lab.tasks.run(lab.pool.set("c", &kept)).unwrap();
    assert!(lab.pool.leases().is_empty());
}

#[test]
fn many_expire_with_one_write_of_the_journal() {
    let lab = lab();
    let names: Vec<String> = (0..500).map(|i| format!("v{i}")).collect();
    let extension = ExtensionChanges::default().with_expires(10);
    let options = CreateOptions::new(MIB, 1).with_extension(extension);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    lab.tasks.run(lab.pool.create_all(&names, &options)).unwrap();
    let of_snapshots = ExtensionChanges::default().with_expires(10);
    let taken = lab.pool.snapshot_extended(&[("v0", "s"), ("v1", "s")], SnapshotFlags::NONE, &of_snapshots, 1);
    assert!(lab.tasks.run(taken).unwrap().iter().all(|info| info.expires == 10));
    let before = lab.pool.statistics();
    assert_eq!(lab.delete_expired(10).len(), 502);
    let after = lab.pool.statistics();
    assert!(after.journal.count - before.journal.count <= 1, "{before:?} {after:?}");
    lab.tasks.run(lab.pool.wait_freed()).unwrap();
    assert!(lab.tasks.run(lab.pool.check()).unwrap().damage.is_empty());
}
