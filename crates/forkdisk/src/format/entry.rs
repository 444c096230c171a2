//! One entry of a map table: 16 bytes that describe a range of a volume.
//!
//! Bits, lowest first: page 40, mapped 17, kind 3, birth 36, checksum 32. Little-endian on disk. Entries of data have
//! the number of an account in the place of the checksum.

use std::fmt;

use crate::types::{AccountId, Block, Epoch, MAX_EPOCH, PageAddr, entry_span};

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Never written, or discarded: reads as zeroes.
    Absent,
    /// One page of data (tables of level 0).
    Page,
    /// 256 contiguous pages, a whole block of the pool (tables of level 1).
    Block,
    /// A table one level below.
    Table,
    /// A value this version does not know: damage, or a newer format.
    Unknown(u8),
}

const PAGE_MASK: u128 = (1 << 40) - 1;
const MAPPED_SHIFT: u32 = 40;
const MAPPED_MASK: u128 = (1 << 17) - 1;
const KIND_SHIFT: u32 = 57;
const KIND_MASK: u128 = 7;
const BIRTH_SHIFT: u32 = 60;
const BIRTH_MASK: u128 = (MAX_EPOCH as u128) - 1;
const SUM_SHIFT: u32 = 96;
const KIND_PAGE: u8 = 2;
const KIND_BLOCK: u8 = 3;
const KIND_TABLE: u8 = 4;
/// A table in memory, not yet placed: the page field holds its number. Never on disk.
const KIND_UNPLACED: u8 = 7;
/// The highest level of tables for which the entry above contains how many pages they map.
pub const MAPPED_LEVEL: u8 = 1;

/// Where a table is: on the device, or only in memory until a checkpoint places it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableRef(u64);

/// Set in a reference to a table in memory.
const MEMORY: u64 = 1 << 63;

impl TableRef {
    /// Returns a reference to a table at `page` on the device.
    pub fn on_disk(page: PageAddr) -> TableRef {
        debug_assert!(page.0 < 1 << 40);
        TableRef(page.0)
    }

    /// Returns a reference to the table in memory with number `id`.
    pub fn in_memory(id: u64) -> TableRef {
        debug_assert!(id < 1 << 40);
        TableRef(MEMORY | id)
    }

    /// Returns the page it lies in, unless it is only in memory.
    pub fn page(self) -> Option<PageAddr> {
        (self.0 & MEMORY == 0).then_some(PageAddr(self.0))
    }
}

impl fmt::Debug for TableRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.page() {
            Some(page) => write!(f, "table at {page:?}"),
            None => write!(f, "unplaced table {}", self.0 & !MEMORY),
        }
    }
}

/// One entry.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct MapEntry(u128);

impl MapEntry {
    /// The entry of a range that was never written.
    pub const ABSENT: MapEntry = MapEntry(0);

    fn build(place: u64, kind: u8, birth: Epoch, checksum: u32) -> MapEntry {
        debug_assert!(birth.0 < MAX_EPOCH);
        MapEntry(
            u128::from(place)
                | u128::from(kind) << KIND_SHIFT
                | u128::from(birth.0) << BIRTH_SHIFT
                | u128::from(checksum) << SUM_SHIFT,
        )
    }

    /// Creates the entry of one page of data.
    pub fn page(at: PageAddr, birth: Epoch) -> MapEntry {
        MapEntry::build(at.0, KIND_PAGE, birth, 0)
    }

    /// Creates the entry of one page of metadata (a directory page) with its checksum.
    pub fn checked_page(at: PageAddr, birth: Epoch, checksum: u32) -> MapEntry {
        MapEntry::build(at.0, KIND_PAGE, birth, checksum)
    }

    /// Creates the entry of a whole block of data.
    pub fn block(at: Block, birth: Epoch) -> MapEntry {
        MapEntry::build(at.first_page().0, KIND_BLOCK, birth, 0)
    }

    /// Creates the entry of a table; the checksum is 0 while it is only in memory.
    pub fn table(at: TableRef, birth: Epoch, checksum: u32) -> MapEntry {
        let kind = if at.page().is_some() { KIND_TABLE } else { KIND_UNPLACED };
        MapEntry::build(at.0 & !MEMORY, kind, birth, checksum)
    }

