//! Hard links: names of one file, their snapshots, forks and verbs.

use forkdisk::device::Buf;
use forkdisk::{
    Changes, CreateOptions, ErrorKind, ExtensionChanges, ForkOptions, MAX_HARD_LINKS, SnapshotFlags, VolumeId,
};

use crate::{Lab, MIB, lab};

impl Lab {
    /// Creates a file that begins with this byte, under all of these names.
    pub fn create(&self, names: &[&str], byte: u8) -> VolumeId {
        let id = self.tasks.run(self.pool.create(names[0], &CreateOptions::new(MIB, 1))).unwrap().id;
        self.write(names[0], byte);
        names[1..].iter().for_each(|name| self.pool.link_file(id, name).unwrap());
        id
    }

    fn write(&self, name: &str, byte: u8) {
        let volume = self.pool.volume(name).unwrap();
        self.tasks.run(volume.write(0, Buf::copy_of(&[byte; 4096]), false)).0.unwrap();
    }

    fn read(&self, name: &str) -> u8 {
        let volume = self.pool.volume(name).unwrap();
        let (read, buf) = self.tasks.run(volume.read(0, Buf::zeroed(1)));
        read.unwrap();
        buf[0]
    }

    /// The other names of a file.
    fn others(&self, name: &str) -> Vec<String> {
        self.pool.find(name).unwrap().hard_links
    }

    fn names(&self) -> Vec<String> {
        self.pool.names_after("", 1000)
    }

    fn id(&self, name: &str) -> VolumeId {
        self.pool.find(name).unwrap().id
    }
}

#[test]
fn a_file_stays_until_its_last_name_is_removed() {
    let mut lab = lab();
    let id = lab.create(&["a", "f/b", "c"], 1);
    lab.write("f/b", 2);
    assert_eq!(
        (lab.read("a"), lab.others("a"), lab.others("c")),
        (2, vec!["c".into(), "f/b".into()], vec!["a".into(), "f/b".into()])
    );
    assert_eq!(lab.pool.list().len(), 1, "one volume");
    lab.pool.remove_file("a").unwrap();
    lab.reopen();
    assert_eq!((lab.names(), lab.id("c"), lab.read("f/b")), (vec!["c".into(), "f/b".into()], id, 2));
    lab.pool.remove_file("c").unwrap();
    lab.crash();
    assert_eq!((lab.names(), lab.others("f/b").len(), lab.read("f/b")), (vec!["f/b".into()], 0, 2));
    let held = lab.pool.volume("f/b").unwrap();
    lab.pool.remove_file("f/b").unwrap();
    assert_eq!((lab.names().len(), held.info().hard_links.len()), (0, 0));
    drop(held);
    lab.check();
    lab.reopen();
    assert_eq!((lab.pool.list().len(), lab.features() & 512), (0, 0), "older versions open it again");
}

#[test]
fn renames_concern_one_name_and_do_nothing_between_names_of_one_file() {
    let mut lab = lab();
    let (first, second) = (lab.create(&["a", "b"], 1), lab.create(&["c", "d"], 2));
    lab.pool.rename_file("a", "b", true).unwrap();
    assert_eq!(lab.names(), ["a", "b", "c", "d"]);
    assert_eq!(lab.pool.rename_file("a", "b", false).unwrap_err().kind(), ErrorKind::Exists);
    lab.pool.rename_file("b", "f/e", true).unwrap();
    lab.pool.rename_folder("f", "g").unwrap();
    assert_eq!((lab.others("a"), lab.id("g/e")), (vec!["g/e".to_string()], first));
    // Over a further name, and over the own name of a file that has another.
    lab.pool.rename_file("g/e", "d", true).unwrap();
    assert_eq!((lab.read("d"), lab.read("c"), lab.others("c").len()), (1, 2, 0));
    lab.pool.link_file(second, "x").unwrap();
    lab.pool.rename_file("d", "c", true).unwrap();
    lab.crash();
    assert_eq!((lab.names(), lab.id("c"), lab.id("x")), (vec!["a".into(), "c".into(), "x".into()], first, second));
    lab.pool.swap_files("a", "x").unwrap();
    assert_eq!((lab.read("a"), lab.read("x"), lab.others("x")), (2, 1, vec!["c".to_string()]));
    lab.tasks.run(lab.pool.rename("x", "y")).unwrap();
    assert_eq!((lab.others("c"), lab.id("y")), (vec!["y".to_string()], first));
    lab.check();
}

