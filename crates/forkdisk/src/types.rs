//! Identifiers and units, each with a separate type, and sets of the pages of a block.

use std::fmt;
use std::ops::Range;

/// Bytes in a page: the unit of mapping, of sharing and of metadata.
pub const PAGE_SIZE: usize = 4096;

/// [`PAGE_SIZE`] as a length on a device.
pub const PAGE_BYTES: u64 = PAGE_SIZE as u64;
/// Pages in a block.
pub const BLOCK_PAGES: u64 = 256;
/// Bytes in a block: the unit of free space.
pub const BLOCK_SIZE: u64 = BLOCK_PAGES * PAGE_SIZE as u64;
/// Entries in a map table.
pub const TABLE_FANOUT: usize = 256;
/// Largest volume, in bytes (1 PiB).
pub const MAX_VOLUME_SIZE: u64 = 1 << 50;
/// Largest chunk of a volume, in bytes.
pub const MAX_CHUNK_BYTES: u64 = 64 << 20;
/// Most bytes that are copied ahead of a sequential writer of an origin.
pub const MAX_COPY_AHEAD_BYTES: u64 = 1 << 30;
/// Largest pool, in bytes (4 PiB).
pub const MAX_POOL_SIZE: u64 = 1 << 52;

/// A page of the pool's device, counted from its start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageAddr(pub u64);

impl PageAddr {
    /// Returns where the page starts on the device, in bytes.
    pub fn offset(self) -> u64 {
        self.0 * PAGE_SIZE as u64
    }

    /// Returns the block the page lies in.
    pub fn block(self) -> Block {
        Block(self.0 / BLOCK_PAGES)
    }

    /// Returns the page's index within its block.
    pub fn index(self) -> usize {
        (self.0 % BLOCK_PAGES) as usize
    }
}

impl fmt::Debug for PageAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// A block of the pool's device, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u64);

impl Block {
    /// Returns the block's first page.
    pub fn first_page(self) -> PageAddr {
        PageAddr(self.0 * BLOCK_PAGES)
    }

    /// Returns the block's page number `index`.
    pub fn page(self, index: usize) -> PageAddr {
        PageAddr(self.0 * BLOCK_PAGES + index as u64)
    }
}

/// A page of a volume, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualPage(pub u64);

impl VirtualPage {
    /// Returns the page's slot in the table of `level` that covers it.
    pub fn slot(self, level: u8) -> usize {
        ((self.0 >> (8 * u32::from(level))) & 0xff) as usize
    }

    /// Returns the page's index within its virtual block.
    pub fn index(self) -> usize {
        (self.0 % BLOCK_PAGES) as usize
    }

    /// Returns the virtual block the page lies in.
    pub fn block(self) -> u64 {
        self.0 / BLOCK_PAGES
    }
}

/// Returns the pages that one entry of a table of `level` covers.
pub fn entry_span(level: u8) -> u64 {
    1 << (8 * u32::from(level))
}

/// Returns the pages that a whole table of `level` covers.
pub fn table_span(level: u8) -> u64 {
    1 << (8 * (u32::from(level) + 1))
}

/// Limit of epochs: enough for a thousand snapshots a second for two years.
pub const MAX_EPOCH: u64 = 1 << 36;

/// Whether a volume may have a chunk of `bytes` bytes: a power of two from a page to 64 MiB.
pub fn is_chunk(bytes: u64) -> bool {
    bytes.is_power_of_two() && (PAGE_SIZE as u64..=MAX_CHUNK_BYTES).contains(&bytes)
}

/// The pool's logical time: ascends with every verb that shares something, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// A volume's or snapshot's number, never reused within a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VolumeId(pub u64);

/// The number under which pages are charged to a volume, never reused within a pool; see [`Bound`](crate::Bound).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AccountId(pub u32);

/// The account of pages that are charged to no volume.
pub const NO_ACCOUNT: AccountId = AccountId(0);

/// In the place of an account: entries have checksums there, those of the directory's map.
pub const CHECKSUMS: AccountId = AccountId(u32::MAX);

/// What a pool accepts at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Everything.
    #[default]
    ReadWrite,
    /// Reads only: opened read-only.
    ReadOnly,
    /// Everything that needs no new space.
    OutOfDataSpace,
    /// Reads only until it is opened again: a flush or a metadata write failed.
    Failed,
}

/// What a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeKind {
    /// A volume that can be written.
    Volume,
    /// A snapshot of a volume or of an origin.
    Snapshot,
    /// An origin: a device that is protected in place.
    Origin,
    /// A symbolic link on a mount.
    Link,
    /// A FIFO on a mount.
    Fifo,
    /// A socket on a mount.
    Socket,
    /// A folder with a bound or a quota.
    Folder,
}

/// A set of pages of a block: one bit for each.
pub type Bitmap = [u64; 4];

/// All pages of a block.
pub const ALL: Bitmap = [u64::MAX; 4];
const _: () = assert!(BLOCK_PAGES == 256);

/// Returns the number of pages in a set.
pub fn pages_in(bits: &Bitmap) -> u64 {
    bits.iter().map(|w| u64::from(w.count_ones())).sum()
}

/// Returns the bits of `range`.
pub fn mask(range: Range<usize>) -> Bitmap {
    std::array::from_fn(|word| {
        let (from, to) = (range.start.max(64 * word), range.end.min(64 * word + 64));
        match to.checked_sub(from) {
            None | Some(0) => 0,
            Some(n) => u64::MAX >> (64 - n) << (from % 64),
        }
    })
}

/// Returns the first bit from `from` on that is not set, before `to`; or `to`.
pub fn first_unset(bits: &Bitmap, from: usize, to: usize) -> usize {
    let unset = mask(from..to).into_iter().zip(bits).enumerate().find_map(|(word, (mask, bits))| {
        let unset = mask & !bits;
        (unset != 0).then(|| 64 * word + unset.trailing_zeros() as usize)
    });
    unset.unwrap_or(to)
}

/// Whether page `i` of the block is in a set.
pub fn bit(bits: &Bitmap, i: usize) -> bool {
    bits[i / 64] >> (i % 64) & 1 == 1
}

/// Iterates over the runs of set bits.
pub fn rows(bits: Bitmap) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let unset = bits.map(|word| !word);
        let start = first_unset(&unset, at, BLOCK_PAGES as usize);
        at = first_unset(&bits, start, BLOCK_PAGES as usize);
        (start < at).then_some(start..at)
    })
}

/// As `Vec::splice`, for short lists of items that are cheap to copy.
pub fn replace<T: Copy>(list: &mut Vec<T>, place: Range<usize>, new: &[T]) {
    let (over, more) = new.split_at(new.len().min(place.len()));
    list[place.start..place.start + over.len()].copy_from_slice(over);
    match more {
        [] => drop(list.drain(place.start + over.len()..place.end)),
        more => more.iter().rev().for_each(|&item| list.insert(place.end, item)),
    }
}

#[cfg(test)]
mod replace_tests {
    use super::*;

    #[test]
    fn it_is_a_splice() {
        for (from, to, n) in (0..=6).flat_map(|from| (from..=6).flat_map(move |to| (0..5).map(move |n| (from, to, n))))
        {
            let (mut ours, mut theirs) = ([0, 1, 2, 3, 4, 5].to_vec(), [0, 1, 2, 3, 4, 5].to_vec());
            let new: Vec<i32> = (10..10 + n).collect();
            replace(&mut ours, from..to, &new);
            theirs.splice(from..to, new);
            assert_eq!(ours, theirs);
        }
    }
}
