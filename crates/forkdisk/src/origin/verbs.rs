//! Protecting a device, opening and closing it, and ending the protection.

use std::rc::Rc;

use smallvec::smallvec;

use crate::catalog::{
    Catalog, Changes, SOME_CHECKPOINT_PAGES, VolumeInfo, check_origin_text, check_size, exceptions,
    refuse_during_rollback,
};
use crate::device::{CachedDevice, Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Identity, NO_VOLUME, OriginFull, OriginRecord, Record, Stamp, VolumeRecord, VolumeState, ZONES};
use crate::planted::correct;
use crate::store::transaction::{prepare_change, retry_after_checkpoint};
use crate::store::{Store, deleted_error};
use crate::sync::LockMode;
use crate::types::{BLOCK_SIZE, MAX_COPY_AHEAD_BYTES, PAGE_SIZE, VolumeId, is_chunk};

use super::{Origin, Origins, sample};

/// Samples of the fingerprint of an older version, and bytes of each.
const SAMPLE_COUNT: u64 = 64;
const SAMPLE_BYTES: u64 = 4096;

/// Path and outside identity of a device.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OriginPlace {
    /// Its path, kept for the next open.
    pub path: String,
    /// Identity that the device reports, such as a WWN or a serial number; empty if none.
    pub identity: String,
    /// Modification time of a file in nanoseconds since 1970; 0 for a block device.
    pub modified: u64,
}

impl OriginPlace {
    /// A device without an identity.
    pub fn at(path: &str, modified: u64) -> OriginPlace {
        OriginPlace { path: path.into(), identity: String::new(), modified }
    }
}

/// Change of a device that an open of its origin accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OriginChange {
    /// None.
    #[default]
    Nothing,
    /// Another identity: the contents were copied to another device.
    Identity,
    /// A greater length: the origin grows with it.
    Longer,
}

/// Options of protecting a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProtectOptions {
    /// The device.
    pub place: OriginPlace,
    /// Bytes of a chunk, the unit of copying out: a power of two, 4 KiB to 1 MiB.
    pub chunk: u64,
    /// Most bytes copied ahead of a sequential writer (up to 1 GiB; 0: none).
    pub copy_ahead: u64,
    /// What happens to a write if there is no space for the old contents.
    pub when_full: OriginFull,
    /// Seconds since 1970.
    pub now: u64,
}

/// An origin as the pool knows it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OriginInfo {
    /// Its name.
    pub name: String,
    /// Path of its device at the last open.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Most bytes copied ahead of a sequential writer.
    pub copy_ahead: u64,
    /// What happens to a write if there is no space for the old contents.
    pub when_full: OriginFull,
    /// Whether it was closed cleanly.
    pub clean: bool,
    /// Whether its device is open.
    pub open: bool,
    /// Zones whose sample could be compared after a crash now: not written since the open.
    pub comparable_zones: u32,
    /// The snapshot of a running rollback, as `volume@snapshot`; until it ends, the device alone does not
    /// have the contents of the origin.
    pub rolling: Option<String>,
}

fn check_options(options: &ProtectOptions, name: &str) -> Result<()> {
    let invalid = |why: String| Err(Error::new(ErrorKind::Invalid, why));
    if !is_chunk(options.chunk) || options.chunk > BLOCK_SIZE {
        return invalid(format!("bad chunk of {} bytes: a power of two from 4 KiB to 1 MiB", options.chunk));
    }
    if options.copy_ahead > MAX_COPY_AHEAD_BYTES {
        return invalid(format!("bad copy_ahead of {} bytes: at most 1 GiB", options.copy_ahead));
    }
    check_origin_text(name, &options.place.path, Some(&options.place.identity))
}

fn check_device<D: Device>(device: &D) -> Result<()> {
    let (len, block) = (device.len(), device.block_size() as u64);
    if len == 0 || !len.is_multiple_of(block) {
        let why = "its length is not a multiple of the disk's block size; lengthen it first (truncate -s %4K)";
        return Err(Error::new(ErrorKind::Invalid, format!("an origin of {len} bytes cannot be protected: {why}")));
    }
    Ok(())
}

