//! Claims: pages promised to writes under way, of a volume and of the bounded folders that it is in.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::planted::correct;

/// Pages that writes under way will add to those of a volume, or of all volumes in a bounded folder.
#[derive(Default)]
pub struct QuotaClaims {
    pages: Cell<u64>,
    /// Those of the bounded folder that it is in.
    above: RefCell<Option<Rc<QuotaClaims>>>,
}

impl QuotaClaims {
    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.pages.get()
    }

    fn change(&self, by: impl Fn(u64) -> u64 + Copy) {
        self.pages.set(by(self.pages.get()));
        if let Some(above) = &*self.above.borrow() {
            correct!(above.change(by), Bug::FolderForgetsClaims => ());
        }
    }

    /// Moves the claims into those of another bounded folder, or of none.
    pub fn link(&self, above: Option<&Rc<QuotaClaims>>) {
        let pages = self.pages.get();
        if let Some(old) = self.above.replace(above.cloned()) {
            old.change(|sum| sum.saturating_sub(pages));
        }
        if let Some(new) = above {
            new.change(|sum| sum + pages);
        }
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
        all.change(|sum| sum + pages);
        self.pages.set(self.pages.get() + pages);
    }

    /// `pages` of the claim were mapped.
    pub fn commit(&self, pages: u64) {
        let Some(all) = &self.of else { return };
        debug_assert!(pages <= self.pages.get(), "a page that becomes the volume's was claimed");
        let pages = pages.min(self.pages.get());
        all.change(|sum| sum - pages);
        self.pages.set(self.pages.get() - pages);
    }
}

impl Drop for QuotaClaim {
    fn drop(&mut self) {
        self.commit(self.pages.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_count_in_all_folders_above_and_move_with_their_volume() {
        let [outer, inner, other, volume]: [Rc<QuotaClaims>; 4] = Default::default();
        inner.link(Some(&outer));
        volume.link(Some(&inner));
        let mut write = QuotaClaim::default();
        write.add(&volume, 5);
        let all = || [&outer, &inner, &other, &volume].map(|claims| claims.pages());
        assert_eq!(all(), [5, 5, 0, 5]);
        volume.link(Some(&other));
        assert_eq!(all(), [0, 0, 5, 5]);
        other.link(Some(&outer));
        write.commit(2);
        assert_eq!(all(), [3, 0, 3, 3]);
        other.link(None);
        drop(write);
        assert_eq!(all(), [0, 0, 0, 0]);
    }
}
