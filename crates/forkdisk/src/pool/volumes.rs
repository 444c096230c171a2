//! Opening volumes.

use crate::catalog::CatalogEntry;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::VolumeState::{Dead, Folder, HardLink};
use crate::types::VolumeId;
use crate::volume::Volume;

use super::Pool;

impl<D: Device> Pool<D> {
    /// Opens `volume` or `volume@snapshot` for I/O. For an origin, its snapshots and their clones, the device
    /// of the origin must be open ([`attach_origin`](Self::attach_origin)).
    ///
    /// # Errors
    /// `NotFound` if the name is that of nothing, `Invalid` if it is no disk (a symbolic link, a FIFO, a socket),
    /// `Busy` if the device of the origin is not open.
    pub fn volume(&self, name: &str) -> Result<Volume<D>> {
        let meta = self.store.meta.borrow();
        let record = &meta.directory.find(name)?.record;
        super::links::refuse_special(record, name)?;
        let id = record.id;
        drop(meta);
        self.open_volume(id)
    }

    /// Opens a volume or snapshot by its number for I/O, also one that was removed while open.
    ///
    /// # Errors
    /// `NotFound` if there is no volume with this number, `Busy` if the device of the origin is not open.
    pub fn volume_by_id(&self, id: VolumeId) -> Result<Volume<D>> {
        let is_there = |v: &&CatalogEntry| !matches!(v.record.state, Dead | Folder | HardLink) && !v.pending;
        if self.store.meta.borrow().directory.get(id).filter(is_there).is_none() {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no volume with the number {}", id.0)));
        }
        self.open_volume(id)
    }

    fn open_volume(&self, id: VolumeId) -> Result<Volume<D>> {
        Volume::open(&self.store, &self.origins, self.upkeep.clone(), id)
    }
}