/// Hash of the device's length and a sample of its contents, for origins without a stamp.
async fn fingerprint<D: Device>(device: &D) -> Result<u64> {
    let (len, block) = (device.len(), device.block_size() as u64);
    let step = (len / SAMPLE_COUNT).max(SAMPLE_BYTES.max(block)) / block * block;
    let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(len);
    let mut at = 0;
    while at < len {
        let n = SAMPLE_BYTES.max(block).min(len - at) as usize;
        let (result, buf) = device.read(device.buffer(n), smallvec![Segment { offset: at, at: 0, len: n }]).await;
        result.map_err(|e| Error::io(format!("reading the origin at {at}"), e))?;
        hash.update(&buf);
        at += step;
    }
    Ok(hash.digest())
}

impl<D: Device> Origins<D> {
    /// Protects `device` under `name`: from now on a volume whose data stays in place. The device is open
    /// afterwards.
    ///
    /// # Errors
    /// `Invalid` for a bad name, chunk, copy-ahead or path, `Exists` if the name is taken; and those of
    /// [changing](crate#errors).
    pub async fn protect(&self, name: &str, device: D, options: &ProtectOptions) -> Result<VolumeInfo> {
        check_options(options, name)?;
        check_device(&device)?;
        let store = &self.store;
        store.check_writable()?;
        let size = device.len();
        check_size(size)?;
        let ProtectOptions { place: OriginPlace { path, identity: device_identity, modified }, .. } = options.clone();
        let ProtectOptions { chunk, copy_ahead, when_full, now, .. } = *options;
        let identity = Identity { modified, fingerprint: 0 };
        let hashes = sample::hashes(&device, size).await?;
        let stamp = Box::new(Stamp { device: device_identity, hashes, written: 0 });
        let device = CachedDevice::new(device, 0);
        let publish = |meta: &mut Catalog| {
            meta.directory.check_new(NO_VOLUME, name)?;
            let id = VolumeId(meta.next_id);
            let (name, path) = (name.to_string(), path.clone());
            let protect = Record::Protect { id, name, path, size, chunk, now, identity };
            let settings = Record::SetOrigin { id, copy_ahead, when_full };
            store.publish_parts(meta, vec![protect, Record::Stamp { id, stamp: stamp.clone() }, settings])?;
            // Registered as soon as the name exists, so that no other device can be opened for it.
            self.open.borrow_mut().insert(id, Rc::new(Origin::new(id, device.clone(), size, chunk, 0)));
            Ok(id)
        };
        let id = retry_after_checkpoint(store, publish).await?;
        store.clone().commit().await?;
        store.info(id)
    }

    /// Opens the device of an origin, found at `place`, with the accepted `change`, and
    /// changes properties in the same commit. Returns the number of the origin.
    pub async fn attach_changed(
        &self,
        name: &str,
        device: D,
        place: &OriginPlace,
        change: OriginChange,
        changes: &Changes,
    ) -> Result<VolumeId> {
        changes.check()?;
        let store = &self.store;
        prepare_change(store, SOME_CHECKPOINT_PAGES).await;
        let record = store.meta.borrow().directory.find(name)?.record.clone();
        let id = record.id;
        let Some(protects) = record.origin_record.clone().filter(|_| record.state == VolumeState::Origin) else {
            return Err(Error::new(ErrorKind::Invalid, format!("{name:?} is a volume of the pool, not an origin")));
        };
        let is_open = || Error::new(ErrorKind::Busy, format!("the device of {name:?} is open already"));
        if self.open.borrow().contains_key(&id) {
            return Err(is_open());
        }
        check_origin_text(&record.name, &place.path, record.stamp.as_ref().map(|_| ""))?;
        check_device(&device)?;
        check_same_device(&record, *protects, &device, place, change).await?;
        let size = device.len();
        let mut records = Vec::new();
        if !store.options.read_only {
            if size != record.size {
                check_size(size)?;
                records.push(Record::Resize { id, size });
            }
            if record.origin != place.path {
                let (clean, identity, path) = (protects.clean, protects.identity, place.path.clone());
                records.push(Record::Identify { id, clean, identity, path });
            }
        }
        let written = record.stamp.as_ref().map_or(u32::MAX, |stamp| stamp.written);
        let mut origin = Origin::new(id, CachedDevice::new(device, 0), size, record.chunk, written);
        if !store.options.read_only {
            // After a kill, written data may be in a volatile cache only: flush, so that what is read and
            // stamped from now on stays.
            origin.flush().await?;
            let known = record.stamp.as_ref().map_or("", |stamp| &*stamp.device);
            let tells = known.is_empty() || are_comparable(known, &place.identity) || change == OriginChange::Identity;
            let identity = if tells { &place.identity } else { known };
            let fits = |identity: &&str| check_origin_text(&record.name, &place.path, Some(identity)).is_ok();
            if let Some(identity) = [identity, ""].into_iter().find(fits) {
                let hashes = sample::hashes(&*origin.device, size).await?;
                let stamp = Some(Box::new(Stamp { device: identity.to_string(), hashes, written: 0 }));
                origin.sample = sample::Sample::new(size, 0);
                if stamp != record.stamp {
                    records.extend(stamp.map(|stamp| Record::Stamp { id, stamp }));
                }
            }
        }
        let origin = Rc::new(origin);
        let is_changed;
        {
            // Another call may have opened the device or changed its record while it was read.
            let mut meta = store.meta.borrow_mut();
            let now = meta.directory.get(id).map(|v| &v.record).filter(|now| now.state == VolumeState::Origin);
            let is_same = |now: &VolumeRecord| {
                let known = |p: &OriginRecord| (p.clean, p.identity);
                let ours = (record.size, record.chunk, &record.stamp, Some(known(&protects)));
                (now.size, now.chunk, &now.stamp, now.origin_record.as_deref().map(known)) == ours
            };
            if !now.is_some_and(is_same) {
                return Err(Error::new(ErrorKind::Busy, format!("{name:?} has been changed meanwhile; try again")));
            }
            if self.open.borrow().contains_key(&id) {
                return Err(is_open());
            }
            records.extend(changes.records(&meta, name)?.1);
            is_changed = !records.is_empty();
            if is_changed {
                store.check_writable()?;
            }
            // Before any write: notes of written zones follow the stamp.
            store.publish_parts(&mut meta, records)?;
            self.open.borrow_mut().insert(id, origin.clone());
        }
        origin.start_rollback_task(store);
        if is_changed {
            store.clone().commit().await?;
        }
        Ok(id)
    }

