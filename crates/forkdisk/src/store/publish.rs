//! Changes of the catalog: each is checked, applied and appended to the journal in one synchronous section.

use std::rc::Rc;

use crate::catalog::{Catalog, CatalogEntry, Failure, VolumeInfo, admit, folder_of};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{NO_VOLUME, Record, VolumeRecord, VolumeState};
use crate::planted::correct;
use crate::sync::LockMode;
use crate::types::{NO_ACCOUNT, PAGE_SIZE, VolumeId};

use super::{Store, changed_error, checkpoint, deleted_error};

/// Lock number of the device's length, beside that of the superblock.
const LENGTH_LOCK_INDEX: u64 = 1;

impl<D: Device> Store<D> {
    /// Applies `record` and appends it to the journal; the caller commits. Refuses a record for which the next
    /// checkpoint would find no space.
    pub fn publish(&self, meta: &mut Catalog, record: &Record) -> Result<()> {
        admit(meta, record).map_err(|needs| unadmitted_error(meta, record, needs))?;
        publish_admitted(self, meta, record)
    }

    /// Runs one verb: `decide` checks and returns the record, which is applied and made durable.
    pub async fn verb<T>(self: &Rc<Self>, mut decide: impl FnMut(&mut Catalog) -> Result<(Record, T)>) -> Result<T> {
        self.verb_of_parts(|meta| decide(meta).map(|(record, value)| (vec![record], value))).await
    }

    /// Properties of a volume.
    pub fn info(&self, id: VolumeId) -> Result<VolumeInfo> {
        let meta = self.meta.borrow();
        let volume = meta.directory.get(id).ok_or_else(deleted_error)?;
        Ok(self.info_of(&meta, &volume.record))
    }

    /// Properties of the volume with this record.
    pub fn info_of(&self, meta: &Catalog, record: &VolumeRecord) -> VolumeInfo {
        meta.info_of(record, self.handles(record.id))
    }

    /// Properties of the volume or snapshot with this name.
    pub fn find(&self, name: &str) -> Result<VolumeInfo> {
        let meta = self.meta.borrow();
        meta.info_by_name(name, |id| self.handles(id))
    }

    /// Open handles of a volume.
    pub fn handles(&self, id: VolumeId) -> usize {
        self.live.borrow().handles(id)
    }

    /// Refuses a volume that has handles.
    pub fn refuse_in_use(&self, id: VolumeId, name: &str) -> Result<()> {
        match self.handles(id) {
            0 => Ok(()),
            n => Err(Error::new(ErrorKind::Busy, format!("{name:?} is in use ({n} open); close it first"))),
        }
    }

    /// Runs one change: `decide` checks and returns the record, which is applied. The next commit makes it
    /// durable.
    pub fn note<T>(self: &Rc<Self>, decide: impl FnOnce(&mut Catalog) -> Result<(Record, T)>) -> Result<T> {
        self.check_writable()?;
        let noted = {
            let mut meta = self.meta.borrow_mut();
            let (record, value) = decide(&mut meta)?;
            self.publish(&mut meta, &record).map(|()| value)
        };
        if noted.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace) {
            checkpoint::start_for_space(self);
        }
        let value = noted?;
        self.note_dirty();
        self.commit_soon();
        self.checkpoint_soon();
        Ok(value)
    }
}

/// Like [`Store::publish`], for a record that was admitted or cannot be refused.
pub fn publish_admitted<D: Device>(store: &Store<D>, meta: &mut Catalog, record: &Record) -> Result<()> {
    let mut done = 0;
    match meta.apply(record, &mut done) {
        Ok(()) => {
            update_live(store, meta, record);
            if meta.space.accounts.folders.take_moved() {
                store.live.borrow().iter().for_each(|(id, live)| live.link_claims(folder_of(meta, id)));
            }
            match is_unordered(meta, record) {
                true => meta.journal.append_unordered(record),
                false => meta.journal.append(record),
            }
            Ok(())
        }
        // Memory has a part of a transaction: nothing of that may become durable.
        Err(failure) if done > 0 => Err(store.fail(&stopped_half_way(failure))),
        Err(Failure::Nonsense(what)) => Err(Error::new(ErrorKind::Corrupt, what)),
        Err(Failure::Gone) => Err(deleted_error()),
        Err(Failure::Changed) => Err(changed_error()),
        Err(Failure::OverQuota(_) | Failure::OverBound(_)) => unreachable!("verbs on volumes map nothing"),
        Err(Failure::Stop(stop)) => unreachable!("verbs on volumes touch no tables: {stop:?}"),
    }
}

/// Whether a record may become durable before data that is not: it says nothing of that.
fn is_unordered(meta: &Catalog, record: &Record) -> bool {
    match record {
        Record::ZonesWritten { .. } | Record::Create { .. } | Record::Delete { .. } | Record::SetExtension { .. } => {
            true
        }
        Record::Clone { source, .. } | Record::Rollback { snapshot: source, .. } => {
            correct!(is_durable(meta, *source), Bug::ForkBeforeData => true)
        }
        Record::Transaction { parts } => parts.iter().all(|part| is_unordered(meta, part)),
        _ => false,
    }
}

