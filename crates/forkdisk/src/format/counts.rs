//! Pages of the tree of reference counts.
//!
//! A leaf holds seven blocks of 528 bytes: 16 bytes for the block as a whole (its count in the
//! first four), then 256 counts of 16 bit, one per page. An upper page holds entries of 16 bytes.

use crate::types::{BLOCK_PAGES, PAGE_SIZE};

/// Blocks in a leaf.
pub const LEAF_BLOCKS: usize = 7;
/// Leaves in a region.
pub const LEAVES_PER_REGION: usize = 124;
const BLOCK_BYTES: usize = 16 + BLOCK_PAGES as usize * 2;

/// Which of the two places of a count page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The first.
    A = 0,
    /// The second.
    B = 1,
}

impl Slot {
    /// The other one.
    pub fn other(self) -> Slot {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }
}

/// What the page above knows of a count page. `None` as slot: never written, all 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountEntry {
    /// The current slot.
    pub slot: Option<Slot>,
    /// Checksum of the page in it.
    pub checksum: u32,
    /// Pages in use under it, not counting what is reserved from the beginning.
    pub used: u64,
    /// References that each block of a leaf has as a whole beside those that the leaf says.
    pub common: u16,
}

impl CountEntry {
    /// The bytes on disk.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut out = [0; 16];
        out[0] = self.slot.map_or(0, |slot| 1 + slot as u8);
        out[2..4].copy_from_slice(&self.common.to_le_bytes());
        out[4..8].copy_from_slice(&self.checksum.to_le_bytes());
        out[8..].copy_from_slice(&self.used.to_le_bytes());
        out
    }

    /// The entry in 16 bytes; `initially_free` stands for a page that was never written. `None`: damage.
    pub fn from_bytes(bytes: [u8; 16], initially_free: u64) -> Option<CountEntry> {
        let slot = match bytes[0] {
            0 => None,
            1 => Some(Slot::A),
            2 => Some(Slot::B),
            _ => return None,
        };
        let common = u16::from_le_bytes([bytes[2], bytes[3]]);
        let checksum = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
        let used = u64::from_le_bytes(bytes[8..].try_into().ok()?);
        let entry = CountEntry { slot, checksum, used, common };
        let makes_sense = slot.is_some() || common > 0 || entry == CountEntry::default();
        (used <= initially_free && makes_sense).then_some(entry)
    }
}

/// The bytes of one count page, leaf or upper.
#[derive(Clone)]
pub struct CountPage(Box<[u8; PAGE_SIZE]>);

impl Default for CountPage {
    fn default() -> Self {
        CountPage(Box::new([0; PAGE_SIZE]))
    }
}

impl CountPage {
    /// A copy of a page read from disk.
    pub fn from_bytes(bytes: &[u8]) -> CountPage {
        let mut page = CountPage::default();
        page.0.copy_from_slice(&bytes[..PAGE_SIZE]);
        page
    }

    /// The bytes on disk.
    pub fn bytes(&self) -> &[u8; PAGE_SIZE] {
        &self.0
    }

    /// Entry `i` of an upper page.
    pub fn entry(&self, i: usize, initially_free: u64) -> Option<CountEntry> {
        CountEntry::from_bytes(self.0[i * 16..][..16].try_into().ok()?, initially_free)
    }

    /// Replaces entry `i` of an upper page.
    pub fn set_entry(&mut self, i: usize, entry: CountEntry) {
        self.0[i * 16..][..16].copy_from_slice(&entry.to_bytes());
    }

    /// The counts of the leaf's block number `i`.
    pub fn block(&self, i: usize) -> BlockCounts<'_> {
        BlockCounts(self.0[i * BLOCK_BYTES..][..BLOCK_BYTES].try_into().expect("seven blocks fit a leaf"))
    }

    /// Replaces the whole-block count of block `i`.
    pub fn set_whole(&mut self, i: usize, count: u32) {
        self.0[i * BLOCK_BYTES..][..4].copy_from_slice(&count.to_le_bytes());
    }

    /// Replaces the count of page `page` of block `i`.
    pub fn set_page(&mut self, i: usize, page: usize, count: u16) {
        self.0[i * BLOCK_BYTES + 16 + page * 2..][..2].copy_from_slice(&count.to_le_bytes());
    }
}

/// The counts of one block in a leaf.
#[derive(Clone, Copy)]
pub struct BlockCounts<'a>(&'a [u8; BLOCK_BYTES]);

impl BlockCounts<'_> {
    /// References to the block as a whole.
    pub fn whole(&self) -> u32 {
        u32::from_le_bytes([self.0[0], self.0[1], self.0[2], self.0[3]])
    }

    /// References to its page number `page`.
    pub fn page(&self, page: usize) -> u16 {
        u16::from_le_bytes([self.0[16 + page * 2], self.0[17 + page * 2]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_keep_apart() {
        let mut page = CountPage::default();
        page.set_whole(6, u32::MAX);
        page.set_page(6, 255, 0x1234);
        page.set_page(5, 255, 7);
        let again = CountPage::from_bytes(page.bytes());
        assert_eq!((again.block(6).whole(), again.block(6).page(255), again.block(6).page(0)), (u32::MAX, 0x1234, 0));
        assert_eq!((again.block(5).whole(), again.block(5).page(255)), (0, 7));
    }

    #[test]
    fn an_entry_that_was_never_written_is_all_free() {
        let e = CountEntry::from_bytes([0; 16], 77).expect("valid");
        assert_eq!((e.slot, e.used), (None, 0));
        assert_eq!(e.to_bytes(), [0; 16]);
        let e = CountEntry { slot: Some(Slot::B), checksum: 9, used: 5, common: 0x102 };
        assert_eq!(CountEntry::from_bytes(e.to_bytes(), 77), Some(e));
        assert_eq!(CountEntry::from_bytes(e.to_bytes(), 4), None, "more used than there are");
        let e = CountEntry { slot: None, checksum: 0, used: 5, common: 1 };
        assert_eq!(CountEntry::from_bytes(e.to_bytes(), 5), Some(e), "never written, and yet in use");
        let e = CountEntry { common: 0, ..e };
        assert_eq!(CountEntry::from_bytes(e.to_bytes(), 5), None, "in use by nobody");
    }
}
