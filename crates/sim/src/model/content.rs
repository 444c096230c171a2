//! A volume's contents as sets of candidates: the values that each sector may hold, and since when.

use std::collections::BTreeSet;
use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::pattern::Value;

/// Logical time: every event has a distinct one.
pub type Time = u64;

/// Sectors in a page of the model.
pub const SECTORS_PER_PAGE: u64 = 8;

/// The number of an operation that changes contents.
pub type RecId = u32;

/// When an operation ran and how it ended.
#[derive(Clone, Copy, Debug)]
pub struct Rec {
    /// When it was submitted.
    pub start: Time,
    /// When it ended; `Time::MAX` while it is in flight.
    pub end: Time,
    /// Whether it was acknowledged.
    pub ok: bool,
    /// Whether it is durable without a flush: FUA, acknowledged.
    pub durable: bool,
}

/// The operation before all others, the source of all settled values.
pub const SETTLED: RecId = 0;

/// A value that a sector may hold, and the operation that wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The value.
    pub value: Value,
    /// The operation.
    pub rec: RecId,
}

/// All versions that one sector may hold, in the order of submission.
pub type Cell = SmallVec<[Version; 1]>;
type Page = [Cell; SECTORS_PER_PAGE as usize];
/// Pages of a group.
const FAN_PAGES: usize = 64;
type Group = [Option<Rc<Page>>; FAN_PAGES];

/// Returns a sector that holds exactly `value`.
pub fn settled(value: Value) -> Cell {
    smallvec![Version { value, rec: SETTLED }]
}

/// Contents of a volume or snapshot; a clone shares all pages, so that cloning a huge volume costs little.
#[derive(Clone, Default)]
pub struct Content {
    groups: Vec<Option<Rc<Group>>>,
    unsettled: BTreeSet<u64>,
}

impl Content {
    /// Returns the sector's versions; `None` means zeroes, settled.
    pub fn cell(&self, sector: u64) -> Option<&Cell> {
        Some(&self.page(sector)?[(sector % SECTORS_PER_PAGE) as usize])
    }

    fn page(&self, sector: u64) -> Option<&Page> {
        let at = (sector / SECTORS_PER_PAGE) as usize;
        self.groups.get(at / FAN_PAGES)?.as_ref()?[at % FAN_PAGES].as_deref()
    }

    /// Returns a copy of the sector's versions.
    pub fn versions(&self, sector: u64) -> Cell {
        self.cell(sector).cloned().unwrap_or_else(|| settled(Value::ZERO))
    }

    /// Returns the sector's versions for changes. Call [`settle`](Self::settle) or [`mark`](Self::mark) on
    /// its page afterwards.
    pub fn cell_mut(&mut self, sector: u64) -> &mut Cell {
        let at = (sector / SECTORS_PER_PAGE) as usize;
        if self.groups.len() <= at / FAN_PAGES {
            self.groups.resize(at / FAN_PAGES + 1, None);
        }
        let group = self.groups[at / FAN_PAGES].get_or_insert_with(|| Rc::new([const { None }; FAN_PAGES]));
        let page = Rc::make_mut(group)[at % FAN_PAGES]
            .get_or_insert_with(|| Rc::new(std::array::from_fn(|_| settled(Value::ZERO))));
        &mut Rc::make_mut(page)[(sector % SECTORS_PER_PAGE) as usize]
    }

    /// Replaces a sector's versions.
    pub fn set(&mut self, sector: u64, cell: Cell) {
        *self.cell_mut(sector) = cell;
        self.mark(sector);
    }

    /// Notes that the sector's page has versions to settle.
    pub fn mark(&mut self, sector: u64) {
        self.unsettled.insert(sector / SECTORS_PER_PAGE);
    }

    /// Returns the first sectors of the pages that may hold more than one settled version.
    pub fn unsettled(&self) -> Vec<u64> {
        self.unsettled.iter().map(|p| p * SECTORS_PER_PAGE).collect()
    }

    /// Whether the page of this sector was never written.
    pub fn is_hole(&self, sector: u64) -> bool {
        self.page(sector).is_none()
    }

    /// Returns the first sectors of the pages that were written, in ascending order.
    pub fn written(&self) -> Vec<u64> {
        let groups = self.groups.iter().enumerate().filter_map(|(g, group)| Some((g, group.as_ref()?)));
        let pages = groups
            .flat_map(|(g, group)| (0..FAN_PAGES).filter(|&i| group[i].is_some()).map(move |i| g * FAN_PAGES + i));
        pages.map(|page| page as u64 * SECTORS_PER_PAGE).collect()
    }

    /// Whether the page of this sector has no uncertain contents.
    pub fn is_settled(&self, sector: u64) -> bool {
        !self.unsettled.contains(&(sector / SECTORS_PER_PAGE))
    }

    /// Drops versions that can never be read again, in every unsettled page.
    pub fn settle(&mut self, mut prune: impl FnMut(&mut Cell)) {
        for page in std::mem::take(&mut self.unsettled) {
            let mut open = false;
            for sector in page * SECTORS_PER_PAGE..(page + 1) * SECTORS_PER_PAGE {
                let cell = self.cell_mut(sector);
                prune(cell);
                open |= cell.len() > 1 || cell[0].rec != SETTLED;
            }
            if open {
                self.unsettled.insert(page);
            }
        }
    }

    /// Forgets everything from `sector` on.
    pub fn truncate(&mut self, sector: u64) {
        for rest in sector..sector.next_multiple_of(SECTORS_PER_PAGE) {
            if !self.is_hole(rest) {
                *self.cell_mut(rest) = settled(Value::ZERO);
            }
        }
        let page = sector.div_ceil(SECTORS_PER_PAGE);
        let (group, within) = (page as usize / FAN_PAGES, page as usize % FAN_PAGES);
        if let Some(Some(group)) = self.groups.get_mut(group) {
            Rc::make_mut(group)[within..].fill(None);
        }
        self.groups.truncate(group + usize::from(within > 0));
        self.unsettled.split_off(&page);
    }
}
