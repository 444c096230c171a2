//! The only source of randomness: a small generator whose sequence is part of the replay format.
//!
//! A seed kept in the repository must produce the same history forever, so this is not left to a library that
//! may change its algorithm.

/// SplitMix64: 64 bits of state, every seed is good.
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// Mixes numbers into one seed, so that parts of a run draw from independent sequences.
pub fn mix(parts: &[u64]) -> u64 {
    let mut rng = Rng(0x243f_6a88_85a3_08d3);
    for &part in parts {
        rng.0 ^= part;
        rng.0 = rng.next();
    }
    rng.0
}

impl Rng {
    /// Creates the sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Returns 64 random bits.
    #[expect(clippy::should_implement_trait, reason = "a generator is no iterator: it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// Returns an index into something of length `n`; 0 if `n` is 0.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// Returns true once in `n` times on average; never for 0.
    pub fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    /// Returns one of the items.
    ///
    /// # Panics If there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.index(items.len())]
    }

    /// Shuffles the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.index(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_fixed() {
        let mut rng = Rng::new(0);
        assert_eq!(rng.next(), 0xe220_a839_7b1d_cdaf, "SplitMix64's published first value for seed 0");
        assert_ne!(mix(&[1, 2]), mix(&[2, 1]));
    }

    #[test]
    fn below_covers_its_range_and_nothing_else() {
        let mut rng = Rng::new(7);
        let mut seen = [0u32; 5];
        for _ in 0..1000 {
            seen[rng.index(5)] += 1;
        }
        assert!(seen.iter().all(|&n| n > 100), "{seen:?}");
        assert_eq!(rng.below(0), 0);
    }
}
