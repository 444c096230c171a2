//! Bounds of volumes: how far one may diverge from what it was when its bound was set.
//!
//! Each page that a volume with a bound maps first, for a hole or for a shared page, is charged to its account, until
//! nothing refers to the page any more. It is checked when a write is planned, including what other writes under way
//! have claimed; pages that are exclusive to the volume can always be overwritten.

use crate::planted::correct;
use crate::types::{AccountId, PAGE_SIZE, VolumeId};

use super::directory::extensions;
use super::{Catalog, Failure};

impl Catalog {
    /// Refuses `more` new pages of a volume if its bound does not allow them; `claimed` pages are promised to writes
    /// under way.
    pub fn admits_divergence(&self, id: VolumeId, claimed: u64, more: u64) -> Result<(), Failure> {
        if self.space.accounts.is_empty() {
            return Ok(());
        }
        let Some(bound) = self.directory.get(id).and_then(|volume| volume.bound()) else { return Ok(()) };
        let pages = self.space.accounts.pages(bound.account) + correct!(claimed, Bug::BoundForgetsClaims => 0) + more;
        match pages <= bound.diverge / PAGE_SIZE as u64 {
            true => Ok(()),
            false => Err(Failure::OverBound),
        }
    }

    /// Begins the accounts of volumes that were loaded.
    pub fn open_accounts(&mut self) {
        for volume in self.directory.iter() {
            if let Some(bound) = volume.bound() {
                self.space.accounts.open(bound.account, volume.record.id, bound.charged);
            }
        }
    }

    /// Follows a change of the account of a volume.
    pub(super) fn change_account(&mut self, id: VolumeId, old: AccountId, new: AccountId) {
        if correct!(old != new, Bug::LabelResetsCharge => true) {
            self.space.accounts.close(old);
            if new != AccountId(0) {
                self.space.accounts.open(new, id, 0);
                self.next_id = self.next_id.max(u64::from(new.0) + 1);
            }
        }
    }

    /// Ends the account of a volume that is being deleted.
    pub(super) fn close_account(&mut self, id: VolumeId) {
        let account = self.directory.get(id).map(|volume| volume.account());
        account.into_iter().for_each(|account| self.space.accounts.close(account));
    }

    /// Enters what is charged to volumes into the directory, for a checkpoint. May be repeated.
    pub fn enter_charges(&mut self) {
        for (id, pages) in self.space.accounts.changed() {
            extensions::set_charged(&mut self.directory, id, pages);
        }
    }
}