    /// Closes the device of an origin: all writes become durable, and its identity is recorded. `modified` is
    /// called after the last write and returns the modification time of the file. Refused while the origin or
    /// a volume with it as backing is in use.
    pub async fn detach(&self, name: &str, modified: impl FnOnce() -> u64) -> Result<()> {
        let store = &self.store;
        let id = store.meta.borrow().directory.find(name)?.record.id;
        let origin = self.attached(id)?;
        prepare_change(store, SOME_CHECKPOINT_PAGES).await;
        origin.stop_rolling().await;
        // A background commit is no user, and uses no origin while this lock is held.
        let settling = origin.flush_lock.lock(0..1, LockMode::Exclusive).await;
        // One reference is the table's, one is ours.
        let in_use = |origin: &Rc<Origin<D>>| {
            let why = || Error::new(ErrorKind::Busy, format!("{name:?} or a snapshot of it is in use; close it first"));
            if Rc::strong_count(origin) > 2 { Err(why()) } else { Ok(()) }
        };
        let (mut left, mut is_changed) = (None, false);
        let flushed = async {
            in_use(&origin)?;
            if origin.marked_dirty.get() && store.check_writable().is_ok() {
                origin.flush().await?;
                left = Some(identity_at_close(store, &origin, modified()).await?);
            }
            // It may have been opened and written while its device was read.
            in_use(&origin)
        };
        let ended = flushed.await.and_then(|()| {
            // Nothing was awaited since it was found unused. It cannot be opened from here on.
            if let Some((identity, stamp)) = left.take() {
                store.check_writable()?;
                let mut meta = store.meta.borrow_mut();
                let records = identification(&meta, id, true, identity, stamp)?;
                store.publish_parts(&mut meta, records)?;
                is_changed = true;
            }
            self.open.borrow_mut().remove(&id);
            Ok(())
        });
        drop(settling);
        if let Err(error) = ended {
            origin.start_rollback_task(store);
            return Err(error);
        }
        if is_changed {
            store.clone().commit().await?;
        }
        Ok(())
    }