#[test]
fn a_snapshot_of_a_folder_shows_a_file_under_all_names_that_it_had() {
    let mut lab = lab();
    lab.create(&["f/a", "f/b", "outside"], 1);
    let taken = lab.pool.snapshot_folder("f", "s", SnapshotFlags::NONE, 1);
    assert_eq!(lab.tasks.run(taken).unwrap().len(), 2);
    lab.write("outside", 2);
    assert_eq!((lab.read("f/a@s"), lab.read("f/b@s"), lab.read("f/a")), (1, 1, 2));
    assert_eq!(lab.pool.remove_file("f/b").unwrap_err().kind(), ErrorKind::Busy, "a mount keeps its snapshots first");
    for name in ["f/b", "f/a"] {
        lab.pool.keep_snapshots(name, 1).unwrap();
        lab.pool.remove_file(name).unwrap();
    }
    lab.crash();
    assert_eq!((lab.read("f/a@s"), lab.read("f/b@s"), lab.read("outside")), (1, 1, 2));
    let children = lab.pool.children_of_snapshot("f", "s");
    assert_eq!(children.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    lab.pool.remove_snapshots_in("f", "s").unwrap();
    lab.check();
    assert_eq!(lab.pool.list().len(), 1);
}

#[test]
fn a_snapshot_belongs_to_the_name_under_which_it_was_taken() {
    let mut lab = lab();
    let id = lab.create(&["a", "b"], 1);
    lab.tasks.run(lab.pool.snapshot(&[("b", "s")], 1)).unwrap();
    lab.write("a", 2);
    assert!(lab.pool.find("a@s").is_err() && lab.names() == ["a", "b", "b@s"]);
    lab.tasks.run(lab.pool.clone_volume("b@s", "c", 1)).unwrap();
    assert_eq!(lab.pool.line_of(lab.id("c"), 9), ["c", "a"]);
    // The file takes the name, and its snapshots with it.
    lab.tasks.run(lab.pool.delete(&["a"])).unwrap();
    lab.crash();
    assert_eq!((lab.id("b"), lab.read("b"), lab.read("b@s"), lab.read("c")), (id, 2, 1, 1));
    lab.tasks.run(lab.pool.rollback("b", "s")).unwrap();
    assert_eq!(lab.read("b"), 1);
    lab.tasks.run(lab.pool.delete(&["b@s", "b", "c"])).unwrap();
    lab.check();
}

#[test]
fn a_name_is_deleted_with_its_snapshots_while_another_keeps_its_own() {
    let mut lab = lab();
    lab.create(&["a", "b"], 1);
    lab.tasks.run(lab.pool.snapshot(&[("a", "s")], 1)).unwrap();
    lab.write("b", 2);
    lab.tasks.run(lab.pool.snapshot(&[("b", "s")], 1)).unwrap();
    lab.write("b", 3);
    lab.tasks.run(lab.pool.delete(&["a", "a@s"])).unwrap();
    lab.crash();
    assert_eq!((lab.names(), lab.read("b"), lab.read("b@s")), (vec!["b".into(), "b@s".into()], 3, 2));
    lab.tasks.run(lab.pool.delete(&["b", "b@s"])).unwrap();
    lab.check();
    assert!(lab.names().is_empty());
}

#[test]
fn a_fork_of_a_folder_has_links_where_the_folder_has_them() {
    let mut lab = lab();
    lab.create(&["f/a", "f/b", "f/in/c", "outside"], 1);
    lab.create(&["before", "f/d"], 3);
    lab.tasks.run(lab.pool.snapshot_folder("f", "s", SnapshotFlags::NONE, 1)).unwrap();
    lab.write("f/a", 2);
    lab.tasks.run(lab.pool.fork("f", &["live/1", "live/2"], &ForkOptions::new(1))).unwrap();
    lab.tasks.run(lab.pool.fork("f@s", &["kept"], &ForkOptions::new(1))).unwrap();
    lab.crash();
    for (fork, byte) in [("live/1", 2), ("live/2", 2), ("kept", 1)] {
        let name = |short: &str| format!("{fork}/{short}");
        assert_eq!(lab.others(&name("in/c")), [name("a"), name("b")], "{fork}");
        assert_eq!((lab.read(&name("b")), lab.others(&name("d")).len(), lab.read(&name("d"))), (byte, 0, 3));
        lab.write(&name("in/c"), 9);
        assert_eq!((lab.read(&name("a")), lab.read("f/a")), (9, 2));
    }
    let rolled = lab.tasks.run(lab.pool.rollback_folder("f", "s")).unwrap();
    assert_eq!((rolled, lab.read("outside")), (vec!["f/a".to_string(), "f/d".to_string()], 1));
    lab.check();
}

#[test]
fn verbs_find_a_file_by_any_name_and_delete_names() {
    let mut lab = lab();
    let id = lab.create(&["a", "b", "c"], 1);
    assert_eq!((lab.pool.find("b").unwrap().name, lab.pool.find("b").unwrap().id), ("b".into(), id));
    lab.tasks.run(lab.pool.resize("b", 2 * MIB)).unwrap();
    lab.tasks.run(lab.pool.clone_volume("c", "copy", 1)).unwrap();
    assert_eq!((lab.pool.find("a").unwrap().size, lab.read("copy"), lab.others("copy").len()), (2 * MIB, 1, 0));
    assert_eq!(lab.tasks.run(lab.pool.freed_by(&["a", "b"])).unwrap(), 0, "one name is left");
    lab.tasks.run(lab.pool.delete(&["a", "copy"])).unwrap();
    lab.tasks.run(lab.pool.wait_freed()).unwrap();
    assert!(lab.tasks.run(lab.pool.freed_by(&["c", "b"])).unwrap() > 0);
    assert_eq!((lab.names(), lab.read("c")), (vec!["b".into(), "c".into()], 1));
    lab.tasks.run(lab.pool.delete(&["b", "c"])).unwrap();
    lab.reopen();
    assert_eq!((lab.names().len(), lab.pool.list().len()), (0, 0));
    lab.check();
}

#[test]
fn a_file_that_expires_goes_with_all_names_unless_one_has_a_snapshot() {
    let lab = lab();
    lab.create(&["a", "b"], 1);
    let extension = ExtensionChanges::default().with_expires(5);
    lab.tasks.run(lab.pool.set("b", &Changes::default().with_extension(extension))).unwrap();
    lab.tasks.run(lab.pool.snapshot(&[("b", "s")], 1)).unwrap();
    assert!(lab.tasks.run(lab.pool.delete_expired(9, |_| false)).unwrap().is_empty());
    lab.tasks.run(lab.pool.delete(&["b@s"])).unwrap();
    assert_eq!(lab.tasks.run(lab.pool.delete_expired(9, |_| false)).unwrap().len(), 1);
    assert!(lab.names().is_empty());
    lab.check();
}

#[test]
fn only_files_have_further_names_and_no_more_than_there_can_be() {
    let lab = lab();
    let id = lab.create(&["a"], 1);
    lab.tasks.run(lab.pool.snapshot(&[("a", "s")], 1)).unwrap();
    let refused = |id: VolumeId, name: &str| lab.pool.link_file(id, name).unwrap_err().kind();
    assert_eq!(
        (refused(lab.id("a@s"), "b"), refused(id, "a"), refused(VolumeId(99), "b")),
        (ErrorKind::Invalid, ErrorKind::Exists, ErrorKind::NotFound)
    );
    assert_eq!(refused(id, "a/b"), ErrorKind::Exists);
    (1..MAX_HARD_LINKS).for_each(|i| lab.pool.link_file(id, &format!("n/{i}")).unwrap());
    assert_eq!(refused(id, "one-more"), ErrorKind::Invalid);
    assert_eq!(lab.others("a").len(), MAX_HARD_LINKS - 1);
}

#[test]
fn a_file_that_is_left_with_a_name_in_another_folder_counts_there() {
    let lab = lab();
    lab.create(&["in/a", "out/b"], 1);
    let bound = ExtensionChanges::default().with_diverge(64 << 10);
    for folder in ["in", "out"] {
        let changes = Changes::default().with_quota(128 << 10).with_extension(bound.clone());
        lab.tasks.run(lab.pool.set(folder, &changes)).unwrap();
    }
    let counts = || ["in", "out"].map(|folder| lab.pool.find_folder(folder).unwrap().referenced);
    assert_eq!(counts(), [4096, 0], "it counts by its own name");
    lab.pool.remove_file("in/a").unwrap();
    assert_eq!(counts(), [0, 4096]);
    let volume = lab.pool.volume("out/b").unwrap();
    let write = |at: u64| lab.tasks.run(volume.write(at, Buf::copy_of(&[2; 4096]), false)).0;
    let written = (1..64).take_while(|page| write(page * 4096).is_ok()).count();
    assert_eq!(written, 16, "the bound of the folder that it is in now");
    drop(volume);
    lab.check();
}
