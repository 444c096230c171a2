//! Names in the model: folders and files that are changed by calls that end at once.
//!
//! Such changes are durable with the next flush, in the order of the calls. So a crash leaves one of the
//! states since the last one known to be durable, and no mixture of them. With memory that outlives the
//! process a kill leaves the last state, except for changes that came too fast for the memory and were not
//! acknowledged yet.

use std::collections::{BTreeMap, BTreeSet};

use forkdisk::FileKind;

use super::Bad;
use super::content::Time;

/// Folder of all of them; no other volume of the model is in there.
pub const PREFIX: &str = "n/";

/// The meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whether it is a folder with a record.
    pub folder: bool,
    /// The operation that set its attributes; 0: none.
    pub mark: u32,
    /// Bytes of a file.
    pub size: u64,
    /// The operation that filled its first pages before it had a name; 0: none.
    pub filled: u32,
    /// Kind of a file.
    pub kind: FileKind,
    /// Which file it is: names with the same number are hard links of each other. 0 for folders.
    pub file: u32,
}

impl Entry {
    /// Returns what a listing shows of it.
    fn seen(&self) -> (bool, u32, u64, FileKind) {
        (self.folder, self.mark, self.size, self.kind)
    }
}

/// All names at one instant.
pub type Tree = BTreeMap<String, Entry>;

/// For each name the index of the first name of the same file.
fn first_names(tree: &Tree) -> Vec<usize> {
    let mut first = BTreeMap::new();
    let all = tree.values().enumerate();
    all.map(|(i, entry)| if entry.folder { i } else { *first.entry(entry.file).or_insert(i) }).collect()
}

/// Whether there is anything in a folder.
pub fn has_children(tree: &Tree, folder: &str) -> bool {
    let prefix = format!("{folder}/");
    tree.range(prefix.clone()..).next().is_some_and(|(name, _)| name.starts_with(&prefix))
}

/// The possible states of the names.
#[derive(Clone, Default)]
pub struct Names {
    /// The last durable state, and later ones, each with the time from which on it is valid; empty: no names
    /// were ever used.
    states: Vec<(Time, Tree)>,
    /// The state if an operation in flight has happened.
    maybe: Option<Tree>,
    /// Times of the first and the last change that are not known to outlive the process.
    unkept: Option<(Time, Time)>,
}

impl Names {
    /// Returns the current names.
    pub fn now(&self) -> Tree {
        self.states.last().map_or_else(Tree::new, |(_, tree)| tree.clone())
    }

    /// Notes that a change has ended.
    pub fn push(&mut self, time: Time, tree: Tree) {
        if self.states.is_empty() {
            self.states.push((0, Tree::new()));
        }
        self.states.push((time, tree));
    }

    /// Notes that the change made at this time, and all behind it, may be lost if the process dies.
    pub fn hold(&mut self, time: Time) {
        self.unkept = Some((self.unkept.map_or(time, |(first, _)| first), time));
    }

    /// Notes that all changes made before this time outlive the process.
    pub fn kept(&mut self, time: Time) {
        self.unkept = self.unkept.filter(|&(_, last)| last >= time);
    }

    /// The process dies: only acknowledged changes are left.
    pub fn outlive(&mut self, now: Time) {
        self.flushed(self.unkept.map_or(now, |(first, _)| first));
    }

    /// Begins a change that may happen at any time from now on; no other one happens meanwhile.
    pub fn begin(&mut self, tree: Tree) {
        self.maybe = Some(tree);
    }

    /// Ends that change: it has happened and is durable, or it has not.
    pub fn end(&mut self, time: Time, done: bool) {
        if let Some(tree) = self.maybe.take().filter(|_| done) {
            self.states = vec![(time, tree)];
            self.unkept = None;
        }
    }

    /// Notes that a flush that began at this time has ended.
    pub fn flushed(&mut self, start: Time) {
        if let Some(last) = self.states.iter().rposition(|(time, _)| *time < start) {
            self.states.drain(..last);
        }
    }

