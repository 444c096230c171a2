//! A mount on its way to another process of the server: the numbers and handles that the kernel holds. The connection
//! to the kernel is passed beside it ([`SessionHandle::pass_on`](crate::SessionHandle::pass_on)).

use std::collections::BTreeSet;
use std::rc::Rc;

use forkdisk::{Device, Error, Pool, Result, VolumeId};
use serde::{Deserialize, Serialize};

use super::folders::Opened;
use super::nodes::{Nodes, PassedNode};
use super::record::MountRecord;
use super::swap::{PassedSwap, Swaps};
use super::{Open, Volumes, VolumesOptions};
use crate::codec::{Kind, Time};

/// What the kernel holds of a mounted pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedMount {
    pub(super) nodes: Vec<PassedNode>,
    /// The last number that was given to a node.
    pub(super) last_node: u64,
    pub(super) files: Vec<PassedFile>,
    pub(super) folders: Vec<PassedFolder>,
    /// Exchanges of names that the kernel may request again.
    #[serde(default)]
    pub(super) swaps: Vec<PassedSwap>,
    /// Last change of the root, in seconds since 1970 and nanoseconds.
    pub(super) root_changed: (i64, u32),
}

/// An open file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PassedFile {
    pub(super) handle: usize,
    pub(super) volume: u64,
    pub(super) writes: bool,
    /// Id of the request that opened it.
    #[serde(default)]
    pub(super) request: u64,
}

/// An open folder, with its entries: name, and whether it is a folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PassedFolder {
    pub(super) handle: usize,
    pub(super) entries: Option<Vec<(String, bool)>>,
    /// Id of the request that opened it.
    #[serde(default)]
    pub(super) request: u64,
}

impl<D: Device> Volumes<D> {
    /// Returns what the kernel holds, for [`resume`](Self::resume) in another process. Called when no request is in
    /// flight. This file system must be kept until the pool is closed: with it, removed files that are open would go.
    pub fn pass_on(&self) -> PassedMount {
        let file = |(handle, file): (usize, &Rc<Open<D>>)| {
            let (volume, writes) = (file.volume.id().0, file.writes);
            PassedFile { handle, volume, writes, request: file.request }
        };
        let folder = |(handle, folder): (usize, &Opened)| {
            let names = |list: &Rc<Vec<(String, Kind)>>| {
                list.iter().map(|(name, kind)| (name.clone(), *kind == Kind::Folder)).collect()
            };
            PassedFolder { handle, entries: folder.listing.as_ref().map(names), request: folder.request }
        };
        let (nodes, last_node) = self.nodes.borrow().pass_on();
        let Time { seconds, nanos } = self.root_changed.get();
        PassedMount {
            nodes,
            last_node,
            files: self.files.borrow().iter().map(file).collect(),
            folders: self.folders.borrow().iter().map(folder).collect(),
            swaps: self.swaps.borrow().pass_on(),
            root_changed: (seconds, nanos),
        }
    }

    /// Continues a mount of another process.
    ///
    /// # Errors
    /// A volume that is open cannot be opened any more.
    pub fn resume(pool: Pool<D>, options: VolumesOptions, passed: &PassedMount) -> Result<Rc<Volumes<D>>> {
        let mut files = Vec::with_capacity(passed.files.len());
        for &PassedFile { handle, volume, writes, request } in &passed.files {
            files.push((handle, Rc::new(Open { volume: pool.volume_by_id(VolumeId(volume))?, writes, request })));
        }
        let volumes = Volumes::new(pool, options);
        files.iter().for_each(|(_, file)| volumes.opens.borrow_mut().add(file.volume.id(), file.writes, false));
        files.iter().for_each(|(_, file)| volumes.cached.add_all(file.volume.id()));
        *volumes.files.borrow_mut() = files.into_iter().collect();
        let kind = |is_folder| if is_folder { Kind::Folder } else { Kind::File };
        let folder = |PassedFolder { handle, entries, request }: &PassedFolder| {
            let entries = entries.as_ref().map(|entries| {
                Rc::new(entries.iter().map(|(name, is_folder)| (name.clone(), kind(*is_folder))).collect())
            });
            (*handle, Opened { listing: entries, request: *request })
        };
        *volumes.folders.borrow_mut() = passed.folders.iter().map(folder).collect();
        *volumes.nodes.borrow_mut() = Nodes::resume(&passed.nodes, passed.last_node);
        *volumes.swaps.borrow_mut() = Swaps::resume(&passed.swaps);
        let (seconds, nanos) = passed.root_changed;
        volumes.root_changed.set(Time { seconds, nanos });
        Ok(volumes)
    }

    /// Records what the kernel holds in `record` from now on.
    ///
    /// # Errors
    /// There is no memory.
    pub fn keep(&self, record: MountRecord) -> std::io::Result<()> {
        record.write_whole(&self.pass_on())?;
        // Called once.
        let _ = self.record.set(record);
        Ok(())
    }

    /// Continues a mount of a process that was killed, with the record that it left. Handles of files that are gone
    /// fail.
    ///
    /// # Errors
    /// There is no memory for the record.
    pub fn take_over(
        pool: Pool<D>,
        options: VolumesOptions,
        (record, mut left): (MountRecord, PassedMount),
    ) -> Result<Rc<Volumes<D>>> {
        // Held until they are opened below: the last handle of a removed volume takes the volume along.
        let mut open = Vec::new();
        left.files.retain(|file| {
            let volume = pool.volume_by_id(VolumeId(file.volume));
            if volume.is_err() {
                tracing::error!(volume = file.volume, "a file that was open is gone: its volume was removed");
            }
            let is_there = volume.is_ok();
            open.extend(volume);
            is_there
        });
        let volumes = Volumes::resume(pool, options, &left)?;
        volumes.keep(record).map_err(|e| Error::io("the mount record", e))?;
        Ok(volumes)
    }

    /// Makes the kernel drop its cache for all open files: contents may have changed while nothing served the mount.
    pub async fn forget_cached(&self) {
        let open: BTreeSet<VolumeId> = self.files.borrow().iter().map(|(_, file)| file.volume.id()).collect();
        for id in open {
            self.cached.add_all(id);
            self.drop_cached(id, 0, u64::MAX).await;
        }
    }
}
