//! A page of an ordered map: up to 127 pairs of a 16-byte key and a 16-byte value, in ascending order of
//! keys.
//!
//! Slot 0 holds the number of pairs, slot 1 nothing; pair *i* lies in slots 2 + 2*i* and 3 + 2*i*. In a leaf
//! the values are the map's; above it they are entries of the pages below. Each key there is a lower bound of
//! the keys of its page and above all keys of the page before it.
//!
//! Exceptions of an origin: keys and values of its ordered map, which tell what was copied out of which
//! chunk, for which snapshot.
//!
//! A key has 128 bits, highest first: kind 8, then 56, 48 and 16 bits. One chunk's copy is one *piece* where
//! the pool had contiguous space for it, else several; the lowest field of a piece's key is its first page
//! within the chunk.

use crate::types::{BLOCK_PAGES, PAGE_SIZE, PageAddr, TABLE_FANOUT, VolumeId};

use super::{Kind, MapEntry};

/// Level of a leaf of an ordered map in checksum seeds and in memory; pages above count up from it.
pub const ORDERED_LEAF: u8 = 0x40;
/// Levels an ordered map can have.
pub const MAX_ORDERED_HEIGHT: u8 = 16;
/// Pairs a page holds.
pub const PAIRS_PER_LEAF: usize = (TABLE_FANOUT - 2) / 2;

/// The slots of a page in memory.
pub type Slots = [MapEntry; TABLE_FANOUT];

/// The root of an ordered map, and how many levels it has (0: the map is empty).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeRoot {
    /// The root page's entry.
    pub entry: MapEntry,
    /// Levels.
    pub height: u8,
}

impl TreeRoot {
    /// Returns what is wrong with a root read from disk.
    pub fn flaw(&self, pool_pages: u64) -> Option<&'static str> {
        match self.height {
            0 if self.entry.is_absent() => None,
            1..=MAX_ORDERED_HEIGHT if self.entry.kind() == Kind::Table => self.entry.flaw(1, pool_pages),
            _ => Some("an ordered map of a height that does not suit its root"),
        }
    }
}

/// Whether tables of `level` are pages of an ordered map.
pub fn is_ordered(level: u8) -> bool {
    (ORDERED_LEAF..ORDERED_LEAF + MAX_ORDERED_HEIGHT).contains(&level)
}

/// Returns the slots of a page of `level`, radix or ordered, that point to pages below.
pub fn child_slots(level: u8) -> std::iter::StepBy<std::ops::Range<usize>> {
    match level {
        0 | ORDERED_LEAF => (0..0).step_by(1),
        level if is_ordered(level) => (3..TABLE_FANOUT).step_by(2),
        _ => (0..TABLE_FANOUT).step_by(1),
    }
}

/// Returns the number of pairs in a page.
pub fn pairs(page: &Slots) -> usize {
    page[0].bits() as usize
}

/// Returns the key of pair `i`.
pub fn key(page: &Slots, i: usize) -> u128 {
    page[2 + 2 * i].bits()
}

/// Returns the value of pair `i`.
pub fn value(page: &Slots, i: usize) -> MapEntry {
    page[3 + 2 * i]
}

/// Replaces the key of pair `i`.
pub fn set_key(page: &mut Slots, i: usize, key: u128) {
    page[2 + 2 * i] = MapEntry::from_bits(key);
}

/// Replaces the value of pair `i`.
pub fn set_value(page: &mut Slots, i: usize, value: MapEntry) {
    page[3 + 2 * i] = value;
}

fn set_pairs(page: &mut Slots, n: usize) {
    page[0] = MapEntry::from_bits(n as u128);
}

/// Returns the first pair whose key is not below `wanted`.
pub fn position(page: &Slots, wanted: u128) -> usize {
    let (mut low, mut high) = (0, pairs(page));
    while low < high {
        let middle = (low + high) / 2;
        if key(page, middle) < wanted { low = middle + 1 } else { high = middle }
    }
    low
}

