//! Quota of a volume: a limit in bytes of what it refers to, shared or not.
//!
//! It is checked when a write is planned, including what other writes under way have claimed; mapped pages
//! can always be overwritten. A quota below what a volume refers to removes nothing: the volume cannot grow
//! until it refers to less.

use crate::Changes;
use crate::catalog::{CatalogEntry, folder_of};
use crate::device::Device;
use crate::error::Result;
use crate::types::VolumeId;

use super::Pool;

impl<D: Device> Pool<D> {
    /// Sets the most bytes that the volume may have mapped, at most 1 PiB, in whole pages; 0: no limit. A
    /// snapshot or clone of the volume has no quota, a rollback keeps it.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot, `Invalid` for a quota out of its
    /// bounds; and those of [changing](crate#errors).
    pub async fn set_quota(&self, name: &str, quota: u64) -> Result<()> {
        self.set(name, &Changes { quota: Some(quota), ..Changes::default() }).await
    }

    /// Whether writes of a volume may be refused for a quota or a bound, also of a folder, although the pool has space.
    pub fn is_limited(&self, id: VolumeId) -> bool {
        let meta = self.store.meta.borrow();
        folder_of(&meta, id).is_some() || meta.directory.get(id).is_some_and(has_limit)
    }

    /// Whether there is a volume or folder with such a limit.
    pub fn has_limits(&self) -> bool {
        self.store.meta.borrow().directory.iter().any(has_limit)
    }
}

fn has_limit(entry: &CatalogEntry) -> bool {
    entry.record.quota != 0 || entry.bound().is_some_and(|bound| bound.diverge != 0)
}
