//! A mount on its way to another process of the server: the numbers and handles that the kernel holds. The connection
//! to the kernel is passed beside it ([`SessionHandle::pass_on`](crate::SessionHandle::pass_on)).

use std::rc::Rc;

use forkdisk::{Device, Pool, Result, VolumeId};
use serde::{Deserialize, Serialize};

use super::folders::Opened;
use super::nodes::{Nodes, PassedNode};
use super::{Open, Volumes, VolumesOptions};
use crate::codec::{Kind, Time};

/// What the kernel holds of a mounted pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedMount {
    nodes: Vec<PassedNode>,
    /// The last number that was given to a node.
    last_node: u64,
    files: Vec<PassedFile>,
    folders: Vec<PassedFolder>,
    /// Last change of the root, in seconds since 1970 and nanoseconds.
    root_changed: (i64, u32),
}

/// An open file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PassedFile {
    handle: usize,
    volume: u64,
    writes: bool,
}

/// An open folder, with its entries: name, and whether it is a folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PassedFolder {
    handle: usize,
    entries: Option<Vec<(String, bool)>>,
}

impl<D: Device> Volumes<D> {
    /// Returns what the kernel holds, for [`resume`](Self::resume) in another process. Called when no request is in
    /// flight. This file system must be kept until the pool is closed: with it, removed files that are open would go.
    pub fn pass_on(&self) -> PassedMount {
        let file = |(handle, file): (usize, &Rc<Open<D>>)| {
            let (volume, writes) = (file.volume.id().0, file.writes);
            PassedFile { handle, volume, writes }
        };
        let folder = |(handle, folder): (usize, &Opened)| {
            let names = |list: &Rc<Vec<(String, Kind)>>| {
                list.iter().map(|(name, kind)| (name.clone(), *kind == Kind::Folder)).collect()
            };
            PassedFolder { handle, entries: folder.0.as_ref().map(names) }
        };
        let (nodes, last_node) = self.nodes.borrow().pass_on();
        let Time { seconds, nanos } = self.root_changed.get();
        PassedMount {
            nodes,
            last_node,
            files: self.files.borrow().iter().map(file).collect(),
            folders: self.folders.borrow().iter().map(folder).collect(),
            root_changed: (seconds, nanos),
        }
    }

    /// Continues a mount of another process.
    ///
    /// # Errors
    /// A volume that is open cannot be opened any more.
    pub fn resume(pool: Pool<D>, options: VolumesOptions, passed: &PassedMount) -> Result<Rc<Volumes<D>>> {
        let mut files = Vec::with_capacity(passed.files.len());
        for &PassedFile { handle, volume, writes } in &passed.files {
            files.push((handle, Rc::new(Open { volume: pool.volume_by_id(VolumeId(volume))?, writes })));
        }
        let volumes = Volumes::new(pool, options);
        for (_, file) in files.iter().filter(|(_, file)| file.writes) {
            *volumes.writers.borrow_mut().entry(file.volume.id()).or_default() += 1;
        }
        *volumes.files.borrow_mut() = files.into_iter().collect();
        let kind = |is_folder| if is_folder { Kind::Folder } else { Kind::File };
        let folder = |PassedFolder { handle, entries }: &PassedFolder| {
            let entries = entries.as_ref().map(|entries| {
                Rc::new(entries.iter().map(|(name, is_folder)| (name.clone(), kind(*is_folder))).collect())
            });
            (*handle, Opened(entries))
        };
        *volumes.folders.borrow_mut() = passed.folders.iter().map(folder).collect();
        *volumes.nodes.borrow_mut() = Nodes::resume(&passed.nodes, passed.last_node);
        let (seconds, nanos) = passed.root_changed;
        volumes.root_changed.set(Time { seconds, nanos });
        Ok(volumes)
    }
}
