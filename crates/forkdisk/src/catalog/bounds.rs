//! Bounds of volumes: how far one may diverge from what it was when its bound was set.
//!
//! Each page that a volume with a bound maps first, for a hole or for a shared page, is charged to its account, until
//! nothing refers to the page any more. It is checked when a write is planned, including what other writes under way
//! have claimed; pages that are exclusive to the volume can always be overwritten.

use crate::format::{Bound, Extension, NO_VOLUME, VolumeState};
use crate::map::Stop;
use crate::planted::correct;
use crate::space::{Need, Reservation, Reserve};
use crate::types::{AccountId, NO_ACCOUNT, PAGE_SIZE, VolumeId, table_span};

use super::directory::extensions;
use super::directory::within::{count_referenced, set_reaped};
use super::{Catalog, CatalogEntry, Failure, folder_bounds, level_for, pages_of};

/// What has to be kept free so that `bytes` of new pages of a volume of `size` bytes can be written.
fn reserve_of(bytes: u64, size: u64) -> Reserve {
    let (pages, of_volume, top) = (bytes / PAGE_SIZE as u64, pages_of(size), level_for(size));
    let tables = (0..=top).map(|level| of_volume.div_ceil(table_span(level)).max(1)).sum();
    Reserve { pages, path: u64::from(top) + 1, tables }
}

/// Refuses `more` new pages of a volume if its bound does not allow them; `claimed` pages are promised to writes
/// under way.
pub fn admit_divergence(catalog: &Catalog, id: VolumeId, claimed: u64, more: u64) -> Result<(), Failure> {
    if catalog.space.accounts.is_empty() {
        return Ok(());
    }
    folder_bounds::admit_new_pages(catalog, id, more)?;
    let bound = catalog.directory.get(id).and_then(|volume| volume.bound());
    let Some(bound) = bound.filter(|bound| bound.diverge != 0) else { return Ok(()) };
    let pages = catalog.space.accounts.pages(bound.account) + correct!(claimed, Bug::BoundForgetsClaims => 0) + more;
    match pages <= bound.diverge / PAGE_SIZE as u64 {
        true => Ok(()),
        false => Err(Failure::OverBound(NO_VOLUME)),
    }
}

/// The account that new pages of a volume are charged to.
pub fn account_of(catalog: &Catalog, id: VolumeId) -> AccountId {
    match catalog.space.accounts.is_empty() {
        true => NO_ACCOUNT,
        false => catalog.directory.get(id).map_or(NO_ACCOUNT, |volume| volume.account()),
    }
}

/// As [`Catalog::reserve`] for a request of a volume, for which pages may be kept free.
pub fn reserve_for(catalog: &Catalog, id: VolumeId, need: Need) -> Result<Reservation, Stop> {
    catalog.space.reserve(need, catalog.checkpoint_pages(), account_of(catalog, id)).map_err(Stop::from)
}

/// Begins the accounts of volumes and folders that were loaded.
pub fn open_accounts(catalog: &mut Catalog) {
    for volume in catalog.directory.iter() {
        if let Some(bound) = volume.bound() {
            let _is_volume = volume.record.state != VolumeState::Folder;
            let charged = correct!(bound.charged, Bug::FolderCountLostAtOpen => bound.charged * u64::from(_is_volume));
            catalog.space.accounts.open(bound.account, volume.record.id, charged);
            let reserve = reserve_of(bound.reserve, volume.record.size);
            correct!(catalog.space.accounts.set_reserve(bound.account, reserve), Bug::ReserveEndsWithOpen => ());
        }
    }
    folder_bounds::open(catalog);
}

/// Follows a change of the reserve or of the size of a volume.
pub fn update_reserve(catalog: &mut Catalog, id: VolumeId) {
    let Some(volume) = catalog.directory.get(id) else { return };
    if let Some(bound) = volume.bound() {
        catalog.space.accounts.set_reserve(bound.account, reserve_of(bound.reserve, volume.record.size));
    }
}

/// Returns how many pages more have to be kept free if a volume, which has or gets this size, gets this bound.
pub fn more_held(catalog: &Catalog, id: VolumeId, size: u64, bound: Option<&Bound>) -> u64 {
    let held = |bound: &Bound| reserve_of(bound.reserve, size).held(catalog.space.accounts.pages(bound.account));
    let old = catalog.directory.get(id).map_or(NO_ACCOUNT, |volume| volume.own_account());
    bound.map_or(0, held).saturating_sub(catalog.space.accounts.held_for(old))
}

/// Follows a change of the account of a volume.
pub fn change_account(catalog: &mut Catalog, id: VolumeId, old: AccountId, new: AccountId) {
    if correct!(old != new, Bug::LabelResetsCharge => true) {
        catalog.space.accounts.close(old);
        if new != NO_ACCOUNT {
            catalog.space.accounts.open(new, id, 0);
            catalog.next_id = catalog.next_id.max(u64::from(new.0) + 1);
        }
    }
}

/// Ends the account of a volume that is being deleted, or keeps it if it counts in a folder.
pub fn close_account(catalog: &mut Catalog, id: VolumeId) {
    let Some(account) = catalog.directory.get(id).map(|volume| volume.own_account()) else { return };
    if folder_bounds::keeps_account(catalog, id) {
        catalog.space.accounts.set_reserve(account, Reserve::default());
        catalog.directory.get_mut(id).expect("found above").within.keeps_account = true;
        return;
    }
    catalog.space.accounts.close(account);
}

/// Removes a dead volume that has no map any more; it stays if its account counts in a folder.
pub fn remove_dead(catalog: &mut Catalog, id: VolumeId) {
    let account = catalog.directory.get(id).and_then(kept_account);
    match account {
        Some(account) if catalog.space.accounts.pages(account) > 0 => {
            return set_reaped(&mut catalog.directory, id, true);
        }
        Some(account) => {
            catalog.space.accounts.close(account);
            extensions::set(&mut catalog.directory, id, Extension::default());
        }
        None => {}
    }
    catalog.directory.remove(id);
}

/// The account of a deleted volume that counts in a folder.
fn kept_account(entry: &CatalogEntry) -> Option<AccountId> {
    let bound = entry.bound().filter(|bound| entry.record.state == VolumeState::Dead && bound.folder != NO_VOLUME);
    bound.map(|bound| bound.account)
}

/// Enters what is charged to volumes into the directory, for a checkpoint. May be repeated.
pub fn enter_charges(catalog: &mut Catalog) {
    // Not for the checkpoint: so that what is to be counted does not pile up.
    count_referenced(&mut catalog.directory, &mut catalog.space.accounts.folders);
    for (id, pages) in catalog.space.accounts.changed() {
        extensions::set_charged(&mut catalog.directory, id, pages);
        if pages == 0 && catalog.directory.get(id).and_then(kept_account).is_some() {
            set_reaped(&mut catalog.directory, id, false);
        }
    }
}
