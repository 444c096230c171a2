//! Lookup, creation, removal and renaming of files and folders.

use forkdisk::{Child, CreateOptions, Device, ErrorKind};

use super::folders::{below, full_name};
use super::nodes::{Node, SNAPSHOTS_NAME, join, parent};
use super::record::Change;
use super::{Failed, Outcome, Volumes, now};
use crate::codec::{Entry, Header, Kind, Reply};

const NO_REPLACE: u32 = libc::RENAME_NOREPLACE;
pub(super) const EXCHANGE: u32 = libc::RENAME_EXCHANGE;

impl<D: Device> Volumes<D> {
    /// Returns the node of `name` in a folder, and for how long the kernel may cache it.
    pub(super) fn child_node(&self, folder: u64, name: &str) -> Outcome<(Node, u32)> {
        match self.node(folder)? {
            Node::Folder(path) if path.is_empty() && name == SNAPSHOTS_NAME => {
                Ok((Node::Snapshots(String::new()), self.valid()))
            }
            Node::Folder(path) => {
                let path = join(&path, name);
                Ok(match self.pool.child(&path)? {
                    Child::Folder(..) => (Node::Folder(path), self.valid()),
                    Child::Volume(info) => (Node::Volume(info.id), self.valid()),
                })
            }
            Node::Snapshots(path) if self.is_volume(&path) => {
                // Never cached: the next system call may want to remove it as a folder.
                Ok((Node::Volume(self.pool.find(&full_name(&path, name))?.id), 0))
            }
            Node::Snapshots(path) => {
                match (self.pool.child(&join(&path, name)), self.pool.find(&full_name(&path, name))) {
                    (Err(_), Ok(kept)) => Ok((Node::Volume(kept.id), 0)),
                    (Err(_), _) if self.pool.has_snapshot_in(&path, name) => {
                        Ok((Node::Kept(path, name.to_string()), 0))
                    }
                    (Err(_), _) if self.pool.has_kept(&join(&path, name)) => Ok((below(&path, name), 0)),
                    (found, _) => found.map(|_| (below(&path, name), self.valid())).map_err(Failed::from),
                }
            }
            Node::Kept(path, snapshot) => {
                let path = join(&path, name);
                match self.pool.find(&full_name(&path, &snapshot)) {
                    Ok(found) => Ok((Node::Volume(found.id), 0)),
                    Err(_) if self.pool.has_snapshot_in(&path, &snapshot) => Ok((Node::Kept(path, snapshot), 0)),
                    Err(_) => Err(Failed(libc::ENOENT)),
                }
            }
            Node::Volume(_) => Err(Failed(libc::ENOTDIR)),
            Node::Phantom | Node::Removed => Err(Failed(libc::ENOENT)),
        }
    }

    /// Returns the entry of a name.
    pub(super) fn find(&self, folder: u64, name: &str) -> Outcome<Entry> {
        let (node, valid) = self.child_node(folder, name)?;
        self.entry(node, valid)
    }

    pub(super) fn look_up(&self, header: &Header, name: &str) -> Outcome {
        let (node, valid) = match self.child_node(header.node, name) {
            Ok(found) => found,
            // The kernel itself creates names in folders, so it may cache their absence. Names
            // below `.snapshots` appear with their volumes.
            Err(Failed(libc::ENOENT))
                if self.options.alone && matches!(self.node(header.node), Ok(Node::Folder(_))) =>
            {
                return Ok(Reply::NoEntry(self.valid()));
            }
            Err(error) => return Err(error),
        };
        // Only for the snapshot itself: the same system call also looks up the folders on its path.
        let is_snapshot = matches!((self.node(header.node)?, &node), (Node::Snapshots(_), Node::Volume(_)));
        if is_snapshot && super::snapshots::wants_a_folder(header.pid) {
            return self.entry(Node::Phantom, 0).map(Reply::Entry);
        }
        self.entry(node, valid).map(Reply::Entry)
    }

    fn make_file(&self, header: &Header, name: &str, mode: u32) -> Outcome<(Entry, forkdisk::Volume<D>)> {
        let path = self.path_in(header.node, name)?;
        let options = CreateOptions::new(0, now().seconds as u64).with_gather(self.options.gather);
        let volume = self.pool.create_file(&path, &options, self.fresh_in(parent(&path), header, mode, Kind::File)?)?;
        self.touch_folder(parent(&path))?;
        Ok((self.entry(Node::Volume(volume.id()), self.valid())?, volume))
    }

    pub(super) fn create(&self, header: &Header, name: &str, mode: u32) -> Outcome {
        let (entry, volume) = self.make_file(header, name, mode)?;
        let (handle, flags) = self.opened(volume, true, header);
        Ok(Reply::Created(entry, handle, flags))
    }

    pub(super) fn make_node(&self, header: &Header, name: &str, mode: u32) -> Outcome {
        if !matches!(mode & libc::S_IFMT, 0 | libc::S_IFREG) {
            return self.make_special(header, name, mode);
        }
        Ok(Reply::Entry(self.make_file(header, name, mode)?.0))
    }

