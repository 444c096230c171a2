//! Changing a volume's length, and its contents as a whole. Published at once like a write, durable with
//! the next flush.
//!
//! One at a time for each volume: what grows clears the rest of the last page first, and nobody may
//! write there in between.

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{NO_VOLUME, Record, VolumeState};
use crate::pool::{check_size, pages_of};
use crate::sync::{LockMode, RangeGuard};
use crate::types::VolumeId;

use super::Volume;
use super::backing::Backing;

/// Stands for the length in the locks of a volume, behind all pages.
const LENGTH_LOCK: u64 = u64::MAX - 1;

impl<D: Device> Volume<D> {
    /// A new length in bytes. What lies beyond it is gone; what is added reads as zeroes. Takes no longer
    /// for a long volume that becomes empty than for a short one.
    pub async fn set_size(&self, size: u64) -> Result<()> {
        let changed = self.change_size(size, false).await;
        self.wait_process_safe(changed).await
    }

    /// As [`set_size`](Self::set_size) if the volume is shorter; else nothing.
    pub async fn grow_to(&self, size: u64) -> Result<()> {
        let changed = self.change_size(size, true).await;
        self.wait_process_safe(changed).await
    }

    /// From now on the volume has the contents, the length and the chunk of `source`, as a clone has; its name,
    /// attributes and snapshots stay. Takes no longer for a long source than for a short one.
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

    /// Refuses a length that what lies under the volume does not allow: an origin's is its device's, and below a
    /// shorter clone of a snapshot the origin would show when it grows again.
    fn check_backing_size(&self, size: u64) -> Result<()> {
        match self.backing() {
            Backing::Origin(_) => Err(Error::new(ErrorKind::Invalid, "an origin is as long as its device")),
            Backing::Snapshot(..) if self.record(&self.inner.meta.borrow()).state == VolumeState::Snapshot => {
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
        let guard = self.live.locks.lock(LENGTH_LOCK..LENGTH_LOCK + 1, LockMode::Exclusive).await;
        self.inner.check_writable()?;
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
        // Writes beyond the new end have ended before it moves.
        let _beyond = if size < now {
            Some(self.live.locks.lock(pages_of(size)..LENGTH_LOCK, LockMode::Exclusive).await)
        } else {
            self.prepare_to_grow().await?;
            None
        };
        self.inner.note(|_| Ok((Record::Resize { id: self.id, size }, ())))?;
        self.inner.mark_changed(self.id, &self.live.last_change);
        self.inner.reap_soon();
        Ok(())
    }

    /// What is still mapped beyond the end from when the volume was longer must not come back.
    async fn prepare_to_grow(&self) -> Result<()> {
        let has_tail = || {
            let meta = self.inner.meta.borrow();
            let record = self.record(&meta);
            record.trim_end > record.size
        };
        while has_tail() {
            self.inner.check_writable()?;
            self.inner.reap_soon();
            self.inner.reaped.wait().await;
        }
        // What the last page still holds; nobody sees it before the end moves.
        self.zero_beyond_end().await
    }

    async fn replace(&self, source: VolumeId) -> Result<()> {
        let alone = self.live.locks.lock(0..LENGTH_LOCK, LockMode::Exclusive).await;
        self.inner.wait_below_dirty_limit().await?;
        self.inner.note(|meta| {
            let dead = VolumeId(meta.next_id);
            Ok((Record::Replace { volume: self.id, source, dead }, ()))
        })?;
        self.inner.mark_changed(self.id, &self.live.last_change);
        self.inner.note_cloned(&self.inner.meta.borrow(), source, self.id);
        // Writes in place of the source that were planned before end before others share the pages.
        self.inner.generations.barrier().await;
        drop(alone);
        self.inner.reap_soon();
        self.inner.checkpoint_soon();
        Ok(())
    }
}
