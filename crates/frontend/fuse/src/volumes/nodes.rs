//! The kernel's numbers for files and folders.
//!
//! The number of a volume or snapshot is derived from its id and never changes. Folders are
//! identified by their paths, so they get numbers when they are looked up, for as long as the
//! kernel holds them. Pure: does not access the pool.

use std::collections::HashMap;

use forkdisk::VolumeId;
use serde::{Deserialize, Serialize};

/// Number of the root.
pub const ROOT_ID: u64 = 1;
/// Number of the folder of all snapshots.
const SNAPSHOTS_ID: u64 = 2;
/// Name of that folder in the root.
pub const SNAPSHOTS_NAME: &str = ".snapshots";

/// Object of a node number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Node {
    /// A volume or snapshot. Its number is derived, and never passed on.
    #[serde(skip)]
    Volume(VolumeId),
    /// A folder, by its path; the root's is empty.
    Folder(String),
    /// A folder below `.snapshots`, by the path of its folder or volume; empty for `.snapshots` itself.
    Snapshots(String),
    /// A folder as the snapshots of one name of the volumes in it show it: its path, and that name.
    Kept(String, String),
    /// Stands for a snapshot while a system call requires a folder. It supports no operation.
    Phantom,
    /// A folder that was removed or replaced while the kernel held it. It is empty.
    Removed,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Known {
    node: Node,
    references: u64,
    /// The folder was removed; its path may belong to another one now.
    gone: bool,
}

/// A node that the kernel holds, for another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedNode {
    number: u64,
    known: Known,
    /// Whether lookups of the node return this number.
    is_current: bool,
}

/// Table of node numbers, as described above.
pub struct Nodes {
    known: HashMap<u64, Known>,
    numbers: HashMap<Node, u64>,
    next: u64,
}

impl Default for Nodes {
    fn default() -> Nodes {
        Nodes { known: HashMap::new(), numbers: HashMap::new(), next: SNAPSHOTS_ID + 2 }
    }
}

impl Nodes {
    /// Returns all nodes that the kernel holds, and the last number that was given.
    pub fn pass_on(&self) -> (Vec<PassedNode>, u64) {
        let passed = |(&number, known): (&u64, &Known)| {
            let is_current = self.numbers.get(&known.node) == Some(&number);
            PassedNode { number, known: known.clone(), is_current }
        };
        (self.known.iter().map(passed).collect(), self.next)
    }

    /// Continues the table of another process.
    pub fn resume(passed: &[PassedNode], next: u64) -> Nodes {
        let known = passed.iter().map(|passed| (passed.number, passed.known.clone())).collect();
        let current = passed.iter().filter(|passed| passed.is_current);
        let numbers = current.map(|passed| (passed.known.node.clone(), passed.number)).collect();
        Nodes { known, numbers, next }
    }

    /// Returns the node of `number`; `None` if the kernel was never given it.
    pub fn get(&self, number: u64) -> Option<Node> {
        match number {
            ROOT_ID => Some(Node::Folder(String::new())),
            SNAPSHOTS_ID => Some(Node::Snapshots(String::new())),
            odd if odd % 2 == 1 => Some(Node::Volume(VolumeId(odd / 2))),
            even => self.known.get(&even).and_then(|known| match (known.gone, &known.node) {
                (false, node) => Some(node.clone()),
                (true, Node::Folder(_)) => Some(Node::Removed),
                (true, _) => None,
            }),
        }
    }

    /// Returns the number of `node` and counts one more reference of the kernel.
    pub fn remember(&mut self, node: Node) -> u64 {
        if let Some(number) = fixed(&node) {
            return number;
        }
        let number = match self.numbers.get(&node) {
            Some(&number) => number,
            None => {
                self.next += 2;
                self.next
            }
        };
        if node != Node::Phantom {
            self.numbers.insert(node.clone(), number);
        }
        self.known.entry(number).or_insert(Known { node, references: 0, gone: false }).references += 1;
        number
    }

    /// Returns the number of `node` for a listing, which gives the kernel no reference.
    pub fn number(&self, node: &Node) -> u64 {
        // The kernel looks the name up before it uses the number.
        fixed(node).or_else(|| self.numbers.get(node).copied()).unwrap_or(u64::from(u32::MAX))
    }

    /// Drops `n` references of the kernel.
    pub fn forget(&mut self, number: u64, n: u64) {
        let Some(known) = self.known.get_mut(&number) else { return };
        known.references = known.references.saturating_sub(n);
        if known.references == 0 {
            let known = self.known.remove(&number).expect("found above");
            if !known.gone {
                self.numbers.remove(&known.node);
            }
        }
    }

    /// Records that a folder was removed: a new one with the same path gets another number.
    pub fn removed(&mut self, node: &Node) {
        if let Some(number) = self.numbers.remove(node) {
            self.known.get_mut(&number).expect("a number is known").gone = true;
        }
    }

    /// Exchanges everything at and below `a` with everything at and below `b`.
    pub fn exchanged(&mut self, a: &str, b: &str) {
        self.moved(|node| moved(node, a, b).or_else(|| moved(node, b, a)));
    }

    /// Moves everything at and below `from` to `to`.
    pub fn renamed(&mut self, from: &str, to: &str) {
        self.moved(|node| moved(node, from, to));
    }

    /// Gives nodes their new places.
    fn moved(&mut self, place: impl Fn(&Node) -> Option<Node>) {
        let known = self.known.iter().filter(|(_, known)| !known.gone);
        let moved: Vec<(u64, Node)> =
            known.filter_map(|(&number, known)| Some((number, place(&known.node)?))).collect();
        for (number, _) in &moved {
            self.numbers.remove(&self.known[number].node);
        }
        for (number, node) in moved {
            self.known.get_mut(&number).expect("listed above").node = node.clone();
            self.numbers.insert(node, number);
        }
    }
}

