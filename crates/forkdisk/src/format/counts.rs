//! Pages of the tree of reference counts.
//!
//! A leaf holds seven blocks of 528 bytes: 16 bytes for the block as a whole (its count in the
//! first four), then the lower 16 bits of 256 counts, one per page; its last bytes hold their upper bits. An upper page
//! holds entries of 16 bytes.

use crate::types::Bitmap;
use crate::types::{BLOCK_PAGES, PAGE_SIZE};

use super::upper_bits::{self, UpperBits};

/// Blocks in a leaf.
pub const LEAF_BLOCKS: usize = 7;
/// Leaves in a region.
pub const LEAVES_PER_REGION: usize = 124;
const BLOCK_BYTES: usize = 16 + BLOCK_PAGES as usize * 2;

/// One of the two places of a count page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The first.
    A = 0,
    /// The second.
    B = 1,
}

impl Slot {
    /// Returns the other one.
    pub fn other(self) -> Slot {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }
}

/// Entry of a count page in the page above. `None` as slot: never written, all 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountEntry {
    /// The current slot.
    pub slot: Option<Slot>,
    /// Checksum of the page in it.
    pub checksum: u32,
    /// Pages in use under it, without those reserved from the beginning.
    pub used: u64,
    /// Common count: references that each block of a leaf has as a whole in addition to those in the leaf.
    pub common: u16,
}

impl CountEntry {
    /// Encodes the entry.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut out = [0; 16];
        out[0] = self.slot.map_or(0, |slot| 1 + slot as u8);
        out[2..4].copy_from_slice(&self.common.to_le_bytes());
        out[4..8].copy_from_slice(&self.checksum.to_le_bytes());
        out[8..].copy_from_slice(&self.used.to_le_bytes());
        out
    }

    /// Decodes an entry; `initially_free` is used for a page that was never written. `None`: damage.
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

/// A page's count that is *pinned*: the number of references is not known, so the page is never free again
/// and never written in place.
pub const PINNED: u32 = u32::MAX;
/// A pinned count in a leaf. Larger counts are stored as one more than they are.
const STORED_PINNED: u32 = u16::MAX as u32;

/// Returns the stored form of a count.
fn stored(count: u32) -> u32 {
    match count {
        count if count < STORED_PINNED => count,
        count if count < i32::MAX as u32 => count + 1,
        _ => STORED_PINNED,
    }
}

/// One count page, leaf or upper.
#[derive(Clone)]
pub struct CountPage {
    /// As on disk; the upper bits of a leaf's counts as of the last [`seal`](Self::seal).
    bytes: Box<[u8; PAGE_SIZE]>,
    /// Upper bits of a leaf's counts; `None`: all 0.
    upper: Option<Box<UpperBits>>,
}

impl Default for CountPage {
    fn default() -> Self {
        CountPage { bytes: Box::new([0; PAGE_SIZE]), upper: None }
    }
}

impl CountPage {
    /// Copies a page of `level` read from disk. `None`: the upper bits of a leaf are damaged.
    pub fn from_bytes(level: u8, bytes: &[u8]) -> Option<CountPage> {
        let mut page = CountPage::default();
        page.bytes.copy_from_slice(&bytes[..PAGE_SIZE]);
        if level == 0 {
            page.upper = upper_bits::decode(&page.bytes[LEAF_BLOCKS * BLOCK_BYTES..])?;
        }
        Some(page)
    }

    /// Returns the bytes on disk. Those of a leaf must have been [sealed](Self::seal) since its last change.
    pub fn bytes(&self) -> &[u8; PAGE_SIZE] {
        &self.bytes
    }

    /// Encodes the upper bits of a leaf's counts into its bytes. Counts that do not fit become pinned; up to three
    /// different values of upper bits always fit.
    pub fn seal(&mut self) {
        let (counts, room) = self.bytes.split_at_mut(LEAF_BLOCKS * BLOCK_BYTES);
        room.fill(0);
        let Some(upper) = self.upper.as_deref_mut() else { return };
        if upper_bits::encode(upper, room) {
            return;
        }
        let kept = upper_bits::most_common(upper);
        for (i, upper) in upper.iter_mut().enumerate().filter(|(_, upper)| !kept.contains(upper)) {
            let at = low_at(i / BLOCK_PAGES as usize, i % BLOCK_PAGES as usize);
            *upper = 0;
            counts[at..at + 2].copy_from_slice(&(STORED_PINNED as u16).to_le_bytes());
        }
        let fits = upper_bits::encode(upper, room);
        debug_assert!(fits, "three values always fit");
    }

    /// Whether a leaf has counts of 65,535 or more, or had some since it was read.
    pub fn has_upper_bits(&self) -> bool {
        self.upper.is_some()
    }

    /// Returns entry `i` of an upper page.
    pub fn entry(&self, i: usize, initially_free: u64) -> Option<CountEntry> {
        CountEntry::from_bytes(self.bytes[i * 16..][..16].try_into().ok()?, initially_free)
    }

    /// Replaces entry `i` of an upper page.
    pub fn set_entry(&mut self, i: usize, entry: CountEntry) {
        self.bytes[i * 16..][..16].copy_from_slice(&entry.to_bytes());
    }

