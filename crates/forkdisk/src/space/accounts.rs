//! Accounts: how many pages in use are charged to each volume with a bound.
//!
//! A page is charged when a volume with an account maps it first, and credited when nothing refers to it any more,
//! through whichever volume that happens. The entries that map a page have the number of its account.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use crate::types::{AccountId, NO_ACCOUNT, VolumeId};

/// Numbers of pages, by account.
pub type Credits = SmallVec<[(AccountId, u64); 2]>;

/// Adds pages of an account.
pub fn credit(credits: &mut Credits, account: AccountId, pages: u64) {
    match credits.iter_mut().find(|(other, _)| *other == account) {
        Some((_, sum)) => *sum += pages,
        None => credits.push((account, pages)),
    }
}

/// See the module.
#[derive(Default)]
pub struct Accounts {
    accounts: BTreeMap<AccountId, (VolumeId, u64)>,
    /// Those whose pages changed since the last checkpoint.
    changed: BTreeSet<AccountId>,
}

impl Accounts {
    /// Begins the account of a volume to which `pages` pages are charged.
    pub fn open(&mut self, account: AccountId, volume: VolumeId, pages: u64) {
        self.accounts.insert(account, (volume, pages));
    }

    /// Ends an account: what is charged to it is charged to no volume from now on.
    pub fn close(&mut self, account: AccountId) {
        self.accounts.remove(&account);
        self.changed.remove(&account);
    }

    /// Returns the number of accounts.
    pub fn len(&self) -> usize {
        self.accounts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.accounts.is_empty()
    }

    /// Whether there is this account.
    pub fn has(&self, account: AccountId) -> bool {
        account != NO_ACCOUNT && self.accounts.contains_key(&account)
    }

    /// Returns the number of pages charged to an account.
    pub fn pages(&self, account: AccountId) -> u64 {
        self.accounts.get(&account).map_or(0, |&(_, pages)| pages)
    }

    /// Charges new pages to an account, if there is one.
    pub fn charge(&mut self, account: AccountId, pages: u64) {
        if account != NO_ACCOUNT {
            self.change(account, |charged| charged + pages);
        }
    }

    /// Credits pages that nothing refers to any more.
    pub fn credit(&mut self, credits: Credits) {
        for (account, pages) in credits {
            self.change(account, |charged| {
                debug_assert!(charged >= pages, "a page is credited once");
                charged.saturating_sub(pages)
            });
        }
    }

    fn change(&mut self, account: AccountId, to: impl FnOnce(u64) -> u64) {
        if let Some((_, pages)) = self.accounts.get_mut(&account) {
            *pages = to(*pages);
            self.changed.insert(account);
        }
    }

    /// Returns the accounts whose pages changed since the last checkpoint, with their volumes and pages.
    pub fn changed(&self) -> Vec<(VolumeId, u64)> {
        self.changed.iter().filter_map(|account| self.accounts.get(account).copied()).collect()
    }

    /// Notes that a checkpoint has all changes.
    pub fn take_changed(&mut self) {
        self.changed.clear();
    }
}
