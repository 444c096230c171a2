//! The log of counts: changes that checkpoints made without writing the count pages.
//!
//! It lies in pages of the first block that nothing else uses. Every checkpoint that adds to it adds a
//! *segment* of one or more units of four pages: flash devices rarely write less at once, and it is one
//! request either way. The superblock contains the number of its pages and the checksum of all of them.

use crate::types::{BLOCK_PAGES, PAGE_SIZE, PageAddr};
use crate::types::{Bitmap, mask, rows};

use super::checksum::{Seed, page_checksum};
use super::counts::LEAF_BLOCKS;
use super::cursor::{Append, Reader};
use super::layout::SUPERBLOCK_PAGES;

/// Pages available for the log.
const COUNT_LOG_PAGES: u32 = 252;
/// A segment is a multiple of this many bytes.
const COUNT_LOG_UNIT_BYTES: usize = 4 * PAGE_SIZE;
/// The kind in its checksum.
const SEED_LEVEL: u8 = 0xc0;

/// The valid part of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountLog {
    /// Number of its pages; 0: there is no log.
    pub pages: u32,
    /// Checksum of all of them together; 0 if there are none.
    pub checksum: u32,
}

impl CountLog {
    /// Returns the log with the pages of one more segment appended.
    pub fn with(self, pool: [u8; 16], segment: &[u8]) -> CountLog {
        if segment.is_empty() {
            return self;
        }
        let checksum = match self.pages {
            0 => page_checksum(&seed(pool), segment),
            _ => crc32c::crc32c_append(self.checksum, segment),
        };
        CountLog { pages: self.pages + (segment.len() / PAGE_SIZE) as u32, checksum }
    }

    /// Whether these values are possible.
    pub fn makes_sense(self) -> bool {
        let is_whole = (self.pages as usize * PAGE_SIZE).is_multiple_of(COUNT_LOG_UNIT_BYTES);
        self.pages <= COUNT_LOG_PAGES && is_whole && (self.pages > 0 || self.checksum == 0)
    }

    /// Whether these bytes are the log.
    pub fn is(self, pool: [u8; 16], bytes: &[u8]) -> bool {
        bytes.len() == self.pages as usize * PAGE_SIZE && page_checksum(&seed(pool), bytes) == self.checksum
    }
}

fn seed(pool: [u8; 16]) -> Seed {
    Seed { pool, page: count_log_page(0), level: SEED_LEVEL, birth: 0 }
}

/// Returns where page `i` of the log lies: around the second superblock.
pub fn count_log_page(i: u32) -> PageAddr {
    let at = u64::from(i) + 1;
    PageAddr(at + u64::from(at >= SUPERBLOCK_PAGES[1].0))
}

/// The changes in a leaf of counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeafChange {
    /// Number of the leaf.
    pub leaf: u64,
    /// Change of the pages in use under it.
    pub used: i64,
    /// Change of the common count: references noted above the leaf, which each of its blocks has as a whole.
    pub common: i32,
    /// Changes of its blocks, by the block's index in the leaf, ascending.
    pub blocks: Vec<(u8, BlockChange)>,
}

/// The changes in the counts of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockChange {
    /// Change of the references to the block as a whole.
    pub whole: i64,
    /// Changes (not 0), each with the pages whose counts change by it; no page twice.
    pub pages: Vec<(i32, Bitmap)>,
}

/// Encodes the pages of a segment.
pub fn encode_count_segment(changes: &[LeafChange]) -> Vec<u8> {
    let mut out = Vec::new();
    number(&mut out, changes.len() as u64);
    let mut next = 0;
    for change in changes {
        number(&mut out, change.leaf - next);
        next = change.leaf + 1;
        signed(&mut out, change.used);
        signed(&mut out, change.common.into());
        out.u8(change.blocks.iter().fold(0, |mask, (place, _)| mask | 1 << place));
        for (_, block) in &change.blocks {
            // Most changes affect one set of pages only.
            number(&mut out, (block.pages.len() as u64) << 1 | u64::from(block.whole != 0));
            if block.whole != 0 {
                signed(&mut out, block.whole);
            }
            for &(by, bits) in &block.pages {
                signed(&mut out, by.into());
                pages(&mut out, bits);
            }
        }
    }
    out.resize(out.len().next_multiple_of(COUNT_LOG_UNIT_BYTES), 0);
    out
}

/// Decodes the changes of all segments of a log, in their order. `None`: they are invalid.
pub fn decode_count_log(log: &[u8], leaves: u64) -> Option<Vec<LeafChange>> {
    let (mut changes, mut rest) = (Vec::new(), log);
    while !rest.is_empty() {
        let mut r = Reader(rest);
        let mut next = 0_u64;
        for _ in 0..read_number(&mut r)? {
            let leaf = next.checked_add(read_number(&mut r)?).filter(|&leaf| leaf < leaves)?;
            next = leaf + 1;
            let used = within(read_signed(&mut r)?, LEAF_BLOCKS as i64 * BLOCK_PAGES as i64)?;
            let common = within(read_signed(&mut r)?, u16::MAX.into())? as i32;
            let mask = r.u8().filter(|mask| mask >> LEAF_BLOCKS == 0)?;
            let mut blocks = Vec::new();
            for place in (0..LEAF_BLOCKS as u8).filter(|place| mask >> place & 1 == 1) {
                blocks.push((place, read_block(&mut r)?));
            }
            changes.push(LeafChange { leaf, used, common, blocks });
        }
        let taken = rest.len() - r.0.len();
        // A segment without a change does not exist: it would have no page.
        (taken > 1).then_some(())?;
        rest = rest.get(taken.next_multiple_of(COUNT_LOG_UNIT_BYTES)..)?;
    }
    Some(changes)
}

