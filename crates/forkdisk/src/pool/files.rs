//! Verbs of file systems, on names and attributes (`…_file`, `…_folder`): visible at once, durable with the
//! next flush, in the order of the calls. After a crash all of them up to some point have happened, none in
//! part. A caller that acknowledges a change without a flush awaits [`Pool::wait_process_safe`] first.
//!
//! Folders are the parts of names before a `/`. A folder exists while something is in it, or if it has a
//! record, which also keeps its attributes; the record of the root has the empty name.

use crate::catalog::directory::{hard_links, names, remnants};
use crate::catalog::{
    CreateOptions, DUE_CHECKPOINT_PAGES, VolumeInfo, check_chunk, check_gather, check_size, check_volume_name,
    refuse_origin, refuse_with_snapshots, writable_volume,
};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Attributes, FileKind, GatherPolicy, NO_VOLUME, Record, VolumeState};
use crate::planted::correct;
use crate::store::transaction::prepare_change;
use crate::types::VolumeId;
use crate::volume::Volume;

use super::Pool;

/// Object of a name.
#[derive(Clone, Debug)]
pub enum Child {
    /// A volume.
    Volume(Box<VolumeInfo>),
    /// A folder, with its attributes if they were set, and its time of creation (0: implied by a volume in
    /// it).
    Folder(Option<Attributes>, u64),
}

fn missing(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no volume or folder {name:?}"))
}

impl<D: Device> Pool<D> {
    /// The object of `name`; the empty name is the root.
    ///
    /// # Errors
    /// `NotFound` if the name is that of nothing.
    pub fn child(&self, name: &str) -> Result<Child> {
        let meta = self.store.meta.borrow();
        let directory = &meta.directory;
        match directory.folder(name) {
            Some(record) => Ok(Child::Folder(record.attributes, record.created)),
            None if name.is_empty() || directory.has_children(name) => Ok(Child::Folder(None, 0)),
            None if name.contains('@') => Err(missing(name)),
            None => Ok(Child::Volume(Box::new(meta.info_by_name(name, |id| self.store.handles(id))?))),
        }
    }

    /// Names of everything directly in a folder (empty: the root), sorted, each with its kind.
    pub fn children(&self, folder: &str) -> Vec<(String, FileKind)> {
        names::children(&self.store.meta.borrow().directory, folder)
    }

    /// Names of at most `most` volumes and snapshots, each volume before its snapshots, that sort after the
    /// name `after` (empty: from the first on). For long lists in pieces, between which other tasks run and
    /// names come and go.
    pub fn names_after(&self, after: &str, most: usize) -> Vec<String> {
        names::names_after(&self.store.meta.borrow().directory, after, most, true)
    }

    /// Like [`names_after`](Self::names_after), volumes only.
    pub fn volume_names_after(&self, after: &str, most: usize) -> Vec<String> {
        names::names_after(&self.store.meta.borrow().directory, after, most, false)
    }

    /// A number that changes whenever the name of a volume or snapshot appears or disappears.
    pub fn names_version(&self) -> u64 {
        self.store.meta.borrow().directory.names_version()
    }

    /// The snapshots of a volume, sorted by name.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume.
    pub fn snapshots_of(&self, volume: &str) -> Result<Vec<VolumeInfo>> {
        let meta = self.store.meta.borrow();
        let ids = meta.directory.snapshots_of(names::named(&meta.directory, volume)?);
        let seen = ids.into_iter().filter_map(|id| meta.directory.get(id)).filter(|v| !v.pending);
        Ok(seen.map(|v| self.store.info_of(&meta, &v.record)).collect())
    }

    /// The last names of snapshots of a volume in sorted order, at most `most`, without the volume's part.
    /// The time does not depend on the number of snapshots.
    pub fn last_snapshot_names(&self, volume: &str, most: usize) -> Vec<String> {
        names::last_snapshot_names(&self.store.meta.borrow().directory, volume, most)
    }

    /// To be awaited before the verbs of this module that change something: on a nearly full pool it writes a
    /// checkpoint, after which they need less space.
    pub async fn prepare_verb(&self) {
        prepare_change(&self.store, DUE_CHECKPOINT_PAGES).await;
    }