/// Inserts a pair before pair `i` of a page that is not full.
pub fn insert(page: &mut Slots, i: usize, key: u128, value: MapEntry) {
    let n = pairs(page);
    page.copy_within(2 + 2 * i..2 + 2 * n, 4 + 2 * i);
    (page[2 + 2 * i], page[3 + 2 * i]) = (MapEntry::from_bits(key), value);
    set_pairs(page, n + 1);
}

/// Removes pair `i`.
pub fn remove(page: &mut Slots, i: usize) {
    let n = pairs(page);
    page.copy_within(4 + 2 * i..2 + 2 * n, 2 + 2 * i);
    (page[2 * n], page[2 * n + 1]) = (MapEntry::ABSENT, MapEntry::ABSENT);
    set_pairs(page, n - 1);
}

/// Removes pairs `from..` and returns a page that holds them.
pub fn split(page: &mut Slots, from: usize) -> Box<Slots> {
    let mut right = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    let n = pairs(page);
    right[2..2 + 2 * (n - from)].copy_from_slice(&page[2 + 2 * from..2 + 2 * n]);
    page[2 + 2 * from..2 + 2 * n].fill(MapEntry::ABSENT);
    set_pairs(&mut right, n - from);
    set_pairs(page, from);
    right
}

/// Appends the pairs of `right`, the first of them under the key `first`.
pub fn append(page: &mut Slots, right: &Slots, first: u128) {
    let (n, m) = (pairs(page), pairs(right));
    page[2 + 2 * n..2 + 2 * (n + m)].copy_from_slice(&right[2..2 + 2 * m]);
    page[2 + 2 * n] = MapEntry::from_bits(first);
    set_pairs(page, n + m);
}

/// Reads a page of `level`, or reports what is wrong with it.
pub fn decode_ordered(bytes: &[u8], level: u8, pool_pages: u64) -> Result<Box<Slots>, String> {
    let mut page = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    for (slot, bytes) in page.iter_mut().zip(bytes[..PAGE_SIZE].chunks_exact(16)) {
        *slot = MapEntry::from_bytes(bytes.try_into().expect("16 bytes"));
    }
    let n = page[0].bits();
    if n == 0 || n > PAIRS_PER_LEAF as u128 {
        return Err(format!("it says that it holds {n} pairs"));
    }
    let n = n as usize;
    if !page[1].is_absent() || page[2 + 2 * n..].iter().any(|e| !e.is_absent()) {
        return Err("what holds no pair is not zero".into());
    }
    for i in 0..n {
        if i > 0 && key(&page, i - 1) >= key(&page, i) {
            return Err(format!("the key of pair {i} does not rise"));
        }
        let flaw = match level {
            ORDERED_LEAF => flaw(key(&page, i), value(&page, i).bits(), pool_pages),
            _ if value(&page, i).kind() != Kind::Table => Some("a value that is no page"),
            _ => value(&page, i).flaw(1, pool_pages),
        };
        if let Some(flaw) = flaw {
            return Err(format!("pair {i}: {flaw}"));
        }
    }
    Ok(page)
}

/// Highest number of a chunk, and of a snapshot.
const MAX_NUMBER: u64 = (1 << 48) - 1;
/// Chunks that one entry of a list of chunks covers.
pub const CHUNKS_PER_LIST: u64 = 128;

const CHAINED: u8 = 1;
const INDEPENDENT: u8 = 2;
const LIST: u8 = 3;
const BACK: u8 = 4;

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExceptionKey(pub u128);

/// The meaning of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExceptionKind {
    /// A piece of `chunk` as it was when snapshot `sequence` was the newest one.
    Chained { chunk: u64, sequence: VolumeId, page: u64 },
    /// A piece of `chunk` that belongs to snapshot `sequence` only.
    Independent { sequence: VolumeId, chunk: u64, page: u64 },
    /// Which of the chunks from `first` on have an exception of `sequence` in the chain.
    List { sequence: VolumeId, first: u64 },
    /// Which of the chunks from `first` on a running rollback has restored out of order.
    Back { first: u64 },
}

