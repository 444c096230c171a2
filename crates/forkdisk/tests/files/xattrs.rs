//! Extended attributes of files: limits, what inherits them, and what older versions see.

use std::collections::BTreeMap;

use forkdisk::{Attributes, Changes, ErrorKind, ExtensionChanges, ForkOptions};

use crate::{Lab, lab};

impl Lab {
    fn xattrs(&self, name: &str) -> BTreeMap<String, Vec<u8>> {
        self.pool.xattrs(self.pool.number_of(name).unwrap())
    }

    fn label(&self, name: &str, value: &str) -> forkdisk::Result<()> {
        let labels = [("k".to_string(), Some(value.to_string()))].into();
        let extension = ExtensionChanges::default().with_labels(labels);
        self.tasks.run(self.pool.set(name, &Changes::default().with_extension(extension)))
    }
}

#[test]
fn attributes_and_labels_share_their_room_to_the_last_byte() {
    let lab = lab();
    let id = lab.create(&["v"], 1);
    let full = |set: forkdisk::Result<()>| set.unwrap_err().kind() == ErrorKind::NoSpace;
    assert!(full(lab.pool.set_xattr(id, "n", Some(&[1; 252]))));
    lab.pool.set_xattr(id, "n", Some(&[1; 251])).unwrap();
    assert!(full(lab.pool.set_xattr(id, "m", Some(b""))));
    lab.pool.set_xattr(id, "n", Some(&[2; 251])).unwrap();
    let refused = lab.label("v", &"x".repeat(60)).unwrap_err();
    assert!(refused.to_string().contains("of which its extended attributes take 256"), "{refused}");
    lab.label("v", &"x".repeat(59)).unwrap();
    lab.pool.set_xattr(id, "n", None).unwrap();
    lab.label("v", &"x".repeat(315)).unwrap();
    assert!(full(lab.pool.set_xattr(id, "n", Some(b""))), "labels leave no room");
    for bad in ["".to_string(), "n".repeat(251)] {
        assert_eq!(lab.pool.set_xattr(id, &bad, Some(b"")).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn a_fork_with_too_many_labels_and_attributes_is_refused() {
    let lab = lab();
    let id = lab.create(&["v"], 1);
    lab.pool.set_xattr(id, "n", Some(&[1; 251])).unwrap();
    let labels = [("k".to_string(), Some("x".repeat(60)))].into();
    let extension = ExtensionChanges::default().with_labels(labels);
    let options = ForkOptions::new(1).with_changes(Changes::default().with_extension(extension));
    let refused = lab.tasks.run(lab.pool.fork("v", &["c"], &options)).unwrap_err();
    assert!(refused.kind() == ErrorKind::Invalid && lab.pool.find("c").is_err(), "{refused}");
}

#[test]
fn snapshots_and_forks_have_the_attributes_of_their_time() {
    let mut lab = lab();
    let attributes = Attributes { mode: 0o755, uid: 1, gid: 1, accessed: 0, modified: 0, changed: 0 };
    lab.pool.create_folder("f", attributes, 1).unwrap();
    let folder = lab.pool.number_of("f").unwrap();
    let id = lab.create(&["f/v"], 1);
    let set = |lab: &Lab, value: &[u8]| {
        lab.pool.set_xattr(folder, "of.folder", Some(value)).unwrap();
        lab.pool.set_xattr(id, "n", Some(value)).unwrap();
    };
    set(&lab, b"old");
    lab.tasks.run(lab.pool.snapshot(&[("f/v", "s")], 1)).unwrap();
    set(&lab, b"new");
    for (source, to) in [("f", "live"), ("f@s", "kept")] {
        lab.tasks.run(lab.pool.fork(source, &[to], &ForkOptions::new(1))).unwrap();
    }
    lab.tasks.run(lab.pool.clone_volume("f/v@s", "c", 1)).unwrap();
    lab.pool.rename_file("f/v", "f/w", false).unwrap();
    lab.reopen();
    let of = |name: &str, key: &str| lab.xattrs(name).remove(key).unwrap();
    for (name, value) in [("f/w", "new"), ("f/w@s", "old"), ("live/v", "new"), ("kept/v", "old"), ("c", "old")] {
        assert_eq!(of(name, "n"), value.as_bytes(), "{name}");
    }
    assert_eq!((of("f", "of.folder"), of("live", "of.folder")), (b"new".to_vec(), b"new".to_vec()));
    let kept = lab.pool.find("f/w@s").unwrap().id;
    assert_eq!(lab.pool.set_xattr(kept, "n", None).unwrap_err().kind(), ErrorKind::ReadOnly);
    assert!(lab.tasks.run(lab.pool.check()).unwrap().damage.is_empty());
}

#[test]
fn older_versions_open_a_pool_again_when_nothing_has_an_attribute() {
    let mut lab = lab();
    let id = lab.create(&["v"], 1);
    lab.label("v", "l").unwrap();
    lab.reopen();
    assert_eq!(lab.features() & 512, 0, "nothing has one");
    lab.pool.set_xattr(id, "n", Some(b"1")).unwrap();
    lab.reopen();
    assert_ne!(lab.features() & 512, 0, "one has it");
    lab.pool.set_xattr(id, "n", None).unwrap();
    lab.reopen();
    assert_eq!((lab.features() & 512, lab.features() & 64), (0, 64));
}
