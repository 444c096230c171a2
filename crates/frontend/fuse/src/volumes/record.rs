//! The mount record: what the kernel holds of a mount, in memory that outlives the process. After a kill another
//! process continues the mount with it.
//!
//! The memory is two files without names. One of them is current: lines of JSON, the first of which is the whole
//! state with a generation, each further one a change. A line that was not written to its end does not count: the
//! request that made the change was not answered. When the current file has grown, the whole state is written to the
//! other one with the next generation.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::nodes::{Node, Nodes};
use super::passed::{PassedFile, PassedFolder, PassedMount};
use super::swap::Swaps;

/// Length from which the current file is replaced, unless the state itself is longer.
const REPLACE_BYTES: u64 = 1 << 20;

/// A change of what the kernel holds.
#[derive(Debug, Serialize, Deserialize)]
pub enum Change {
    /// A file was opened.
    Opened(PassedFile),
    /// A handle of a file was released.
    Released(usize),
    /// A folder was opened.
    FolderOpened(PassedFolder),
    /// A handle of a folder was released.
    FolderReleased(usize),
    /// The kernel got a reference to a node.
    Referenced(Node),
    /// The kernel dropped references: node and count.
    Forgotten(Vec<(u64, u64)>),
    /// A node is gone.
    Removed(Node),
    /// Everything at and below the first path is at the second one.
    Renamed(String, String),
    /// Two names are about to be exchanged: request, number of what has the first one.
    SwapBegun(u64, u64),
    /// Everything at and below one path is at the other one: request, both paths.
    Swapped(u64, String, String),
}

/// The whole state, as the first line of a file.
#[derive(Serialize, Deserialize)]
struct Whole<T> {
    generation: u64,
    state: T,
}

/// The mount record of a mounted pool.
pub struct MountRecord {
    files: [File; 2],
    current: Cell<usize>,
    generation: Cell<u64>,
    /// Bytes of the current file, and from which it is replaced.
    len: Cell<u64>,
    most: Cell<u64>,
}

impl MountRecord {
    /// Allocates the memory. It has no state before [`Volumes::keep`](super::Volumes::keep).
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn new() -> io::Result<MountRecord> {
        let make = || memfd_create("forkdisk-mount", MemfdFlags::CLOEXEC).map(File::from);
        Ok(MountRecord::of([make()?, make()?]))
    }

    fn of(files: [File; 2]) -> MountRecord {
        let (current, generation, len, most) = Default::default();
        MountRecord { files, current, generation, len, most }
    }

    /// Returns the memory's descriptors, for another process.
    pub fn files(&self) -> [BorrowedFd<'_>; 2] {
        [self.files[0].as_fd(), self.files[1].as_fd()]
    }

    /// Reads what another process has left.
    ///
    /// # Errors
    /// There is no complete state, or a change does not follow from it.
    pub fn read(files: [OwnedFd; 2]) -> io::Result<(MountRecord, PassedMount)> {
        let record = MountRecord::of(files.map(File::from));
        let mut newest: Option<(usize, u64, PassedMount)> = None;
        for (index, file) in record.files.iter().enumerate() {
            let mut text = Vec::new();
            let mut from_start = file.try_clone()?;
            io::Seek::rewind(&mut from_start)?;
            from_start.read_to_end(&mut text)?;
            let Some((generation, state)) = replay(&text)? else { continue };
            if newest.as_ref().is_none_or(|(_, before, _)| *before < generation) {
                newest = Some((index, generation, state));
            }
        }
        let none = || io::Error::new(io::ErrorKind::InvalidData, "the mount record has no complete state");
        let (current, generation, state) = newest.ok_or_else(none)?;
        record.current.set(current);
        record.generation.set(generation);
        Ok((record, state))
    }

    /// Appends a change. Returns false if the whole state has to be written instead.
    pub(super) fn append(&self, change: &Change) -> io::Result<bool> {
        let mut line = serde_json::to_vec(change)?;
        line.push(b'\n');
        if self.len.get() + line.len() as u64 > self.most.get() {
            return Ok(false);
        }
        self.files[self.current.get()].write_all_at(&line, self.len.get())?;
        self.len.set(self.len.get() + line.len() as u64);
        Ok(true)
    }

    /// Writes the whole state to the other file, which becomes the current one.
    pub(super) fn write_whole(&self, state: &PassedMount) -> io::Result<()> {
        let (before, next, generation) = (self.current.get(), 1 - self.current.get(), self.generation.get() + 1);
        let mut line = serde_json::to_vec(&Whole { generation, state })?;
        line.push(b'\n');
        self.files[next].set_len(0)?;
        self.files[next].write_all_at(&line, 0)?;
        self.current.set(next);
        self.generation.set(generation);
        self.len.set(line.len() as u64);
        self.most.set(REPLACE_BYTES.max(line.len() as u64 * 4));
        self.files[before].set_len(0)
    }

    /// Removes the state: the mount cannot be continued.
    pub(super) fn clear(&self) {
        for file in &self.files {
            // It fails for want of memory only, which this needs none of.
            let _ = file.set_len(0);
        }
        self.most.set(u64::MAX);
    }
}