impl ExceptionKey {
    /// Behind every possible key.
    pub const END: ExceptionKey = ExceptionKey(u128::MAX);

    fn new(kind: u8, a: u64, b: u64, c: u64) -> ExceptionKey {
        debug_assert!(a < 1 << 56 && b < 1 << 48 && c < 1 << 16);
        ExceptionKey(u128::from(kind) << 120 | u128::from(a) << 64 | u128::from(b) << 16 | u128::from(c))
    }

    /// Returns the key of a piece in the chain, from page `page` of the chunk on.
    pub fn chained(chunk: u64, sequence: VolumeId, page: u64) -> ExceptionKey {
        ExceptionKey::new(CHAINED, chunk, sequence.0, page)
    }

    /// Returns the key of a piece of an independent snapshot.
    pub fn independent(sequence: VolumeId, chunk: u64, page: u64) -> ExceptionKey {
        ExceptionKey::new(INDEPENDENT, sequence.0, chunk, page)
    }

    /// Returns the key of the entry that lists `chunk` for `sequence`.
    pub fn list(sequence: VolumeId, chunk: u64) -> ExceptionKey {
        ExceptionKey::new(LIST, sequence.0, chunk / CHUNKS_PER_LIST, 0)
    }

    /// Returns the key of the entry that lists `chunk` as restored.
    pub fn back(chunk: u64) -> ExceptionKey {
        ExceptionKey::new(BACK, 0, chunk / CHUNKS_PER_LIST, 0)
    }

    /// Returns its meaning; `None`: this version does not know it.
    pub fn kind(self) -> Option<ExceptionKind> {
        let a = (self.0 >> 64) as u64 & ((1 << 56) - 1);
        let (b, c) = ((self.0 >> 16) as u64 & ((1 << 48) - 1), self.0 as u64 & 0xffff);
        match (self.0 >> 120) as u8 {
            CHAINED if a <= MAX_NUMBER => Some(ExceptionKind::Chained { chunk: a, sequence: VolumeId(b), page: c }),
            INDEPENDENT => Some(ExceptionKind::Independent { sequence: VolumeId(a), chunk: b, page: c }),
            BACK if a == 0 && c == 0 => Some(ExceptionKind::Back { first: b * CHUNKS_PER_LIST }),
            LIST if c == 0 => Some(ExceptionKind::List { sequence: VolumeId(a), first: b * CHUNKS_PER_LIST }),
            _ => None,
        }
    }

    /// Returns the key directly behind this one.
    pub fn next(self) -> ExceptionKey {
        ExceptionKey(self.0.saturating_add(1))
    }
}

/// Pages of the pool that hold a piece of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first page.
    pub to: PageAddr,
    /// Number of pages.
    pub pages: u64,
}

impl Piece {
    /// Encodes the value: its page in bits 0 to 39, the number of pages in bits 40 to 55. (The value of a
    /// list has one bit per chunk.)
    pub fn to_bits(self) -> u128 {
        u128::from(self.to.0 | self.pages << 40)
    }
}

/// Decodes a piece from its 128 bits.
pub fn piece(bits: u128) -> Piece {
    Piece { to: PageAddr(bits as u64 & ((1 << 40) - 1)), pages: bits as u64 >> 40 }
}

