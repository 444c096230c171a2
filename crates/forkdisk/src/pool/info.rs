//! Properties of a pool and its volumes.

use crate::catalog::directory::descent;
use crate::catalog::{VolumeInfo, folders_with_properties, info_of_folder};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::VolumeState;
use crate::store::{PoolInfo, PoolSpace, is_low, mode, pool_info, pool_space};
use crate::types::{Mode, VolumeId};

use super::Pool;

impl<D: Device> Pool<D> {
    /// What the pool accepts at the moment.
    pub fn mode(&self) -> Mode {
        mode(&self.store)
    }

    /// Whether less space is free than [`OpenOptions::low_water`](crate::OpenOptions::low_water), or none can
    /// be used, in the pool or the host file system.
    pub fn is_low(&self) -> bool {
        is_low(&self.store)
    }

    /// Space of the pool. Unlike [`info`](Self::info), which visits all volumes, it takes no time.
    pub fn space(&self) -> PoolSpace {
        pool_space(&self.store)
    }

    /// Properties of the pool.
    pub fn info(&self) -> PoolInfo {
        pool_info(&self.store)
    }

    /// All volumes and snapshots, sorted by name.
    pub fn list(&self) -> Vec<VolumeInfo> {
        let meta = self.store.meta.borrow();
        let named = |state| matches!(state, VolumeState::Volume | VolumeState::Snapshot | VolumeState::Origin);
        let seen = meta.directory.iter().filter(|v| named(v.record.state) && !v.pending);
        let mut all: Vec<VolumeInfo> = seen.map(|v| self.store.info_of(&meta, &v.record)).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Names of the volumes that volume or snapshot `id` descends from: its own (empty if it has none), that
    /// of its source, and so on, at most `most`. Other volumes without a name are left out.
    pub fn line_of(&self, id: VolumeId, most: usize) -> Vec<String> {
        descent::line_of(&self.store.meta.borrow().directory, id, most)
    }

    /// A folder by name: its bounds, and what they count.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder, or it exists only as a part of names and has no bound.
    pub fn find_folder(&self, name: &str) -> Result<VolumeInfo> {
        let mut meta = self.store.meta.borrow_mut();
        let id = meta.directory.folder(name).map(|record| record.id);
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no folder {name:?} with properties"));
        id.and_then(|id| info_of_folder(&mut meta, id)).ok_or_else(missing)
    }

    /// The folders with properties, sorted by name.
    pub fn folders_with_properties(&self) -> Vec<VolumeInfo> {
        folders_with_properties(&mut self.store.meta.borrow_mut())
    }

    /// A volume or snapshot by name.
    ///
    /// # Errors
    /// `NotFound` if the name is that of nothing.
    pub fn find(&self, name: &str) -> Result<VolumeInfo> {
        self.store.find(name)
    }
}