    /// Ends the protection: the data stays in place, the name and all snapshots are deleted. Without
    /// `snapshots` it is refused if there are any. The device need not be open.
    ///
    /// # Errors
    /// `NotFound` and `Invalid` if the name is that of no origin, `Busy` if it is in use, has snapshots that
    /// shall stay or clones that need them; and those of [changing](crate#errors).
    pub async fn unprotect(&self, name: &str, snapshots: bool) -> Result<()> {
        let store = &self.store;
        self.check_unprotect(name, snapshots)?;
        let id = store.meta.borrow().directory.find(name)?.record.id;
        let open = self.open.borrow().get(&id).cloned();
        let in_use = || match &open {
            Some(origin) if Rc::strong_count(origin) > 2 => {
                Err(Error::new(ErrorKind::Busy, format!("{name:?} is in use; close it first")))
            }
            _ => Ok(()),
        };
        prepare_change(store, SOME_CHECKPOINT_PAGES).await;
        let mut settling = None;
        if let Some(origin) = &open {
            origin.stop_rolling().await;
            settling = Some(origin.flush_lock.lock(0..1, LockMode::Exclusive).await);
            in_use()?;
            origin.flush().await?;
        }
        let publish = || {
            store.check_writable()?;
            let mut meta = store.meta.borrow_mut();
            // It may have been opened during the flush.
            in_use()?;
            if open.is_none() && self.open.borrow().contains_key(&id) {
                return Err(Error::new(ErrorKind::Busy, format!("{name:?} has been opened meanwhile; try again")));
            }
            let mut ids = unprotectable(&meta, id, snapshots)?;
            ids.push(id);
            store.publish(&mut meta, &Record::Delete { ids })?;
            self.open.borrow_mut().remove(&id);
            Ok(())
        };
        let ended = publish();
        drop(settling);
        if let (Err(_), Some(origin)) = (&ended, &open) {
            origin.start_rollback_task(store);
        }
        ended?;
        store.clone().commit().await?;
        store.hooks.reap_soon();
        Ok(())
    }

    /// Refuses what [`unprotect`](Self::unprotect) would, except for volumes in use.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` and `Busy`, as [`unprotect`](Self::unprotect).
    pub fn check_unprotect(&self, name: &str, snapshots: bool) -> Result<()> {
        let store = &self.store;
        let meta = store.meta.borrow();
        let record = &meta.directory.find(name)?.record;
        if record.state != VolumeState::Origin {
            return Err(Error::new(ErrorKind::Invalid, format!("{name:?} is a volume of the pool: delete it")));
        }
        // Without the device a rollback never ends.
        if self.open.borrow().contains_key(&record.id) {
            refuse_during_rollback(&meta, record.id)?;
        }
        unprotectable(&meta, record.id, snapshots).map(drop)
    }

