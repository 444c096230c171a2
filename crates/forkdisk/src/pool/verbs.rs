//! Verbs on volumes: each is checked, applied and appended to the journal in one synchronous section, and
//! acknowledged when it is durable.

use crate::Changes;
use crate::catalog::directory::{hard_links, names, remnants};
use crate::catalog::{
    Catalog, CreateOptions, ExtensionChanges, VolumeInfo, check_origin_text, check_size, deletable, new_snapshots,
    writable_volume, xattrs,
};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Extension, FileKind, Record, SnapshotFlags, VolumeRecord, VolumeState};
use crate::map::Stop;
use crate::planted::correct;
use crate::space::alloc;
use crate::store::transaction::retry_after_checkpoint;
use crate::store::{Store, commit, deleted_error, publish};
use crate::types::{BLOCK_PAGES, BLOCK_SIZE, VolumeId};
use crate::upkeep::ignore_no_space;

use super::Pool;

/// Before the record of a rollback is published: forgets what belongs to the contents that volume `id` has.
pub fn begin_rollback<D: Device>(store: &Store<D>, meta: &mut Catalog, id: VolumeId) {
    meta.space.forget_reservations_of(id);
    let live = store.live.borrow_mut().get_or_create(id).clone();
    commit::mark_changed(store, id, &live.last_change);
    live.rollbacks.set(live.rollbacks.get() + 1);
    store.live.borrow_mut().release(id);
}