/// Returns a number if its magnitude is at most `most`.
fn within(n: i64, most: i64) -> Option<i64> {
    (-most..=most).contains(&n).then_some(n)
}

fn read_block(r: &mut Reader<'_>) -> Option<BlockChange> {
    let head = read_number(r)?;
    let whole = if head & 1 == 1 { within(read_signed(r)?, u32::MAX.into())? } else { 0 };
    let (mut block, mut seen) = (BlockChange { whole, pages: Vec::new() }, [0; 4]);
    for _ in 0..head >> 1 {
        let by = within(read_signed(r)?, i32::MAX.into()).filter(|&by| by != 0)? as i32;
        let bits = read_pages(r)?;
        if (0..4).any(|i| seen[i] & bits[i] != 0) {
            return None;
        }
        seen.iter_mut().zip(bits).for_each(|(seen, more)| *seen |= more);
        block.pages.push((by, bits));
    }
    block.pages.shrink_to_fit();
    Some(block)
}

/// Encodes runs of pages as Rice codes: the gap before each, and its length. Sparse sets take a byte for a
/// page, dense ones less than a bit.
fn pages(out: &mut Vec<u8>, bits: Bitmap) {
    let mut end = 0;
    let rows: Vec<(usize, usize)> = rows(bits)
        .map(|row| {
            let before = row.start - end;
            end = row.end;
            (before, row.len() - 1)
        })
        .collect();
    let (apart, long) = (best(rows.iter().map(|row| row.0)), best(rows.iter().map(|row| row.1)));
    out.u8(apart | long << 4);
    number(out, rows.len() as u64);
    let mut codes = Codes { out, bits: 0, len: 0 };
    for (before, more) in rows {
        codes.add(before, apart);
        codes.add(more, long);
    }
    codes.end();
}

fn read_pages(r: &mut Reader<'_>) -> Option<Bitmap> {
    let parameters = r.u8()?;
    let (apart, long) = (parameters & 15, parameters >> 4);
    (apart <= MAX_PARAMETER && long <= MAX_PARAMETER).then_some(())?;
    let (mut bits, mut at) = ([0; 4], 0);
    let rows = read_number(r)?;
    let mut codes = CodesRead { r, byte: 0, left: 0 };
    for _ in 0..rows {
        let first = at + codes.next(apart)?;
        at = first + codes.next(long)? + 1;
        (at <= BLOCK_PAGES as usize).then_some(())?;
        bits.iter_mut().zip(mask(first..at)).for_each(|(bits, more)| *bits |= more);
    }
    Some(bits)
}

/// Largest parameter: bits of a code that are stored unencoded.
const MAX_PARAMETER: u8 = 7;

/// Returns the parameter with which these take the fewest bits.
fn best(all: impl Iterator<Item = usize> + Clone) -> u8 {
    let bits = |parameter: u8| all.clone().map(|n| (n >> parameter) + 1 + usize::from(parameter)).sum::<usize>();
    (0..=MAX_PARAMETER).min_by_key(|&parameter| bits(parameter)).unwrap_or_default()
}

/// A sequence of bits, the lowest of a byte first.
struct Codes<'a> {
    out: &'a mut Vec<u8>,
    bits: u8,
    len: u8,
}

impl Codes<'_> {
    /// Appends `n >> parameter` ones and a zero, then the lower bits of `n`.
    fn add(&mut self, n: usize, parameter: u8) {
        (0..n >> parameter).for_each(|_| self.bit(1));
        self.bit(0);
        (0..parameter).for_each(|i| self.bit((n >> i & 1) as u8));
    }

    fn bit(&mut self, bit: u8) {
        self.bits |= bit << self.len;
        self.len += 1;
        if self.len == 8 {
            self.out.u8(self.bits);
            (self.bits, self.len) = (0, 0);
        }
    }

    fn end(self) {
        if self.len > 0 {
            self.out.u8(self.bits);
        }
    }
}

struct CodesRead<'a, 'b> {
    r: &'a mut Reader<'b>,
    byte: u8,
    left: u8,
}

impl CodesRead<'_, '_> {
    fn next(&mut self, parameter: u8) -> Option<usize> {
        let mut n = 0;
        while self.bit()? == 1 {
            n += 1;
            (n <= BLOCK_PAGES as usize).then_some(())?;
        }
        n <<= parameter;
        for i in 0..parameter {
            n |= usize::from(self.bit()?) << i;
        }
        Some(n)
    }

