//! Listing folders. A listing is created when it is read from its beginning and stays unchanged
//! until the next such read.

use std::rc::Rc;

use forkdisk::{Device, VolumeInfo};

use super::nodes::{Node, SNAPSHOTS_NAME, join};
use super::passed::PassedFolder;
use super::record::Change;
use super::{Failed, Outcome, Volumes};
use crate::codec::{DirectoryPage, Header, Kind, Reply};

/// Names in a folder, with their types.
type Listing = Rc<Vec<(String, Kind)>>;

/// An open folder: its entries when it was last read from its beginning.
pub struct Opened {
    pub(super) listing: Option<Listing>,
    /// Id of the request that opened it.
    pub(super) request: u64,
}

impl<D: Device> Volumes<D> {
    pub(super) fn open_folder(&self, header: &Header) -> Outcome {
        if let Node::Volume(_) = self.node(header.node)? {
            return Err(Failed(libc::ENOTDIR));
        }
        let request = header.request();
        let handle = self.folders.borrow_mut().insert(Opened { listing: None, request });
        self.record(|| Change::FolderOpened(PassedFolder { handle, entries: None, request }));
        Ok(Reply::Opened(handle as u64, 0))
    }

    fn list(&self, number: u64) -> Outcome<Vec<(String, Kind)>> {
        let mut names: Vec<(String, Kind)> = [".", ".."].map(|n| (n.to_string(), Kind::Folder)).into();
        match self.node(number)? {
            Node::Folder(path) => {
                names.extend(self.pool.children(&path).into_iter().map(|(name, kind)| (name, kind.into())));
                if path.is_empty() && self.options.show_snapshots {
                    names.push((SNAPSHOTS_NAME.to_string(), Kind::Folder));
                }
            }
            Node::Snapshots(path) => match self.is_volume(&path) {
                true => {
                    let all = self.pool.snapshots_of(&path)?;
                    let kind = |s: &VolumeInfo| s.attributes.map_or(Kind::File, |attributes| attributes.kind().into());
                    names.extend(all.iter().map(|s| (short_name(&s.name).to_string(), kind(s))));
                }
                false => {
                    let children = self.pool.children(&path);
                    let kept = self.pool.snapshot_names_in(&path)?;
                    let is_child = |name: &String| children.iter().any(|(child, _)| child == name);
                    names.extend(kept.into_iter().filter(|name| !is_child(name)).map(|name| (name, Kind::Folder)));
                    names.extend(children.into_iter().map(|(name, _)| (name, Kind::Folder)));
                }
            },
            Node::Kept(path, snapshot) => {
                let kept = self.pool.children_of_snapshot(&path, &snapshot).into_iter();
                names.extend(kept.map(|(name, kind)| (name, kind.into())));
            }
            Node::Volume(_) => return Err(Failed(libc::ENOTDIR)),
            Node::Phantom => {}
            Node::Removed => names.clear(),
        }
        Ok(names)
    }

    /// Returns the listing of an open folder; creates it anew if `from` is 0.
    fn listing(&self, number: u64, handle: u64, from: u64) -> Outcome<Listing> {
        let bad = Failed(libc::EBADF);
        let known = self.folders.borrow().get(handle as usize).ok_or(bad)?.listing.clone();
        if let (Some(known), 1..) = (known, from) {
            return Ok(known);
        }
        let listing = Rc::new(self.list(number)?);
        self.folders.borrow_mut().get_mut(handle as usize).ok_or(bad)?.listing = Some(listing.clone());
        Ok(listing)
    }

    pub(super) fn read_folder(&self, number: u64, handle: u64, from: u64, size: u32, plus: bool) -> Outcome {
        let listing = self.listing(number, handle, from)?;
        let mut page = DirectoryPage::new(size);
        for (i, (name, kind)) in listing.iter().enumerate().skip(usize::try_from(from).unwrap_or(usize::MAX)) {
            let next = i as u64 + 1;
            let is_dots = i < 2;
            if !plus || is_dots {
                // Names that were removed meanwhile are left out.
                let Some(node) = (if is_dots { Some(number) } else { self.number_in(number, name) }) else { continue };
                let fits = if plus { page.has_room_plus(name) } else { page.add(node, *kind, name, next) };
                if !fits {
                    break;
                }
                if plus {
                    page.add_plus(node, *kind, name, next, None);
                }
                continue;
            }
            if !page.has_room_plus(name) {
                break;
            }
            // Names that were removed since the folder was opened are left out.
            if let Ok(entry) = self.find(number, name) {
                page.add_plus(entry.node, entry.attr.kind, name, next, Some(&entry));
            }
        }
        Ok(page.reply())
    }

    /// Returns the inode number of `name` in listings, if it exists.
    fn number_in(&self, folder: u64, name: &str) -> Option<u64> {
        let (node, _) = self.child_node(folder, name).ok()?;
        Some(self.nodes.borrow().number(&node))
    }

    /// Returns whether the folder is that of a volume's snapshots, so that its entries are snapshots.
    pub(super) fn holds_snapshots(&self, number: u64) -> bool {
        matches!(self.node(number), Ok(Node::Snapshots(path)) if self.is_volume(&path))
    }

    /// Returns whether `path` is a volume.
    pub(super) fn is_volume(&self, path: &str) -> bool {
        !path.is_empty() && self.pool.find(path).is_ok()
    }
}

/// Returns the part of a snapshot's name after `@`.
pub fn short_name(name: &str) -> &str {
    name.rsplit_once('@').map_or(name, |(_, short)| short)
}

/// Returns the full name of a snapshot.
pub fn full_name(volume: &str, snapshot: &str) -> String {
    format!("{volume}@{snapshot}")
}

/// Returns the node of `name` in a folder of snapshots.
pub fn below(path: &str, name: &str) -> Node {
    Node::Snapshots(join(path, name))
}