    /// Creates and opens an empty volume with these attributes.
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Invalid` for a bad name or option; and those of
    /// [changing](crate#errors).
    pub fn create_file(&self, name: &str, options: &CreateOptions, attributes: Attributes) -> Result<Volume<D>> {
        check_size(options.size)?;
        check_chunk(options.chunk)?;
        check_gather(options.gather)?;
        let id = self.store.note(|meta| {
            meta.directory.check_new(NO_VOLUME, name)?;
            let id = VolumeId(meta.next_id);
            let CreateOptions { size, chunk, now, gather, .. } = *options;
            let create = Record::Create { id, name: name.to_string(), size, chunk, now };
            let attributes = Record::SetAttributes { id, attributes: Some(attributes.with_kind(FileKind::File)) };
            let gather = (gather != GatherPolicy::Off).then_some(Record::SetGather { id, gather });
            Ok((Record::Transaction { parts: [create, attributes].into_iter().chain(gather).collect() }, id))
        })?;
        self.volume_by_id(id)
    }

    /// Sets the attributes of the volume or folder with this number. Refused for snapshots.
    ///
    /// # Errors
    /// `NotFound` if there is no volume or folder with this number, `ReadOnly` for a snapshot; and those of
    /// [changing](crate#errors).
    pub fn set_attributes(&self, id: VolumeId, attributes: Attributes) -> Result<()> {
        self.store.note(|meta| match meta.directory.get(id).map(|v| (v.record.state, v.record.kind())) {
            Some((VolumeState::Snapshot, _)) => Err(Error::new(ErrorKind::ReadOnly, "a snapshot cannot be changed")),
            Some((state, kind)) if state != VolumeState::Dead => {
                let changed = attributes.with_kind(correct!(kind, Bug::ChangedModeForgetsKind => FileKind::File));
                Ok((Record::SetAttributes { id, attributes: Some(changed) }, ()))
            }
            _ => Err(missing(&format!("number {}", id.0))),
        })?;
        self.store.live.borrow_mut().set_change_recorded(id);
        Ok(())
    }

    /// Creates a folder that exists without contents. Refused if a volume or folder has this name.
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Invalid` for a bad name; and those of [changing](crate#errors).
    pub fn create_folder(&self, name: &str, attributes: Attributes, now: u64) -> Result<()> {
        check_volume_name(name)?;
        self.store.note(|meta| {
            meta.directory.check_new(NO_VOLUME, name)?;
            let id = VolumeId(meta.next_id);
            Ok((Record::MakeFolder { id, name: name.to_string(), attributes: Some(attributes), now }, ()))
        })
    }

    /// Sets the attributes of a folder (empty: the root), which gets a record if it has none.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder; and those of [changing](crate#errors).
    pub fn set_folder_attributes(&self, name: &str, attributes: Attributes, now: u64) -> Result<()> {
        let known = self.store.meta.borrow().directory.folder(name).map(|record| record.id);
        if let Some(id) = known {
            return self.set_attributes(id, attributes);
        }
        self.store.note(|meta| {
            if !name.is_empty() && !meta.directory.has_children(name) {
                return Err(missing(name));
            }
            let id = VolumeId(meta.next_id);
            Ok((Record::MakeFolder { id, name: name.to_string(), attributes: Some(attributes), now }, ()))
        })
    }

    /// Removes an empty folder; any other is `Busy`.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder, `Busy` if something is in it; and those of
    /// [changing](crate#errors).
    pub fn remove_folder(&self, name: &str) -> Result<()> {
        self.store.note(|meta| {
            if meta.directory.has_children(name) {
                return Err(Error::new(ErrorKind::Busy, format!("the folder {name:?} is not empty")));
            }
            let id = meta.directory.folder(name).ok_or_else(|| missing(name))?.id;
            Ok((Record::Delete { ids: vec![id] }, ()))
        })?;
        self.upkeep.start_reaping();
        Ok(())
    }

    /// Removes a volume or a snapshot (`volume@snapshot`): its name at once, its contents at the last close. A file
    /// with further names keeps these.
    /// Refused for a volume that has snapshots.
    ///
    /// # Errors
    /// `NotFound` if the name is that of nothing, `Busy` for a volume with snapshots and a snapshot that
    /// something needs, `Invalid` for an origin; and those of [changing](crate#errors).
    pub fn remove_file(&self, name: &str) -> Result<()> {
        self.store.note(|meta| {
            let (volume, id) = (meta.directory.find(name)?, names::named(&meta.directory, name)?);
            refuse_with_snapshots(meta, id)?;
            if id != volume.record.id {
                return Ok((Record::Delete { ids: vec![id] }, ()));
            }
            refuse_origin(meta, volume, self.store.handles(volume.record.id))?;
            let first = hard_links::links_of(&meta.directory, id).next();
            if let Some(link) = correct!(first, Bug::RemovalIgnoresHardLinks => None) {
                return Ok((Record::TakeName { file: id, link }, ()));
            }
            let mut ids = remnants::idle_remnants(&meta.directory, &[id]);
            ids.retain(|&remnant| self.store.handles(remnant) == 0);
            if self.store.handles(id) > 0 {
                let unlink = Record::Unlink { id };
                return Ok(match ids.is_empty() {
                    true => (unlink, ()),
                    false => (Record::Transaction { parts: vec![unlink, Record::Delete { ids }] }, ()),
                });
            }
            ids.push(id);
            Ok((Record::Delete { ids: hard_links::with_links(&meta.directory, ids) }, ()))
        })?;
        self.upkeep.start_reaping();
        Ok(())
    }

    /// Renames a volume, or one of the names of a file; the snapshots taken under that name go with it. If a volume has
    /// the new name, it is removed in the same instant, as by [`remove_file`](Self::remove_file), or without `replace`
    /// the rename is refused. If both are names of one file, both stay.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `Exists` if the new name is taken and not to be replaced,
    /// `Busy` if what has it cannot be removed, `Invalid` for a bad name, `ReadOnly` for a snapshot; and
    /// those of [changing](crate#errors).
    pub fn rename_file(&self, from: &str, to: &str, replace: bool) -> Result<()> {
        let file = |name: &str| self.store.meta.borrow().directory.find(name).map(|volume| volume.record.id);
        if from != to && replace && file(from)? == file(to).unwrap_or(NO_VOLUME) {
            return Ok(());
        }
        self.store.note(|meta| {
            writable_volume(meta.directory.find(from)?, from)?;
            let (id, name) = (names::named(&meta.directory, from)?, to.to_string());
            let old = meta.directory.find(to).ok().filter(|_| replace && !to.contains('@'));
            let Some(old) = old else {
                meta.directory.check_new(NO_VOLUME, to)?;
                return Ok((Record::Rename { id, name }, ()));
            };
            let replaced = names::named(&meta.directory, to)?;
            if replaced == id {
                return Ok((Record::Rename { id, name }, ()));
            }
            refuse_with_snapshots(meta, replaced)?;
            if replaced != old.record.id {
                return Ok((Record::RenameOver { id, name, replaced, kept: false }, ()));
            }
            let kept = self.store.handles(replaced) > 0;
            refuse_origin(meta, old, self.store.handles(replaced))?;
            if let Some(link) = hard_links::links_of(&meta.directory, replaced).next() {
                let parts = vec![Record::TakeName { file: replaced, link }, Record::Rename { id, name }];
                return Ok((Record::Transaction { parts }, ()));
            }
            Ok((Record::RenameOver { id, name, replaced, kept }, ()))
        })?;
        self.upkeep.start_reaping();
        Ok(())
    }

    /// The number of a volume, or of a folder that has attributes.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn number_of(&self, name: &str) -> Result<VolumeId> {
        let directory = &self.store.meta.borrow().directory;
        match directory.folder(name) {
            Some(record) => Ok(record.id),
            None => Ok(directory.find(name)?.record.id),
        }
    }

    /// Renames a folder and everything in it. The new name must be free, and not within the folder.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder, `Exists` if the new name is taken, `Invalid` if it is bad or
    /// within the folder; and those of [changing](crate#errors).
    pub fn rename_folder(&self, from: &str, to: &str) -> Result<()> {
        self.store.note(|meta| {
            let directory = &meta.directory;
            if directory.folder(from).is_none() && !directory.has_children(from) {
                return Err(missing(from));
            }
            directory.check_new(NO_VOLUME, to)?;
            if to.starts_with(&format!("{from}/")) {
                return Err(Error::new(ErrorKind::Invalid, format!("{to:?} lies within {from:?}")));
            }
            names::check_renamed(directory, from, to)?;
            Ok((Record::RenameFolder { from: from.to_string(), to: to.to_string() }, ()))
        })
    }
}
