//! Pages that gathering moves, and whether they were written meanwhile.

use std::collections::BTreeMap;

use crate::planted::correct;
use crate::types::PageAddr;

/// Pages that are being copied elsewhere, and which of them were written since.
#[derive(Default)]
pub struct WatchedPages(BTreeMap<PageAddr, bool>);

impl WatchedPages {
    /// Watches these pages from now on.
    pub fn watch(&mut self, pages: impl Iterator<Item = PageAddr>) {
        self.0.extend(pages.map(|page| (page, false)));
    }

    /// Whether a page is watched.
    pub fn is_watched(&self, page: PageAddr) -> bool {
        self.0.contains_key(&page)
    }

    /// Watches nothing any more.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Called before a write in place to these pages; returns true, because the write is allowed.
    pub fn note(&mut self, first: PageAddr, pages: u64) -> bool {
        if !self.0.is_empty() {
            let range = first..PageAddr(first.0 + pages);
            self.0.range_mut(range).for_each(|(_, written)| *written = true);
        }
        true
    }

    /// Whether a page was written since it is watched.
    pub fn was_written(&self, page: PageAddr) -> bool {
        correct!(self.0.get(&page).is_none_or(|&written| written), Bug::GatherIgnoresWrites => false)
    }
}
