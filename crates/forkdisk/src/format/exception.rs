//! Keys and values of the ordered map of an origin: what was kept of which chunk, for whom.
//!
//! A key has 128 bits, highest first: kind 8, then 56, 48 and 16 bits. One chunk's copy is one
//! *piece* where the pool had room for it in a row, else several; the lowest field of a piece's key
//! is its first page within the chunk.

use crate::types::{BLOCK_PAGES, PageAddr, VolumeId};

/// Highest number of a chunk, and of a snapshot.
const MAX_NUMBER: u64 = (1 << 48) - 1;
/// Chunks that one entry of a list of chunks stands for.
pub const CHUNKS_PER_LIST: u64 = 128;

const CHAINED: u8 = 1;
const INDEPENDENT: u8 = 2;
const LIST: u8 = 3;
const BACK: u8 = 4;

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExceptionKey(pub u128);

/// What a key stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExceptionKind {
    /// A piece of `chunk` as it was when snapshot `sequence` was the newest one.
    Chained { chunk: u64, sequence: VolumeId, page: u64 },
    /// A piece of `chunk` that is snapshot `sequence`'s alone.
    Independent { sequence: VolumeId, chunk: u64, page: u64 },
    /// Which of the chunks from `first` on are kept for `sequence` in the chain.
    List { sequence: VolumeId, first: u64 },
    /// Which of the chunks from `first` on a rollback under way has brought back out of turn.
    Back { first: u64 },
}

impl ExceptionKey {
    /// Behind every key there can be.
    pub const END: ExceptionKey = ExceptionKey(u128::MAX);

    fn new(kind: u8, a: u64, b: u64, c: u64) -> ExceptionKey {
        debug_assert!(a < 1 << 56 && b < 1 << 48 && c < 1 << 16);
        ExceptionKey(u128::from(kind) << 120 | u128::from(a) << 64 | u128::from(b) << 16 | u128::from(c))
    }

    /// A piece in the chain, from page `page` of the chunk on.
    pub fn chained(chunk: u64, sequence: VolumeId, page: u64) -> ExceptionKey {
        ExceptionKey::new(CHAINED, chunk, sequence.0, page)
    }

    /// A piece of an independent snapshot.
    pub fn independent(sequence: VolumeId, chunk: u64, page: u64) -> ExceptionKey {
        ExceptionKey::new(INDEPENDENT, sequence.0, chunk, page)
    }

    /// The entry that lists `chunk` for `sequence`.
    pub fn list(sequence: VolumeId, chunk: u64) -> ExceptionKey {
        ExceptionKey::new(LIST, sequence.0, chunk / CHUNKS_PER_LIST, 0)
    }

    /// The entry that lists `chunk` as back.
    pub fn back(chunk: u64) -> ExceptionKey {
        ExceptionKey::new(BACK, 0, chunk / CHUNKS_PER_LIST, 0)
    }

    /// What it stands for; `None`: nothing that this version knows.
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

    /// The key right behind this one.
    pub fn next(self) -> ExceptionKey {
        ExceptionKey(self.0.saturating_add(1))
    }
}

/// Pages of the pool that hold a piece of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first of them.
    pub to: PageAddr,
    /// How many.
    pub pages: u64,
}

impl Piece {
    /// The value that stands for it: its page in bits 0 to 39, how many in bits 40 to 55. (The value of
    /// a list has one bit per chunk.)
    pub fn to_bits(self) -> u128 {
        u128::from(self.to.0 | self.pages << 40)
    }
}

/// A piece from its 128 bits.
pub fn piece(bits: u128) -> Piece {
    Piece { to: PageAddr(bits as u64 & ((1 << 40) - 1)), pages: bits as u64 >> 40 }
}

/// What is wrong with a pair read from disk.
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