/// Returns what is wrong with a pair read from disk.
pub fn flaw(key: u128, value: u128, pool_pages: u64) -> Option<&'static str> {
    match ExceptionKey(key).kind() {
        None => Some("a key of unknown kind"),
        Some(ExceptionKind::List { .. } | ExceptionKind::Back { .. }) => (value == 0).then_some("a list of no chunk"),
        Some(ExceptionKind::Chained { page, .. } | ExceptionKind::Independent { page, .. }) => {
            let Piece { to, pages } = piece(value);
            let sound = value >> 56 == 0 && pages > 0 && page + pages <= BLOCK_PAGES && to.0 + pages <= pool_pages;
            (!sound).then_some("a piece outside the pool or its chunk")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ordered::Piece;
    use crate::format::{ExceptionKey, encode_table};
    use crate::types::{PageAddr, VolumeId};

    fn leaf(n: u64) -> Box<Slots> {
        let mut page = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
        for i in 0..n {
            let piece = Piece { to: PageAddr(512 + i), pages: 1 };
            let (key, value) = (ExceptionKey::chained(i, VolumeId(3), 0).0, MapEntry::from_bits(piece.to_bits()));
            insert(&mut page, i as usize, key, value);
        }
        page
    }

    #[test]
    fn pairs_move_as_a_whole() {
        let mut page = leaf(10);
        let right = split(&mut page, 4);
        assert_eq!((pairs(&page), pairs(&right)), (4, 6));
        append(&mut page, &right, key(&right, 0));
        assert!(page == leaf(10));
        remove(&mut page, 3);
        assert_eq!(pairs(&page), 9);
        let lost = ExceptionKey::chained(3, VolumeId(3), 0).0;
        assert_eq!(position(&page, lost), 3);
        assert!(key(&page, 3) > lost);
    }

    #[test]
    fn damage_is_told() {
        let mut bytes = vec![0; PAGE_SIZE];
        encode_table(&leaf(127), &mut bytes);
        assert!(decode_ordered(&bytes, ORDERED_LEAF, 1 << 20).is_ok());
        assert!(decode_ordered(&bytes, ORDERED_LEAF, 600).is_err(), "pieces outside the pool");
        assert!(decode_ordered(&bytes, ORDERED_LEAF + 1, 1 << 20).is_err(), "values that are no pages");
        for (at, byte) in [(0, 0), (0, 128), (16, 1), (47, 9)] {
            let mut bad = bytes.clone();
            bad[at] = byte;
            assert!(decode_ordered(&bad, ORDERED_LEAF, 1 << 20).is_err(), "{byte} at {at}");
        }
    }
}

#[cfg(test)]
mod exception_tests {
    use super::*;

    #[test]
    fn keys_sort_by_chunk_then_by_age() {
        let at = |chunk, id| ExceptionKey::chained(chunk, VolumeId(id), 0);
        assert!(at(1, 9) < at(2, 3) && at(2, 3) < at(2, 4));
        assert!(ExceptionKey::chained(2, VolumeId(3), 255) < at(2, 4));
        assert!(at(MAX_NUMBER, MAX_NUMBER) < ExceptionKey::independent(VolumeId(0), 0, 0));
    }

    #[test]
    fn keys_tell_what_they_stand_for() {
        let (chunk, sequence) = (MAX_NUMBER - 127, VolumeId(MAX_NUMBER));
        let first = chunk / CHUNKS_PER_LIST * CHUNKS_PER_LIST;
        for (key, kind) in [
            (ExceptionKey::chained(chunk, sequence, 255), ExceptionKind::Chained { chunk, sequence, page: 255 }),
            (ExceptionKey::independent(sequence, chunk, 1), ExceptionKind::Independent { sequence, chunk, page: 1 }),
            (ExceptionKey::list(sequence, chunk), ExceptionKind::List { sequence, first }),
            (ExceptionKey::back(chunk), ExceptionKind::Back { first }),
        ] {
            assert_eq!(key.kind(), Some(kind));
        }
        assert_eq!(ExceptionKey(7).kind(), None);
    }

    #[test]
    fn a_piece_out_of_range_is_damage() {
        let key = ExceptionKey::chained(1, VolumeId(1), 8).0;
        let bits = |to, pages| Piece { to: PageAddr(to), pages }.to_bits();
        assert_eq!(flaw(key, bits(100, 8), 108), None);
        for bad in [bits(100, 9), bits(100, 0), bits(0, 249), bits(100, 8) | 1 << 100] {
            assert!(flaw(key, bad, 108).is_some(), "{bad:#x}");
        }
    }
}
