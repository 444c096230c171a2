//! A volume open for I/O: the handle and the requests of clients, each of which counts as one operation.

mod backing;
pub(crate) mod compare;
mod copy_break;
mod discard;
mod extents;
mod fault;
mod flatten;
mod inflight_copies;
mod pending_write;
mod quota;
mod range;
mod read;
mod resize;
mod status;
mod write;
mod write_policy;

use std::ops::Range;
use std::rc::Rc;

use backing::Backing;

use crate::catalog::{Catalog, VolumeInfo, folder_of};
use crate::counters::Operation;
use crate::device::{Buf, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{VolumeRecord, VolumeState, WritePolicy};
use crate::live::{Activity, LastChange, Live};
use crate::origin::{Origins, WriteIntent};
use crate::planted::correct;
use crate::store::last_used::note_used;
use crate::store::{Hooks, Store, commit, deleted_error, publish};
use crate::sync::{LockMode, RangeGuard};
use crate::types::VolumeId;
pub use compare::{DiffClass, DiffPart, DiffRun};
pub use extents::Extent;
pub use flatten::FlattenReport;
pub use status::{Sharing, StatusRun};

/// A volume or snapshot open for I/O. While a handle exists the volume is not deleted.
///
/// Offsets and lengths are bytes and may be of any alignment; multiples of 4 KiB are fastest. A
/// range past the end is refused as a whole.
pub struct Volume<D: Device> {
    store: Rc<Store<D>>,
    /// The layers above; held, so that they last as long as the volume is open.
    hooks: Rc<dyn Hooks>,
    id: VolumeId,
    read_only: bool,
    live: Rc<Live>,
    activity: Rc<Activity>,
    backing: Backing<D>,
}

/// How a write is done. The hints change its speed only.
#[derive(Default)]
#[non_exhaustive]
pub struct WriteFlags {
    /// The data is durable on return.
    pub fua: bool,
    /// Hint: the client pipelines, so more writes follow before this one is acknowledged (see [`Device::cork`]).
    pub more: bool,
    /// The announcement of this write ([`Volume::announce_write`]); withdrawn as it begins.
    pub intent: Option<WriteIntent>,
}

impl WriteFlags {
    /// The same flags with another [`more`](Self::more).
    #[must_use]
    pub fn with_more(self, more: bool) -> WriteFlags {
        WriteFlags { more, ..self }
    }

    /// The same flags with another [`intent`](Self::intent).
    #[must_use]
    pub fn with_intent(self, intent: Option<WriteIntent>) -> WriteFlags {
        WriteFlags { intent, ..self }
    }
}

impl From<bool> for WriteFlags {
    fn from(fua: bool) -> WriteFlags {
        WriteFlags { fua, ..WriteFlags::default() }
    }
}

impl<D: Device> Clone for Volume<D> {
    fn clone(&self) -> Self {
        self.live.open.set(self.live.open.get() + 1);
        Volume {
            store: self.store.clone(),
            hooks: self.hooks.clone(),
            id: self.id,
            read_only: self.read_only,
            live: self.live.clone(),
            activity: self.activity.clone(),
            backing: self.backing.clone(),
        }
    }
}

impl<D: Device> Drop for Volume<D> {
    fn drop(&mut self) {
        self.live.open.set(self.live.open.get() - 1);
        if self.live.open.get() == 0 {
            note_used(&self.store, self.id);
            publish::last_closed(&self.store, self.id);
        }
    }
}

impl<D: Device> Volume<D> {
    /// The backing.
    fn backing(&self) -> &Backing<D> {
        if self.live.backing.is_removed() { &Backing::None } else { &self.backing }
    }

    /// The backing, if it is still read.
    fn visible_backing(&self) -> &Backing<D> {
        if self.live.backing.is_read() { &self.backing } else { &Backing::None }
    }

    /// Opens volume `id`, which exists.
    pub(crate) fn open(
        store: &Rc<Store<D>>,
        origins: &Origins<D>,
        hooks: Rc<dyn Hooks>,
        id: VolumeId,
    ) -> Result<Volume<D>> {
        // Its errors name the origin, for which it borrows the catalog, too.
        let backing = Backing::of(origins, &store.meta.borrow(), id)?;
        let meta = store.meta.borrow();
        let entry = meta.directory.get(id).ok_or_else(deleted_error)?;
        let record = &entry.record;
        let read_only = record.state == VolumeState::Snapshot && !record.flags.writable || store.options.read_only;
        let mut volumes = store.live.borrow_mut();
        let activity = volumes.activity_or_create(record).clone();
        activity.opened.set(true);
        let live = volumes.get_or_create(id).clone();
        live.open.set(live.open.get() + 1);
        live.link_claims(folder_of(&meta, id));
        live.writes.set(entry.extension().map_or(WritePolicy::ALL, |extension| extension.writes));
        drop((meta, volumes));
        if live.open.get() == 1 {
            note_used(store, id);
        }
        Ok(Volume { store: store.clone(), hooks, id, read_only, live, activity, backing })
    }
}

impl<D: Device> Volume<D> {
    /// Hint: this range, in bytes, will be written as soon as its data has arrived. The returned value is given to
    /// that write ([`WriteFlags::intent`]); dropping it withdraws the hint. `None` where the hint has no effect.
    #[doc(hidden)]
    pub fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent> {
        match &self.backing {
            Backing::Origin(origin) => Some(origin.announce(offset, (offset + len).min(origin.size))),
            _ => None,
        }
    }

    /// Its number.
    pub fn id(&self) -> VolumeId {
        self.id
    }

    /// Its name: `volume` or `volume@snapshot`.
    pub fn name(&self) -> String {
        let meta = self.store.meta.borrow();
        meta.directory.full_name(self.record(&meta))
    }

    /// Current state, with name and attributes; the name is empty after removal.
    pub fn info(&self) -> VolumeInfo {
        if self.live.last_change.get() == LastChange::Marked {
            commit::take_time(&self.store, &mut self.store.meta.borrow_mut(), self.id);
        }
        let meta = self.store.meta.borrow();
        self.store.info_of(&meta, self.record(&meta))
    }

    /// Its name in messages.
    fn shown_name(&self) -> String {
        match self.name() {
            name if name.is_empty() => "a volume without a name".to_string(),
            name => name,
        }
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.record(&self.store.meta.borrow()).size
    }

    /// Whether writes are refused (a snapshot, or a pool opened for reading).
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether data of the volume lies in an origin: it is an origin, a snapshot of one, or a clone of such a
    /// snapshot. Its ranges can be copied, but not shared.
    pub fn has_backing(&self) -> bool {
        !self.backing().is_none()
    }

    async fn commit(&self) -> Result<()> {
        if let Backing::Origin(origin) = &self.backing {
            return origin.flush().await;
        }
        correct!(
            self.store.commit_for_client().await,
            Bug::FlushCoversOneVolume => if self.store.meta.borrow().directory.has_changed(self.id) {
                self.store.commit_for_client().await
            } else {
                Ok(())
            }
        )
    }

    fn record<'a>(&self, meta: &'a Catalog) -> &'a VolumeRecord {
        meta.directory.of_handle(self.id)
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        let size = self.size();
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => {
                let why = format!("{len} bytes at {offset} reach past the end of {} ({size} bytes)", self.shown_name());
                Err(Error::new(ErrorKind::Invalid, why))
            }
        }
    }

    /// Locks pages to replace their contents, after all writes of these pages that were accepted before, also those
    /// that wait for space.
    pub(super) async fn lock_behind_writes(&self, pages: Range<u64>) -> RangeGuard {
        let locks = &self.live.locks;
        if pages.is_empty() || !self.live.write_queue.overlaps(&pages) {
            return locks.lock(pages, LockMode::Exclusive).await;
        }
        let queued = self.live.write_queue.enter(pages.clone());
        queued.admitted_alone().await;
        locks.lock(pages, LockMode::Exclusive).await
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<()> {
        self.store.check_writable()?;
        if self.read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{} is a snapshot and cannot be written", self.shown_name()),
            ));
        }
        self.check_range(offset, len)
    }
}

