//! What each journal record does to the metadata: the same when it is made and when it is replayed.

use crate::catalog::directory::{self, descent, extensions, hard_links, names, remnants};
use crate::catalog::folder_bounds::{self, keeps_account};
use crate::catalog::{bounds, exceptions, parts};
use crate::format::{
    Bound, BreakPolicy, Extension, Identity, Layout, NO_VOLUME, OriginFull, OriginRecord, Record, SnapshotFlags,
    Throttle, VolumeRecord, VolumeState,
};
use crate::planted::correct;
use crate::types::{BLOCK_PAGES, MAX_POOL_SIZE, NO_ACCOUNT, PageAddr, VirtualPage, VolumeId};

use super::{Catalog, Failure, level_for, pages_of};

/// What is kept ahead of a sequential writer of an origin when nothing else is said, in bytes.
const DEFAULT_COPY_AHEAD_BYTES: u64 = 8 << 20;

impl Catalog {
    /// Does to the metadata what `record` says, from page `done` of it on (`Map`, `Unmap`,
    /// `CloneRange`) or from that part on (`Transaction`). May be called again after a [`Stop`](crate::map::Stop).
    pub fn apply(&mut self, record: &Record, done: &mut u64) -> Result<(), Failure> {
        match record {
            Record::Map { volume, at, len, to } => map_all(self, *volume, *at, *len, *to, done)?,
            Record::Unmap { volume, at, len } => unmap_all(self, *volume, *at, *len, done)?,
            Record::CloneRange { source, from, target, to, len, dead } => {
                share_all(self, (*source, *from), (*target, *to), *len, *dead, done)?
            }
            Record::Create { id, name, size, chunk, now } => self.add(VolumeRecord {
                size: *size,
                chunk: *chunk,
                level: level_for(*size),
                ..VolumeRecord::empty(*id, name, *now)
            }),
            Record::Snapshot { of, now, flags } => add_snapshots(self, of, *now, *flags)?,
            Record::Clone { source, id, name, now } => add_clone(self, *source, *id, name, *now)?,
            Record::Rollback { volume, snapshot, dead } => roll_back(self, *volume, *snapshot, *dead)?,
            Record::Delete { ids } => delete_all(self, ids)?,
            Record::Rename { id, name } => {
                self.record_of(*id)?;
                self.directory.rename(*id, name);
            }
            Record::Resize { id, size } => resize(self, *id, *size)?,
            Record::SetChunk { id, chunk } => {
                self.record_of(*id)?;
                self.directory.change(*id).expect("read above").record.chunk = *chunk;
            }
            Record::Protect { id, name, path, size, chunk, now, identity } => {
                add_origin(self, *id, name, path, (*size, *chunk), *now, *identity)
            }
            Record::SetOrigin { id, copy_ahead, when_full } => {
                let protects = self.protects_mut(*id)?;
                (protects.copy_ahead, protects.when_full) = (*copy_ahead, *when_full);
            }
            Record::Identify { id, clean, identity, path } => {
                let protects = self.protects_mut(*id)?;
                (protects.clean, protects.identity) = (*clean, *identity);
                self.directory.change(*id).expect("changed above").record.origin = path.clone();
            }
            Record::Stamp { id, stamp } => {
                self.protects_mut(*id)?;
                self.directory.change(*id).expect("changed above").record.stamp = Some(stamp.clone());
            }
            Record::ZonesWritten { id, zones } => note_zones(self, *id, *zones)?,
            Record::CopyOut { origin, sequence, at, len, to } => {
                add_all_exceptions(self, *origin, *sequence, *at, *len, *to, done)?
            }
            Record::RollbackProgress { origin, snapshot, cursor } => {
                exceptions::advance_rollback(self, *origin, *snapshot, *cursor)?
            }
            Record::ChunksRolledBack { origin, first, count } => {
                exceptions::note_rolled_back(self, *origin, *first, u64::from(*count))?
            }
            Record::SetCopying { id, break_policy, throttle } => set_copying(self, *id, *break_policy, *throttle)?,
            Record::SetCopier { settings } => self.copier = *settings,
            Record::SetQuota { id, quota } => set_quota(self, *id, *quota)?,
            Record::Grow { size } => grow(self, *size)?,
            Record::SetAttributes { id, attributes } => {
                self.record_of(*id)?;
                self.directory.change(*id).expect("read above").record.attributes = *attributes;
            }
            Record::MakeFolder { id, name, attributes, now } => self.add(VolumeRecord {
                state: VolumeState::Folder,
                attributes: *attributes,
                ..VolumeRecord::empty(*id, name, *now)
            }),
            Record::CreateUnnamed { id, size, chunk, now } => self.add(VolumeRecord {
                state: VolumeState::Orphan,
                size: *size,
                chunk: *chunk,
                level: level_for(*size),
                ..VolumeRecord::empty(*id, "", *now)
            }),
            Record::NameVolume { id, name } => name_volume(self, *id, name)?,
            Record::KeepSnapshots { id, remnant, name, now } => keep_snapshots(self, *id, *remnant, name, *now)?,
            Record::Unlink { id } => unlink(self, *id)?,
            Record::RenameOver { id, name, replaced, kept } => rename_over(self, *id, name, *replaced, *kept)?,
            Record::RenameFolder { from, to } => self.directory.rename_folder(from, to),
            Record::Exchange { a, b } => names::exchange(&mut self.directory, a, b),
            Record::Replace { volume, source, dead } => replace(self, *volume, *source, *dead)?,
            Record::Flatten { id } => {
                self.record_of(*id)?;
                self.directory.set_base(*id, NO_VOLUME);
            }
            Record::SetGather { id, gather } => {
                self.record_of(*id)?;
                self.directory.change(*id).expect("read above").record.gather = *gather;
                self.directory.update_gathering(*id);
            }
            Record::SetExtension { id, extension } => set_extension(self, *id, extension)?,
            Record::MakeHardLink { id, file, name } => make_hard_link(self, *id, *file, name)?,
            Record::TakeName { file, link } => take_name(self, *file, *link)?,
            Record::Transaction { parts } => parts::apply(self, parts, done)?,
            Record::Gather { volumes, at, moved } => self.move_pages(volumes, *at, moved)?,
        }
        folder_bounds::follow(self, record);
        Ok(())
    }
}

