//! Changing the length of a volume, or all of its contents. Published at once like a write, durable with the
//! next flush.
//!
//! One change at a time for each volume: growing zeroes the rest of the last page first, and no write may
//! come in between.

use crate::catalog::{check_size, pages_of};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{NO_VOLUME, Record, VolumeState};
use crate::store::commit;
use crate::sync::{LockMode, RangeGuard};
use crate::types::VolumeId;

use super::Volume;
use super::backing::Backing;

/// Lock number of the length, beyond all pages.
const LENGTH_LOCK_INDEX: u64 = u64::MAX - 1;

impl<D: Device> Volume<D> {
    /// Sets the length in bytes. Data beyond it is dropped; added space reads as zeroes. The time does not
    /// depend on the amount of dropped data.
    ///
    /// # Errors
    /// `Invalid` for a length beyond 1 PiB or one that the backing does not allow, `ReadOnly` for a snapshot;
    /// and those of [changing](crate#errors).
    pub async fn set_size(&self, size: u64) -> Result<()> {
        let changed = self.change_size(size, false).await;
        self.wait_process_safe(changed).await
    }

    /// Like [`set_size`](Self::set_size) if the volume is shorter; otherwise does nothing.
    ///
    /// # Errors
    /// Those of [`set_size`](Self::set_size).
    pub async fn grow_to(&self, size: u64) -> Result<()> {
        let changed = self.change_size(size, true).await;
        self.wait_process_safe(changed).await
    }

    /// Replaces contents, length and chunk with those of `source`, as a clone has them; name, attributes and
    /// snapshots stay. The time does not depend on the length.
    ///
    /// # Errors
    /// `Invalid` if both are the same or one has an origin as its backing, `ReadOnly` for a snapshot; and
    /// those of [changing](crate#errors).
    pub async fn replace_with(&self, source: &Volume<D>) -> Result<()> {
        if self.id == source.id {
            return Err(Error::new(ErrorKind::Invalid, "a volume cannot take the place of itself"));
        }
        if self.has_backing() || source.has_backing() {
            return Err(Error::new(ErrorKind::Invalid, "what shows through to an origin can be copied, not shared"));
        }
        let length = self.lock_length().await?;
        let replaced = self.replace(source.id).await;
        drop(length);
        self.wait_process_safe(replaced).await
    }

    /// Waits until no request of the volume is running. None begins while the guards live.
    pub(crate) async fn suspend(&self) -> Result<[RangeGuard; 2]> {
        let length = self.lock_length().await?;
        let requests = self.lock_behind_writes(0..LENGTH_LOCK_INDEX).await;
        Ok([length, requests])
    }

    /// Refuses a length that the backing does not allow: an origin is as long as its device, and a clone of a
    /// snapshot that grows again would show the origin beyond its shorter length.
    fn check_backing_size(&self, size: u64) -> Result<()> {
        match self.backing() {
            Backing::Origin(_) => Err(Error::new(ErrorKind::Invalid, "an origin is as long as its device")),
            Backing::Snapshot(..) if self.record(&self.store.meta.borrow()).state == VolumeState::Snapshot => {
                Err(Error::new(ErrorKind::ReadOnly, "a snapshot has the length it was taken with"))
            }
            Backing::Snapshot(..) if size < self.size() => {
                let why =
                    "it shows through to the origin it was cloned from; flatten it first, then it can be made smaller";
                Err(Error::new(ErrorKind::Invalid, why))
            }
            _ => Ok(()),
        }
    }

    async fn lock_length(&self) -> Result<RangeGuard> {
        self.check_write(0, 0)?;
        let guard = self.live.locks.lock(LENGTH_LOCK_INDEX..LENGTH_LOCK_INDEX + 1, LockMode::Exclusive).await;
        self.store.check_writable()?;
        Ok(guard)
    }

    async fn change_size(&self, size: u64, grow_only: bool) -> Result<()> {
        check_size(size)?;
        if grow_only && self.size() >= size {
            return self.check_write(0, 0);
        }
        self.check_backing_size(size)?;
        let _length = self.lock_length().await?;
        let now = self.size();
        if now == size || grow_only && now > size {
            return Ok(());
        }
        if size == 0 {
            return self.replace(NO_VOLUME).await;
        }
        // Writes beyond the new end finish before it changes.
        let _beyond = if size < now {
            Some(self.lock_behind_writes(pages_of(size)..LENGTH_LOCK_INDEX).await)
        } else {
            self.prepare_to_grow().await?;
            None
        };
        self.store.note(|_| Ok((Record::Resize { id: self.id, size }, ())))?;
        commit::mark_changed(&self.store, self.id, &self.live.last_change);
        self.hooks.reap_soon();
        Ok(())
    }

    /// Unmaps what is left beyond the end from before a shrink, so that it does not reappear.
    async fn prepare_to_grow(&self) -> Result<()> {
        let has_tail = || {
            let meta = self.store.meta.borrow();
            let record = self.record(&meta);
            record.trim_end > record.size
        };
        while has_tail() {
            self.store.check_writable()?;
            self.hooks.reap_soon();
            self.store.reaped.wait().await;
        }
        // The rest of the last page: not readable before the end moves.
        self.zero_beyond_end().await
    }

    async fn replace(&self, source: VolumeId) -> Result<()> {
        let alone = self.lock_behind_writes(0..LENGTH_LOCK_INDEX).await;
        self.store.wait_below_dirty_limit().await?;
        self.store.note(|meta| {
            let dead = VolumeId(meta.next_id);
            Ok((Record::Replace { volume: self.id, source, dead }, ()))
        })?;
        commit::mark_changed(&self.store, self.id, &self.live.last_change);
        self.hooks.note_cloned(&self.store.meta.borrow(), source, self.id);
        // Planned writes in place to the source end before its pages are shared.
        self.store.generations.barrier().await;
        drop(alone);
        self.hooks.reap_soon();
        self.store.checkpoint_soon();
        Ok(())
    }
}
