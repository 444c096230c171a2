//! Requests that the kernel sends again, since the process that received them was killed before it answered.
//!
//! Such a request may have been carried out. The kernel holds the lock of its folder meanwhile, so through this mount
//! nothing else has changed the name: if its effect is there, it is answered without being carried out again. Requests
//! that can be repeated, like reads and writes, are carried out again.

use forkdisk::{Child, Device};

use super::names::EXCHANGE;
use super::nodes::{Node, join};
use super::{Outcome, Volumes};
use crate::codec::{Header, Operation, Reply};

impl<D: Device> Volumes<D> {
    /// Returns the reply to a request that has been carried out; `None` if its effect is not there.
    pub(super) fn reply_again(&self, header: &Header, operation: &Operation) -> Outcome<Option<Reply>> {
        let folder = header.node;
        let is_there = |folder: u64, name: &str| self.child_node(folder, name).is_ok();
        Ok(match operation {
            Operation::Open { .. } => {
                let files = self.files.borrow();
                let found = files.iter().find(|(_, file)| file.request == header.request());
                found.map(|(handle, file)| Reply::Opened(handle as u64, self.open_flags(&file.volume)))
            }
            Operation::OpenFolder => {
                let folders = self.folders.borrow();
                let found = folders.iter().find(|(_, folder)| folder.request == header.request());
                found.map(|(handle, _)| Reply::Opened(handle as u64, 0))
            }
            Operation::Create { name, .. } => match self.child_node(folder, name) {
                Ok((Node::Volume(id), valid)) => {
                    let entry = self.entry(Node::Volume(id), valid)?;
                    let known = self.files.borrow().iter().find(|(_, f)| f.request == header.request()).map(|(h, _)| h);
                    let volume = self.pool.volume_by_id(id)?;
                    let flags = self.open_flags(&volume);
                    let handle = known.map_or_else(|| self.opened(volume, true, header).0, |handle| handle as u64);
                    Some(Reply::Created(entry, handle, flags))
                }
                _ => None,
            },
            Operation::MakeNode { name, .. } | Operation::MakeLink { name, .. } | Operation::Link { name, .. }
                if is_there(folder, name) =>
            {
                Some(Reply::Entry(self.find(folder, name)?))
            }
            Operation::CreateUnnamed { .. } => {
                let files = self.files.borrow();
                let known = files.iter().find(|(_, file)| file.request == header.request());
                let known = known.map(|(handle, file)| (handle as u64, file.volume.clone()));
                drop(files);
                match known {
                    Some((handle, volume)) => {
                        let entry = self.entry(Node::Volume(volume.id()), 0)?;
                        Some(Reply::Created(entry, handle, self.open_flags(&volume)))
                    }
                    None => None,
                }
            }
            Operation::SetXattr { name, value, .. } if self.has_xattr(header.node, name, Some(value))? => {
                Some(Reply::Done)
            }
            Operation::RemoveXattr { name } if self.has_xattr(header.node, name, None)? => Some(Reply::Done),
            Operation::MakeFolder { name, .. } if is_there(folder, name) => {
                Some(Reply::Entry(match self.holds_snapshots(folder) {
                    // The kernel expects a folder here.
                    true => self.entry(Node::Phantom, 0)?,
                    false => self.find(folder, name)?,
                }))
            }
            Operation::Unlink { name } | Operation::RemoveFolder { name } if !is_there(folder, name) => {
                Some(Reply::Done)
            }
            Operation::Rename { name, folder: to, new_name, flags: EXCHANGE } => {
                self.has_swapped(header.request(), (folder, name), (*to, new_name))?.then_some(Reply::Done)
            }
            Operation::Rename { name, folder: to, new_name, .. }
                if !is_there(folder, name) && is_there(*to, new_name) =>
            {
                // The process may have been killed before it recorded that.
                if let (Node::Folder(from), Node::Folder(to)) = (self.node(folder)?, self.node(*to)?) {
                    let (from, to) = (join(&from, name), join(&to, new_name));
                    if let Ok(Child::Folder(..)) = self.pool.child(&to) {
                        self.rename_nodes(&from, &to);
                    }
                }
                Some(Reply::Done)
            }
            _ => None,
        })
    }
}
