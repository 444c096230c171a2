//! Quota of a volume or folder: a limit in bytes of what it, or everything below it, refers to, shared or not.
//!
//! It is checked when a write is planned, including what other writes under way have claimed; mapped pages
//! can always be overwritten. A quota below what a volume refers to removes nothing: the volume cannot grow
//! until it refers to less.

use crate::format::NO_VOLUME;
use crate::planted::correct;
use crate::types::{PAGE_SIZE, VolumeId};

use super::{Catalog, Failure, folder_bounds};

impl Catalog {
    /// Refuses `more` pages that a volume does not refer to yet if they exceed its quota; `claimed` pages are
    /// promised to writes under way.
    pub fn admits(&mut self, id: VolumeId, claimed: u64, more: u64) -> std::result::Result<(), Failure> {
        folder_bounds::admit_referenced(self, id, more)?;
        let record = self.directory.of_handle(id);
        let pages = record.referenced + correct!(claimed, Bug::QuotaForgetsClaims => 0) + more;
        match record.quota {
            0 => Ok(()),
            _ if more == 0 => Ok(()),
            quota if pages <= quota / PAGE_SIZE as u64 => Ok(()),
            _ => Err(Failure::OverQuota(NO_VOLUME)),
        }
    }
}
