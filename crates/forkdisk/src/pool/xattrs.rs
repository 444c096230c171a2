//! Extended attributes of files and folders.

use std::collections::BTreeMap;

use crate::catalog::xattrs;
use crate::device::Device;
use crate::error::Result;
use crate::format::VolumeState;
use crate::store::deleted_error;
use crate::types::VolumeId;

use super::Pool;

impl<D: Device> Pool<D> {
    /// The extended attributes of the volume, snapshot or folder with this number: names without `user.`, and values.
    pub fn xattrs(&self, id: VolumeId) -> BTreeMap<String, Vec<u8>> {
        xattrs::of(&self.store.meta.borrow().directory, id)
    }

    /// Sets an extended attribute of the volume or folder with this number, or without `value` removes it; durable with
    /// the next flush, like the other verbs of files. Snapshots and clones made later have it, too.
    ///
    /// # Errors
    /// `NotFound` if there is no volume or folder with this number, `ReadOnly` for a snapshot, `Invalid` for a bad
    /// name, `NoSpace` if all attributes of the file take more than 256 bytes (names, values, and 4 for each), or with
    /// its labels 320; and those of [changing](crate#errors).
    pub fn set_xattr(&self, id: VolumeId, name: &str, value: Option<&[u8]>) -> Result<()> {
        let changed = {
            let meta = self.store.meta.borrow();
            let found = meta.directory.get(id).filter(|volume| volume.record.state != VolumeState::Dead);
            xattrs::change(found.ok_or_else(deleted_error)?, name, value)?
        };
        changed.map_or(Ok(()), |record| self.store.note(|_| Ok((record, ()))))
    }
}
