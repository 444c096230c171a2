//! The pool: the face of the engine. Its verbs check, publish and commit; what they need of each layer is called
//! here.

mod copying;
mod expiry;
mod files;
mod folders;
mod hard_links;
mod info;
mod links;
mod origins;
mod quota;
mod statistics;
mod transaction;
mod unnamed;
mod upkeep;
mod verbs;
mod volumes;
mod xattrs;

use std::rc::Rc;

use crate::catalog::Changes;
use crate::device::{Buf, Device};
use crate::error::Result;
use crate::origin::Origins;
use crate::runtime::Runtime;
use crate::store;
use crate::store::{FormatOptions, OpenOptions, PoolEvent, Recovery, Store, commit, open};
use crate::types::VolumeId;
use crate::upkeep::Upkeep;
pub use expiry::Expired;
pub use files::Child;
pub use hard_links::MAX_HARD_LINKS;

/// An open pool, for use on one thread (`!Send`). Cheap to clone; all clones are the same pool.
///
/// Run the futures of its methods to their end (spawn a task for each request).
pub struct Pool<D: Device> {
    store: Rc<Store<D>>,
    origins: Rc<Origins<D>>,
    upkeep: Rc<Upkeep<D>>,
}

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Pool { store: self.store.clone(), origins: self.origins.clone(), upkeep: self.upkeep.clone() }
    }
}

impl<D: Device> Pool<D> {
    /// Formats the device as an empty pool. Its contents are lost.
    ///
    /// # Errors
    /// `Invalid` for a size or journal out of its bounds or beyond the device; `Io` and `NoSpace` if the
    /// device fails.
    pub async fn format(device: &D, options: &FormatOptions) -> Result<()> {
        store::format(device, options).await
    }

    /// Opens a pool. After an unclean end, replays its journal in memory and continues deletions.
    ///
    /// # Errors
    /// `NotAPool` if the device has no superblock, `Corrupt` if a superblock or the metadata that recovery
    /// needs is damaged, `Unsupported` for a pool of a newer version, `Busy` if another host owns it, `Io` if
    /// the device fails, `ReadOnly` if it cannot be written.
    pub async fn open(device: D, runtime: Rc<dyn Runtime>, options: OpenOptions) -> Result<Pool<D>> {
        let store = Store::open(device, runtime, options).await?;
        let origins = Origins::new(&store);
        let upkeep = Upkeep::new(&store, &origins);
        open::recover(&store).await?;
        Ok(Pool { store, origins, upkeep })
    }

    /// Waits for requests in flight, writes a checkpoint and marks the pool clean. Later requests are
    /// refused.
    ///
    /// # Errors
    /// `Failed` if the pool had failed before, `Io` and `NoSpace` if the last checkpoint failed; the next
    /// open recovers then.
    pub async fn close(&self) -> Result<()> {
        if !self.store.options.read_only {
            self.store.check_alive()?;
            self.origins.stop_rolling().await;
        }
        open::close(&self.store).await
    }

    /// What the open of this pool found.
    pub fn recovery(&self) -> Recovery {
        self.store.recovery.get()
    }

    /// A buffer of `len` bytes fit for the device, with unspecified contents.
    pub fn buffer(&self, len: usize) -> Buf {
        self.store.device.buffer(len)
    }

    /// The device below.
    pub fn device(&self) -> &D {
        self.store.device.inner()
    }

    /// Makes all acknowledged changes durable.
    ///
    /// # Errors
    /// `Failed`, now and from then on, if the data or the journal could not be made durable.
    pub async fn flush(&self) -> Result<()> {
        self.store.commit_for_client().await
    }

    /// Waits until all changes of names and attributes survive a crash of this process, in a pool opened with
    /// [`OpenOptions::volatile`]. Returns at once unless the volatile log was full. Call it before such a
    /// change is acknowledged without a flush; writes, discards and changes of size call it themselves.
    ///
    /// # Errors
    /// `Failed` if the commit that it waits for failed.
    pub async fn wait_process_safe(&self) -> Result<()> {
        self.store.wait_process_safe().await
    }

    /// Whether [`wait_process_safe`](Self::wait_process_safe) would return at once.
    pub fn is_process_safe(&self) -> bool {
        self.store.is_process_safe()
    }

    /// Writes a checkpoint: afterwards there is nothing to replay.
    ///
    /// # Errors
    /// Those of [changing](crate#errors); `NoSpace` if the host file system is full.
    pub async fn checkpoint(&self) -> Result<()> {
        self.store.check_writable()?;
        self.store.clone().checkpoint().await?;
        commit::reset_background_mark(&self.store);
        Ok(())
    }

    /// Sets the receiver of all events from now on, in place of any other. It must neither wait nor use the
    /// pool.
    pub fn observe(&self, observer: impl Fn(&PoolEvent) + 'static) {
        *self.store.observer.borrow_mut() = Some(Box::new(observer));
    }

    /// Changes properties of a volume or origin, all or none.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `Invalid` for a bad value or a property that it does not have, `ReadOnly`
    /// for a snapshot; and those of [changing](crate#errors).
    pub async fn set(&self, name: &str, changes: &Changes) -> Result<()> {
        changes.check()?;
        let id =
            self.store.verb_of_parts(|meta| changes.records(meta, name).map(|(id, records)| (records, id))).await?;
        self.note_changes(id, changes);
        Ok(())
    }

    /// What follows changes of the volume `id`.
    fn note_changes(&self, id: VolumeId, changes: &Changes) {
        if changes.break_policy.is_some() || changes.throttle.is_some() {
            self.store.copier.throttle_changed();
        }
        if changes.gather.is_some() {
            self.upkeep.policy_changed(id);
        }
    }
}
