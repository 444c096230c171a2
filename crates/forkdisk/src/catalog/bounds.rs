//! Bounds of volumes: how far one may diverge from what it was when its bound was set.
//!
//! Each page that a volume with a bound maps first, for a hole or for a shared page, is charged to its account, until
//! nothing refers to the page any more. It is checked when a write is planned, including what other writes under way
//! have claimed; pages that are exclusive to the volume can always be overwritten.

use crate::planted::correct;
use crate::types::{AccountId, PAGE_SIZE, VolumeId};

use super::directory::extensions;
use super::{Catalog, Failure};

/// Refuses `more` new pages of a volume if its bound does not allow them; `claimed` pages are promised to writes
/// under way.
pub fn admit_divergence(catalog: &Catalog, id: VolumeId, claimed: u64, more: u64) -> Result<(), Failure> {
    if catalog.space.accounts.is_empty() {
        return Ok(());
    }
    let Some(bound) = catalog.directory.get(id).and_then(|volume| volume.bound()) else { return Ok(()) };
    let pages = catalog.space.accounts.pages(bound.account) + correct!(claimed, Bug::BoundForgetsClaims => 0) + more;
    match pages <= bound.diverge / PAGE_SIZE as u64 {
        true => Ok(()),
        false => Err(Failure::OverBound),
    }
}

/// Begins the accounts of volumes that were loaded.
pub fn open_accounts(catalog: &mut Catalog) {
    for volume in catalog.directory.iter() {
        if let Some(bound) = volume.bound() {
            catalog.space.accounts.open(bound.account, volume.record.id, bound.charged);
        }
    }
}

/// Follows a change of the account of a volume.
pub fn change_account(catalog: &mut Catalog, id: VolumeId, old: AccountId, new: AccountId) {
    if correct!(old != new, Bug::LabelResetsCharge => true) {
        catalog.space.accounts.close(old);
        if new != AccountId(0) {
            catalog.space.accounts.open(new, id, 0);
            catalog.next_id = catalog.next_id.max(u64::from(new.0) + 1);
        }
    }
}

/// Ends the account of a volume that is being deleted.
pub fn close_account(catalog: &mut Catalog, id: VolumeId) {
    let account = catalog.directory.get(id).map(|volume| volume.account());
    account.into_iter().for_each(|account| catalog.space.accounts.close(account));
}

/// Enters what is charged to volumes into the directory, for a checkpoint. May be repeated.
pub fn enter_charges(catalog: &mut Catalog) {
    for (id, pages) in catalog.space.accounts.changed() {
        extensions::set_charged(&mut catalog.directory, id, pages);
    }
}