/// Returns the state of a file, with its generation; `None` if it has no complete one.
fn replay(text: &[u8]) -> io::Result<Option<(u64, PassedMount)>> {
    let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let mut lines = text[..whole].split_inclusive(|&byte| byte == b'\n');
    let Some(first) = lines.next() else { return Ok(None) };
    let Whole { generation, mut state } = serde_json::from_slice::<Whole<PassedMount>>(first)?;
    let (mut nodes, mut swaps) = (Nodes::resume(&state.nodes, state.last_node), Swaps::resume(&state.swaps));
    for line in lines {
        match serde_json::from_slice(line)? {
            Change::Opened(file) => state.files.push(file),
            Change::Released(handle) => state.files.retain(|file| file.handle != handle),
            Change::FolderOpened(folder) => state.folders.push(folder),
            Change::FolderReleased(handle) => state.folders.retain(|folder| folder.handle != handle),
            Change::Referenced(node) => drop(nodes.remember(node)),
            Change::Forgotten(all) => all.iter().for_each(|&(number, n)| nodes.forget(number, n)),
            Change::Removed(node) => nodes.removed(&node),
            Change::Renamed(from, to) => nodes.renamed(&from, &to),
            Change::SwapBegun(request, first) => swaps.begin(request, first),
            Change::Swapped(request, a, b) => {
                nodes.exchanged(&a, &b);
                swaps.end(request);
            }
        }
    }
    (state.nodes, state.last_node) = nodes.pass_on();
    state.swaps = swaps.pass_on();
    Ok(Some((generation, state)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(handle: usize, volume: u64) -> PassedFile {
        PassedFile { handle, volume, writes: true, request: 0 }
    }

    fn empty() -> PassedMount {
        let (nodes, last_node) = Nodes::default().pass_on();
        PassedMount {
            nodes,
            last_node,
            files: Vec::new(),
            folders: Vec::new(),
            swaps: Vec::new(),
            root_changed: (0, 0),
        }
    }

    fn left_by(record: &MountRecord) -> (MountRecord, PassedMount) {
        let files = record.files();
        MountRecord::read(files.map(|file| file.try_clone_to_owned().unwrap())).unwrap()
    }

    fn handles(state: &PassedMount) -> Vec<usize> {
        state.files.iter().map(|file| file.handle).collect()
    }

    #[test]
    fn changes_are_read_after_the_state_and_half_a_line_is_not() {
        let record = MountRecord::new().unwrap();
        record.write_whole(&empty()).unwrap();
        for change in [
            Change::Opened(file(0, 7)),
            Change::Opened(file(1, 8)),
            Change::Released(0),
            Change::Referenced(Node::Folder("a".into())),
            Change::Renamed("a".into(), "b".into()),
        ] {
            assert!(record.append(&change).unwrap());
        }
        let half = serde_json::to_vec(&Change::Released(1)).unwrap();
        record.files[record.current.get()].write_all_at(&half, record.len.get()).unwrap();
        let (_, state) = left_by(&record);
        assert_eq!(handles(&state), [1]);
        let nodes = Nodes::resume(&state.nodes, state.last_node);
        assert_eq!(nodes.get(state.last_node), Some(Node::Folder("b".into())));
    }

    #[test]
    fn a_record_that_grows_is_replaced_and_stays_short() {
        let record = MountRecord::new().unwrap();
        record.write_whole(&empty()).unwrap();
        let mut replaced = 0;
        for n in 0..100_000 {
            let change = if n % 2 == 0 { Change::Opened(file(n, 7)) } else { Change::Released(n - 1) };
            if !record.append(&change).unwrap() {
                let open = if n % 2 == 0 { vec![file(n, 7)] } else { Vec::new() };
                record.write_whole(&PassedMount { files: open, ..empty() }).unwrap();
                replaced += 1;
            }
        }
        assert!(record.append(&Change::Opened(file(5, 9))).unwrap());
        let (_, state) = left_by(&record);
        assert_eq!(handles(&state), [5]);
        assert!(replaced > 1);
        let len: u64 = record.files.iter().map(|file| file.metadata().unwrap().len()).sum();
        assert!(len <= REPLACE_BYTES, "{len}");
    }

    #[test]
    fn a_kill_between_two_files_leaves_the_newer_one() {
        let record = MountRecord::new().unwrap();
        record.write_whole(&empty()).unwrap();
        let before = record.current.get();
        assert!(record.append(&Change::Opened(file(3, 7))).unwrap());
        // The other file has half of its first line.
        (&record.files[1 - before]).write_all(br#"{"generation":2,"state":{"#).unwrap();
        assert_eq!(handles(&left_by(&record).1), [3]);
        // Both are complete.
        let old = std::fs::read(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&record.files[before])));
        record.write_whole(&PassedMount { files: vec![file(4, 7)], ..empty() }).unwrap();
        record.files[before].write_all_at(&old.unwrap(), 0).unwrap();
        assert_eq!(handles(&left_by(&record).1), [4]);
    }

    #[test]
    fn a_cleared_record_has_no_state() {
        let record = MountRecord::new().unwrap();
        record.write_whole(&empty()).unwrap();
        record.clear();
        assert!(MountRecord::read(record.files().map(|file| file.try_clone_to_owned().unwrap())).is_err());
    }
}
