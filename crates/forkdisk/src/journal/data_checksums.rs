//! Data checksums: which pages a group of the journal covers.
//!
//! A commit whose records map only pages with known checksums needs one flush instead of two. The checksums
//! are written with the records, and recovery accepts the group only if the pages match them (it verifies
//! only where no later group says that all was durable). Such a page must keep its contents until a later
//! group on the device says that they are durable. So:
//!
//! - A write in place to a page of a *pending* record makes the next commit a plain one: data first, flush,
//!   then the journal.
//! - A write in place to a page of a *written* record goes to a new page instead, and its record makes the
//!   next commit a plain one, so that no page is relocated twice in succession.

use std::collections::BTreeMap;

use crate::planted::correct;
use crate::types::PageAddr;

/// Most pages that a commit covers: recovery may have to read them all.
const MAX_CHECKSUMMED_PAGES: u64 = 8192;
/// Most extents: 20 bytes each in the journal.
const MAX_EXTENTS: usize = 2048;

/// Extents: first page and number of pages.
type Extents = BTreeMap<u64, u64>;

fn overlaps(extents: &Extents, page: PageAddr, pages: u64) -> bool {
    let before = extents.range(..page.0 + pages).next_back();
    before.is_some_and(|(&first, &n)| first + n > page.0)
}

/// The pages that a commit covers.
struct Commit {
    /// The sequence number behind its last record.
    next: u64,
    pages: u64,
    extents: Extents,
}

/// See the module.
pub struct ChecksummedPages {
    /// Most pages that a commit covers.
    max_pages: u64,
    pending: Extents,
    pages: u64,
    /// The pending records require a data flush before the journal write.
    needs_data_flush: bool,
    /// Commits whose groups are written.
    written: Vec<Commit>,
}

impl Default for ChecksummedPages {
    fn default() -> ChecksummedPages {
        ChecksummedPages {
            max_pages: MAX_CHECKSUMMED_PAGES,
            pending: Extents::new(),
            pages: 0,
            needs_data_flush: false,
            written: Vec::new(),
        }
    }
}

impl ChecksummedPages {
    /// Limits the pages that a commit covers.
    pub fn limit(&mut self, pages: u64) {
        self.max_pages = pages.min(MAX_CHECKSUMMED_PAGES);
        if self.pages > self.max_pages {
            self.require_data_flush();
        }
    }

    /// Whether a checksum of `pages` more pages is useful.
    pub fn wants(&self, pages: u64) -> bool {
        !self.needs_data_flush && self.pages + pages <= self.max_pages && self.pending.len() < MAX_EXTENTS
    }

    /// Adds pages that a pending record maps and whose checksum is known.
    pub fn add(&mut self, to: PageAddr, pages: u64) {
        if !self.needs_data_flush {
            self.pending.insert(to.0, pages);
            self.pages += pages;
        }
    }

    /// Makes the next commit flush the data first.
    pub fn require_data_flush(&mut self) {
        self.needs_data_flush = true;
        self.pending.clear();
        self.pages = 0;
    }

    /// Whether the next commit covers everything that its records map.
    pub fn covers_data(&self) -> bool {
        !self.needs_data_flush
    }

    /// Called before a write in place to these pages. False: it is not allowed.
    pub fn may_overwrite(&mut self, page: PageAddr, pages: u64) -> bool {
        if correct!(overlaps(&self.pending, page, pages), Bug::PendingChangedUnnoticed => false) {
            self.require_data_flush();
        }
        let is_vouched = self.written.iter().any(|commit| overlaps(&commit.extents, page, pages));
        correct!(!is_vouched, Bug::VouchedWrittenInPlace => true)
    }

    /// The pending records, up to sequence number `next`, are taken for writing.
    pub fn take(&mut self, next: u64) {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            self.written.push(Commit { next, pages: self.pages, extents: pending });
        }
        (self.pages, self.needs_data_flush) = (0, false);
    }

    /// Notes that the device itself says everything before `sequence` is durable.
    pub fn set_durable(&mut self, sequence: u64) {
        self.written.retain(|commit| commit.next > sequence);
    }

    /// Returns the number of pages of written groups.
    pub fn written_pages(&self) -> u64 {
        self.written.iter().map(|commit| commit.pages).sum()
    }

    /// Whether written groups may wait for a later flush: recovery has little data to verify.
    pub fn may_wait(&self) -> bool {
        self.written_pages() <= self.max_pages / 2
    }

    /// Whether any page must not be written in place.
    pub fn holds_pages(&self) -> bool {
        !self.written.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_page_that_changes_makes_the_commit_plain() {
        let mut checksums = ChecksummedPages::default();
        checksums.add(PageAddr(100), 4);
        assert!(checksums.may_overwrite(PageAddr(96), 4) && checksums.may_overwrite(PageAddr(104), 1));
        assert!(checksums.covers_data(), "beside it");
        assert!(checksums.may_overwrite(PageAddr(103), 1), "in place");
        assert!(!checksums.covers_data() && !checksums.wants(1));
        checksums.take(7);
        assert!(checksums.covers_data() && checksums.wants(1) && !checksums.holds_pages());
    }

    #[test]
    fn a_written_page_stays_until_the_device_says_so() {
        let mut checksums = ChecksummedPages::default();
        checksums.add(PageAddr(100), 4);
        checksums.take(7);
        checksums.add(PageAddr(200), 1);
        checksums.take(9);
        assert!(!checksums.may_overwrite(PageAddr(90), 11) && !checksums.may_overwrite(PageAddr(200), 1));
        checksums.set_durable(7);
        assert!(checksums.may_overwrite(PageAddr(100), 4) && !checksums.may_overwrite(PageAddr(200), 1));
        checksums.set_durable(9);
        assert!(!checksums.holds_pages());
    }

    #[test]
    fn what_is_left_for_it_bounds_a_commit() {
        let mut checksums = ChecksummedPages::default();
        checksums.add(PageAddr(0), 10);
        checksums.limit(10);
        assert!(checksums.covers_data() && !checksums.wants(1));
        checksums.limit(9);
        assert!(!checksums.covers_data(), "less is left than was when they were added");
        checksums.take(7);
        assert_eq!(checksums.written_pages(), 0);
        checksums.add(PageAddr(0), 9);
        checksums.take(8);
        assert_eq!(checksums.written_pages(), 9);
    }

    #[test]
    fn what_recovery_would_have_to_read_is_bounded() {
        let mut checksums = ChecksummedPages::default();
        checksums.add(PageAddr(0), MAX_CHECKSUMMED_PAGES - 1);
        assert!(checksums.wants(1) && !checksums.wants(2));
    }
}
