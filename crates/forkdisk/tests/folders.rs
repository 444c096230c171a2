//! Verbs of folders: what is in one, and what is refused.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::Buf;
use forkdisk::testing::{DelayingDevice, Inline, MemoryDevice};
use forkdisk::{
    Attributes, BreakPolicy, Changes, Child, CloneProperty, CreateOptions, ErrorKind, ExtensionChanges, FileKind,
    ForkOptions, FormatOptions, GatherPolicy, OpenOptions, OriginPlace, Pool, ProtectOptions, SnapshotFlags,
    VolumeKind,
};

const MIB: u64 = 1 << 20;
const PLAIN: SnapshotFlags = SnapshotFlags::NONE;

struct Lab {
    tasks: Inline,
    pool: Pool<MemoryDevice>,
}

/// A pool with the volumes `vm/disk`, `vm/state/memory` and `other`, each with one page of 1.
fn lab() -> Lab {
    let (tasks, device) = (Inline::new(), MemoryDevice::new(64 * MIB));
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [1; 16], 0))).unwrap();
    let pool = tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
    let lab = Lab { tasks, pool };
    for name in ["vm/disk", "vm/state/memory", "other"] {
        lab.tasks.run(lab.pool.create(name, &CreateOptions::new(MIB, 7))).unwrap();
        lab.fill(name, 1);
    }
    lab
}

impl Lab {
    fn fill(&self, name: &str, value: u8) {
        let volume = self.pool.volume(name).unwrap();
        self.tasks.run(volume.write(0, Buf::copy_of(&[value; 4096]), false)).0.unwrap();
    }

    fn first(&self, name: &str) -> u8 {
        let volume = self.pool.volume(name).unwrap();
        let (read, buf) = self.tasks.run(volume.read(0, Buf::zeroed(4096)));
        read.unwrap();
        buf[0]
    }

    fn names(&self) -> Vec<String> {
        self.pool.list().into_iter().map(|v| v.name).collect()
    }

    fn fork(&self, source: &str, names: &[&str]) -> forkdisk::Result<Vec<String>> {
        let made = self.tasks.run(self.pool.fork(source, names, &ForkOptions::new(8)))?;
        Ok(made.into_iter().map(|v| v.name).collect())
    }

    fn snapshot(&self, folder: &str, name: &str) -> forkdisk::Result<Vec<String>> {
        let made = self.tasks.run(self.pool.snapshot_folder(folder, name, PLAIN, 8))?;
        Ok(made.into_iter().map(|v| v.name).collect())
    }

    fn check(&self) {
        let report = self.tasks.run(self.pool.check()).unwrap();
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    }
}

#[test]
fn a_fork_has_everything_that_is_in_the_folder_and_its_attributes() {
    let lab = lab();
    let attributes = |mode, uid| Attributes { mode, uid, gid: uid, ..Attributes::of_no_owner(3) };
    lab.pool.set_folder_attributes("vm", attributes(0o750, 4), 3).unwrap();
    lab.pool.create_folder("vm/empty", attributes(0o700, 5), 3).unwrap();
    lab.tasks.run(lab.pool.flush()).unwrap();
    let made = lab.fork("vm", &["kids/1", "kids/2"]).unwrap();
    assert_eq!(made, ["kids/1/disk", "kids/1/state/memory", "kids/2/disk", "kids/2/state/memory"]);
    lab.fill("vm/disk", 2);
    assert_eq!(["vm/disk", "kids/1/disk", "kids/2/state/memory"].map(|name| lab.first(name)), [2, 1, 1]);
    for (folder, mode, uid) in [("kids/2", 0o750, 4), ("kids/2/empty", 0o700, 5)] {
        let Ok(Child::Folder(Some(found), _)) = lab.pool.child(folder) else { panic!("{folder} has attributes") };
        assert_eq!((found.mode, found.uid), (mode, uid), "{folder}");
    }
    assert!(matches!(lab.pool.child("kids/1/state"), Ok(Child::Folder(None, 0))));
    // Of a volume and of a snapshot, with other properties and another owner.
    lab.snapshot("vm", "s").unwrap();
    let changes = Changes::default().with_quota(2 * MIB).with_chunk(128 << 10);
    let options = ForkOptions::new(9).with_changes(changes).with_uid(6).with_gid(7).with_mode(0o600);
    let made = lab.tasks.run(lab.pool.fork("vm/disk@s", &["a", "b/c"], &options)).unwrap();
    for v in &made {
        let attributes = v.attributes.unwrap();
        assert_eq!((v.quota, v.chunk, v.origin.as_str()), (2 * MIB, 128 << 10, "vm/disk@s"));
        assert_eq!((attributes.mode, attributes.uid, attributes.gid), (0o600, 6, 7));
    }
    let made = lab.tasks.run(lab.pool.fork("vm", &["owned"], &ForkOptions::new(9).with_uid(8).with_gid(9))).unwrap();
    assert!(made.iter().all(|v| v.attributes.is_some_and(|a| (a.mode, a.uid, a.gid) == (0o644, 8, 9))));
    let Ok(Child::Folder(Some(found), _)) = lab.pool.child("owned/empty") else { panic!("it has attributes") };
    assert_eq!((found.mode, found.uid), (0o700, 8));
    lab.check();
}