/// Returns whether a number belongs to the same node at all times.
pub fn is_fixed(number: u64) -> bool {
    number == SNAPSHOTS_ID || number % 2 == 1
}

fn fixed(node: &Node) -> Option<u64> {
    match node {
        Node::Volume(id) => Some(id.0 * 2 + 1),
        Node::Folder(path) if path.is_empty() => Some(ROOT_ID),
        Node::Snapshots(path) if path.is_empty() => Some(SNAPSHOTS_ID),
        _ => None,
    }
}

fn moved(node: &Node, from: &str, to: &str) -> Option<Node> {
    let path = |path: &str| {
        let rest = path.strip_prefix(from)?;
        (rest.is_empty() || rest.starts_with('/')).then(|| format!("{to}{rest}"))
    };
    match node {
        Node::Folder(p) => path(p).map(Node::Folder),
        Node::Snapshots(p) => path(p).map(Node::Snapshots),
        Node::Kept(p, snapshot) => path(p).map(|path| Node::Kept(path, snapshot.clone())),
        Node::Volume(_) | Node::Phantom | Node::Removed => None,
    }
}

/// Returns the path of `name` in the folder `path`.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}/{name}") }
}

/// Returns the folder that contains `path`.
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(path: &str) -> Node {
        Node::Folder(path.into())
    }

    #[test]
    fn a_number_lasts_as_long_as_the_kernel_holds_it() {
        let mut nodes = Nodes::default();
        let a = nodes.remember(folder("a"));
        assert_eq!(nodes.remember(folder("a")), a);
        assert_eq!(nodes.get(a), Some(folder("a")));
        nodes.forget(a, 1);
        assert_eq!(nodes.get(a), Some(folder("a")));
        nodes.forget(a, 1);
        assert_eq!(nodes.get(a), None);
        assert_ne!(nodes.remember(folder("a")), a);
    }

    #[test]
    fn a_folder_made_again_is_another_one() {
        let mut nodes = Nodes::default();
        let old = nodes.remember(folder("a"));
        nodes.removed(&folder("a"));
        assert_eq!(nodes.get(old), Some(Node::Removed));
        let new = nodes.remember(folder("a"));
        assert_ne!(old, new);
        nodes.forget(old, 1);
        assert_eq!((nodes.get(old), nodes.get(new)), (None, Some(folder("a"))));
    }

    #[test]
    fn a_rename_takes_along_what_is_below_and_nothing_beside() {
        let mut nodes = Nodes::default();
        let kept = |path: &str| Node::Kept(path.into(), "s".into());
        let all = [folder("a"), folder("a/b"), folder("ab"), Node::Snapshots("a/b/v".into()), kept("a/b")];
        let numbers: Vec<u64> = all.iter().map(|n| nodes.remember(n.clone())).collect();
        nodes.renamed("a", "x/y");
        let now: Vec<Node> = numbers.iter().map(|&n| nodes.get(n).unwrap()).collect();
        let moved = [folder("x/y"), folder("x/y/b"), folder("ab"), Node::Snapshots("x/y/b/v".into()), kept("x/y/b")];
        assert_eq!(now, moved);
        assert_eq!(nodes.remember(folder("x/y/b")), numbers[1]);
        assert_ne!(nodes.remember(folder("a")), numbers[0]);
    }

    #[test]
    fn an_exchange_moves_what_is_below_either_name() {
        let mut nodes = Nodes::default();
        let all = [folder("a"), folder("a/x"), folder("b/c"), folder("b/c/x"), folder("b")];
        let numbers: Vec<u64> = all.iter().map(|n| nodes.remember(n.clone())).collect();
        nodes.exchanged("a", "b/c");
        let now: Vec<Node> = numbers.iter().map(|&n| nodes.get(n).unwrap()).collect();
        assert_eq!(now, [folder("b/c"), folder("b/c/x"), folder("a"), folder("a/x"), folder("b")]);
        assert_eq!((nodes.number(&folder("a")), nodes.number(&folder("b/c"))), (numbers[2], numbers[0]));
    }

    #[test]
    fn another_process_continues_with_the_same_numbers() {
        let mut nodes = Nodes::default();
        let [a, b] = ["a", "b"].map(|path| nodes.remember(folder(path)));
        nodes.remember(folder("a"));
        nodes.removed(&folder("b"));
        let new_b = nodes.remember(folder("b"));
        let (passed, last) = nodes.pass_on();
        let mut nodes = Nodes::resume(&passed, last);
        assert_eq!(
            (nodes.get(a), nodes.get(b), nodes.get(new_b)),
            (Some(folder("a")), Some(Node::Removed), Some(folder("b")))
        );
        nodes.forget(a, 1);
        assert_eq!(nodes.remember(folder("a")), a, "one reference is left");
        assert_eq!(nodes.remember(folder("b")), new_b);
        let c = nodes.remember(folder("c"));
        assert!(![a, b, new_b].contains(&c));
    }

    #[test]
    fn volumes_and_roots_have_their_numbers_from_the_beginning() {
        let mut nodes = Nodes::default();
        for node in [Node::Volume(VolumeId(7)), folder(""), Node::Snapshots(String::new())] {
            let number = nodes.remember(node.clone());
            nodes.forget(number, 1);
            assert_eq!(nodes.get(number), Some(node));
        }
        assert_eq!(nodes.get(ROOT_ID), Some(folder("")));
        assert_eq!(
            (join("", "a"), join("a/b", "c"), parent("a/b"), parent("a")),
            ("a".into(), "a/b/c".into(), "a", "")
        );
    }
}