    /// The same, for a table of level 0 or 1 that maps `pages` pages.
    pub fn mapping(self, pages: u32) -> MapEntry {
        debug_assert!(self.kind() == Kind::Table && u128::from(pages) <= MAPPED_MASK);
        MapEntry(self.0 & !(MAPPED_MASK << MAPPED_SHIFT) | u128::from(pages) << MAPPED_SHIFT)
    }

    /// The same entry of data, charged to `account`.
    #[must_use]
    pub fn charged_to(self, account: AccountId) -> MapEntry {
        debug_assert!(matches!(self.kind(), Kind::Page | Kind::Block));
        MapEntry(self.0 & !(u128::from(u32::MAX) << SUM_SHIFT) | u128::from(account.0) << SUM_SHIFT)
    }

    /// Returns the account that the data is charged to (kinds page and block).
    pub fn account(self) -> AccountId {
        AccountId(self.checksum())
    }

    fn number(self) -> u8 {
        (self.0 >> KIND_SHIFT & KIND_MASK) as u8
    }

    /// Returns the kind of the entry.
    pub fn kind(self) -> Kind {
        match self.number() {
            0 => Kind::Absent,
            KIND_PAGE => Kind::Page,
            KIND_BLOCK => Kind::Block,
            KIND_TABLE | KIND_UNPLACED => Kind::Table,
            other => Kind::Unknown(other),
        }
    }

    /// Whether nothing is mapped here.
    pub fn is_absent(self) -> bool {
        self.0 == 0
    }

    /// Returns the first page of the data (kinds page and block).
    pub fn addr(self) -> PageAddr {
        PageAddr((self.0 & PAGE_MASK) as u64)
    }

    /// Returns where the table is (kind table).
    pub fn table_ref(self) -> TableRef {
        let number = (self.0 & PAGE_MASK) as u64;
        TableRef(if self.number() == KIND_UNPLACED { MEMORY | number } else { number })
    }

    /// Returns how many pages the table of level 0 or 1 maps that it points to; 0 while that is only in
    /// memory, and for tables of higher levels.
    pub fn mapped(self) -> u32 {
        (self.0 >> MAPPED_SHIFT & MAPPED_MASK) as u32
    }

    /// Returns the epoch in which the entry was made.
    pub fn birth(self) -> Epoch {
        Epoch((self.0 >> BIRTH_SHIFT & BIRTH_MASK) as u64)
    }

    /// Returns the checksum of the table or directory page it points to.
    pub fn checksum(self) -> u32 {
        (self.0 >> SUM_SHIFT) as u32
    }

    /// Returns all bits: a slot of an ordered map may hold any number.
    pub fn bits(self) -> u128 {
        self.0
    }

    /// Creates a slot that holds these bits.
    pub fn from_bits(bits: u128) -> MapEntry {
        MapEntry(bits)
    }

    /// Whether entries may [follow](Self::behind) it.
    pub fn can_go_on(self) -> bool {
        matches!(self.kind(), Kind::Absent | Kind::Page)
    }

    /// Returns the entry `n` slots further on if each maps the page behind the one before it, or all are
    /// absent.
    pub fn behind(self, n: usize) -> MapEntry {
        debug_assert!(n == 0 || self.can_go_on());
        if self.is_absent() { self } else { MapEntry(self.0 + n as u128) }
    }

    /// Returns the bytes on disk.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// Decodes an entry from 16 bytes; [`MapEntry::flaw`] tells whether it is valid.
    pub fn from_bytes(bytes: [u8; 16]) -> MapEntry {
        MapEntry(u128::from_le_bytes(bytes))
    }

