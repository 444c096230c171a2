//! The data that simulated clients write: every sector identifies its operation, volume and place.
//!
//! A sector's contents follow from its [`Value`] and vice versa, so that data found in a wrong place can be
//! traced to the operation that wrote it. Writes smaller than a sector make *blends*, whose bytes are kept in
//! a side table.

use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;

/// Bytes of a sector as clients see it: the unit that is never torn.
pub const SECTOR: usize = 512;

const OP_BITS: u32 = 22;
/// Marks the other contents of a write from memory that changes meanwhile.
pub const OTHER_CONTENTS_FLAG: u32 = 1 << (OP_BITS - 1);
const VOLUME_BITS: u32 = 15;
const PLACE_BITS: u32 = 26;
const BLEND_FLAG: u64 = 1 << 63;
const KEY: u64 = 0x9d3f_2c71_b0e6_5a48;

/// The contents of a sector in short: zeroes, the mark of a write, or a blend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(u64);

impl Value {
    /// Zero bytes.
    pub const ZERO: Value = Value(0);

    /// Returns what operation `op` (not 0) writes to sector `place` of the volume numbered `volume`.
    pub fn mark(op: u32, volume: u32, place: u64) -> Value {
        debug_assert!(op > 0 && op < 1 << OP_BITS && volume < 1 << VOLUME_BITS && place < 1 << PLACE_BITS);
        Value(u64::from(op) << (VOLUME_BITS + PLACE_BITS) | u64::from(volume) << PLACE_BITS | place)
    }

    /// Returns the operation that made the mark.
    pub fn op(self) -> u32 {
        (self.0 >> (VOLUME_BITS + PLACE_BITS)) as u32
    }
    fn volume(self) -> u32 {
        (self.0 >> PLACE_BITS) as u32 & ((1 << VOLUME_BITS) - 1)
    }
    fn place(self) -> u64 {
        self.0 & ((1 << PLACE_BITS) - 1)
    }

    fn word(self, i: usize) -> [u8; 8] {
        (self.0 ^ KEY).wrapping_mul(2 * i as u64 + 1).to_le_bytes()
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Value::ZERO {
            f.write_str("zeroes")
        } else if self.0 & BLEND_FLAG != 0 {
            write!(f, "blend {}", self.0 & !BLEND_FLAG)
        } else {
            write!(f, "op {} (volume #{}, sector {})", self.op(), self.volume(), self.place())
        }
    }
}

/// The blends of one history, by number. A copy shares them.
#[derive(Clone, Default)]
pub struct Blends(Vec<Rc<Blend>>);

struct Blend {
    bytes: [u8; SECTOR],
    base: Value,
    over: Value,
}

impl Blends {
    /// Returns the value of a sector that holds `base` except for `from..to`, where `over` was written.
    pub fn blend(&mut self, base: Value, over: Value, from: usize, to: usize) -> Value {
        let (mut bytes, mut top) = ([0; SECTOR], [0; SECTOR]);
        self.fill(base, &mut bytes);
        self.fill(over, &mut top);
        bytes[from..to].copy_from_slice(&top[from..to]);
        self.0.push(Rc::new(Blend { bytes, base, over }));
        Value(BLEND_FLAG | (self.0.len() as u64 - 1))
    }

