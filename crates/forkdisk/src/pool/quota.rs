//! Quota of a volume: a limit in bytes of what it refers to, shared or not.
//!
//! It is checked when a write is planned, including what other writes under way have claimed; mapped pages
//! can always be overwritten. A quota below what a volume refers to removes nothing: the volume cannot grow
//! until it refers to less.

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::planted::{Bug, planted};
use crate::types::{MAX_VOLUME_SIZE, PAGE_SIZE, VolumeId};

use super::verbs::writable_volume;
use super::{Failure, Meta, Pool};

pub(super) fn check_quota(quota: u64) -> Result<()> {
    match quota <= MAX_VOLUME_SIZE {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Invalid, format!("bad quota of {quota} bytes: at most 1 PiB; 0 for none"))),
    }
}

impl Meta {
    /// Refuses `more` pages that a volume does not refer to yet if they exceed its quota.
    pub fn admits(&self, id: VolumeId, more: u64) -> std::result::Result<(), Failure> {
        let volume = self.directory.get(id).expect("a volume with a handle is not removed");
        let claimed = if planted(Bug::QuotaForgetsClaims) { 0 } else { self.live.of_handle(id).claims.pages() };
        let pages = volume.record.referenced + claimed + more;
        match volume.record.quota {
            0 => Ok(()),
            _ if more == 0 => Ok(()),
            quota if pages <= quota / PAGE_SIZE as u64 => Ok(()),
            _ => Err(Failure::OverQuota),
        }
    }
}

impl<D: Device> Pool<D> {
    /// Sets the most bytes that the volume may have mapped, at most 1 PiB, in whole pages; 0: no limit. A
    /// snapshot or clone of the volume has no quota, a rollback keeps it.
    pub async fn set_quota(&self, name: &str, quota: u64) -> Result<()> {
        check_quota(quota)?;
        self.0
            .verb(|meta| {
                let id = writable_volume(meta.directory.find(name)?, name)?;
                Ok((Record::SetQuota { id, quota }, ()))
            })
            .await
    }
}
