//! Accounts: how many pages in use are charged to each volume or folder with a bound.
//!
//! A page is charged when a volume with an account maps it first, and credited when nothing refers to it any more,
//! through whichever volume that happens. The entries that map a page have the number of its account.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use crate::format::NO_VOLUME;
use crate::planted::correct;
use crate::types::{AccountId, NO_ACCOUNT, VolumeId};

use super::folders::Folders;

/// Numbers of pages, by account.
pub type Credits = SmallVec<[(AccountId, u64); 2]>;

/// Adds pages of an account.
pub fn credit(credits: &mut Credits, account: AccountId, pages: u64) {
    match credits.iter_mut().find(|(other, _)| *other == account) {
        Some((_, sum)) => *sum += pages,
        None => credits.push((account, pages)),
    }
}

/// What is kept free for an account.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Reserve {
    /// Pages that can be charged to it.
    pub pages: u64,
    /// Tables on the path to a page of the volume.
    pub path: u64,
    /// Tables of the whole volume.
    pub tables: u64,
}

impl Reserve {
    /// Returns the pages that have to be free while `charged` pages are charged: what is left, the tables that writing
    /// it may copy, at most each table once, and what a write needs beyond that.
    pub fn held(self, charged: u64) -> u64 {
        match self.pages.saturating_sub(charged) {
            0 => 0,
            left => left + (left * self.path).min(self.tables) + SLACK_PAGES,
        }
    }
}

/// Pages held with each reserve for the admission of its writes.
const SLACK_PAGES: u64 = 64;

/// An account.
struct Account {
    /// The volume or folder that has it.
    volume: VolumeId,
    /// The bounded folder that it counts in, or none.
    folder: VolumeId,
    pages: u64,
    reserve: Reserve,
}

/// See the module.
#[derive(Default)]
pub struct Accounts {
    accounts: BTreeMap<AccountId, Account>,
    /// Folders with bounds.
    pub folders: Folders,
    /// Sum of what is held for all of them.
    held: u64,
    /// Accounts with a change of their pages since the last checkpoint.
    changed: BTreeSet<AccountId>,
}

impl Accounts {
    /// Begins the account of a volume or folder to which `pages` pages are charged.
    pub fn open(&mut self, account: AccountId, volume: VolumeId, pages: u64) {
        self.accounts.insert(account, Account { volume, folder: NO_VOLUME, pages, reserve: Reserve::default() });
    }

    /// Ends an account: what is charged to it is charged to no volume from now on.
    pub fn close(&mut self, account: AccountId) {
        if let Some(ended) = self.accounts.remove(&account) {
            self.held -= ended.reserve.held(ended.pages);
            self.folders.change(ended.folder, -(ended.pages as i64), 0);
        }
        self.changed.remove(&account);
    }

    /// An account counts in this bounded folder, or in none, from now on.
    pub fn move_to(&mut self, account: AccountId, folder: VolumeId) {
        if let Some(found) = self.accounts.get_mut(&account) {
            let (old, pages) = (std::mem::replace(&mut found.folder, folder), found.pages as i64);
            self.folders.change(old, -pages, 0);
            self.folders.change(folder, pages, 0);
        }
    }

    /// Sets what is kept free for an account.
    pub fn set_reserve(&mut self, account: AccountId, reserve: Reserve) {
        if let Some(found) = self.accounts.get_mut(&account) {
            self.held = self.held - found.reserve.held(found.pages) + reserve.held(found.pages);
            found.reserve = reserve;
        }
    }

    /// Returns the pages kept free for an account.
    pub fn held_for(&self, account: AccountId) -> u64 {
        self.accounts.get(&account).map_or(0, |account| account.reserve.held(account.pages))
    }

    /// Returns the pages that are kept free for others.
    pub fn held_for_others(&self, account: AccountId) -> u64 {
        let own = if account == NO_ACCOUNT { 0 } else { self.held_for(account) };
        correct!(self.held - own, Bug::OthersTakeReserve => 0)
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
        self.accounts.get(&account).map_or(0, |account| account.pages)
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
        if let Some(found) = self.accounts.get_mut(&account) {
            let before = found.reserve.held(found.pages);
            let pages = found.pages;
            found.pages = to(pages);
            self.folders.change(found.folder, found.pages as i64 - pages as i64, 0);
            self.held = self.held - before + found.reserve.held(found.pages);
            self.changed.insert(account);
        }
    }

    /// Returns the accounts with a change of their pages since the last checkpoint, with their volumes and pages.
    pub fn changed(&self) -> Vec<(VolumeId, u64)> {
        self.changed
            .iter()
            .filter_map(|account| self.accounts.get(account))
            .map(|account| (account.volume, account.pages))
            .collect()
    }

    /// Notes that a checkpoint has all changes.
    pub fn take_changed(&mut self) {
        self.changed.clear();
    }
}
