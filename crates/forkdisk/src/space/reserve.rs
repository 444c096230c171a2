//! Admission of everything that takes free pages (I9: a full pool still works).
//!
//! A change takes free pages only with a [`Reservation`]. It gets one only while the free pages cover its
//! data, the headroom of its kind and everything that the next checkpoint writes. The headroom pays for the
//! tables that the change copies and for verbs that free space. A reservation is used in the synchronous
//! section that made it, so no page is set aside: nothing else can take pages in between.

use crate::space::alloc;

use super::{Refusal, Space};

/// What a change needs of the free space, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// One step of a verb, of a discard or of the reaper: tables only.
    Step,
    /// A verb that leads to free space: the tables that it changes are part of what the checkpoint writes.
    Release,
    /// First writes to this many pages.
    Write(u64),
    /// Old contents of an origin, and pages of the ordered map beyond the headroom.
    CopyOut { pages: u64, tables: u64 },
    /// Old contents of an origin that no write waits for: taken only where twice as much is free.
    CopyAhead { pages: u64, views: u64 },
    /// The record that chunks of an origin were rolled back.
    NoteRollback,
    /// Pages moved to a contiguous place, and tables that change. Leaves a part of the pool free.
    Move { pages: u64, tables: u64 },
    /// Tables that change when moved pages are mapped.
    PublishMove { tables: u64 },
}

/// Headroom of a step: the tables that it may copy.
const STEP_PAGES: u64 = 12;
/// Headroom of a first write.
const WRITE_PAGES: u64 = 48;
/// Headroom of copies of an origin.
const COPY_OUT_PAGES: u64 = 64;
/// Headroom of a rollback record: a path of the ordered map.
const NOTE_PAGES: u64 = 16;
/// Headroom of moves.
const MOVE_PAGES: u64 = 64;
/// Moves leave this part of the pool free: one page of this many.
const MOVE_POOL_PART: u64 = 64;

/// Permission to take free pages.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    /// Pages that have to be free, including those to be taken.
    pages: u64,
}

impl Space {
    /// Admits `need` if the free pages cover it and the `checkpoint` pages that the next checkpoint writes.
    pub fn reserve(&self, need: Need, checkpoint: u64) -> Result<Reservation, Refusal> {
        let pages = match need {
            Need::Step => checkpoint + STEP_PAGES,
            Need::Release => checkpoint,
            Need::Write(pages) => checkpoint + WRITE_PAGES + pages,
            Need::CopyOut { pages, tables } => checkpoint + COPY_OUT_PAGES + tables + pages,
            Need::CopyAhead { pages, views } => 2 * (checkpoint + COPY_OUT_PAGES + views * (pages + COPY_OUT_PAGES)),
            Need::NoteRollback => checkpoint + NOTE_PAGES,
            Need::Move { pages, tables } => {
                checkpoint + MOVE_PAGES + tables + pages + self.layout.pages() / MOVE_POOL_PART
            }
            Need::PublishMove { tables } => checkpoint + MOVE_PAGES + tables,
        };
        if self.available < pages { Err(Refusal::NoSpace) } else { Ok(Reservation { pages }) }
    }

    /// Returns the free pages beyond what admits a first write of zero pages.
    pub fn unreserved(&self, checkpoint: u64) -> u64 {
        self.available.saturating_sub(checkpoint + WRITE_PAGES)
    }

    /// Searches the counts until all reserved pages are known to be free.
    pub fn find_reserved(&mut self, reservation: &Reservation) -> Result<(), Refusal> {
        alloc::ensure_known(self, reservation.pages)
    }
}

#[cfg(test)]
impl Reservation {
    /// Creates a reservation without a check, for tests of what takes pages.
    pub fn unchecked() -> Reservation {
        Reservation { pages: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Layout;

    #[test]
    fn each_kind_is_admitted_down_to_its_headroom_and_no_further() {
        let layout = Layout::new(64 << 20);
        let mut space = Space::new(layout, [0; 16], Vec::new());
        let part = layout.pages() / MOVE_POOL_PART;
        let needs = [
            (Need::Step, 12),
            (Need::Release, 0),
            (Need::Write(5), 53),
            (Need::CopyOut { pages: 5, tables: 7 }, 76),
            (Need::CopyAhead { pages: 5, views: 2 }, 2 * (100 + 64 + 2 * 69) - 100),
            (Need::NoteRollback, 16),
            (Need::Move { pages: 5, tables: 7 }, 76 + part),
            (Need::PublishMove { tables: 7 }, 71),
        ];
        for (need, pages) in needs {
            space.available = pages + 100;
            assert_eq!(space.reserve(need, 100).unwrap().pages, pages + 100, "{need:?}");
            space.available -= 1;
            assert!(matches!(space.reserve(need, 100), Err(Refusal::NoSpace)), "{need:?}");
        }
    }
}
