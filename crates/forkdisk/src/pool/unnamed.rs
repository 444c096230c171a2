//! Volumes that get their name when they are complete. Until then no verb finds them; a failure, a kill or a
//! power failure in between deletes them: they are orphans.

use crate::catalog::{Catalog, CreateOptions, ExtensionChanges, check_chunk, check_gather, check_quota, check_size};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, GatherPolicy, NO_VOLUME, Record, VolumeState};
use crate::store::deleted_error;
use crate::types::VolumeId;
use crate::volume::Volume;

use super::Pool;

impl<D: Device> Pool<D> {
    /// Creates and opens an empty volume without a name. It is deleted at its last close, or at the next open
    /// of the pool, unless [`name_volume`](Self::name_volume) named it. Its break policy is `split`, and it
    /// has no quota.
    ///
    /// # Errors
    /// `Invalid` for a bad option; and those of [changing](crate#errors).
    pub fn create_unnamed(&self, options: &CreateOptions) -> Result<Volume<D>> {
        check_size(options.size)?;
        check_chunk(options.chunk)?;
        check_gather(options.gather)?;
        check_quota(options.quota)?;
        debug_assert!(options.break_policy == BreakPolicy::Split && options.quota == 0);
        options.extension.check()?;
        let CreateOptions { size, chunk, now, gather, .. } = *options;
        let id = self.store.note(|meta| {
            let id = VolumeId(meta.next_id);
            Ok((Record::CreateUnnamed { id, size, chunk, now }, id))
        })?;
        let volume = self.volume_by_id(id)?;
        if gather != GatherPolicy::Off {
            self.store.note(|_| Ok((Record::SetGather { id, gather }, ())))?;
        }
        if let Some(extension) = options.extension.record_of_new(id) {
            self.store.note(|_| Ok((extension, ())))?;
        }
        Ok(volume)
    }

    /// Bounds how far an unnamed volume may diverge from what it is now, and how much of that is reserved, in bytes; 0:
    /// no bound, nothing. The next commit makes it durable.
    ///
    /// # Errors
    /// `Invalid` for a bound out of range; and those of [changing](crate#errors).
    pub fn bound_unnamed(&self, volume: &Volume<D>, diverge: u64, reserve: u64) -> Result<()> {
        let changes = ExtensionChanges::default().with_diverge(diverge).with_reserve(reserve);
        changes.check()?;
        let record = {
            let meta = self.store.meta.borrow();
            let entry = meta.directory.get(volume.id()).ok_or_else(deleted_error)?;
            changes.record(entry, "the new volume", VolumeId(meta.next_id))?
        };
        record.map_or(Ok(()), |record| self.store.note(|_| Ok((record, ()))))
    }

    /// Names an unnamed volume. On return the name and all earlier writes to the volume are durable.
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Invalid` if it is bad or the volume has a name; and those of
    /// [changing](crate#errors).
    pub async fn name_volume(&self, volume: &Volume<D>, name: &str) -> Result<()> {
        let id = volume.id();
        volume.flush().await?;
        self.store.verb(|meta| Ok((naming(meta, id, name)?, ()))).await
    }
}

/// The record that names an unnamed volume.
pub(super) fn naming(meta: &Catalog, id: VolumeId, name: &str) -> Result<Record> {
    if meta.directory.get(id).is_none_or(|v| v.record.state != VolumeState::Orphan) {
        return Err(Error::new(ErrorKind::Invalid, "only a volume without a name can be given its first"));
    }
    meta.directory.check_new(NO_VOLUME, name)?;
    Ok(Record::NameVolume { id, name: name.to_string() })
}
