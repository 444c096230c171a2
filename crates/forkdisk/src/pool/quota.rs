//! Quota of a volume: a limit in bytes of what it refers to, shared or not.
//!
//! It is checked when a write is planned, including what other writes under way have claimed; mapped pages
//! can always be overwritten. A quota below what a volume refers to removes nothing: the volume cannot grow
//! until it refers to less.

use super::Pool;
use crate::catalog::{check_quota, writable_volume};
use crate::device::Device;
use crate::error::Result;
use crate::format::Record;

impl<D: Device> Pool<D> {
    /// Sets the most bytes that the volume may have mapped, at most 1 PiB, in whole pages; 0: no limit. A
    /// snapshot or clone of the volume has no quota, a rollback keeps it.
    pub async fn set_quota(&self, name: &str, quota: u64) -> Result<()> {
        check_quota(quota)?;
        self.store
            .verb(|meta| {
                let id = writable_volume(meta.directory.find(name)?, name)?;
                Ok((Record::SetQuota { id, quota }, ()))
            })
            .await
    }
}
