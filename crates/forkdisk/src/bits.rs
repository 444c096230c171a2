//! A set of pages of a block: one bit for each.

use std::ops::Range;

use crate::types::BLOCK_PAGES;

pub type Bitmap = [u64; 4];

pub const ALL: Bitmap = [u64::MAX; 4];
const _: () = assert!(BLOCK_PAGES == 256);

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
