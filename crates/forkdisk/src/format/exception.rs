//! Exceptions of an origin: keys and values of its ordered map, which tell what was copied out of which
//! chunk, for which snapshot.
//!
//! A key has 128 bits, highest first: kind 8, then 56, 48 and 16 bits. One chunk's copy is one *piece* where
//! the pool had contiguous space for it, else several; the lowest field of a piece's key is its first page
//! within the chunk.

use crate::types::{BLOCK_PAGES, PageAddr, VolumeId};

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
