//! Hard links: further names of a file.

use crate::catalog::directory::hard_links::{MAX_NAMES_COUNT, links_of};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{NO_VOLUME, Record, VolumeState};
use crate::store::deleted_error;
use crate::types::VolumeId;

use super::Pool;

/// Most names of a file.
pub const MAX_HARD_LINKS: usize = MAX_NAMES_COUNT;

impl<D: Device> Pool<D> {
    /// Gives a file a further name; durable with the next flush, like the other verbs of files. All names are alike:
    /// the file stays until the last one is removed, and snapshots belong to the name under which they were taken.
    ///
    /// # Errors
    /// `NotFound` if there is no volume with this number, `Exists` if the name is taken, `Invalid` for a bad name, a
    /// snapshot, an origin, or a file with [`MAX_HARD_LINKS`] names; and those of [changing](crate#errors).
    pub fn link_file(&self, file: VolumeId, name: &str) -> Result<()> {
        self.store.note(|meta| {
            let invalid = |why: String| Err(Error::new(ErrorKind::Invalid, why));
            let record = &meta.directory.get(file).filter(|v| !v.pending).ok_or_else(deleted_error)?.record;
            if record.state != VolumeState::Volume || record.name.starts_with(".snapshots/") {
                return invalid("only a file can have a further name".to_string());
            }
            if 1 + links_of(&meta.directory, file).count() >= MAX_HARD_LINKS {
                return invalid(format!("{:?} has {MAX_HARD_LINKS} names, the most there can be", record.name));
            }
            meta.directory.check_new(NO_VOLUME, name)?;
            let id = VolumeId(meta.next_id);
            Ok((Record::MakeHardLink { id, file, name: name.to_string() }, ()))
        })
    }
}