#[test]
fn a_snapshot_of_a_folder_is_forked_and_rolled_back_without_what_came_later() {
    let lab = lab();
    assert_eq!(lab.snapshot("vm", "s").unwrap(), ["vm/disk@s", "vm/state/memory@s"]);
    lab.fill("vm/disk", 2);
    lab.fill("vm/state/memory", 2);
    lab.tasks.run(lab.pool.create("vm/later", &CreateOptions::new(MIB, 9))).unwrap();
    lab.fill("vm/later", 3);
    assert_eq!(lab.fork("vm@s", &["f"]).unwrap(), ["f/disk", "f/state/memory"]);
    assert_eq!((lab.first("f/disk"), lab.first("f/state/memory")), (1, 1));
    let rolled = lab.tasks.run(lab.pool.rollback_folder("vm", "s")).unwrap();
    assert_eq!(rolled, ["vm/disk", "vm/state/memory"]);
    assert_eq!(["vm/disk", "vm/state/memory", "vm/later"].map(|name| lab.first(name)), [1, 1, 3]);
    lab.tasks.run(lab.pool.wait_freed()).unwrap();
    lab.check();
    // The root is a folder as well.
    assert_eq!(lab.snapshot("", "all").unwrap().len(), 6);
}

#[test]
fn a_folder_goes_back_under_open_handles_and_requests_in_flight() {
    let lab = lab();
    lab.snapshot("vm", "s").unwrap();
    let volumes = ["vm/disk", "vm/state/memory"].map(|name| Rc::new(lab.pool.volume(name).unwrap()));
    for value in 2..40 {
        let write = |volume: &Rc<forkdisk::Volume<MemoryDevice>>| {
            let volume = volume.clone();
            lab.tasks.start(async move { volume.write(0, Buf::copy_of(&[value; 8192]), false).await.0 })
        };
        let running = [0, 1, 0, 1].map(|i| write(&volumes[i]));
        if value % 2 == 0 {
            lab.tasks.run_until_idle();
        }
        assert_eq!(lab.tasks.run(lab.pool.rollback_folder_live("vm", "s")).unwrap(), ["vm/disk", "vm/state/memory"]);
        running.into_iter().for_each(|running| lab.tasks.run(running).unwrap());
        // Writes that came in time are undone, the others follow the rollback: in whole.
        for volume in &volumes {
            let found = lab.tasks.run(volume.read(0, Buf::zeroed(8192))).1.to_vec();
            let clean = [[1; 4096], [0; 4096]].concat();
            assert!(found == clean || found == [value; 8192], "{value}: {} {}", found[0], found[4096]);
        }
    }
    lab.tasks.run(lab.pool.rollback_folder_live("vm", "s")).unwrap();
    assert_eq!(["vm/disk", "vm/state/memory", "other"].map(|name| lab.first(name)), [1, 1, 1]);
    drop(volumes);
    lab.tasks.run(lab.pool.wait_freed()).unwrap();
    lab.check();
}

