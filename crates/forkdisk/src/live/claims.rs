//! Quota promised to writes under way.
//!
//! A page is claimed from the plan that maps a hole until it is mapped or the plan is dropped: exactly once.

use std::cell::Cell;
use std::rc::Rc;

/// Pages that writes under way will add to those that a volume refers to.
#[derive(Default)]
pub struct QuotaClaims(Cell<u64>);

impl QuotaClaims {
    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.0.get()
    }
}

/// The claim of one write; dropping it returns the rest.
#[derive(Default)]
pub struct QuotaClaim {
    of: Option<Rc<QuotaClaims>>,
    pages: Cell<u64>,
}

impl QuotaClaim {
    /// Claims `pages` more of those of a volume.
    pub fn add(&mut self, claims: &Rc<QuotaClaims>, pages: u64) {
        let all = self.of.get_or_insert_with(|| claims.clone());
        all.0.set(all.0.get() + pages);
        self.pages.set(self.pages.get() + pages);
    }

    /// `pages` of the claim were mapped.
    pub fn commit(&self, pages: u64) {
        let Some(all) = &self.of else { return };
        debug_assert!(pages <= self.pages.get(), "a page that becomes the volume's was claimed");
        let pages = pages.min(self.pages.get());
        all.0.set(all.0.get() - pages);
        self.pages.set(self.pages.get() - pages);
    }
}

impl Drop for QuotaClaim {
    fn drop(&mut self) {
        self.commit(self.pages.get());
    }
}
