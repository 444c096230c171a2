//! Extended attributes of files and folders, which programs set on a mount (`user.NAME`). They are in the extension of
//! a volume, and a snapshot and a clone have those of their source.

use std::collections::BTreeMap;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{Extension, MAX_XATTR_NAME_BYTES, Record, VolumeState};
use crate::types::VolumeId;

use super::{CatalogEntry, Directory};

/// The extended attributes of a volume, snapshot or folder.
pub fn of(directory: &Directory, id: VolumeId) -> BTreeMap<String, Vec<u8>> {
    let extension = directory.get(id).and_then(CatalogEntry::extension);
    extension.map(|extension| extension.xattrs.clone()).unwrap_or_default()
}

/// The record that gives a new folder those of another one, if that has some.
pub fn record_of_copy(directory: &Directory, of_folder: VolumeId, id: VolumeId) -> Option<Record> {
    let xattrs = of(directory, of_folder);
    let extension = Box::new(Extension { xattrs, ..Extension::default() });
    (!extension.is_empty()).then_some(Record::SetExtension { id, extension })
}

/// The record that sets an extended attribute of a file or folder, or without `value` removes it; `None` if there is
/// no difference.
pub fn change(volume: &CatalogEntry, name: &str, value: Option<&[u8]>) -> Result<Option<Record>> {
    if volume.record.state == VolumeState::Snapshot {
        return Err(Error::new(ErrorKind::ReadOnly, "a snapshot cannot be changed"));
    }
    if !(1..=MAX_XATTR_NAME_BYTES).contains(&name.len()) {
        let why = format!("bad name of an extended attribute: 1 to {MAX_XATTR_NAME_BYTES} bytes");
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let old = volume.extension().cloned().unwrap_or_default();
    let mut new = old.clone();
    match value {
        Some(value) => new.xattrs.insert(name.to_string(), value.to_vec()),
        None => new.xattrs.remove(name),
    };
    if value.is_some() && !new.has_room() {
        let why = "there is no room for the extended attribute: all of a file take 256 bytes, with its labels 320";
        return Err(Error::new(ErrorKind::NoSpace, why));
    }
    Ok((new != old).then(|| Record::SetExtension { id: volume.record.id, extension: Box::new(new) }))
}
