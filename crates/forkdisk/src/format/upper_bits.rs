//! The upper 16 bits of the counts of a leaf, in the bytes behind its blocks.
//!
//! Few pages have counts of 65,535 or more, and neighbours have similar ones: the tables and pages that many snapshots
//! of one volume share. The 400 bytes left in a leaf hold three different values in any order, or runs of equal values.

use std::collections::BTreeMap;

use crate::types::BLOCK_PAGES;

use super::counts::LEAF_BLOCKS;
use super::cursor::Reader;

/// Pages of a leaf.
pub const LEAF_PAGES: usize = LEAF_BLOCKS * BLOCK_PAGES as usize;
/// One number per page.
pub type UpperBits = [u16; LEAF_PAGES];

/// Forms: none, any order of three values, runs.
const NONE: u8 = 0;
const DIGITS: u8 = 1;
const ROWS: u8 = 2;
/// Values that the first form has, and how many of its digits a byte holds.
const MAX_VALUES: usize = 3;
const DIGITS_PER_BYTE: usize = 5;

/// Encodes them into `room`, which is all 0. Returns whether they fit.
pub fn encode(upper: &UpperBits, room: &mut [u8]) -> bool {
    let Some(values) = values(upper) else { return encode_rows(upper, room) };
    if values == [0; MAX_VALUES] {
        return true;
    }
    let mut out = vec![DIGITS];
    values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
    let digit = |value: &u16| values.iter().position(|v| v == value).expect("one of the three") as u8;
    for pages in upper.chunks(DIGITS_PER_BYTE) {
        out.push(pages.iter().rev().fold(0, |byte, value| byte * MAX_VALUES as u8 + digit(value)));
    }
    room[..out.len()].copy_from_slice(&out);
    true
}

/// Returns all different values, 0 first, if there are no more than the first form has.
fn values(upper: &UpperBits) -> Option<[u16; MAX_VALUES]> {
    let (mut values, mut n) = ([0; MAX_VALUES], 1);
    for row in upper.chunk_by(|a, b| a == b) {
        if !values[..n].contains(&row[0]) {
            *values.get_mut(n)? = row[0];
            n += 1;
        }
    }
    Some(values)
}

fn encode_rows(upper: &UpperBits, room: &mut [u8]) -> bool {
    let rows: Vec<&[u16]> = upper.chunk_by(|a, b| a == b).collect();
    let mut out = vec![ROWS];
    out.extend_from_slice(&(rows.len() as u16).to_le_bytes());
    for row in &rows {
        out.extend_from_slice(&row[0].to_le_bytes());
        out.extend_from_slice(&(row.len() as u16).to_le_bytes());
    }
    let fits = out.len() <= room.len();
    if fits {
        room[..out.len()].copy_from_slice(&out);
    }
    fits
}

/// Decodes them. `None`: they are invalid. `Some(None)`: all are 0.
pub fn decode(room: &[u8]) -> Option<Option<Box<UpperBits>>> {
    let mut r = Reader(room);
    let mut upper = Box::new([0; LEAF_PAGES]);
    match r.u8()? {
        NONE => return r.0.iter().all(|&byte| byte == 0).then_some(None),
        DIGITS => {
            let values: [u16; MAX_VALUES] = [r.u16()?, r.u16()?, r.u16()?];
            for pages in upper.chunks_mut(DIGITS_PER_BYTE) {
                let mut byte = r.u8()?;
                for page in pages {
                    *page = values[usize::from(byte) % MAX_VALUES];
                    byte /= MAX_VALUES as u8;
                }
                (byte == 0).then_some(())?;
            }
        }
        ROWS => {
            let (mut at, rows) = (0, r.u16()?);
            for _ in 0..rows {
                let (value, len) = (r.u16()?, usize::from(r.u16()?));
                upper.get_mut(at..at + len)?.fill(value);
                at += len;
            }
            (at == LEAF_PAGES).then_some(())?;
        }
        _ => return None,
    }
    Some(Some(upper))
}

/// Returns 0 and the most frequent other values, as many as always fit. Pages with any other value become
/// pinned.
pub fn most_common(upper: &UpperBits) -> [u16; MAX_VALUES] {
    let mut pages: BTreeMap<u16, usize> = BTreeMap::new();
    upper.iter().filter(|&&value| value > 0).for_each(|&value| *pages.entry(value).or_default() += 1);
    let mut values: Vec<(usize, u16)> = pages.into_iter().map(|(value, n)| (n, value)).collect();
    values.sort_unstable_by(|a, b| b.cmp(a));
    let mut kept = [0; MAX_VALUES];
    kept[1..].iter_mut().zip(values).for_each(|(kept, (_, value))| *kept = value);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: usize = 400;

    fn round_trip(upper: &UpperBits) -> Option<Box<UpperBits>> {
        let mut room = [0; ROOM];
        encode(upper, &mut room).then(|| decode(&room).expect("valid").unwrap_or_else(|| Box::new([0; LEAF_PAGES])))
    }

    #[test]
    fn three_values_fit_in_any_order() {
        let upper: UpperBits = std::array::from_fn(|i| [0, 9, u16::MAX][i * i * 7 % 11 % 3]);
        assert_eq!(round_trip(&upper).as_deref(), Some(&upper));
        assert_eq!(round_trip(&[0; LEAF_PAGES]).as_deref(), Some(&[0; LEAF_PAGES]));
        assert_eq!(round_trip(&[5; LEAF_PAGES]).as_deref(), Some(&[5; LEAF_PAGES]));
    }

    #[test]
    fn rows_of_many_values_fit() {
        let upper: UpperBits = std::array::from_fn(|i| (i / 19) as u16);
        assert_eq!(round_trip(&upper).as_deref(), Some(&upper));
        let upper: UpperBits = std::array::from_fn(|i| (i / 2) as u16);
        assert_eq!(round_trip(&upper), None, "more than there is room for");
        let kept = most_common(&std::array::from_fn(|i| (i / 500) as u16));
        assert_eq!(kept, [0, 2, 1]);
    }

    #[test]
    fn nonsense_is_found() {
        let mut room = [0; ROOM];
        assert_eq!(decode(&room), Some(None));
        room[399] = 1;
        assert_eq!(decode(&room), None, "none, and something behind it");
        room[0] = 3;
        assert_eq!(decode(&room), None, "no such form");
        assert!(encode(&std::array::from_fn(|i| (i % 2) as u16), &mut room));
        room[7] = 255;
        assert_eq!(decode(&room), None, "a digit that is none");
        let mut room = [0; ROOM];
        assert!(encode(&std::array::from_fn(|i| (i / 400) as u16), &mut room));
        room[5] += 1;
        assert_eq!(decode(&room), None, "more pages than a leaf has");
    }
}