/// Limits what a volume, or everything below a folder, may refer to.
fn set_quota(catalog: &mut Catalog, id: VolumeId, quota: u64) -> Result<(), Failure> {
    catalog.refuse_unknown(id)?;
    catalog.directory.change(id).expect("refused if unknown").record.quota = quota;
    folder_bounds::limits_changed(catalog, id);
    Ok(())
}

/// Gives a volume its extension.
fn set_extension(catalog: &mut Catalog, id: VolumeId, extension: &Extension) -> Result<(), Failure> {
    let volume = catalog.directory.get(id).ok_or_else(|| Failure::Nonsense(Catalog::unknown(id)))?;
    let (old, mut extension) = (volume.own_account(), extension.clone());
    if let Some(bound) = volume.bound().filter(|_| extension.bound.is_none() && keeps_account(catalog, id)) {
        extension.bound = Some(Bound { diverge: 0, reserve: 0, ..*bound });
    }
    bounds::change_account(catalog, id, old, extension.bound.map_or(NO_ACCOUNT, |bound| bound.account));
    if let Some(bound) = &mut extension.bound {
        bound.charged = catalog.space.accounts.pages(bound.account);
    }
    extensions::set(&mut catalog.directory, id, extension);
    folder_bounds::limits_changed(catalog, id);
    bounds::update_reserve(catalog, id);
    Ok(())
}

/// Maps pages block by block.
fn map_all(
    catalog: &mut Catalog,
    volume: VolumeId,
    at: VirtualPage,
    len: u32,
    to: PageAddr,
    done: &mut u64,
) -> Result<(), Failure> {
    while *done < u64::from(len) {
        let from = VirtualPage(at.0 + *done);
        let n = (u64::from(len) - *done).min(BLOCK_PAGES - from.index() as u64);
        catalog.map(volume, from, n, PageAddr(to.0 + *done))?;
        *done += n;
    }
    Ok(())
}

/// Shares a range step by step; `dead` becomes what was replaced.
fn share_all(
    catalog: &mut Catalog,
    (source, from): (VolumeId, VirtualPage),
    (target, to): (VolumeId, VirtualPage),
    len: u64,
    dead: VolumeId,
    done: &mut u64,
) -> Result<(), Failure> {
    while *done < len {
        let (from, to) = (VirtualPage(from.0 + *done), VirtualPage(to.0 + *done));
        *done += catalog.share_step(source, from, target, to, len - *done, dead)?;
    }
    Ok(())
}