/// Whether this is a snapshot with all of its data in the pool: that was durable when it became visible.
fn is_durable(meta: &Catalog, id: VolumeId) -> bool {
    let is_origin = |id| meta.directory.get(id).is_none_or(|volume| volume.record.state == VolumeState::Origin);
    meta.directory.get(id).is_some_and(|volume| {
        let record = &volume.record;
        record.state == VolumeState::Snapshot && record.base == NO_VOLUME && !is_origin(record.parent)
    })
}

/// Applies the effect of a record to open volumes.
fn update_live<D: Device>(store: &Store<D>, meta: &Catalog, record: &Record) {
    let mut live = store.live.borrow_mut();
    match record {
        Record::SetCopying { id, throttle, .. } => {
            if let Some(activity) = live.activity(*id) {
                activity.set_throttle(*throttle);
            }
        }
        Record::Rollback { volume: id, .. } | Record::Flatten { id } => {
            live.set_backing(*id, meta.directory.get(*id).is_some_and(|v| v.record.base != NO_VOLUME));
        }
        Record::SetExtension { id, extension } => {
            if let Some(live) = live.get(*id) {
                live.writes.set(extension.writes);
            }
        }
        Record::RenameOver { replaced, kept: false, .. } => live.note_deleted(*replaced),
        Record::Delete { ids } => ids.iter().for_each(|&id| live.note_deleted(id)),
        Record::Transaction { parts } => {
            drop(live);
            parts.iter().for_each(|part| update_live(store, meta, part));
        }
        _ => {}
    }
}

fn unadmitted_error(meta: &Catalog, record: &Record, needs: u64) -> Error {
    let held = meta.space.accounts.held_for_others(NO_ACCOUNT);
    let has = meta.space.available().saturating_sub(held) * PAGE_SIZE as u64;
    let parts = if let Record::Transaction { parts } = record { &parts[..] } else { std::slice::from_ref(record) };
    let is_new = |part: &&Record| matches!(part, Record::Create { .. } | Record::Clone { .. } | Record::Protect { .. });
    let (what, fewer) = match (parts.iter().filter(is_new).count(), record) {
        (0, Record::Snapshot { of, .. }) if of.len() > 1 => (format!("{} new snapshots need", of.len()), true),
        (0, Record::Delete { ids }) if ids.len() > 1 => (format!("{} deletions need", ids.len()), true),
        (0, _) => ("this change needs".to_string(), false),
        (1, _) => ("1 new volume needs".to_string(), false),
        (volumes, _) => (format!("{volumes} new volumes need"), true),
    };
    let remedy = if fewer { "free some, grow the pool, or name fewer" } else { "free some or grow the pool" };
    let missing = needs.saturating_sub(has);
    let why = format!("{what} {needs} bytes of free space at once, and the pool has {has}, {missing} too few");
    Error::new(ErrorKind::NoSpace, format!("{why}; {remedy}"))
}

fn stopped_half_way(failure: Failure) -> Error {
    Error::new(ErrorKind::Corrupt, format!("a change of several parts stopped half-way: {failure:?}"))
}

/// Grows the device to at least `size` bytes, durably.
pub async fn lengthen<D: Device>(store: &Store<D>, size: u64) -> Result<()> {
    // One at a time: a length that was compared before another change could make the device shorter.
    let _alone = store.superblock_lock.lock(LENGTH_LOCK_INDEX..LENGTH_LOCK_INDEX + 1, LockMode::Exclusive).await;
    if store.device.len() >= size {
        return Ok(());
    }
    store.device.set_len(size).await.map_err(|e| Error::io("lengthening the pool", e))?;
    store.flush_device().await
}

/// Called at the last close of a volume: drops its live state, and deletes it if it was removed.
pub fn last_closed<D: Device>(store: &Rc<Store<D>>, id: VolumeId) {
    let is_orphan = |meta: &Catalog| meta.directory.get(id).is_some_and(|v| v.record.state == VolumeState::Orphan);
    if let Ok(mut live) = store.live.try_borrow_mut() {
        live.release(id);
    }
    // Otherwise a later checkpoint or the next open of the pool deletes it.
    if store.check_writable().is_ok() && store.meta.try_borrow_mut().is_ok_and(|meta| is_orphan(&meta)) {
        match store.note(|_| Ok((Record::Delete { ids: vec![id] }, ()))) {
            Ok(()) => store.hooks.reap_soon(),
            Err(_) => store.orphans_left.set(true),
        }
    }
}

/// Deletes volumes that were removed and have no handle. Those for which there is no space stay until the next
/// checkpoint.
pub fn delete_orphans<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    store.orphans_left.set(false);
    let orphan = |v: &&CatalogEntry| v.record.state == VolumeState::Orphan && store.handles(v.record.id) == 0;
    let ids: Vec<VolumeId> = store.meta.borrow().directory.iter().filter(orphan).map(|v| v.record.id).collect();
    if correct!(ids.is_empty() || store.options.read_only, Bug::OrphansOutliveCrash => true) {
        return Ok(());
    }
    let delete = |ids: &[VolumeId]| store.note(|_| Ok((Record::Delete { ids: ids.to_vec() }, ())));
    let deleted = delete(&ids).or_else(|error| match error.kind() {
        ErrorKind::NoSpace => ids.iter().try_for_each(|&id| delete(&[id])),
        _ => Err(error),
    });
    match deleted {
        Err(error) if error.kind() == ErrorKind::NoSpace => {
            store.orphans_left.set(true);
            Ok(())
        }
        ended => ended,
    }
}