#[test]
fn a_folder_goes_back_when_the_requests_of_all_its_volumes_have_ended() {
    let (tasks, memory) = (Inline::new(), MemoryDevice::new(64 * MIB));
    tasks.run(Pool::format(&memory, &FormatOptions::new(64 * MIB, [1; 16], 0))).unwrap();
    let device = DelayingDevice::new(memory, Rc::new(tasks.clone()), Duration::from_millis(1));
    let pool = Rc::new(tasks.run(Pool::open(device, Rc::new(tasks.clone()), OpenOptions::default())).unwrap());
    let open = |name| {
        tasks.run(pool.create(name, &CreateOptions::new(MIB, 7))).unwrap();
        Rc::new(pool.volume(name).unwrap())
    };
    let volumes = ["vm/a", "vm/b"].map(open);
    tasks.run(pool.snapshot_folder("vm", "s", PLAIN, 8)).unwrap();
    let write = |volume: &Rc<forkdisk::Volume<_>>| {
        let volume = volume.clone();
        tasks.start(async move { volume.write(0, Buf::copy_of(&[2; 4096]), false).await.0 })
    };
    tasks.run(write(&volumes[0])).unwrap();
    let running = write(&volumes[1]);
    let rolled = pool.clone();
    let rolled = tasks.start(async move { rolled.rollback_folder_live("vm", "s").await });
    let later = write(&volumes[0]);
    tasks.run_until_idle();
    assert_eq!(volumes[0].info().referenced, 4096, "a write of the other volume is in flight");
    assert!(tasks.run(running).is_ok() && tasks.run(rolled).is_ok() && tasks.run(later).is_ok());
    assert_eq!(volumes.map(|volume| volume.info().referenced), [4096, 0], "what came meanwhile follows");
}

#[test]
fn what_cannot_be_done_to_all_of_a_folder_is_done_to_nothing() {
    let lab = lab();
    lab.snapshot("vm", "s").unwrap();
    lab.fill("vm/disk", 2);
    let before = lab.names();
    let refused = |error: forkdisk::Error, kind, text: &str| {
        assert!(error.kind() == kind && error.to_string().contains(text), "{error}");
        assert_eq!(lab.names(), before);
    };
    refused(lab.snapshot("vm", "s").unwrap_err(), ErrorKind::Exists, "\"vm/disk@s\" exists already");
    refused(lab.snapshot("nothing", "t").unwrap_err(), ErrorKind::NotFound, "no folder \"nothing\"");
    refused(lab.snapshot("other", "t").unwrap_err(), ErrorKind::Invalid, "\"other\" is a volume, not a folder");
    refused(lab.fork("vm", &["vm"]).unwrap_err(), ErrorKind::Exists, "\"vm\" is a folder");
    refused(lab.fork("vm", &["other"]).unwrap_err(), ErrorKind::Exists, "which is a volume");
    refused(lab.fork("vm", &["a", "a"]).unwrap_err(), ErrorKind::Exists, "named twice");
    refused(lab.fork("vm", &["a", "a/disk"]).unwrap_err(), ErrorKind::Exists, "");
    refused(lab.fork("vm/disk", &["vm/state"]).unwrap_err(), ErrorKind::Exists, "is a folder");
    refused(lab.fork("vm", &["a@b"]).unwrap_err(), ErrorKind::Invalid, "bad name");
    refused(lab.fork("vm@none", &["a"]).unwrap_err(), ErrorKind::NotFound, "has a snapshot \"none\"");
    refused(lab.fork("none@s", &["a"]).unwrap_err(), ErrorKind::NotFound, "none");
    refused(lab.fork("", &["a"]).unwrap_err(), ErrorKind::NotFound, "");
    let options = ForkOptions::new(8).with_changes(Changes::default().with_copy_ahead(0));
    let origins_only = lab.tasks.run(lab.pool.fork("vm", &["a"], &options)).unwrap_err();
    refused(origins_only, ErrorKind::Invalid, "properties of origins");
    let options = ForkOptions::new(8).with_mode(0o10000);
    refused(lab.tasks.run(lab.pool.fork("vm", &["a"], &options)).unwrap_err(), ErrorKind::Invalid, "mode");
    let roll_back = |folder, name| lab.tasks.run(lab.pool.rollback_folder(folder, name));
    refused(roll_back("vm", "none").unwrap_err(), ErrorKind::NotFound, "has a snapshot \"none\"");
    refused(roll_back("other", "s").unwrap_err(), ErrorKind::Invalid, "not a folder");
    let open = lab.pool.volume("vm/state/memory").unwrap();
    refused(roll_back("vm", "s").unwrap_err(), ErrorKind::Busy, "\"vm/state/memory\" is in use");
    assert_eq!(lab.first("vm/disk"), 2, "not rolled back either");
    drop(open);
    roll_back("vm", "s").unwrap();
    assert_eq!(lab.first("vm/disk"), 1);
}