/// Punches a hole step by step.
fn unmap_all(
    catalog: &mut Catalog,
    volume: VolumeId,
    at: VirtualPage,
    len: u64,
    done: &mut u64,
) -> Result<(), Failure> {
    while *done < len {
        let (mut editor, record) =
            catalog.editor_for(volume).ok_or_else(|| Failure::Nonsense(Catalog::unknown(volume)))?;
        let next = editor.unmap_step(record, VirtualPage(at.0 + *done), VirtualPage(at.0 + len))?;
        *done = next.0 - at.0;
    }
    Ok(())
}

/// Adds snapshots of one instant.
fn add_snapshots(
    catalog: &mut Catalog,
    of: &[(VolumeId, VolumeId, String)],
    now: u64,
    flags: SnapshotFlags,
) -> Result<(), Failure> {
    // A snapshot that is taken under a further name of a file is one of that name.
    let file = |source: &VolumeId| hard_links::file_of(&catalog.directory, *source);
    let files: Vec<VolumeId> = of.iter().map(|(source, ..)| file(source)).collect();
    let sources: Vec<VolumeRecord> = files.iter().map(|&id| catalog.record_of(id)).collect::<Result<_, _>>()?;
    for (((source, id, name), origin), file) in of.iter().zip(sources).zip(files) {
        let snapshot = VolumeRecord {
            id: *id,
            state: VolumeState::Snapshot,
            parent: *source,
            name: name.as_str().into(),
            created: now,
            origin: String::new(),
            source: NO_VOLUME,
            shared_at: catalog.epoch,
            quota: 0,
            flags,
            origin_record: None,
            cursor: 0,
            ..origin
        };
        correct!(catalog.add_shared(snapshot), Bug::SnapshotWithoutCount => catalog.add(snapshot));
        catalog.raise_shared(file);
        directory::note_snapshot(&mut catalog.directory, file);
    }
    catalog.advance();
    Ok(())
}

/// Adds a clone, which shares the root of its source.
fn add_clone(catalog: &mut Catalog, source: VolumeId, id: VolumeId, name: &str, now: u64) -> Result<(), Failure> {
    let origin = catalog.record_of(source)?;
    let origin_name = catalog.directory.full_name(&origin);
    // What was cloned from an origin's snapshot holds it.
    let base = if catalog.view_of(source).is_none() || origin.base != NO_VOLUME { origin.base } else { source };
    let of_origin = origin.base == NO_VOLUME && base != NO_VOLUME;
    let copy = VolumeRecord {
        id,
        state: VolumeState::Volume,
        parent: NO_VOLUME,
        name: name.into(),
        created: now,
        origin: origin_name,
        source,
        shared_at: correct!(catalog.epoch, Bug::CloneKeepsSharedAt => crate::types::Epoch(0)),
        quota: 0,
        flags: Default::default(),
        // There it counts what is kept, too.
        referenced: if of_origin { origin.referenced - origin.cursor } else { origin.referenced },
        cursor: 0,
        base,
        ..origin
    };
    catalog.add_shared(copy);
    catalog.raise_shared(source);
    catalog.advance();
    Ok(())
}

/// Gives a volume the map of a snapshot or of another volume; what it had goes on as a dead volume.
fn roll_back(catalog: &mut Catalog, volume: VolumeId, snapshot: VolumeId, dead: VolumeId) -> Result<(), Failure> {
    let to = catalog.record_of(snapshot)?;
    let old = catalog.record_of(volume)?;
    let gone = VolumeRecord {
        id: dead,
        state: VolumeState::Dead,
        parent: NO_VOLUME,
        name: "".into(),
        origin: String::new(),
        source: NO_VOLUME,
        cursor: 0,
        attributes: None,
        base: NO_VOLUME,
        ..old
    };
    catalog.add(gone);
    correct!(catalog.share_root(&to), Bug::RollbackCountsTwice => (0..2).for_each(|_| catalog.share_root(&to)));
    let epoch = correct!(catalog.epoch, Bug::RollbackLowersSharedAt => crate::types::Epoch(0));
    let record = &mut catalog.directory.change(volume).expect("read above").record;
    (record.root, record.level, record.referenced) = (to.root, to.level, to.referenced);
    (record.seams, record.estimated) = (to.seams, to.estimated);
    (record.size, record.trim_end, record.shared_at) = (to.size, to.trim_end, epoch);
    correct!(catalog.raise_shared(snapshot), Bug::RollbackKeepsSourceAlone => ());
    // Since the snapshot was taken the volume may have been flattened.
    catalog.directory.set_base(volume, to.base);
    catalog.directory.update_tail(volume);
    bounds::update_reserve(catalog, volume);
    catalog.advance();
    Ok(())
}