    pub(super) async fn make_folder(&self, header: &Header, name: &str, mode: u32) -> Outcome<Entry> {
        if let Node::Snapshots(path) = self.node(header.node)? {
            return self.take_snapshot(&path, name).await;
        }
        let path = self.path_in(header.node, name)?;
        let attributes = self.fresh_in(parent(&path), header, mode, Kind::Folder)?;
        self.pool.create_folder(&path, attributes, now().seconds as u64)?;
        self.touch_folder(parent(&path))?;
        self.entry(Node::Folder(path), self.valid())
    }

    pub(super) fn unlink(&self, folder: u64, name: &str) -> Outcome {
        if let Node::Snapshots(volume) = self.node(folder)? {
            return self.remove_snapshot(&volume, name);
        }
        let path = self.path_in(folder, name)?;
        self.check_unused(&path)?;
        self.keep_folder(parent(&path))?;
        self.keep_snapshots(&path)?;
        self.pool.remove_file(&path)?;
        self.touch_folder(parent(&path))?;
        self.node_removed(Node::Snapshots(path));
        Ok(Reply::Done)
    }

    pub(super) fn remove_folder(&self, folder: u64, name: &str) -> Outcome {
        if let Node::Snapshots(volume) = self.node(folder)? {
            return self.remove_snapshot(&volume, name);
        }
        let path = self.path_in(folder, name)?;
        if path == SNAPSHOTS_NAME {
            return Err(Failed(libc::EPERM));
        }
        if !self.pool.children(&path).is_empty() {
            return Err(Failed(libc::ENOTEMPTY));
        }
        self.keep_folder(parent(&path))?;
        self.pool.remove_folder(&path)?;
        self.touch_folder(parent(&path))?;
        self.node_removed(Node::Folder(path.clone()));
        self.node_removed(Node::Snapshots(path));
        Ok(Reply::Done)
    }

    pub(super) async fn rename(&self, request: u64, from: (u64, &str), to: (u64, &str), flags: u32) -> Outcome {
        if flags == EXCHANGE {
            return self.exchange_names(request, from, to);
        }
        if flags & !NO_REPLACE != 0 {
            return Err(Failed(libc::EINVAL));
        }
        if let (Node::Snapshots(a), Node::Snapshots(b)) = (self.node(from.0)?, self.node(to.0)?) {
            return self.rename_snapshot((&a, from.1), (&b, to.1)).await;
        }
        let (source, target) = (self.path_in(from.0, from.1)?, self.path_in(to.0, to.1)?);
        if source == SNAPSHOTS_NAME || target == SNAPSHOTS_NAME {
            return Err(Failed(libc::EPERM));
        }
        let there = self.pool.child(&target).ok();
        if there.is_some() && flags & NO_REPLACE != 0 {
            return Err(Failed(libc::EEXIST));
        }
        if let Some(Child::Volume(_)) = there {
            self.check_unused(&target)?;
        }
        self.keep_folder(parent(&source))?;
        match (self.pool.child(&source)?, there) {
            (Child::Volume(_), Some(Child::Folder(..))) => return Err(Failed(libc::EISDIR)),
            (Child::Folder(..), Some(Child::Volume(_))) => return Err(Failed(libc::ENOTDIR)),
            (Child::Volume(_), there) => {
                self.keep_snapshots(&source)?;
                if there.is_some() && source != target {
                    self.keep_snapshots(&target)?;
                }
                self.pool.rename_file(&source, &target, true)?;
            }
            (Child::Folder(..), Some(_)) if !self.pool.children(&target).is_empty() => {
                return Err(Failed(libc::ENOTEMPTY));
            }
            (Child::Folder(..), there) => {
                if there.is_some() {
                    self.pool.remove_folder(&target)?;
                    self.node_removed(Node::Folder(target.clone()));
                }
                self.pool.rename_folder(&source, &target)?;
            }
        }
        self.touch_folder(parent(&source))?;
        self.touch_folder(parent(&target))?;
        self.node_removed(Node::Snapshots(target.clone()));
        self.rename_nodes(&source, &target);
        Ok(Reply::Done)
    }

    /// Keeps the snapshots of a file that is to lose its name. An origin is refused later, and without space the file
    /// stays as it is.
    pub(super) fn keep_snapshots(&self, path: &str) -> Outcome<()> {
        match self.pool.keep_snapshots(path, now().seconds as u64) {
            Err(error) if !matches!(error.kind(), ErrorKind::Invalid | ErrorKind::NoSpace) => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn node_removed(&self, node: Node) {
        self.nodes.borrow_mut().removed(&node);
        self.record(|| Change::Removed(node));
    }

    /// Gives the nodes at and below `source` the path `target`.
    pub(super) fn rename_nodes(&self, source: &str, target: &str) {
        self.nodes.borrow_mut().renamed(source, target);
        self.record(|| Change::Renamed(source.to_string(), target.to_string()));
    }
}
