//! A volume open for I/O. Each verb has a file.

mod backing;
mod copy_break;
mod discard;
mod extents;
mod fault;
mod flatten;
mod inflight_copies;
mod io;
mod live;
mod pending_write;
mod quota;
mod range;
mod read;
mod resize;
mod status;
mod submit;
mod write;

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{VolumeRecord, VolumeState};
use crate::origin::WriteIntent;
use crate::planted::{Bug, planted};
use crate::pool::{CatalogEntry, Inner, LastChange, Meta, Pool, VolumeInfo};
use crate::types::VolumeId;

use backing::Backing;
pub use extents::Extent;
pub use flatten::FlattenReport;
use live::Activity;
pub(crate) use live::{Live, LiveVolumes};
pub(crate) use read::push;
pub use status::{Sharing, StatusRun};

/// A volume or snapshot open for I/O. While a handle exists the volume is not deleted.
///
/// Offsets and lengths are bytes and may be of any alignment; multiples of 4 KiB are fastest. A
/// range past the end is refused as a whole.
pub struct Volume<D: Device> {
    inner: Rc<Inner<D>>,
    id: VolumeId,
    read_only: bool,
    live: Rc<Live>,
    activity: Rc<Activity>,
    backing: Backing<D>,
    /// The client pipelines: more writes follow before this one is acknowledged (like TCP_CORK).
    corked: Cell<bool>,
}

impl<D: Device> Clone for Volume<D> {
    fn clone(&self) -> Self {
        self.live.open.set(self.live.open.get() + 1);
        Volume {
            inner: self.inner.clone(),
            id: self.id,
            read_only: self.read_only,
            live: self.live.clone(),
            activity: self.activity.clone(),
            backing: self.backing.clone(),
            corked: Cell::new(self.corked.get()),
        }
    }
}

impl<D: Device> Drop for Volume<D> {
    fn drop(&mut self) {
        self.live.open.set(self.live.open.get() - 1);
        if self.live.open.get() == 0 {
            self.inner.last_closed(self.id);
        }
    }
}

impl<D: Device> Pool<D> {
    /// Opens `volume` or `volume@snapshot` for I/O. For an origin, its snapshots and their clones, the device
    /// of the origin must be open ([`attach_origin`](Self::attach_origin)).
    pub fn volume(&self, name: &str) -> Result<Volume<D>> {
        let id = self.0.meta.borrow().directory.find(name)?.record.id;
        self.handle(id)
    }

    /// Opens a volume or snapshot by its number for I/O, also one that was removed while open.
    pub fn volume_by_id(&self, id: VolumeId) -> Result<Volume<D>> {
        let is_there =
            |v: &&CatalogEntry| !matches!(v.record.state, VolumeState::Dead | VolumeState::Folder) && !v.pending;
        if self.0.meta.borrow().directory.get(id).filter(is_there).is_none() {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no volume with the number {}", id.0)));
        }
        self.handle(id)
    }

    fn handle(&self, id: VolumeId) -> Result<Volume<D>> {
        // Its errors name the origin, for which it borrows the metadata, too.
        let backing = Backing::of(&self.0, &self.0.meta.borrow(), id)?;
        let meta = &mut *self.0.meta.borrow_mut();
        let record = &meta.directory.get(id).expect("found by the caller").record;
        let read_only = record.state == VolumeState::Snapshot && !record.flags.writable || self.0.options.read_only;
        let activity = meta.live.activity_or_create(record).clone();
        activity.opened.set(true);
        let live = meta.live.get_or_create(id).clone();
        live.open.set(live.open.get() + 1);
        Ok(Volume { inner: self.0.clone(), id, read_only, live, activity, backing, corked: Cell::new(false) })
    }
}

impl<D: Device> Volume<D> {
    /// Hint for later writes through this handle: with `more`, further writes follow before these are
    /// acknowledged (see [`Device::cork`]).
    pub fn cork(&self, more: bool) {
        self.corked.set(more);
    }

    /// Hint: this range, in bytes, will be written as soon as its data has arrived. Dropping the returned
    /// value withdraws the hint; drop it just before the write, or when no write will follow. `None` where
    /// the hint has no effect.
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
        let meta = self.inner.meta.borrow();
        meta.directory.full_name(self.record(&meta))
    }

    /// Current state, with name and attributes; the name is empty after removal.
    pub fn info(&self) -> VolumeInfo {
        if self.live.last_change.get() == LastChange::Marked {
            self.inner.take_time(&mut self.inner.meta.borrow_mut(), self.id);
        }
        let meta = self.inner.meta.borrow();
        meta.info_of(self.record(&meta))
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
        self.record(&self.inner.meta.borrow()).size
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
        if planted(Bug::FlushCoversOneVolume) && !self.inner.meta.borrow().directory.has_changed(self.id) {
            return Ok(());
        }
        self.inner.commit_for_client().await
    }

    fn record<'a>(&self, meta: &'a Meta) -> &'a VolumeRecord {
        &meta.directory.get(self.id).expect("a volume with a handle is not removed").record
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

    fn check_write(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.check_writable()?;
        if self.read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{} is a snapshot and cannot be written", self.shown_name()),
            ));
        }
        self.check_range(offset, len)
    }
}