/// Makes volumes dead.
fn delete_all(catalog: &mut Catalog, ids: &[VolumeId]) -> Result<(), Failure> {
    let until = catalog.journal.next() + 1;
    ids.iter().try_for_each(|&id| catalog.refuse_unknown(id))?;
    for &id in ids {
        bounds::close_account(catalog, id);
        catalog.directory.mark_dead(id, until);
        catalog.space.forget_reservations_of(id);
    }
    Ok(())
}

/// Changes the length of a volume; what it loses is cut off later.
fn resize(catalog: &mut Catalog, id: VolumeId, size: u64) -> Result<(), Failure> {
    let (mut editor, record) = catalog.editor_for(id).ok_or_else(|| Failure::Nonsense(Catalog::unknown(id)))?;
    if correct!(size < record.size, Bug::ShrinkKeepsTail => false) {
        record.trim_end = record.trim_end.max(record.size);
    }
    record.size = size;
    editor.raise(record, pages_of(size));
    catalog.directory.update_tail(id);
    bounds::update_reserve(catalog, id);
    Ok(())
}

/// Adds an origin, without exceptions.
fn add_origin(
    catalog: &mut Catalog,
    id: VolumeId,
    name: &str,
    path: &str,
    (size, chunk): (u64, u64),
    now: u64,
    identity: Identity,
) {
    catalog.add(VolumeRecord {
        state: VolumeState::Origin,
        origin: path.into(),
        size,
        chunk,
        level: level_for(size),
        origin_record: Some(Box::new(OriginRecord {
            exceptions: Default::default(),
            copy_ahead: DEFAULT_COPY_AHEAD_BYTES,
            when_full: OriginFull::Wait(60),
            clean: true,
            identity,
            rollback_to: NO_VOLUME,
        })),
        ..VolumeRecord::empty(id, name, now)
    });
}

/// Adds exceptions chunk by chunk.
fn add_all_exceptions(
    catalog: &mut Catalog,
    origin: VolumeId,
    sequence: VolumeId,
    at: VirtualPage,
    len: u32,
    to: PageAddr,
    done: &mut u64,
) -> Result<(), Failure> {
    let chunk_pages = catalog.protects(origin).ok_or_else(|| Failure::Nonsense(Catalog::unknown(origin)))?.1;
    while *done < u64::from(len) {
        let from = VirtualPage(at.0 + *done);
        let n = (u64::from(len) - *done).min(chunk_pages - from.0 % chunk_pages);
        exceptions::add_exceptions(catalog, origin, sequence, from, n, PageAddr(to.0 + *done))?;
        *done += n;
    }
    Ok(())
}

/// Notes which zones of an origin were written since its stamp.
fn note_zones(catalog: &mut Catalog, id: VolumeId, zones: u32) -> Result<(), Failure> {
    catalog.protects_mut(id)?;
    if let Some(stamp) = &mut catalog.directory.change(id).expect("changed above").record.stamp {
        stamp.written |= zones;
    }
    Ok(())
}

/// Makes the pool longer.
fn grow(catalog: &mut Catalog, size: u64) -> Result<(), Failure> {
    let layout = Layout::new(size);
    if layout.blocks() < catalog.space.layout().blocks() || size > MAX_POOL_SIZE {
        return Err(Failure::Nonsense(format!("a journal record makes the pool {size} bytes long")));
    }
    catalog.space.grow(layout);
    Ok(())
}

/// Renames a volume to the name of another, which is deleted or an orphan from now on.
fn rename_over(catalog: &mut Catalog, id: VolumeId, name: &str, replaced: VolumeId, kept: bool) -> Result<(), Failure> {
    catalog.record_of(id)?;
    catalog.record_of(replaced)?;
    match kept {
        true => catalog.directory.orphan(replaced),
        false => {
            bounds::close_account(catalog, replaced);
            catalog.directory.mark_dead(replaced, catalog.journal.next() + 1);
        }
    }
    catalog.directory.rename(id, name);
    Ok(())
}

