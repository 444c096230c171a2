//! The file system under a disk that is a sparse file: what it has allocated, and what it has space for.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use super::image::PAGE;

/// Ranges of bytes whose storage is allocated for good.
pub(super) type SetAside = Rc<Vec<Range<u64>>>;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Host {
    held: BTreeSet<u64>,
    pub set_aside: SetAside,
    /// Pages it has space for; `None`: any number.
    room: Option<u64>,
}

impl Host {
    /// Creates one with these pages and ranges allocated, and unlimited space.
    pub fn holding(pages: Vec<u64>, set_aside: SetAside) -> Host {
        let mut host = Host { held: pages.into_iter().collect(), set_aside: set_aside.clone(), room: None };
        for range in set_aside.iter() {
            host.hold(range.start, range.end - range.start);
        }
        host
    }

    /// Allocates a range for good; returns false if there is no space for it.
    pub fn set_aside(&mut self, offset: u64, len: u64) -> bool {
        let held = self.hold(offset, len);
        if held {
            Rc::make_mut(&mut self.set_aside).push(offset..offset + len);
        }
        held
    }

    /// Sets its space to this many more pages.
    pub fn leave(&mut self, room: Option<u64>) {
        self.room = room;
    }

    /// Returns the pages it has space for.
    pub fn room(&self) -> Option<u64> {
        self.room
    }

    /// Allocates every page of a range; if there is no space for them, returns false and changes nothing.
    pub fn hold(&mut self, offset: u64, len: u64) -> bool {
        let pages = offset / PAGE as u64..(offset + len).div_ceil(PAGE as u64);
        let more: Vec<u64> = pages.filter(|page| !self.held.contains(page)).collect();
        if let Some(room) = &mut self.room {
            let Some(left) = room.checked_sub(more.len() as u64) else { return false };
            *room = left;
        }
        self.held.extend(more);
        true
    }

    /// Frees the whole pages of a range.
    pub fn let_go(&mut self, offset: u64, len: u64) {
        let pages = offset.div_ceil(PAGE as u64)..(offset + len) / PAGE as u64;
        let gone = pages.filter(|page| self.held.remove(page)).count() as u64;
        self.room = self.room.map(|room| room + gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE as u64;

    #[test]
    fn what_it_holds_takes_no_more_room_and_what_it_lets_go_brings_some() {
        let mut host = Host::holding(vec![0, 1], SetAside::default());
        host.leave(Some(2));
        assert!(host.hold(0, 2 * P), "in place");
        assert!(!host.hold(P, 4 * P), "three more");
        assert!(host.hold(2 * P, 2 * P));
        assert_eq!(host.room(), Some(0));
        host.let_go(P - 512, P + 512);
        assert_eq!(host.room(), Some(1), "a part of page 0, and page 1");
        assert!(host.hold(9 * P, 1) && !host.hold(10 * P, 1));
        host.leave(None);
        assert!(host.hold(0, 1000 * P));
    }
}