    /// All origins, sorted by name.
    pub fn list(&self) -> Vec<OriginInfo> {
        let (meta, open) = (self.store.meta.borrow(), self.open.borrow());
        let mut all: Vec<OriginInfo> = meta
            .directory
            .iter()
            .filter(|v| v.record.state == VolumeState::Origin)
            .filter_map(|v| v.record.origin_record.as_deref().map(|protects| (&v.record, protects)))
            .map(|(record, protects)| OriginInfo {
                name: record.name.to_string(),
                path: record.origin.clone(),
                size: record.size,
                chunk: record.chunk,
                copy_ahead: protects.copy_ahead,
                when_full: protects.when_full,
                clean: protects.clean,
                open: open.contains_key(&record.id),
                comparable_zones: record
                    .stamp
                    .as_ref()
                    .map_or(0, |stamp| sample::zones(record.size) & !stamp.written)
                    .count_ones(),
                rolling: exceptions::rollback_snapshot(&meta, record.id),
            })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

/// Identity and stamp by which a closed origin is recognised.
async fn identity_at_close<D: Device>(
    store: &Store<D>,
    origin: &Origin<D>,
    modified: u64,
) -> Result<(Identity, Option<Box<Stamp>>)> {
    let stamp = store.meta.borrow().directory.get(origin.id).ok_or_else(deleted_error)?.record.stamp.clone();
    match stamp {
        Some(stamp) => {
            let hashes = sample::hashes(&*origin.device, origin.size).await?;
            let identity = Identity { modified, fingerprint: 0 };
            Ok((identity, Some(Box::new(Stamp { hashes, written: 0, ..*stamp }))))
        }
        None => Ok((Identity { modified, fingerprint: fingerprint(&*origin.device).await? }, None)),
    }
}

async fn identify<D: Device>(
    store: &Rc<Store<D>>,
    id: VolumeId,
    clean: bool,
    identity: Identity,
    stamp: Option<Box<Stamp>>,
) -> Result<()> {
    store.verb_of_parts(|meta| Ok((identification(meta, id, clean, identity, stamp.clone())?, ()))).await
}

/// The records of an origin's identity, and of its stamp if that has changed.
fn identification(
    meta: &Catalog,
    id: VolumeId,
    clean: bool,
    identity: Identity,
    stamp: Option<Box<Stamp>>,
) -> Result<Vec<Record>> {
    let path = meta.directory.get(id).ok_or_else(deleted_error)?.record.origin.clone();
    let stamp = stamp.map(|stamp| Record::Stamp { id, stamp });
    Ok(stamp.into_iter().chain([Record::Identify { id, clean, identity, path }]).collect())
}

impl<D: Device> Origin<D> {
    /// Before the first write: records durably that the origin is in use.
    pub(super) async fn mark_dirty(&self, store: &Rc<Store<D>>) -> Result<()> {
        if self.marked_dirty.get() {
            return Ok(());
        }
        let _alone = self.edges.lock(u64::MAX - 1..u64::MAX, LockMode::Exclusive).await;
        if !self.marked_dirty.get() {
            identify(store, self.id, false, Identity::default(), None).await?;
            self.marked_dirty.set(true);
        }
        Ok(())
    }
}

/// Whether two identities are of one kind and can be compared: a device does not report everything at any
/// time.
fn are_comparable(one: &str, other: &str) -> bool {
    let kind = |identity: &str| identity.split_once(':').map(|(kind, _)| kind.to_string());
    kind(one).is_some() && kind(one) == kind(other)
}

/// Refuses a device that is not the origin's, except for the accepted `change`.
async fn check_same_device<D: Device>(
    record: &VolumeRecord,
    protects: OriginRecord,
    device: &D,
    place: &OriginPlace,
    change: OriginChange,
) -> Result<()> {
    let (name, path) = (&record.name, &place.path);
    let other = |what: String| {
        let why = format!("{path:?} is not the device that {name:?} protects as it was left: {what}");
        let help = "its snapshots would show what they never held. Give the right device, or unprotect it";
        Err(Error::new(ErrorKind::Busy, format!("{why}; {help}")))
    };
    let (len, size) = (device.len(), record.size);
    if len > size && change != OriginChange::Longer {
        return other(format!("it has {len} bytes instead of {size} (a device that was made longer: resize {name:?})"));
    }
    if len < size {
        return other(format!("it has {len} bytes instead of {size}"));
    }
    let known = record.stamp.as_ref().map_or("", |stamp| &*stamp.device);
    let is_other = are_comparable(known, &place.identity) && known != place.identity;
    if is_other && change != OriginChange::Identity {
        return other(format!("it is {}, not {known}", place.identity));
    }
    // A file that has grown has another modification time, too.
    if protects.clean && protects.identity.modified != place.modified && len == size {
        return other("it has been written since it was stopped".into());
    }
    match &record.stamp {
        Some(stamp) => {
            let now = sample::hashes(device, size).await?;
            let differs = |zone: usize| stamp.written >> zone & 1 == 0 && stamp.hashes[zone] != now[zone];
            let since = if protects.clean { "stopped" } else { "opened last, where forkdisk has not written" };
            match correct!((0..ZONES).any(differs), Bug::OtherDeviceTaken => false) {
                true => other(format!("its contents have changed since it was {since}")),
                false => Ok(()),
            }
        }
        None if protects.clean && fingerprint(device).await? != protects.identity.fingerprint => {
            other("its contents have changed since it was stopped".into())
        }
        None => Ok(()),
    }
}

const _: () = assert!(SAMPLE_BYTES == PAGE_SIZE as u64);

/// The snapshots that are deleted with an origin; refuses if there are some and `snapshots` is false, or if
/// one is needed.
fn unprotectable(meta: &Catalog, origin: VolumeId, snapshots: bool) -> Result<Vec<VolumeId>> {
    let ids = meta.directory.snapshots_of(origin);
    if let Some(&first) = ids.first().filter(|_| !snapshots) {
        let first = meta.directory.get(first).map(|v| meta.directory.full_name(&v.record));
        let why =
            format!("it has snapshots, such as {:?}; delete them first or with it (-r)", first.unwrap_or_default());
        return Err(Error::new(ErrorKind::Busy, why));
    }
    for &snapshot in &ids {
        match meta.directory.clones_backed_by(snapshot) {
            Some(by) if by.record.id != origin => meta.directory.refuse_with_clones(snapshot)?,
            _ => {}
        }
    }
    Ok(ids)
}
