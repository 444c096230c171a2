//! Forks: the records that make clones of a volume, of a snapshot, or of everything in a folder.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    Attributes, Extension, FileKind, Inherited, NO_VOLUME, Record, VolumeRecord, VolumeState, WritePolicy,
};
use crate::planted::correct;
use crate::types::{Epoch, VolumeId};

use super::directory::{Directory, hard_links, names, remnants};
use super::{Catalog, CatalogEntry, Changes, check_new_names, xattrs};

/// What the volumes of a fork have that their sources do not.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForkOptions {
    /// Properties; what is absent is as in the source. A clone has no quota unless one is given.
    pub changes: Changes,
    /// User ID of the owner of the new files and folders on a mount.
    pub uid: Option<u32>,
    /// Group ID of the new files and folders on a mount.
    pub gid: Option<u32>,
    /// Permission bits of the new files on a mount, at most 0o7777.
    pub mode: Option<u32>,
    /// Seconds since 1970.
    pub now: u64,
}

impl ForkOptions {
    /// Clones as they are without options.
    pub fn new(now: u64) -> ForkOptions {
        ForkOptions { changes: Changes::default(), uid: None, gid: None, mode: None, now }
    }

    /// Attributes of the copy of a volume, if they are not those of the source.
    fn attributes(&self, of: &VolumeRecord) -> Option<Attributes> {
        if self.uid.is_none() && self.gid.is_none() && self.mode.is_none() {
            return None;
        }
        let attributes = self.owned(of.attributes.unwrap_or(Attributes::of_no_owner(self.now)));
        let mode = self.mode.filter(|_| attributes.kind() != FileKind::Link).unwrap_or(attributes.mode);
        Some(Attributes { mode, ..attributes }.with_kind(attributes.kind()))
    }

    fn owned(&self, attributes: Attributes) -> Attributes {
        let (uid, gid) = (self.uid.unwrap_or(attributes.uid), self.gid.unwrap_or(attributes.gid));
        Attributes { uid, gid, ..attributes }
    }
}

/// The records of a fork, and its volumes: each with the source and the number of the copy.
pub struct Fork {
    pub parts: Vec<Record>,
    pub copies: Vec<(VolumeId, VolumeId)>,
}

/// Object in a source: its name behind that of the source, its number, and the number of its file, if it is
/// known; a folder is its own source.
struct Part {
    suffix: String,
    from: VolumeId,
    file: VolumeId,
    is_folder: bool,
}

/// Plans clones of `source` under all of these names. `source` is a volume, a snapshot, a folder, or `folder@snapshot`,
/// which stands for the snapshots of this name of all volumes in the folder.
pub fn plan_fork(meta: &Catalog, source: &str, names: &[&str], options: &ForkOptions) -> Result<Fork> {
    options.changes.check_of_clone()?;
    if options.mode.is_some_and(|mode| mode > 0o7777) {
        return Err(Error::new(ErrorKind::Invalid, "bad mode: at most 7777 (octal)"));
    }
    let sources = sources_of(meta, source)?;
    let full = |name: &&str| sources.iter().map(|part| format!("{name}{}", part.suffix)).collect::<Vec<_>>();
    let new: Vec<String> = names.iter().flat_map(full).collect();
    check_new_folders(meta, names, &new, &sources)?;
    check_new_names(&meta.directory, &strs(&new, &sources))?;
    let mut fork = Fork { parts: Vec::new(), copies: Vec::new() };
    let ids = (meta.next_id..).map(VolumeId);
    let mut made: BTreeMap<(VolumeId, Epoch), VolumeId> = BTreeMap::new();
    for ((i, (name, part)), id) in new.into_iter().zip(sources.iter().cycle()).enumerate().zip(ids) {
        let record = &meta.directory.get(part.from).expect("found above").record;
        if i % sources.len() == 0 {
            made.clear();
        }
        // Names of one file, at one instant.
        if let Some(&file) = made.get(&(part.file, record.shared_at)) {
            fork.parts.push(Record::MakeHardLink { id, file, name });
            continue;
        }
        if part.file != NO_VOLUME {
            correct!(made.insert((part.file, record.shared_at), id), Bug::ForkMakesTwoFiles => None);
        }
        if part.is_folder {
            let attributes = record.attributes.map(|attributes| options.owned(attributes));
            fork.parts.push(Record::MakeFolder { id, now: options.now, attributes, name });
            fork.parts.extend(xattrs::record_of_copy(&meta.directory, part.from, id));
            continue;
        }
        let _is_snapshot = record.state == VolumeState::Snapshot;
        let inherited = correct!(
            inherited_at(&meta.directory, &name),
            Bug::SnapshotCloneInheritsNothing => match _is_snapshot {
                true => Inherited::new(),
                false => inherited_at(&meta.directory, &name),
            }
        );
        let changes = options.changes.or_inherited(&inherited, options.now);
        fork.parts.push(Record::Clone { source: part.from, id, now: options.now, name });
        let xattrs = correct!(xattrs::of(&meta.directory, part.from), Bug::CloneForgetsXattrs => Default::default());
        let of_source = Extension { writes: write_policy(&meta.directory, record), xattrs, ..Extension::default() };
        fork.parts.extend(changes.records_of_clone(id, record, &of_source)?);
        let attributes = options.attributes(record);
        fork.parts.extend(attributes.map(|given| Record::SetAttributes { id, attributes: Some(given) }));
        fork.copies.push((part.from, id));
    }
    Ok(fork)
}