    /// Returns what is wrong with an entry read from disk in a table of `level` of a pool of `pages` pages.
    pub fn flaw(self, level: u8, pages: u64) -> Option<&'static str> {
        let place = self.addr().0;
        let most = if (1..=MAPPED_LEVEL + 1).contains(&level) { entry_span(level) } else { 0 };
        match (self.kind(), level) {
            _ if self.number() == KIND_UNPLACED => Some("an entry of unknown kind"),
            (kind, _) if kind != Kind::Table && self.mapped() != 0 => Some("a count of pages where there is no table"),
            (Kind::Table, _) if u64::from(self.mapped()) > most => Some("a table that maps more than it can"),
            (Kind::Absent, _) => (self.0 != 0).then_some("an absent entry that is not all zero"),
            (Kind::Page, 0) => (place >= pages).then_some("a page outside the pool"),
            (Kind::Block, 1) if !place.is_multiple_of(256) => Some("a block that starts inside a block"),
            (Kind::Block, 1) => (place + 256 > pages).then_some("a block outside the pool"),
            (Kind::Table, 1..) => (place >= pages).then_some("a table outside the pool"),
            (Kind::Unknown(_), _) => Some("an entry of unknown kind"),
            _ => Some("an entry of a kind that this level does not have"),
        }
    }
}

impl fmt::Debug for MapEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Kind::Absent => f.write_str("absent"),
            Kind::Table => write!(f, "{:?} born {}", self.table_ref(), self.birth().0),
            kind => write!(f, "{kind:?} {:?} born {}", self.addr(), self.birth().0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch_each_other() {
        let (top, last) = ((1 << 40) - 1, MAX_EPOCH - 1);
        let e = MapEntry::table(TableRef::on_disk(PageAddr(top)), Epoch(0), u32::MAX);
        assert_eq!((e.addr().0, e.birth().0, e.checksum(), e.kind(), e.mapped()), (top, 0, u32::MAX, Kind::Table, 0));
        let e = MapEntry::table(TableRef::on_disk(PageAddr(0)), Epoch(0), 0).mapping(65536);
        assert_eq!((e.addr().0, e.birth().0, e.checksum(), e.kind(), e.mapped()), (0, 0, 0, Kind::Table, 65536));
        assert_eq!(e.mapping(1).mapped(), 1);
        let e = MapEntry::page(PageAddr(top), Epoch(0)).charged_to(AccountId(u32::MAX));
        assert_eq!((e.addr().0, e.birth().0, e.account(), e.mapped()), (top, 0, AccountId(u32::MAX), 0));
        assert_eq!(e.charged_to(AccountId(0)), MapEntry::page(PageAddr(top), Epoch(0)));
        let e = MapEntry::page(PageAddr(0), Epoch(last));
        assert_eq!((e.addr().0, e.birth().0, e.checksum(), e.kind(), e.mapped()), (0, last, 0, Kind::Page, 0));
        assert_eq!(MapEntry::from_bytes(e.to_bytes()), e);
    }

    #[test]
    fn a_table_in_memory_is_no_page() {
        let r = TableRef::in_memory(7);
        assert_eq!(r.page(), None);
        assert_eq!(MapEntry::table(r, Epoch(1), 0).table_ref(), r);
    }

    #[test]
    fn entries_that_make_no_sense_are_named() {
        let page = MapEntry::page(PageAddr(99), Epoch(1));
        assert_eq!(page.flaw(0, 100), None);
        assert!(page.flaw(0, 99).is_some());
        assert!(page.flaw(1, 100).is_some());
        assert!(MapEntry::block(Block(0), Epoch(1)).flaw(1, 255).is_some());
        assert!(MapEntry::table(TableRef::on_disk(PageAddr(1)), Epoch(1), 0).flaw(0, 9).is_some());
        assert!(MapEntry::from_bytes([9; 16]).flaw(0, 1 << 40).is_some());
        let table = MapEntry::table(TableRef::on_disk(PageAddr(1)), Epoch(1), 0);
        assert!(table.mapping(256).flaw(1, 9).is_none() && table.mapping(257).flaw(1, 9).is_some());
        assert!(table.mapping(65536).flaw(2, 9).is_none() && table.mapping(1).flaw(3, 9).is_some());
        assert!(MapEntry::table(TableRef::in_memory(1), Epoch(1), 0).flaw(1, 9).is_some());
    }
}
