//! Verbs on origins.

use crate::catalog::{Changes, VolumeInfo};
use crate::device::Device;
use crate::error::Result;
use crate::format::OriginFull;
use crate::origin::{OriginChange, OriginInfo, OriginPlace, OriginStatistics, ProtectOptions};

use super::Pool;

impl<D: Device> Pool<D> {
    /// Protects `device` under `name`: from now on a volume whose data stays in place. The device is open
    /// afterwards.
    ///
    /// # Errors
    /// `Invalid` for a bad name, chunk, copy-ahead or path, `Exists` if the name is taken; and those of
    /// [changing](crate#errors).
    pub async fn protect(&self, name: &str, device: D, options: &ProtectOptions) -> Result<VolumeInfo> {
        self.origins.protect(name, device, options).await
    }

    /// Opens the device of an origin, found at `place`. Refused if it is another device: another length or
    /// identity, other contents where nothing was written since the last close or open (as far as the sample
    /// shows), or after a clean close another modification time.
    ///
    /// # Errors
    /// `NotFound` if there is no such origin, `Invalid` if the device is another one, `Busy` if the origin
    /// has an open device, `Io` if the device cannot be read; and those of [changing](crate#errors).
    pub async fn attach_origin(&self, name: &str, device: D, place: &OriginPlace) -> Result<()> {
        self.attach_changed_origin(name, device, place, OriginChange::Nothing).await
    }

    /// Like [`attach_origin`](Self::attach_origin), for a device with the accepted `change`.
    ///
    /// # Errors
    /// Those of [`attach_origin`](Self::attach_origin), except for what `change` accepts.
    pub async fn attach_changed_origin(
        &self,
        name: &str,
        device: D,
        place: &OriginPlace,
        change: OriginChange,
    ) -> Result<()> {
        self.attach_origin_and_set(name, device, place, change, &Changes::default()).await
    }

    /// Like [`attach_changed_origin`](Self::attach_changed_origin), and changes properties in the same commit.
    ///
    /// # Errors
    /// Those of [`attach_changed_origin`](Self::attach_changed_origin) and of [`set`](Self::set).
    pub async fn attach_origin_and_set(
        &self,
        name: &str,
        device: D,
        place: &OriginPlace,
        change: OriginChange,
        changes: &Changes,
    ) -> Result<()> {
        let id = self.origins.attach_changed(name, device, place, change, changes).await?;
        self.note_changes(id, changes);
        Ok(())
    }

    /// Closes the device of an origin: all writes become durable, and its identity is recorded. `modified` is
    /// called after the last write and returns the modification time of the file. Refused while the origin or
    /// a volume with it as backing is in use.
    ///
    /// # Errors
    /// `NotFound` if there is no such origin, `Busy` if it or a volume with it as backing is in use, `Io` if
    /// the device cannot be flushed; and those of [changing](crate#errors).
    pub async fn detach_origin(&self, name: &str, modified: impl FnOnce() -> u64) -> Result<()> {
        self.origins.detach(name, modified).await
    }

    /// Ends the protection: the data stays in place, the name and all snapshots are deleted. Without
    /// `snapshots` it is refused if there are any. The device need not be open.
    ///
    /// # Errors
    /// `NotFound` and `Invalid` if the name is that of no origin, `Busy` if it is in use, has snapshots that
    /// shall stay or clones that need them; and those of [changing](crate#errors).
    pub async fn unprotect(&self, name: &str, snapshots: bool) -> Result<()> {
        self.origins.unprotect(name, snapshots).await
    }

    /// Refuses what [`unprotect`](Self::unprotect) would, except for volumes in use.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` and `Busy`, as [`unprotect`](Self::unprotect).
    pub fn check_unprotect(&self, name: &str, snapshots: bool) -> Result<()> {
        self.origins.check_unprotect(name, snapshots)
    }

    /// Sets copy-ahead and the policy for a full pool.
    ///
    /// # Errors
    /// `NotFound` and `Invalid` if the name is that of no origin or a value is out of its bounds; and those
    /// of [changing](crate#errors).
    pub async fn set_origin(&self, name: &str, copy_ahead: u64, when_full: OriginFull) -> Result<()> {
        let (copy_ahead, when_full) = (Some(copy_ahead), Some(when_full));
        self.set(name, &Changes { copy_ahead, when_full, ..Changes::default() }).await
    }

    /// All origins, sorted by name.
    pub fn origins(&self) -> Vec<OriginInfo> {
        self.origins.list()
    }

    /// Figures of the devices of open origins, sorted by name.
    pub fn origin_statistics(&self) -> Vec<OriginStatistics> {
        self.origins.statistics()
    }

    /// Waits for the end of the origin's rollback, if one is running. `progress` gets the bytes done and the
    /// total; if it returns false, the wait ends. Fails when a step fails; for lack of space only after the
    /// wait of the origin's policy, while the rollback goes on. Does not wait for another rollback that
    /// begins then.
    ///
    /// # Errors
    /// `NotFound` if there is no such origin, `Busy` if its device is not open or the pool is being closed;
    /// the error of a step that failed; and those of [changing](crate#errors).
    pub async fn wait_rollback(&self, name: &str, progress: impl FnMut(u64, u64) -> bool) -> Result<()> {
        self.origins.wait_rollback(name, progress).await
    }
}