/// Sets how the copier works for a volume.
fn set_copying(
    catalog: &mut Catalog,
    id: VolumeId,
    break_policy: BreakPolicy,
    throttle: Throttle,
) -> Result<(), Failure> {
    catalog.record_of(id)?;
    let volume = catalog.directory.change(id).expect("read above");
    (volume.record.break_policy, volume.record.throttle) = (break_policy, throttle);
    Ok(())
}

/// Gives the snapshots of a volume to a new one.
fn keep_snapshots(catalog: &mut Catalog, id: VolumeId, remnant: VolumeId, name: &str, now: u64) -> Result<(), Failure> {
    catalog.record_of(id)?;
    catalog.add(VolumeRecord::empty(remnant, name, now));
    remnants::move_snapshots(&mut catalog.directory, id, remnant);
    Ok(())
}

/// Removes the name of a volume.
fn unlink(catalog: &mut Catalog, id: VolumeId) -> Result<(), Failure> {
    catalog.refuse_unknown(id)?;
    catalog.directory.orphan(id);
    Ok(())
}

/// Gives a file a further name.
fn make_hard_link(catalog: &mut Catalog, id: VolumeId, file: VolumeId, name: &str) -> Result<(), Failure> {
    catalog.refuse_unknown(file)?;
    let (state, parent) = (VolumeState::HardLink, file);
    catalog.add(VolumeRecord { state, parent, ..VolumeRecord::empty(id, name, 0) });
    Ok(())
}

/// Gives a file the name of one of its hard links.
fn take_name(catalog: &mut Catalog, file: VolumeId, link: VolumeId) -> Result<(), Failure> {
    catalog.refuse_no_link(file, link)?;
    let until = catalog.journal.next() + 1;
    hard_links::take_name(&mut catalog.directory, file, link, until);
    Ok(())
}

/// Gives an orphan its name.
fn name_volume(catalog: &mut Catalog, id: VolumeId, name: &str) -> Result<(), Failure> {
    if catalog.record_of(id)?.state != VolumeState::Orphan {
        return Err(Failure::Nonsense(format!("a journal record names volume {}, which has a name", id.0)));
    }
    catalog.directory.adopt(id, name);
    Ok(())
}

/// `volume` gets what `source` has, or nothing; what it had goes on as a dead volume.
fn replace(catalog: &mut Catalog, volume: VolumeId, source: VolumeId, dead: VolumeId) -> Result<(), Failure> {
    let old = catalog.record_of(volume)?;
    let new = match source {
        NO_VOLUME => VolumeRecord { chunk: old.chunk, ..VolumeRecord::empty(volume, "", 0) },
        source => catalog.record_of(source)?,
    };
    let origin = if source == NO_VOLUME { String::new() } else { catalog.directory.full_name(&new) };
    // Used up in any case, so that numbers do not depend on what there was to give up.
    catalog.next_id = catalog.next_id.max(dead.0 + 1);
    if !old.root.is_absent() {
        let (state, parent, cursor) = (VolumeState::Dead, NO_VOLUME, 0);
        let (name, origin, attributes) = ("".into(), String::new(), None);
        let (id, source) = (dead, NO_VOLUME);
        catalog.add(VolumeRecord { id, state, parent, name, origin, source, cursor, attributes, ..old });
    }
    catalog.share_root(&new);
    correct!(catalog.raise_shared(source), Bug::ReplaceKeepsSourceAlone => ());
    catalog.raise_shared(volume);
    let record = &mut catalog.directory.change(volume).expect("read above").record;
    (record.root, record.level, record.referenced) = (new.root, new.level, new.referenced);
    (record.seams, record.estimated) = (new.seams, new.estimated);
    (record.size, record.trim_end) = (new.size, new.trim_end);
    (record.chunk, record.origin) = (new.chunk, origin);
    if source != NO_VOLUME {
        (record.break_policy, record.throttle) = (new.break_policy, new.throttle);
        record.gather = new.gather;
    }
    descent::descend(&mut catalog.directory, volume, source);
    catalog.directory.update_tail(volume);
    bounds::update_reserve(catalog, volume);
    catalog.directory.update_gathering(volume);
    catalog.space.forget_reservations_of(volume);
    catalog.advance();
    Ok(())
}