#[test]
fn an_origin_in_a_folder_is_kept_and_forked_by_its_snapshots_and_rolled_back_alone() {
    let lab = lab();
    let disk = MemoryDevice::new(8 * MIB);
    let options = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1);
    lab.tasks.run(lab.pool.protect("vm/origin", disk, &options)).unwrap();
    let refused = lab.fork("vm", &["a"]).unwrap_err();
    assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("\"vm/origin\" is an origin"));
    assert_eq!(lab.snapshot("vm", "s").unwrap().len(), 3);
    assert_eq!(lab.fork("vm@s", &["a"]).unwrap(), ["a/disk", "a/origin", "a/state/memory"]);
    let refused = lab.tasks.run(lab.pool.rollback_folder("vm", "s")).unwrap_err();
    assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("rolled back alone"), "{refused}");
    lab.check();
}

#[test]
fn a_volume_goes_back_to_any_other_one_and_keeps_what_is_its_own() {
    let lab = lab();
    lab.snapshot("vm", "s").unwrap();
    lab.fork("vm@s", &["f", "g"]).unwrap();
    lab.tasks.run(lab.pool.set("f/disk", &Changes::default().with_quota(8 * MIB).with_chunk(8192))).unwrap();
    lab.tasks.run(lab.pool.snapshot(&[("f/disk", "own")], 9)).unwrap();
    lab.fill("g/disk", 5);
    lab.tasks.run(lab.pool.resize("g/disk", 2 * MIB)).unwrap();
    let id = lab.pool.find("f/disk").unwrap().id;
    let back = |to: &str| lab.tasks.run(lab.pool.rollback_to("f/disk", to));
    for (to, size, value) in [("g/disk", 2 * MIB, 5), ("vm/disk@s", MIB, 1), ("g/disk", 2 * MIB, 5), ("other", MIB, 1)]
    {
        back(to).unwrap();
        let found = lab.pool.find("f/disk").unwrap();
        assert_eq!((found.id, found.size, lab.first("f/disk")), (id, size, value), "{to}");
        assert_eq!((found.quota, found.chunk, found.origin.as_str()), (8 * MIB, 8192, "vm/disk@s"));
    }
    // Both can be written, and neither sees the other's writes.
    back("g/disk").unwrap();
    lab.fill("g/disk", 6);
    assert_eq!((lab.first("f/disk"), lab.first("g/disk")), (5, 6));
    lab.fill("f/disk", 7);
    assert_eq!((lab.first("f/disk"), lab.first("g/disk"), lab.first("f/disk@own")), (7, 6, 1));
    let refused = |to: &str, kind, text: &str| {
        let error = back(to).unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(text), "{error}");
    };
    refused("f/disk", ErrorKind::Invalid, "is the volume itself");
    refused("f", ErrorKind::NotFound, "\"f\" is a folder, not a volume");
    refused("none", ErrorKind::NotFound, "none");
    let open = lab.pool.volume("g/disk").unwrap();
    back("g/disk").unwrap();
    drop(open);
    let open = lab.pool.volume("f/disk").unwrap();
    refused("g/disk", ErrorKind::Busy, "in use");
    drop(open);
    lab.tasks.run(lab.pool.wait_freed()).unwrap();
    lab.check();
}