/// The properties that a new clone with this name inherits, each from the nearest folder that has it.
fn inherited_at(directory: &Directory, name: &str) -> Inherited {
    let mut all = Inherited::new();
    for (end, _) in name.match_indices('/') {
        let folder = directory.folder(&name[..end]).and_then(|record| directory.get(record.id));
        if let Some(extension) = folder.and_then(CatalogEntry::extension) {
            all.extend(&extension.inherited);
        }
    }
    all
}

/// Which writes a volume, or that of a snapshot, does not store.
fn write_policy(directory: &Directory, record: &VolumeRecord) -> WritePolicy {
    let of = if record.parent == NO_VOLUME { record.id } else { hard_links::file_of(directory, record.parent) };
    let extension = directory.get(of).and_then(CatalogEntry::extension);
    extension.map_or(WritePolicy::ALL, |extension| extension.writes)
}

/// The names of new volumes among `new`.
fn strs<'a>(new: &'a [String], sources: &[Part]) -> Vec<&'a str> {
    let volumes = new.iter().zip(sources.iter().cycle()).filter(|(_, part)| !part.is_folder);
    volumes.map(|(name, _)| name.as_str()).collect()
}

/// Refuses a target that exists, lies in a volume, or is named twice, and folders where a volume is to be.
fn check_new_folders(meta: &Catalog, names: &[&str], new: &[String], sources: &[Part]) -> Result<()> {
    let refuse =
        |name: &str, why: &str| Err(Error::new(ErrorKind::Exists, format!("{name:?} {why}; choose another name")));
    let mut seen = BTreeSet::new();
    for &name in names {
        if meta.directory.folder(name).is_some() || meta.directory.has_children(name) {
            return refuse(name, "is a folder");
        }
        if !seen.insert(name) {
            return refuse(name, "is named twice");
        }
    }
    let folders = new.iter().zip(sources.iter().cycle()).filter(|(_, part)| part.is_folder);
    folders.map(|(name, _)| name).try_for_each(|name| meta.directory.check_new(VolumeId(0), name))
}

/// Returns what `source` stands for: itself, or all that is in it.
fn sources_of(meta: &Catalog, source: &str) -> Result<Vec<Part>> {
    let (base, snapshot) = source.split_once('@').map_or((source, None), |(base, snapshot)| (base, Some(snapshot)));
    let mut kept = snapshot.map_or_else(BTreeMap::new, |snapshot| kept_snapshots(meta, base, snapshot));
    // A folder that was removed is there in its snapshots.
    let was_folder = || !kept.is_empty() && meta.directory.find(source).is_err();
    if !is_folder(meta, base) && !was_folder() {
        let record = &meta.directory.find(source)?.record;
        refuse_origin_itself(record, source)?;
        return Ok(vec![Part { suffix: String::new(), from: record.id, file: NO_VOLUME, is_folder: false }]);
    }
    let mut parts = Vec::new();
    let suffix = |name: &str| name[base.len()..].to_string();
    for (name, id) in names::entries_within(&meta.directory, base) {
        let file = hard_links::file_of(&meta.directory, id);
        let Some(record) = meta.directory.get(file).filter(|v| !v.pending).map(|v| &v.record) else { continue };
        let is_folder = record.state == VolumeState::Folder;
        let from = match snapshot {
            // What is a folder now was a file.
            Some(_) if is_folder && kept.contains_key(name) => continue,
            Some(snapshot) if !is_folder => match names::snapshot_named(&meta.directory, id, snapshot) {
                Some(found) => correct!(found, Bug::ForkOfSnapshotTakesVolume => file),
                None => continue,
            },
            _ => file,
        };
        if snapshot.is_none() && !is_folder {
            refuse_origin_itself(record, name)?;
        }
        // A folder that was renamed may have brought a snapshot of the same name; it is the one that is found.
        kept.remove(name);
        let file = if is_folder { NO_VOLUME } else { file };
        parts.push(Part { suffix: suffix(name), from, file, is_folder });
    }
    let removed = |(name, from): (String, _)| Part { suffix: suffix(&name), from, file: NO_VOLUME, is_folder: false };
    parts.extend(kept.into_iter().map(removed));
    if let Some(snapshot) = snapshot.filter(|_| parts.iter().all(|part| part.is_folder)) {
        return Err(no_such_snapshot(base, snapshot));
    }
    Ok(parts)
}

/// The snapshots of this name of files that were in the folder, each with the name that the file had.
fn kept_snapshots(meta: &Catalog, folder: &str, snapshot: &str) -> BTreeMap<String, VolumeId> {
    let all = remnants::kept_within(&meta.directory, folder).into_iter().rev();
    all.filter_map(|(name, id)| Some((name, names::snapshot_named(&meta.directory, id, snapshot)?))).collect()
}

/// Whether the name is that of a folder; the root is none here.
pub fn is_folder(meta: &Catalog, name: &str) -> bool {
    !name.is_empty() && (meta.directory.folder(name).is_some() || meta.directory.has_children(name))
}

/// The error for a folder in which no volume has the snapshot.
pub fn no_such_snapshot(folder: &str, snapshot: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("no volume in the folder {folder:?} has a snapshot {snapshot:?}"))
}

fn refuse_origin_itself(record: &VolumeRecord, name: &str) -> Result<()> {
    if record.state == VolumeState::Origin {
        let why = format!("{name:?} is an origin; take a snapshot of it and clone that");
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    Ok(())
}
