//! Accounts as a check finds them: the pages in use by the account that the entries name.

use std::collections::BTreeMap;

use crate::format::MapEntry;
use crate::types::{AccountId, BLOCK_PAGES, Block, NO_ACCOUNT, PageAddr, VolumeId};

/// Pages that are charged to accounts, by block. A page has one account, whatever refers to it.
#[derive(Default)]
pub(super) struct ChargedPages {
    blocks: BTreeMap<Block, Box<[AccountId; BLOCK_PAGES as usize]>>,
    /// A page that is charged to two accounts.
    torn: Option<(PageAddr, AccountId, AccountId)>,
}

impl ChargedPages {
    /// Adds what an entry of data refers to: its page and those behind it, `pages` in all.
    pub fn add(&mut self, entry: MapEntry, pages: u64) {
        let (first, account) = (entry.addr(), entry.account());
        if account == NO_ACCOUNT {
            return;
        }
        let block = self.blocks.entry(first.block()).or_insert_with(|| Box::new([NO_ACCOUNT; BLOCK_PAGES as usize]));
        for page in (first.0..first.0 + pages).map(PageAddr) {
            let before = std::mem::replace(&mut block[page.index()], account);
            if before != NO_ACCOUNT && before != account {
                self.torn.get_or_insert((page, before, account));
            }
        }
    }

    /// Compares with what is charged to the accounts of volumes; returns what is wrong.
    pub fn compare(&self, charged: impl Iterator<Item = (VolumeId, (AccountId, u64))>) -> Vec<String> {
        let mut found: BTreeMap<AccountId, u64> = BTreeMap::new();
        for account in self.blocks.values().flat_map(|block| block.iter()) {
            *found.entry(*account).or_default() += 1;
        }
        let mut wrong = Vec::new();
        if let Some((page, AccountId(a), AccountId(b))) = self.torn {
            wrong.push(format!("{page:?} is charged to the accounts {a} and {b}"));
        }
        for (VolumeId(id), (account, pages)) in charged {
            let found = found.get(&account).copied().unwrap_or(0);
            if found != pages {
                wrong.push(format!("volume {id} has {found} new pages that its bound counts, and {pages} are counted"));
            }
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Epoch;

    #[test]
    fn each_page_counts_once_and_for_one_account() {
        let page = |at, account| MapEntry::page(PageAddr(at), Epoch(1)).charged_to(AccountId(account));
        let mut charged = ChargedPages::default();
        charged.add(MapEntry::block(Block(2), Epoch(1)).charged_to(AccountId(7)), BLOCK_PAGES);
        charged.add(page(512, 7), 1);
        charged.add(page(100, 8), 1);
        charged.add(page(101, 0), 1);
        let said = [(VolumeId(1), (AccountId(7), 256)), (VolumeId(2), (AccountId(8), 1))];
        assert!(charged.compare(said.into_iter()).is_empty());
        assert_eq!(charged.compare([(VolumeId(3), (AccountId(9), 1))].into_iter()).len(), 1);
        charged.add(page(100, 7), 1);
        assert!(charged.compare(std::iter::empty())[0].contains("accounts 8 and 7"));
    }
}