    fn bit(&mut self) -> Option<u8> {
        if self.left == 0 {
            (self.byte, self.left) = (self.r.u8()?, 8);
        }
        self.left -= 1;
        Some(self.byte >> (7 - self.left) & 1)
    }
}

/// Appends a number, seven bits to a byte, the lowest first; the highest bit marks that more follow.
fn number(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.u8(n as u8 | 0x80);
        n >>= 7;
    }
    out.u8(n as u8);
}

fn read_number(r: &mut Reader<'_>) -> Option<u64> {
    let mut n = 0;
    for shift in (0..64).step_by(7) {
        let byte = u64::from(r.u8()?);
        let bits = byte & 0x7f;
        (bits << shift >> shift == bits).then_some(())?;
        n |= bits << shift;
        if byte < 0x80 {
            return Some(n);
        }
    }
    None
}

/// Appends a signed number; small ones take one byte: 0, -1, 1, -2, … are 0, 1, 2, 3, …
fn signed(out: &mut Vec<u8>, n: i64) {
    number(out, (n << 1 ^ n >> 63) as u64);
}

fn read_signed(r: &mut Reader<'_>) -> Option<i64> {
    let n = read_number(r)?;
    Some((n >> 1) as i64 ^ -((n & 1) as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(seed: u64) -> Vec<LeafChange> {
        let mut rng = seed;
        let mut draw = move |below: u64| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (rng >> 33) % below
        };
        let mut leaf = 0;
        (0..1 + draw(60))
            .map(|_| {
                leaf += 1 + draw(300);
                let blocks = (0..LEAF_BLOCKS as u8).filter(|place| seed >> place & 1 == 1);
                let blocks = blocks.map(|place| {
                    let some = [draw(u64::MAX), 0, draw(9), u64::MAX];
                    let pages = match draw(3) {
                        0 => vec![],
                        1 => vec![(-1, some)],
                        _ => vec![(1 - 60_000 * draw(2) as i32, some), (-1, some.map(|bits| !bits))],
                    };
                    (place, BlockChange { whole: draw(3) as i64 - 1, pages })
                });
                let blocks = blocks.collect();
                LeafChange { leaf, used: draw(3585) as i64 - 1792, common: draw(3) as i32 - 1, blocks }
            })
            .collect()
    }

    #[test]
    fn a_log_says_what_its_segments_said() {
        for seed in 0..300 {
            let (first, second) = (changes(seed), changes(seed + 1000));
            let log = [encode_count_segment(&first), encode_count_segment(&second)].concat();
            assert_eq!(decode_count_log(&log, 1 << 20), Some([first, second].concat()), "seed {seed}");
        }
    }

    #[test]
    fn any_flipped_bit_a_shorter_log_and_another_pools_are_noticed() {
        let (first, second) = (encode_count_segment(&changes(5)), encode_count_segment(&changes(6)));
        let end = CountLog::default().with([1; 16], &first).with([1; 16], &second);
        let mut log = [first, second].concat();
        assert!(end.is([1; 16], &log) && !end.is([2; 16], &log) && !end.is([1; 16], &log[PAGE_SIZE..]));
        for bit in (0..log.len() * 8).step_by(3) {
            log[bit / 8] ^= 1 << (bit % 8);
            assert!(!end.is([1; 16], &log), "bit {bit}");
            // Any input is read to its end or refused.
            let _ = decode_count_log(&log, 40);
            log[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let page = |bytes: &[u8]| [bytes, &vec![0; COUNT_LOG_UNIT_BYTES - bytes.len()]].concat();
        for (bytes, flaw) in [
            (&[0][..], "a segment without a leaf"),
            (&[1, 9, 0, 0, 0], "a leaf that the pool does not have"),
            (&[1, 0, 0, 0, 0x80], "an eighth block"),
            (&[1, 0, 0, 0, 1, 2, 0, 0, 1, 0], "a change of nothing"),
            (&[1, 0, 0, 0, 1, 2, 1, 8, 1, 0, 0], "a parameter of more than seven bits"),
            (&[1, 0, 0, 0, 1, 2, 1, 0x70, 3, 0xfe, 0xfd, 0xfb, 0xff], "pages beyond the block's end"),
            (&[1, 0, 0, 0, 1, 4, 1, 0, 1, 0, 3, 0, 1, 0], "a page twice"),
            (&[1, 0, 0x82, 0x1c, 0, 0], "more pages in use than a leaf has"),
            (
                &[1, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 0],
                "a number of more than 64 bits",
            ),
        ] {
            assert_eq!(decode_count_log(&page(bytes), 9), None, "{flaw}");
        }
        assert!(decode_count_log(&page(&[1, 8, 0, 0, 0]), 9).is_some());
    }

    #[test]
    fn the_log_lies_where_nothing_else_does() {
        let pages: Vec<u64> = (0..COUNT_LOG_PAGES).map(|i| count_log_page(i).0).collect();
        assert!(pages.windows(2).all(|w| w[0] < w[1]) && pages.iter().all(|page| (1..256).contains(page)));
        assert!(SUPERBLOCK_PAGES.iter().all(|page| !pages.contains(&page.0)));
    }
}