#[test]
fn volumes_and_folders_exchange_their_names_with_everything_in_them() {
    let lab = lab();
    lab.snapshot("vm", "s").unwrap();
    lab.fork("vm", &["kids/1"]).unwrap();
    lab.fill("kids/1/disk", 2);
    lab.fill("other", 3);
    let swap = |a: &str, b: &str| lab.tasks.run(lab.pool.swap(a, b));
    let open = lab.pool.volume("vm/disk").unwrap();
    swap("vm", "kids/1").unwrap();
    assert_eq!(["vm/disk", "kids/1/disk", "kids/1/disk@s"].map(|name| lab.first(name)), [2, 1, 1]);
    assert_eq!(open.info().name, "kids/1/disk", "a handle goes with its volume");
    assert!(lab.pool.find("vm/disk@s").is_err());
    // A volume and a folder, and back.
    swap("other", "vm").unwrap();
    assert_eq!(["vm", "other/disk", "other/state/memory"].map(|name| lab.first(name)), [3, 2, 1]);
    swap("other", "vm").unwrap();
    swap("other", "vm/disk").unwrap();
    assert_eq!(["other", "vm/disk"].map(|name| lab.first(name)), [2, 3]);
    let before = lab.names();
    for (a, b, kind, text) in [
        ("vm", "none", ErrorKind::NotFound, "none"),
        ("vm", "vm", ErrorKind::Invalid, "are one"),
        ("vm", "vm/disk", ErrorKind::Invalid, "lies within the other"),
        ("kids/1/disk@s", "vm", ErrorKind::Invalid, "is no volume or folder"),
        ("", "vm", ErrorKind::Invalid, "is no volume or folder"),
    ] {
        let error = swap(a, b).unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(text), "{error}");
    }
    let long = "l".repeat(200);
    lab.tasks.run(lab.pool.create(&format!("{long}/x"), &CreateOptions::new(MIB, 9))).unwrap();
    lab.tasks.run(lab.pool.create(&format!("m/{}", "y".repeat(100)), &CreateOptions::new(MIB, 9))).unwrap();
    let error = swap(&long, "m").unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("longer than 255 bytes"), "{error}");
    assert_eq!(lab.names().len(), before.len() + 2);
    lab.check();
}