impl<D: Device> Volume<D> {
    /// Fills all of `buf` from `offset`.
    pub async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let running = self.activity.counters.begin(Operation::Read, buf.len() as u64);
        let (result, buf) = self.read_range(offset, buf).await;
        running.end(result.is_ok());
        (result, buf)
    }

    /// Like [`read`](Self::read), but may leave holes unwritten in `buf`; returns their offset in `buf` and
    /// length, in ascending order.
    pub async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let running = self.activity.counters.begin(Operation::Read, buf.len() as u64);
        let (result, buf) = self.read_range_sparse(offset, buf).await;
        running.end(result.is_ok());
        (result, buf)
    }

    /// Writes all of `buf` at `offset`. With [`fua`](WriteFlags::fua), or `true` as flags, the
    /// data is durable on return.
    pub async fn write(&self, offset: u64, buf: Buf, flags: impl Into<WriteFlags>) -> (Result<()>, Buf) {
        let WriteFlags { fua, more, intent } = flags.into();
        // No other task runs before the write is under way.
        drop(intent);
        let running = self.activity.counters.begin(Operation::Write, buf.len() as u64);
        let (mut result, buf) = self.write_range(offset, buf, fua, more).await;
        // This check avoids an await, which costs more than one percent of the instructions of a 4 KiB write.
        if !self.store.is_process_safe() {
            result = self.wait_process_safe(result).await;
        }
        running.end(result.is_ok());
        self.note_dirty();
        (result, buf)
    }

    /// Makes all acknowledged writes durable, of all volumes of the pool.
    ///
    /// # Errors
    /// `Failed`, now and from then on, if the data or the journal could not be made durable; `Io` if the
    /// device of an origin failed.
    pub async fn flush(&self) -> Result<()> {
        let running = self.activity.counters.begin(Operation::Flush, 0);
        let result = self.commit().await;
        running.end(result.is_ok());
        result
    }

    /// Whole pages within the range read as zeroes afterwards and their space is freed. Partial pages at the
    /// edges stay unchanged, except at the end of the volume. On a full pool some pages may stay.
    ///
    /// # Errors
    /// `Invalid` for a range past the end, `ReadOnly` for a snapshot; and those of [changing](crate#errors).
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let running = self.activity.counters.begin(Operation::Discard, len);
        let result = self.discard_range(offset, len).await;
        let result = self.wait_process_safe(result).await;
        running.end(result.is_ok());
        self.note_dirty();
        result
    }

    /// The range reads as zeroes afterwards; the space of whole pages is freed. With `fua` that is durable on
    /// return.
    ///
    /// # Errors
    /// `Invalid` for a range past the end, `ReadOnly` for a snapshot; and those of [changing](crate#errors).
    pub async fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        let running = self.activity.counters.begin(Operation::Zero, len);
        let result = self.zero_range(offset, len, fua).await;
        let result = self.wait_process_safe(result).await;
        running.end(result.is_ok());
        self.note_dirty();
        result
    }

    /// Waits until a successful change survives a crash of the process.
    pub(super) async fn wait_process_safe(&self, result: Result<()>) -> Result<()> {
        match result {
            Ok(()) => self.store.wait_process_safe().await,
            failed => failed,
        }
    }

    /// Records that a change was acknowledged that may not be durable.
    pub(super) fn note_dirty(&self) {
        if let Backing::Origin(origin) = self.backing() {
            origin.is_dirty.set(true);
        }
        self.store.note_dirty();
        commit::mark_changed(&self.store, self.id, &self.live.last_change);
    }

    /// Records the time from admitting an operation to answering it, in nanoseconds, as measured by a front
    /// end; the engine has no clock.
    #[doc(hidden)]
    pub fn record_latency(&self, operation: Operation, nanoseconds: u64) {
        self.activity.counters.record_latency(operation, nanoseconds);
    }
}