    /// Writes the value's bytes into a whole sector.
    pub fn fill(&self, value: Value, sector: &mut [u8]) {
        if value == Value::ZERO {
            sector.fill(0);
        } else if value.0 & BLEND_FLAG != 0 {
            sector.copy_from_slice(&self.0[(value.0 & !BLEND_FLAG) as usize].bytes);
        } else {
            for (i, word) in sector.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                *word = value.word(i);
            }
        }
    }

    /// Whether `bytes` are those of `value` from byte `from` of the sector on.
    pub fn matches(&self, value: Value, from: usize, bytes: &[u8]) -> bool {
        if value == Value::ZERO {
            return is_zero(bytes);
        }
        if bytes.len() == SECTOR && value.0 & BLEND_FLAG == 0 {
            return is_mark(value, bytes);
        }
        let mut sector = [0; SECTOR];
        self.fill(value, &mut sector);
        sector[from..from + bytes.len()] == *bytes
    }

    /// Returns where a whole sector's bytes come from.
    pub fn trace(&self, bytes: &[u8]) -> Found {
        let recognise = |bytes: &[u8]| {
            if bytes.iter().all(|&b| b == 0) {
                return Some(Value::ZERO);
            }
            mark_of(bytes)
        };
        if let Some(value) = recognise(bytes) {
            return Found::Value(value);
        }
        if let Some(i) = self.0.iter().position(|b| b.bytes == *bytes) {
            return Found::Value(Value(BLEND_FLAG | i as u64));
        }
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let value = Value((u64::from_le_bytes(*word).wrapping_mul(inverse(2 * i as u64 + 1))) ^ KEY);
            let hits = (0..SECTOR / 8).filter(|&j| bytes[8 * j..8 * j + 8] == value.word(j)).count();
            if hits >= 4 && value.0 & BLEND_FLAG == 0 {
                return Found::Torn(value, 8 * hits);
            }
        }
        Found::Foreign(bytes[..16].try_into().expect("a whole sector"))
    }

    /// Whether the value comes from one of these volumes, and from no other.
    pub fn comes_from(&self, value: Value, volumes: &BTreeSet<u32>) -> bool {
        if value == Value::ZERO {
            return true;
        }
        if value.0 & BLEND_FLAG == 0 {
            return volumes.contains(&value.volume());
        }
        let blend = &self.0[(value.0 & !BLEND_FLAG) as usize];
        self.comes_from(blend.base, volumes) && self.comes_from(blend.over, volumes)
    }

    /// Returns a description of how a blend was made.
    pub fn explain(&self, value: Value) -> String {
        match value.0 & BLEND_FLAG != 0 {
            true => {
                let blend = &self.0[(value.0 & !BLEND_FLAG) as usize];
                format!("{:?} over {}", blend.over, self.explain(blend.base))
            }
            false => format!("{value:?}"),
        }
    }
}

/// Where a sector's bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Entirely this value.
    Value(Value),
    /// This many bytes of this value, the rest of something else.
    Torn(Value, usize),
    /// Not written by a client; the first bytes.
    Foreign([u8; 16]),
}

/// Returns the number whose product with odd `n` is 1.
fn inverse(n: u64) -> u64 {
    let mut x = n;
    for _ in 0..5 {
        x = x.wrapping_mul(2u64.wrapping_sub(n.wrapping_mul(x)));
    }
    x
}

/// Compares the whole sector without stopping at the first difference, so that the compiler can vectorise it.
fn is_mark(value: Value, bytes: &[u8]) -> bool {
    let first = value.0 ^ KEY;
    let (mut word, mut differs) = (first, 0);
    for found in bytes.as_chunks::<8>().0 {
        differs |= u64::from_le_bytes(*found) ^ word;
        word = word.wrapping_add(first << 1);
    }
    differs == 0
}

/// Whether all bytes are 0.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    let any = |chunk: &[u8; 64]| chunk.as_chunks::<8>().0.iter().fold(0, |sum, w| sum | u64::from_le_bytes(*w));
    words.iter().all(|chunk| any(chunk) == 0) && rest.iter().all(|&b| b == 0)
}

/// Returns the mark that fills the whole sector, if one does.
pub fn mark_of(bytes: &[u8]) -> Option<Value> {
    let first = u64::from_le_bytes(*bytes.first_chunk::<8>()?);
    let value = Value(first ^ KEY);
    (value.0 & BLEND_FLAG == 0 && value.op() > 0 && is_mark(value, bytes)).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_where_it_comes_from() {
        let mut blends = Blends::default();
        let mut sector = [0; SECTOR];
        assert_eq!(blends.trace(&sector), Found::Value(Value::ZERO));
        let (a, b) = (Value::mark(7, 3, 99), Value::mark(8, 3, 99));
        blends.fill(a, &mut sector);
        assert_eq!(blends.trace(&sector), Found::Value(a));
        assert!(blends.matches(a, 100, &sector[100..200]) && !blends.matches(b, 100, &sector[100..200]));
        assert_eq!(format!("{a:?}"), "op 7 (volume #3, sector 99)");

        let blend = blends.blend(a, b, 10, 20);
        blends.fill(blend, &mut sector);
        assert_eq!(blends.trace(&sector), Found::Value(blend));
        assert!(blends.explain(blend).starts_with("op 8"));
        let volumes = |list: &[u32]| list.iter().copied().collect();
        assert!(blends.comes_from(blend, &volumes(&[3])) && !blends.comes_from(blend, &volumes(&[4])));

        blends.fill(a, &mut sector);
        let mut other = [0; SECTOR];
        blends.fill(b, &mut other);
        sector[..64].copy_from_slice(&other[..64]);
        assert_eq!(blends.trace(&sector), Found::Torn(b, 64));
        sector.fill(0x5a);
        assert_eq!(blends.trace(&sector), Found::Foreign([0x5a; 16]));
    }

    #[test]
    fn odd_numbers_have_inverses() {
        for n in [1u64, 3, 5, 127] {
            assert_eq!(n.wrapping_mul(inverse(n)), 1);
        }
    }
}
