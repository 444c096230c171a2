//! Bounded folders: sums of what the volumes below each of them have, and of what they are promised.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::format::NO_VOLUME;
use crate::planted::correct;
use crate::types::{AccountId, NO_ACCOUNT, VolumeId};

use super::claims::QuotaClaims;

/// A folder with a bound or a quota.
#[derive(Default)]
pub struct BoundedFolder {
    /// The nearest bounded folder that it is in, or none.
    above: VolumeId,
    /// The account that new pages of volumes directly below it are charged to: its own, or that of one above it.
    account: AccountId,
    /// Most pages that may be charged to accounts below it; 0: no limit.
    pub diverge: u64,
    /// Most pages that volumes below it may refer to; 0: no limit.
    pub quota: u64,
    /// Pages charged to accounts below it and to its own.
    pub charged: u64,
    /// Pages that volumes below it refer to.
    pub referenced: u64,
    /// Pages that writes under way will add to `charged`.
    pub new_pages: Rc<QuotaClaims>,
    /// Pages that writes under way will add to `referenced`.
    pub claims: Rc<QuotaClaims>,
}

/// See the module. The folders form a tree, as in the directory.
#[derive(Default)]
pub struct Folders {
    all: BTreeMap<VolumeId, BoundedFolder>,
    /// Volumes may be in other bounded folders than before.
    moved: bool,
}

impl Folders {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the bounded folder with this number.
    pub fn get(&self, id: VolumeId) -> Option<&BoundedFolder> {
        self.all.get(&id)
    }

    /// Iterates over a bounded folder and those above it.
    pub fn from(&self, id: VolumeId) -> impl Iterator<Item = (VolumeId, &BoundedFolder)> {
        let first = self.all.get(&id).map(|folder| (id, folder));
        std::iter::successors(first, |(_, folder)| self.all.get(&folder.above).map(|above| (folder.above, above)))
    }

    /// The account that new pages of volumes directly below it are charged to.
    pub fn account_of(&self, id: VolumeId) -> AccountId {
        self.all.get(&id).map_or(NO_ACCOUNT, |folder| folder.account)
    }

    /// Begins a bounded folder, or sets the limits of one.
    pub fn set_limits(&mut self, id: VolumeId, diverge: u64, quota: u64) {
        let folder = self.all.entry(id).or_default();
        (folder.diverge, folder.quota) = (diverge, quota);
        self.moved = true;
    }

    /// Moves a bounded folder, which has or gets the account `own`, into another one.
    pub fn move_to(&mut self, id: VolumeId, above: VolumeId, own: AccountId) {
        let inherited = self.account_of(above);
        let (new_pages, claims) = match self.all.get(&above) {
            Some(above) => (Some(above.new_pages.clone()), Some(above.claims.clone())),
            None => (None, None),
        };
        let Some(folder) = self.all.get_mut(&id) else { return };
        folder.account = if own == NO_ACCOUNT { inherited } else { own };
        folder.new_pages.link(new_pages.as_ref());
        folder.claims.link(claims.as_ref());
        let old = std::mem::replace(&mut folder.above, above);
        let (charged, referenced) = (folder.charged as i64, folder.referenced as i64);
        self.change(old, -charged, -referenced);
        self.change(above, charged, referenced);
        self.moved = true;
    }

    /// Ends a bounded folder. What is below it has to be moved.
    pub fn remove(&mut self, id: VolumeId) {
        if let Some(folder) = self.all.remove(&id) {
            self.change(folder.above, -(folder.charged as i64), -(folder.referenced as i64));
            self.moved = true;
        }
    }

    /// Adds to the sums of a bounded folder and of those above it.
    pub fn change(&mut self, id: VolumeId, charged: i64, referenced: i64) {
        let mut at = id;
        while at != NO_VOLUME && (charged != 0 || referenced != 0) {
            let Some(folder) = self.all.get_mut(&at) else { return };
            folder.charged = add(folder.charged, charged);
            folder.referenced = add(folder.referenced, referenced);
            at = correct!(folder.above, Bug::NestedFolderIgnored => NO_VOLUME);
        }
    }

    /// Notes that a volume is in another bounded folder than before.
    pub fn note_moved(&mut self) {
        self.moved = true;
    }

    /// Whether volumes may be in other bounded folders than at the last call.
    pub fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Returns the bounded folders in a bounded folder.
    pub fn within(&self, id: VolumeId) -> Vec<VolumeId> {
        self.all.iter().filter(|(_, folder)| folder.above == id).map(|(&id, _)| id).collect()
    }
}

fn add(sum: u64, change: i64) -> u64 {
    debug_assert!(change >= 0 || sum >= change.unsigned_abs(), "a page is in a sum once");
    sum.saturating_add_signed(change)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_follow_changes_moves_and_ends() {
        let [outer, inner, other] = [1, 2, 3].map(VolumeId);
        let mut folders = Folders::default();
        [outer, inner, other].into_iter().for_each(|id| folders.set_limits(id, 10, 0));
        folders.move_to(outer, NO_VOLUME, AccountId(1));
        folders.move_to(inner, outer, NO_ACCOUNT);
        folders.move_to(other, NO_VOLUME, NO_ACCOUNT);
        assert_eq!([outer, inner, other].map(|id| folders.account_of(id)), [AccountId(1), AccountId(1), NO_ACCOUNT]);
        folders.change(inner, 5, 7);
        folders.change(outer, 1, 0);
        let sums = |folders: &Folders| {
            [outer, inner, other].map(|id| folders.get(id).map_or((0, 0), |f| (f.charged, f.referenced)))
        };
        assert_eq!(sums(&folders), [(6, 7), (5, 7), (0, 0)]);
        assert_eq!(folders.from(inner).map(|(id, _)| id).collect::<Vec<_>>(), [inner, outer]);
        folders.move_to(inner, other, NO_ACCOUNT);
        assert_eq!(sums(&folders), [(1, 0), (5, 7), (5, 7)]);
        assert_eq!((folders.within(other), folders.take_moved(), folders.take_moved()), (vec![inner], true, false));
        folders.change(inner, -2, -7);
        folders.remove(inner);
        assert_eq!(sums(&folders), [(1, 0), (0, 0), (0, 0)]);
        folders.change(inner, 9, 9);
        assert_eq!(sums(&folders), [(1, 0), (0, 0), (0, 0)], "it is no bounded folder any more");
    }
}
