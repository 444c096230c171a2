//! Which pages a group of the journal vouches for.
//!
//! A commit whose records map nothing but pages with known checksums needs one flush instead of two:
//! the checksums go along, and recovery takes the group only if the pages hold what they vouch for (it
//! asks only where no later group says that all was durable). Such a page must go on holding that
//! until a later group on the device says so. So:
//!
//! - What is written in place to a page of a *pending* record makes the next commit a plain one: data
//!   first, flush, then the journal.
//! - What would be written in place to a page of a *written* record goes to a new page, and its record
//!   makes the next commit a plain one: no page is moved twice in a row.

use std::collections::BTreeMap;

use crate::planted::{Bug, planted};
use crate::types::PageAddr;

/// Most pages a commit ever vouches for: recovery may have to read them all.
const MAX_PAGES: u64 = 8192;
/// Most extents: 20 bytes each in the journal.
const MAX_EXTENTS: usize = 2048;

/// Pages by their first one, with how many there are.
type Extents = BTreeMap<u64, u64>;

fn overlaps(extents: &Extents, page: PageAddr, pages: u64) -> bool {
    let before = extents.range(..page.0 + pages).next_back();
    before.is_some_and(|(&first, &n)| first + n > page.0)
}

/// What a commit vouches for.
struct Commit {
    /// The sequence number behind it.
    next: u64,
    pages: u64,
    extents: Extents,
}

/// See the module.
pub struct Witnesses {
    /// Most pages a commit vouches for.
    most: u64,
    pending: Extents,
    pages: u64,
    /// The pending records go the long way.
    plain: bool,
    /// Commits whose groups are written.
    written: Vec<Commit>,
}

impl Default for Witnesses {
    fn default() -> Witnesses {
        Witnesses { most: MAX_PAGES, pending: Extents::new(), pages: 0, plain: false, written: Vec::new() }
    }
}

impl Witnesses {
    /// A commit vouches for no more than `pages`.
    pub fn limit(&mut self, pages: u64) {
        self.most = pages.min(MAX_PAGES);
        if self.pages > self.most {
            self.forgo();
        }
    }

    /// Whether it is of use to know what `pages` more pages hold.
    pub fn wants(&self, pages: u64) -> bool {
        !self.plain && self.pages + pages <= self.most && self.pending.len() < MAX_EXTENTS
    }

    /// A pending record maps these pages, and what they hold is known.
    pub fn add(&mut self, to: PageAddr, pages: u64) {
        if !self.plain {
            self.pending.insert(to.0, pages);
            self.pages += pages;
        }
    }

    /// The next commit flushes the data first.
    pub fn forgo(&mut self) {
        self.plain = true;
        self.pending.clear();
        self.pages = 0;
    }

    /// Whether the next commit vouches for all that its records map.
    pub fn vouch(&self) -> bool {
        !self.plain
    }

    /// These pages are about to be written in place. False: they must not be.
    pub fn may_change(&mut self, page: PageAddr, pages: u64) -> bool {
        if overlaps(&self.pending, page, pages) && !planted(Bug::PendingChangedUnnoticed) {
            self.forgo();
        }
        planted(Bug::VouchedWrittenInPlace) || !self.written.iter().any(|commit| overlaps(&commit.extents, page, pages))
    }

    /// The pending records, up to sequence number `next`, are handed out for writing.
    pub fn take(&mut self, next: u64) {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            self.written.push(Commit { next, pages: self.pages, extents: pending });
        }
        (self.pages, self.plain) = (0, false);
    }

    /// The device itself says that everything before `sequence` is durable.
    pub fn confirmed(&mut self, sequence: u64) {
        self.written.retain(|commit| commit.next > sequence);
    }

    /// Pages of written groups.
    pub fn written_pages(&self) -> u64 {
        self.written.iter().map(|commit| commit.pages).sum()
    }

    /// Whether any page must not be written in place.
    pub fn holds_any(&self) -> bool {
        !self.written.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_page_that_changes_makes_the_commit_plain() {
        let mut witnesses = Witnesses::default();
        witnesses.add(PageAddr(100), 4);
        assert!(witnesses.may_change(PageAddr(96), 4) && witnesses.may_change(PageAddr(104), 1));
        assert!(witnesses.vouch(), "beside it");
        assert!(witnesses.may_change(PageAddr(103), 1), "in place");
        assert!(!witnesses.vouch() && !witnesses.wants(1));
        witnesses.take(7);
        assert!(witnesses.vouch() && witnesses.wants(1) && !witnesses.holds_any());
    }

    #[test]
    fn a_written_page_stays_until_the_device_says_so() {
        let mut witnesses = Witnesses::default();
        witnesses.add(PageAddr(100), 4);
        witnesses.take(7);
        witnesses.add(PageAddr(200), 1);
        witnesses.take(9);
        assert!(!witnesses.may_change(PageAddr(90), 11) && !witnesses.may_change(PageAddr(200), 1));
        witnesses.confirmed(7);
        assert!(witnesses.may_change(PageAddr(100), 4) && !witnesses.may_change(PageAddr(200), 1));
        witnesses.confirmed(9);
        assert!(!witnesses.holds_any());
    }

    #[test]
    fn what_is_left_for_it_bounds_a_commit() {
        let mut witnesses = Witnesses::default();
        witnesses.add(PageAddr(0), 10);
        witnesses.limit(10);
        assert!(witnesses.vouch() && !witnesses.wants(1));
        witnesses.limit(9);
        assert!(!witnesses.vouch(), "less is left than was when they were added");
        witnesses.take(7);
        assert_eq!(witnesses.written_pages(), 0);
        witnesses.add(PageAddr(0), 9);
        witnesses.take(8);
        assert_eq!(witnesses.written_pages(), 9);
    }

    #[test]
    fn what_recovery_would_have_to_read_is_bounded() {
        let mut witnesses = Witnesses::default();
        witnesses.add(PageAddr(0), MAX_PAGES - 1);
        assert!(witnesses.wants(1) && !witnesses.wants(2));
    }
}