    /// Returns the counts of the leaf's block number `i`.
    pub fn block(&self, i: usize) -> BlockCounts<'_> {
        let bytes = self.bytes[i * BLOCK_BYTES..][..BLOCK_BYTES].try_into().expect("seven blocks fit a leaf");
        let first = i * BLOCK_PAGES as usize;
        let upper = self.upper.as_ref().map(|upper| &upper[first..first + BLOCK_PAGES as usize]);
        BlockCounts { bytes, upper }
    }

    /// Replaces the whole-block count of block `i`.
    pub fn set_whole(&mut self, i: usize, count: u32) {
        self.bytes[i * BLOCK_BYTES..][..4].copy_from_slice(&count.to_le_bytes());
    }

    /// Replaces the count of page `page` of block `i`.
    pub fn set_page(&mut self, i: usize, page: usize, count: u32) {
        self.set_stored(i, page, stored(count));
    }

    /// Replaces the stored form of the count of page `page` of block `i`.
    pub fn set_stored(&mut self, i: usize, page: usize, stored: u32) {
        let (low, high) = (stored as u16, (stored >> 16) as u16);
        self.bytes[low_at(i, page)..][..2].copy_from_slice(&low.to_le_bytes());
        if high > 0 || self.upper.is_some() {
            let upper = self.upper.get_or_insert_with(|| Box::new([0; upper_bits::LEAF_PAGES]));
            upper[i * BLOCK_PAGES as usize + page] = high;
        }
    }
}

/// Returns the offset of the lower bits of a page's count in a leaf.
fn low_at(i: usize, page: usize) -> usize {
    i * BLOCK_BYTES + 16 + page * 2
}

/// The counts of one block in a leaf.
#[derive(Clone, Copy)]
pub struct BlockCounts<'a> {
    bytes: &'a [u8; BLOCK_BYTES],
    upper: Option<&'a [u16]>,
}

impl BlockCounts<'_> {
    /// Returns the references to the block as a whole.
    pub fn whole(&self) -> u32 {
        u32::from_le_bytes([self.bytes[0], self.bytes[1], self.bytes[2], self.bytes[3]])
    }

    /// Whether all counts equal those of another block.
    pub fn equals(&self, other: &BlockCounts<'_>) -> bool {
        self.bytes == other.bytes && self.upper == other.upper
    }

    /// Returns which pages are free.
    pub fn free(&self) -> Bitmap {
        let mut bits = [0; 4];
        if self.whole() == 0 {
            let mut note = |page: usize| bits[page / 64] |= 1 << (page % 64);
            (0..BLOCK_PAGES as usize).filter(|&page| self.stored(page) == 0).for_each(&mut note);
        }
        bits
    }

    /// Returns the references to its page number `page`, or [`PINNED`].
    pub fn page(&self, page: usize) -> u32 {
        match self.stored(page) {
            STORED_PINNED => PINNED,
            stored if stored > STORED_PINNED => stored - 1,
            count => count,
        }
    }

    /// Returns the stored form of that count. The log of counts has differences of stored forms.
    pub fn stored(&self, page: usize) -> u32 {
        let low = u16::from_le_bytes([self.bytes[16 + page * 2], self.bytes[17 + page * 2]]);
        u32::from(low) | self.upper.map_or(0, |upper| u32::from(upper[page]) << 16)
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
        page.seal();
        let again = CountPage::from_bytes(0, page.bytes()).expect("valid");
        assert_eq!((again.block(6).whole(), again.block(6).page(255), again.block(6).page(0)), (u32::MAX, 0x1234, 0));
        assert_eq!((again.block(5).whole(), again.block(5).page(255)), (0, 7));
    }

    #[test]
    fn large_counts_are_exact() {
        let mut page = CountPage::default();
        let counts = [65_533, 65_534, 65_535, 65_536, 65_537, 131_070, 131_071, 0];
        counts.iter().enumerate().for_each(|(i, &count)| page.set_page(3, 32 * i, count));
        page.seal();
        let again = CountPage::from_bytes(0, page.bytes()).expect("valid");
        counts.iter().enumerate().for_each(|(i, &count)| assert_eq!(again.block(3).page(32 * i), count));
        assert!(again.has_upper_bits());
        counts.iter().enumerate().for_each(|(i, _)| page.set_page(3, 32 * i, 7));
        page.seal();
        let again = CountPage::from_bytes(0, page.bytes()).expect("valid");
        assert!(!again.has_upper_bits() && again.block(3).page(64) == 7);
    }

    /// As builds before large counts wrote it.
    #[test]
    fn a_count_that_was_pinned_stays_so() {
        let mut bytes = [0; PAGE_SIZE];
        bytes[16..18].copy_from_slice(&u16::MAX.to_le_bytes());
        let page = CountPage::from_bytes(0, &bytes).expect("valid");
        assert_eq!((page.block(0).page(0), page.block(0).page(1)), (PINNED, 0));
    }

    #[test]
    fn counts_beyond_the_room_of_their_leaf_are_pinned() {
        let mut page = CountPage::default();
        let count = |i: usize| (i % 5) as u32 * 65_536 + i as u32;
        (0..LEAF_BLOCKS * 256).for_each(|i| page.set_page(i / 256, i % 256, count(i)));
        page.seal();
        let again = CountPage::from_bytes(0, page.bytes()).expect("valid");
        let mut exact = 0;
        for i in 0..LEAF_BLOCKS * 256 {
            let (now, read) = (page.block(i / 256).page(i % 256), again.block(i / 256).page(i % 256));
            assert!(now == read && (read == count(i) || read == PINNED), "{i}: {now}, {read}, {}", count(i));
            exact += usize::from(read == count(i));
        }
        assert!(exact >= LEAF_BLOCKS * 256 * 3 / 5, "{exact}");
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
