//! A volume open for I/O. Each verb has a file.

mod backing;
pub(crate) mod compare;
mod copy_break;
mod discard;
mod extents;
mod fault;
mod flatten;
mod inflight_copies;
mod io;
mod pending_write;
mod quota;
mod range;
mod read;
mod resize;
mod status;
mod submit;
mod write;

use std::rc::Rc;

use crate::catalog::{Catalog, VolumeInfo};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{VolumeRecord, VolumeState};
use crate::live::{Activity, LastChange, Live};
use crate::origin::{Origins, WriteIntent};
use crate::planted::correct;
use crate::store::{Hooks, Store, deleted_error, publish, times};
use crate::types::VolumeId;

use backing::Backing;
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
            publish::last_closed(&self.store, self.id);
        }
    }
}

impl<D: Device> Volume<D> {
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
        let record = &meta.directory.get(id).ok_or_else(deleted_error)?.record;
        let read_only = record.state == VolumeState::Snapshot && !record.flags.writable || store.options.read_only;
        let mut volumes = store.live.borrow_mut();
        let activity = volumes.activity_or_create(record).clone();
        activity.opened.set(true);
        let live = volumes.get_or_create(id).clone();
        live.open.set(live.open.get() + 1);
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
            times::take_time(&self.store, &mut self.store.meta.borrow_mut(), self.id);
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