    /// Checks and adopts the names found after a crash.
    ///
    /// # Errors If they are not possible.
    pub fn settle(&mut self, found: &Tree) -> Result<(), Bad> {
        let is_it = |tree: &&Tree| {
            let all = tree.iter().zip(found);
            let is_same = |(a, b): ((&String, &Entry), (&String, &Entry))| a.0 == b.0 && a.1.seen() == b.1.seen();
            tree.len() == found.len() && all.into_iter().all(is_same) && first_names(tree) == first_names(found)
        };
        let empty = Tree::new();
        let first = self.states.is_empty().then_some(&empty);
        let mut all = self.maybe.iter().chain(self.states.iter().rev().map(|(_, tree)| tree)).chain(first);
        let Some(tree) = all.find(is_it).cloned() else {
            let last = self.now();
            let names: BTreeSet<&String> = last.keys().chain(found.keys()).collect();
            let tell = |tree: &Tree, name: &String| tree.get(name).map(Entry::seen);
            let wrong = names.into_iter().filter(|name| tell(found, name) != tell(&last, name));
            let wrong: Vec<String> =
                wrong.map(|name| format!("{name}: {:?}, last {:?}", tell(found, name), tell(&last, name))).collect();
            let what = format!(
                "the names are in none of {} states since what was durable (folder, mark, bytes, kind): {}; of one \
                 file are {:?}, last {:?}",
                self.states.len(),
                wrong.join("; "),
                first_names(found),
                first_names(&last)
            );
            return Err(Bad { promise: "P4", what });
        };
        (self.states, self.maybe, self.unkept) = (vec![(0, tree)], None, None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(names: &[&str]) -> Tree {
        let entry = Entry { folder: true, mark: 1, size: 0, filled: 0, kind: FileKind::File, file: 0 };
        names.iter().map(|name| (name.to_string(), entry)).collect()
    }

    #[test]
    fn a_crash_leaves_a_state_since_the_last_flush_and_nothing_in_between() {
        let mut names = Names::default();
        assert!(names.clone().settle(&tree(&[])).is_ok());
        for (time, state) in [(1, &["a"][..]), (2, &["a", "b"]), (3, &["b"])] {
            names.push(time, tree(state));
        }
        for state in [&[][..], &["a"], &["a", "b"], &["b"]] {
            assert!(names.clone().settle(&tree(state)).is_ok(), "{state:?}");
        }
        names.flushed(3);
        assert!(names.clone().settle(&tree(&["a"])).is_err() && names.clone().settle(&tree(&["a", "b"])).is_ok());
        names.begin(tree(&["b", "c"]));
        assert!(names.clone().settle(&tree(&["b", "c"])).is_ok() && names.clone().settle(&tree(&["c"])).is_err());
        names.end(4, true);
        assert!(names.settle(&tree(&["b"])).is_err());
    }

    #[test]
    fn the_end_of_a_process_leaves_what_was_acknowledged() {
        let mut names = Names::default();
        for (time, state) in [(1, &["a"][..]), (2, &["b"]), (3, &["c"])] {
            names.push(time, tree(state));
        }
        let left = |names: &Names, state: &[&str]| {
            let mut names = names.clone();
            names.outlive(9);
            names.settle(&tree(state)).is_ok()
        };
        assert!(left(&names, &["c"]) && !left(&names, &["b"]));
        names.hold(2);
        names.hold(3);
        assert!(left(&names, &["c"]) && left(&names, &["b"]) && left(&names, &["a"]) && !left(&names, &[]));
        names.kept(3);
        assert!(left(&names, &["a"]));
        names.kept(4);
        assert!(left(&names, &["c"]) && !left(&names, &["b"]));
    }

    #[test]
    fn names_of_one_file_are_not_those_of_two() {
        let file = |file| Entry { folder: false, mark: 1, size: 0, filled: 0, kind: FileKind::File, file };
        let tree =
            |files: [u32; 3]| Tree::from_iter(["a", "b", "c"].map(String::from).into_iter().zip(files.map(file)));
        let mut names = Names::default();
        names.push(1, tree([5, 6, 5]));
        names.flushed(2);
        assert!(names.clone().settle(&tree([1, 2, 1])).is_ok());
        assert!(names.clone().settle(&tree([1, 2, 3])).is_err() && names.settle(&tree([1, 1, 2])).is_err());
    }

    #[test]
    fn what_is_in_a_folder_begins_with_its_name_and_a_slash() {
        assert!(has_children(&tree(&["n/a/x"]), "n/a") && !has_children(&tree(&["n/a", "n/a.x", "n/ab/x"]), "n/a"));
    }
}