/// Refuses what volume `id` cannot be rolled back to.
fn refuse_as_source(from: &VolumeRecord, (id, kind): (VolumeId, FileKind), source: &str) -> Result<()> {
    if from.kind() != kind {
        let why = format!("{source:?} is another kind of file; a rollback exchanges contents only");
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    if from.id == id {
        return Err(Error::new(ErrorKind::Invalid, format!("{source:?} is the volume itself; name another source")));
    }
    if from.state == VolumeState::Origin {
        let why = format!("{source:?} is an origin; take a snapshot of it and roll back to that");
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    Ok(())
}

fn only_one(mut made: Vec<VolumeInfo>) -> VolumeInfo {
    made.pop().expect("as many as were asked for")
}

impl<D: Device> Pool<D> {
    /// Creates an empty volume.
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Invalid` for a bad name or option; and those of
    /// [changing](crate#errors).
    pub async fn create(&self, name: &str, options: &CreateOptions) -> Result<VolumeInfo> {
        self.create_all(&[name], options).await.map(only_one)
    }

    /// Takes snapshots of several volumes at one instant, all or none: `("a", "x")` makes `a@x`; `now` is the time
    /// of their creation, in seconds since 1970.
    ///
    /// Each has all writes acknowledged before this call; of writes in flight it may have either state.
    ///
    /// # Errors
    /// Those of [`snapshot_with`](Self::snapshot_with).
    pub async fn snapshot(&self, sources: &[(&str, &str)], now: u64) -> Result<Vec<VolumeInfo>> {
        self.snapshot_with(sources, SnapshotFlags::default(), now).await
    }

    /// Like [`snapshot`](Self::snapshot), with `flags` for all of them. The devices of origins among the
    /// sources must be open: their writes become durable first.
    ///
    /// # Errors
    /// `NotFound` if a source does not exist, `Exists` if a name is taken or named twice, `ReadOnly` if a
    /// source is a snapshot, `Invalid` for a bad name or flag, `Busy` during the rollback of an origin; and
    /// those of [changing](crate#errors).
    pub async fn snapshot_with(
        &self,
        sources: &[(&str, &str)],
        flags: SnapshotFlags,
        now: u64,
    ) -> Result<Vec<VolumeInfo>> {
        self.snapshot_extended(sources, flags, &ExtensionChanges::default(), now).await
    }

    /// Like [`snapshot_with`](Self::snapshot_with); the snapshots have this lifetime and these labels.
    ///
    /// # Errors
    /// Those of [`snapshot_with`](Self::snapshot_with), and `Invalid` for a bad label.
    pub async fn snapshot_extended(
        &self,
        sources: &[(&str, &str)],
        flags: SnapshotFlags,
        extension: &ExtensionChanges,
        now: u64,
    ) -> Result<Vec<VolumeInfo>> {
        extension.check()?;
        let mut origins = Vec::new();
        let publish = |meta: &mut Catalog| {
            origins.clear();
            let of = new_snapshots(meta, sources, flags)?;
            for &(source, ..) in &of {
                let record = &meta.directory.get(source).expect("found just now").record;
                if record.state == VolumeState::Origin {
                    origins.push(self.origins.attached_with(record)?);
                }
            }
            let ids: Vec<VolumeId> = of.iter().map(|&(_, id, _)| id).collect();
            let files: Vec<VolumeId> =
                of.iter().map(|&(source, ..)| hard_links::file_of(&meta.directory, source)).collect();
            files.iter().for_each(|&file| commit::record_time(&self.store, meta, file));
            let extensions = files.iter().zip(&ids).map(|(&source, &id)| {
                let xattrs =
                    correct!(xattrs::of(&meta.directory, source), Bug::SnapshotForgetsXattrs => Default::default());
                extension.record_of_clone(id, &Extension { xattrs, ..Extension::default() })
            });
            let extensions = extensions.collect::<Result<Vec<_>>>()?;
            let mut parts = vec![Record::Snapshot { of, now, flags }];
            parts.extend(extensions.into_iter().flatten());
            self.store.publish_parts(meta, parts)?;
            for &id in &ids {
                meta.directory.get_mut(id).expect("just made").pending = true;
            }
            for origin in &origins {
                correct!(origin.note_snapshots(&self.store, &ids), Bug::OriginNotFlushed => ());
            }
            Ok(ids)
        };
        let ids = retry_after_checkpoint(&self.store, publish).await?;
        // Planned writes in place end first; newer writes break already.
        correct!(self.store.generations.barrier().await, Bug::SnapshotIgnoresWriters => ());
        // The contents of an origin become those of the snapshot: make them durable.
        let mut flushed = Ok(());
        for origin in &origins {
            flushed = flushed.and(correct!(origin.flush().await, Bug::OriginNotFlushed => Ok(())));
        }
        if let Err(error) = flushed {
            {
                let mut meta = self.store.meta.borrow_mut();
                let ids = ids.iter().copied().filter(|&id| meta.directory.is_snapshot(id)).collect();
                publish::publish_admitted(&self.store, &mut meta, &Record::Delete { ids })?;
            }
            self.store.clone().commit().await?;
            self.upkeep.start_reaping();
            return Err(error);
        }
        if !origins.is_empty() {
            // The first write after it needs places for copies, and waits for them. Errors are reported
            // there.
            let _ = self
                .store
                .retry_no_alloc(|meta| {
                    let wanted = BLOCK_PAGES.min(meta.space.available());
                    Ok(alloc::ensure_known(&mut meta.space, wanted).map_err(Stop::from)?)
                })
                .await;
        }
        let committed = self.store.clone().commit().await;
        for &id in &ids {
            self.store.meta.borrow_mut().directory.show(id);
        }
        committed?;
        if !ids.iter().all(|&id| self.store.meta.borrow().directory.is_snapshot(id)) {
            // The commit withdrew them because an origin could not be flushed.
            origins.iter().try_for_each(|origin| origin.check_alive())?;
            return Err(deleted_error());
        }
        ids.into_iter().map(|id| self.store.info(id)).collect()
    }

    /// Creates a writable volume with the contents of a volume or snapshot, in a time that does not depend on
    /// its size; `now` is the time of its creation, in seconds since 1970.
    ///
    /// # Errors
    /// `NotFound` if the source does not exist, `Exists` if the name is taken, `Invalid` for a bad name or if
    /// the source is an origin; and those of [changing](crate#errors).
    pub async fn clone_volume(&self, source: &str, name: &str, now: u64) -> Result<VolumeInfo> {
        self.clone_all(source, &[name], now).await.map(only_one)
    }

    /// Gives `volume` the contents and the size of its snapshot `snapshot` (the part behind `@`). All
    /// snapshots stay. Refused while the volume is in use. An origin is rolled back in the background
    /// ([`wait_rollback`](Self::wait_rollback) waits for it).
    ///
    /// # Errors
    /// `NotFound` if the volume or the snapshot does not exist, `Busy` if the volume is in use, `ReadOnly` if
    /// it is a snapshot; and those of [changing](crate#errors).
    pub async fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> {
        let state = self.store.meta.borrow().directory.find(volume)?.record.state;
        if state == VolumeState::Origin {
            return self.origins.roll_back(volume, snapshot).await;
        }
        self.rollback_to(volume, &format!("{volume}@{snapshot}")).await
    }

    /// Gives `volume` the contents and the size of any other volume or snapshot, such as a sibling's or its parent's,
    /// in a time that does not depend on its size. Its number, name, properties and snapshots stay. Refused while the
    /// volume is in use; the source may be in use.
    ///
    /// # Errors
    /// `NotFound` if one of them does not exist, `Busy` if the volume is in use, `ReadOnly` if it is a snapshot,
    /// `Invalid` if one of them is an origin or both are one; and those of [changing](crate#errors).
    pub async fn rollback_to(&self, volume: &str, source: &str) -> Result<()> {
        let found = |meta: &Catalog| {
            let id = writable_volume(meta.directory.find(volume)?, volume)?;
            self.store.refuse_in_use(id, volume)?;
            Ok(id)
        };
        self.publish_rollback(found, source).await?;
        self.end_rollback().await
    }

    /// As [`rollback_to`](Self::rollback_to), while the volume is in use: requests in flight end before, and those that
    /// come meanwhile wait. After it returns, every request shows the new contents. Handles stay open. What clients
    /// have cached themselves is theirs to drop.
    ///
    /// # Errors
    /// Those of [`rollback_to`](Self::rollback_to) but `Busy`; `Invalid`, too, if the volume or the source shows
    /// through to an origin.
    pub async fn rollback_live(&self, volume: &str, source: &str) -> Result<()> {
        let (target, from) = (self.volume(volume)?, self.volume(source)?);
        if target.has_backing() || from.has_backing() {
            let why = format!("{volume:?} or {source:?} shows through to an origin; disconnect the clients first");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let suspended = target.suspend().await?;
        let found = |meta: &Catalog| {
            let entry = meta.directory.get(target.id()).ok_or_else(deleted_error)?;
            writable_volume(entry, volume)
        };
        self.publish_rollback(found, source).await?;
        // Planned writes in place to the source end before its pages are shared.
        self.store.generations.barrier().await;
        drop(suspended);
        correct!(self.end_rollback().await, Bug::LiveRollbackNotDurable => Ok(()))
    }

    async fn publish_rollback(&self, found: impl Fn(&Catalog) -> Result<VolumeId>, source: &str) -> Result<()> {
        let rolled = retry_after_checkpoint(&self.store, |meta| {
            let id = found(meta)?;
            let kind = meta.directory.get(id).ok_or_else(deleted_error)?.record.kind();
            let from = &meta.directory.find(source)?.record;
            refuse_as_source(from, (id, kind), source)?;
            let snapshot = from.id;
            begin_rollback(&self.store, meta, id);
            let dead = VolumeId(meta.next_id);
            self.store.publish(meta, &Record::Rollback { volume: id, snapshot, dead })
        });
        rolled.await
    }

    async fn end_rollback(&self) -> Result<()> {
        // Writes in place of the source that were planned before end first; newer ones break already.
        self.store.generations.barrier().await;
        self.store.clone().commit().await?;
        self.upkeep.start_reaping();
        Ok(())
    }

    /// Renames a volume (`a` to `b`) or a snapshot (`a@x` to `a@y`). Snapshots of a volume keep their part of
    /// the name.
    ///
    /// # Errors
    /// `NotFound` if the name is that of nothing, `Exists` if the new one is taken, `Invalid` if it is bad or
    /// would move a snapshot to another volume; and those of [changing](crate#errors).
    pub async fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.store
            .verb(|meta| {
                let record = &meta.directory.find(from)?.record;
                let (id, parent) = (names::named(&meta.directory, from)?, record.parent);
                let stamp = record.stamp.as_ref().map(|stamp| stamp.device.clone());
                let path = record.origin_record.as_ref().map(|_| record.origin.clone());
                let name = match (from.split_once('@'), to.split_once('@')) {
                    (None, None) => to,
                    (Some((a, _)), Some((b, name))) if a == b => name,
                    _ => {
                        let why = format!("cannot rename {from:?} to {to:?}: a snapshot stays with its volume");
                        return Err(Error::new(ErrorKind::Invalid, why));
                    }
                };
                meta.directory.check_new(parent, name)?;
                remnants::check_snapshots(&meta.directory, id, to)?;
                path.map_or(Ok(()), |path| check_origin_text(name, &path, stamp.as_deref()))?;
                Ok((Record::Rename { id, name: name.to_string() }, ()))
            })
            .await
    }

    /// Sets the length in bytes. Data beyond it is dropped; added space reads as zeroes.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot, `Invalid` for a length beyond 1 PiB
    /// or one that the backing does not allow; and those of [changing](crate#errors).
    pub async fn resize(&self, name: &str, size: u64) -> Result<()> {
        check_size(size)?;
        self.store.check_writable()?;
        let volume = {
            let meta = self.store.meta.borrow();
            writable_volume(meta.directory.find(name)?, name)?;
            drop(meta);
            self.volume(name)?
        };
        volume.set_size(size).await?;
        self.store.clone().commit().await
    }

    /// Sets the chunk: space that a first write reserves, in bytes, a power of two from 4 KiB to 64 MiB.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot, `Invalid` for a bad chunk; and those
    /// of [changing](crate#errors).
    pub async fn set_chunk(&self, name: &str, chunk: u64) -> Result<()> {
        self.set(name, &Changes { chunk: Some(chunk), ..Changes::default() }).await
    }

    /// Deletes volumes and snapshots, all or none. Refused for a volume with snapshots that are not in the
    /// list, and for volumes in use. On return the names are durably gone; the space is freed in the
    /// background ([`wait_freed`](Self::wait_freed) waits for it).
    ///
    /// # Errors
    /// `NotFound` if a name is that of nothing, `Busy` if one of them is in use or something that stays needs
    /// it, `Invalid` for an origin; and those of [changing](crate#errors).
    pub async fn delete(&self, names: &[&str]) -> Result<()> {
        self.store
            .verb_of_parts(|meta| {
                for &name in names {
                    self.store.refuse_in_use(meta.directory.find(name)?.record.id, name)?;
                }
                let mut ids = deletable(meta, names)?;
                let mut idle = remnants::idle_remnants(&meta.directory, &ids);
                idle.retain(|id| !ids.contains(id) && self.store.handles(*id) == 0);
                ids.extend(idle);
                let (ids, kept) = hard_links::divided(&meta.directory, ids);
                // Snapshots go before those of a further name come in their place.
                let deletion = (!ids.is_empty()).then_some(Record::Delete { ids });
                let names = kept.into_iter().map(|(file, link)| Record::TakeName { file, link });
                Ok((deletion.into_iter().chain(names).collect(), ()))
            })
            .await?;
        self.upkeep.start_reaping();
        Ok(())
    }

    /// Refuses what [`delete`](Self::delete) would, except for volumes in use.
    ///
    /// # Errors
    /// `NotFound`, `Busy` and `Invalid`, as [`delete`](Self::delete).
    pub fn check_delete(&self, names: &[&str]) -> Result<()> {
        deletable(&self.store.meta.borrow(), names).map(drop)
    }

    /// Waits until the space of all deletions is free.
    ///
    /// # Errors
    /// Those of [changing](crate#errors): the space is not free then, and stays to be freed.
    pub async fn wait_freed(&self) -> Result<()> {
        self.upkeep.clone().free_deleted().await
    }

    /// Grows the pool to `size` bytes (rounded down to whole MiB), and a pool file with it.
    ///
    /// # Errors
    /// `Invalid` for a size below the present one or beyond 4 PiB, `Io` and `NoSpace` if the device cannot be
    /// lengthened; and those of [changing](crate#errors).
    pub async fn grow(&self, size: u64) -> Result<()> {
        self.store.check_writable()?;
        let size = size / BLOCK_SIZE * BLOCK_SIZE;
        // The superblock may have an older length: it changes with the next checkpoint.
        let refuse_smaller = |now: u64| match size < now {
            true => {
                let why = format!("the pool has {now} bytes and cannot be made smaller ({size})");
                Err(Error::new(ErrorKind::Invalid, why))
            }
            false => Ok(()),
        };
        refuse_smaller(self.store.meta.borrow().size())?;
        if size > crate::types::MAX_POOL_SIZE {
            return Err(Error::new(ErrorKind::Invalid, "a pool has at most 4 PiB"));
        }
        publish::lengthen(&self.store, size).await?;
        let decide = |meta: &mut Catalog| {
            // It may have grown further while the device grew.
            refuse_smaller(meta.size())?;
            Ok((Record::Grow { size }, ()))
        };
        self.store.verb(decide).await?;
        self.store.full.set(false);
        self.store.space_changed.notify();
        // It has grown even if a full host blocks the checkpoint.
        self.store.clone().checkpoint().await.or_else(ignore_no_space)
    }
}