#[test]
fn links_and_special_files_are_kept_and_forked_and_are_no_disks() {
    let lab = lab();
    let attributes = Attributes { mode: 0o640, ..Attributes::of_no_owner(3) };
    lab.tasks.run(lab.pool.create_link("vm/link", b"disk", attributes, 3)).unwrap();
    for (name, kind) in [("vm/fifo", FileKind::Fifo), ("vm/api.sock", FileKind::Socket)] {
        lab.pool.create_special(name, kind, attributes, 3).unwrap();
    }
    lab.pool.set_attributes(lab.pool.find("vm/fifo").unwrap().id, Attributes { mode: 0o600, ..attributes }).unwrap();
    lab.snapshot("vm", "s").unwrap();
    lab.fork("vm", &["a"]).unwrap();
    let options = ForkOptions::new(8).with_mode(0o600);
    lab.tasks.run(lab.pool.fork("vm@s", &["b"], &options)).unwrap();
    for folder in ["vm", "a", "b"] {
        let kinds: Vec<(String, FileKind)> = lab.pool.children(folder);
        let kind = |name: &str| kinds.iter().find(|(found, _)| found == name).unwrap().1;
        assert_eq!(
            ["link", "fifo", "api.sock", "disk", "state"].map(kind),
            [FileKind::Link, FileKind::Fifo, FileKind::Socket, FileKind::File, FileKind::Folder]
        );
        let link = lab.pool.find(&format!("{folder}/link")).unwrap();
        assert_eq!((link.kind, link.attributes.unwrap().mode & 0o7777), (VolumeKind::Link, 0o640));
        assert_eq!(lab.tasks.run(lab.pool.read_link(link.id)).unwrap(), b"disk");
        for name in ["link", "fifo", "api.sock"] {
            let error = lab.pool.volume(&format!("{folder}/{name}")).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
    }
    assert_eq!(lab.pool.volume("vm/link@s").err().unwrap().kind(), ErrorKind::Invalid);
    let link = lab.pool.find("vm/link@s").unwrap();
    assert_eq!(lab.tasks.run(lab.pool.read_link(link.id)).unwrap(), b"disk");
    let refused = lab.tasks.run(lab.pool.rollback_to("vm/disk", "vm/link")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    for bad in [&b""[..], &[b'x'; 4096]] {
        let refused = lab.tasks.run(lab.pool.create_link("vm/bad", bad, attributes, 3)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    }
    lab.check();
}

#[test]
fn a_folder_that_was_removed_or_replaced_is_forked_from_its_snapshot() {
    let lab = lab();
    lab.snapshot("vm", "s").unwrap();
    let remove = |name: &str| {
        lab.pool.keep_snapshots(name, 9).unwrap();
        lab.pool.remove_file(name).unwrap();
    };
    // A folder in the place of a file.
    remove("vm/disk");
    lab.pool.create_folder("vm/disk", Attributes::of_no_owner(9), 9).unwrap();
    lab.fork("vm@s", &["a"]).unwrap();
    assert_eq!(lab.first("a/disk"), 1);
    // Another folder of this name, with a snapshot of the same name.
    remove("vm/state/memory");
    lab.tasks.run(lab.pool.create("new/memory", &CreateOptions::new(MIB, 7))).unwrap();
    lab.snapshot("new", "s").unwrap();
    lab.pool.rename_folder("new", "vm/state").unwrap();
    lab.fork("vm@s", &["b"]).unwrap();
    assert_eq!(lab.first("b/state/memory"), lab.first("vm/state/memory@s"));
    // Nothing is left of the folder.
    remove("vm/state/memory");
    lab.pool.remove_folder("vm/disk").unwrap();
    let rest: Vec<String> = lab.names().into_iter().filter(|n| n.starts_with("vm/") && !n.contains('@')).collect();
    rest.iter().for_each(|name| remove(name));
    let _ = lab.pool.remove_folder("vm");
    assert!(lab.pool.volumes_in("vm").unwrap().is_empty());
    lab.fork("vm@s", &["c"]).unwrap();
    assert_eq!(lab.first("c/disk"), 1);
    assert_eq!(lab.fork("vm@other", &["d"]).unwrap_err().kind(), ErrorKind::NotFound);
    lab.check();
}

#[test]
fn a_folders_snapshot_stays_as_it_was_when_files_are_replaced_renamed_and_removed() {
    let lab = lab();
    lab.snapshot("vm", "s").unwrap();
    lab.fill("vm/disk", 2);
    // As on a mount: `disk` is replaced, `memory` renamed.
    lab.tasks.run(lab.pool.create("vm/new", &CreateOptions::new(MIB, 7))).unwrap();
    for name in ["vm/disk", "vm/state/memory"] {
        lab.pool.keep_snapshots(name, 9).unwrap();
        lab.pool.keep_snapshots(name, 9).unwrap();
    }
    lab.pool.rename_file("vm/new", "vm/disk", true).unwrap();
    lab.pool.rename_file("vm/state/memory", "vm/memory", false).unwrap();
    assert_eq!(lab.first("vm/disk@s"), 1, "of the file that had this name");
    assert!(lab.pool.find("vm/memory@s").is_err());
    let names = |folder: &str| -> Vec<String> {
        lab.pool.children_of_snapshot(folder, "s").into_iter().map(|(name, _)| name).collect()
    };
    assert_eq!((names("vm"), names("vm/state")), (vec!["disk".into(), "state".into()], vec!["memory".into()]));
    lab.fork("vm@s", &["kid"]).unwrap();
    assert_eq!((lab.first("kid/disk"), lab.first("kid/state/memory")), (1, 1));
    assert!(lab.pool.find("kid/memory").is_err());
    // The name is taken, and the folder takes along what it had.
    assert_eq!(lab.tasks.run(lab.pool.snapshot(&[("vm/disk", "s")], 9)).unwrap_err().kind(), ErrorKind::Exists);
    lab.snapshot("vm", "t").unwrap();
    lab.pool.rename_folder("vm", "old").unwrap();
    assert_eq!((lab.first("old/disk@s"), lab.first("old/disk@t")), (1, 0));
    lab.pool.remove_snapshots_in("old", "s").unwrap();
    assert!(!lab.names().iter().any(|name| name.starts_with(".snapshots")), "{:?}", lab.names());
    lab.check();
}

#[test]
fn clones_inherit_from_the_nearest_folder_what_they_are_not_given() {
    let lab = lab();
    let set = |name: &str, all: &[(CloneProperty, Option<u64>)]| {
        let extension = ExtensionChanges::default().with_inherited(all.iter().copied().collect());
        lab.tasks.run(lab.pool.set(name, &Changes::default().with_extension(extension)))
    };
    use CloneProperty::{Break, Chunk, Diverge, Expires, Gather, Quota, Writes, Zeroes};
    // With a slash a folder is made.
    assert_eq!(set("kids", &[(Quota, Some(MIB))]).unwrap_err().kind(), ErrorKind::NotFound);
    let above = [(Quota, Some(2 * MIB)), (Expires, Some(60)), (Diverge, Some(MIB)), (Chunk, Some(128 << 10))];
    set("kids/", &above).unwrap();
    set("kids/deep/", &[(Quota, Some(0)), (Expires, Some(5)), (Writes, Some(1)), (Zeroes, Some(1))]).unwrap();
    set("kids/deep", &[(Gather, Some(20)), (Break, Some(1))]).unwrap();
    lab.fork("other", &["kids/a", "kids/deep/b", "outside"]).unwrap();
    lab.fork("vm", &["kids/vm"]).unwrap();
    let info = |name: &str| lab.pool.find(name).unwrap();
    for name in ["kids/a", "kids/vm/disk", "kids/vm/state/memory"] {
        let found = info(name);
        assert_eq!((found.quota, found.expires, found.diverge, found.chunk), (2 * MIB, 68, MIB, 128 << 10), "{name}");
        assert_eq!((found.writes, found.zeroes, found.gather), Default::default(), "{name}");
    }
    let deep = info("kids/deep/b");
    assert_eq!((deep.quota, deep.expires, deep.diverge, deep.chunk), (0, 13, MIB, 128 << 10));
    let policies = (deep.writes, deep.zeroes, deep.gather, deep.break_policy);
    assert_eq!(
        policies,
        (forkdisk::Writes::Compare, forkdisk::Zeroes::Holes, GatherPolicy::Above(20), BreakPolicy::Copy)
    );
    assert_eq!((info("outside").quota, info("outside").expires), (0, 0));
    // What is given counts, also that there is none.
    let given = Changes::default().with_quota(0).with_extension(ExtensionChanges::default().with_expires(9));
    lab.tasks.run(lab.pool.fork("other", &["kids/given"], &ForkOptions::new(8).with_changes(given))).unwrap();
    assert_eq!((info("kids/given").quota, info("kids/given").expires, info("kids/given").diverge), (0, 9, MIB));
    // New volumes are no clones.
    lab.tasks.run(lab.pool.create("kids/new", &CreateOptions::new(MIB, 9))).unwrap();
    assert_eq!((info("kids/new").quota, info("kids/new").diverge), (0, 0));
    // Removed, the folder above counts; and it stays with its folder.
    set("kids/deep", &[(Expires, None), (Quota, None)]).unwrap();
    lab.pool.rename_folder("kids", "moved").unwrap();
    lab.fork("other", &["moved/deep/c", "kids/d"]).unwrap();
    assert_eq!((info("moved/deep/c").quota, info("moved/deep/c").expires), (2 * MIB, 68));
    assert_eq!((info("kids/d").quota, info("kids/d").expires), (0, 0));
    let found = lab.pool.find_folder("moved/deep").unwrap();
    assert_eq!(found.inherited.into_iter().collect::<Vec<_>>(), [(Break, 1), (Gather, 20), (Writes, 1), (Zeroes, 1)]);
    for (name, bad) in [("moved", (Diverge, Some(100))), ("moved", (Break, Some(2))), ("other", (Quota, Some(MIB)))] {
        assert_eq!(set(name, &[bad]).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
    }
    assert_eq!(set("other/", &[(Quota, Some(MIB))]).unwrap_err().kind(), ErrorKind::Exists);
    lab.check();
}

#[test]
fn what_clones_inherit_outlives_a_crash_and_a_clean_close() {
    let (tasks, device) = (Inline::new(), MemoryDevice::new(64 * MIB));
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [1; 16], 0))).unwrap();
    let open = || tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
    let pool = open();
    tasks.run(pool.create("v", &CreateOptions::new(MIB, 7))).unwrap();
    let inherited = ExtensionChanges::default().with_inherited([(CloneProperty::Quota, Some(MIB))].into());
    tasks.run(pool.set("kids/", &Changes::default().with_extension(inherited))).unwrap();
    drop(pool);
    for (name, closes) in [("kids/a", true), ("kids/b", false)] {
        let pool = open();
        assert_eq!(tasks.run(pool.fork("v", &[name], &ForkOptions::new(8))).unwrap()[0].quota, MIB);
        assert_eq!(pool.folders_with_properties().len(), 1);
        if closes {
            tasks.run(pool.close()).unwrap();
        }
    }
}
