//! A volume's quota: a bound in bytes on what it refers to, whether others share it or not.
//!
//! What may be mapped is judged when a write is planned, together with what other writes under way
//! have been promised; what is mapped already can always be written. A quota below what a volume
//! refers to takes nothing away: the volume grows no further until it refers to less.

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
    /// Refuses `more` pages that a volume does not refer to yet where its quota has no room for them.
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
    /// The most bytes that the volume may have mapped from now on, at most 1 PiB; 0: no bound. Whole pages
    /// count. A snapshot or clone of the volume has no quota, a rollback leaves it as it is.
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
