//! Places of the writes of a round: the published program does not do what its text says, so both are here.

use rand::Rng;
use rand::rngs::SmallRng;

/// Distance between places in the incremental and fixed modes.
const STEP: u64 = 50_000;
/// No write begins in this many last bytes.
const END: u64 = 100;

/// As coded: writes to A, A is cloned to B, A is removed. As described: A is cloned to B, writes to B, A is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Uniform over the file.
    RandomCoded,
    /// The same, in the text's order.
    RandomDescribed,
    /// Write i somewhere below start + i × 50,000, so that the file grows to 2 GB, with holes.
    IncrementalCoded,
    /// Write i at start + i × 50,000, modulo the length.
    IncrementalDescribed,
    /// Write i at i × 50,000, modulo the length. The program has no such mode.
    FixedDescribed,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 5] = [
        Mode::RandomCoded,
        Mode::RandomDescribed,
        Mode::IncrementalCoded,
        Mode::IncrementalDescribed,
        Mode::FixedDescribed,
    ];

    /// Returns the name used in cases.
    pub fn name(self) -> &'static str {
        match self {
            Mode::RandomCoded => "random-coded",
            Mode::RandomDescribed => "random-described",
            Mode::IncrementalCoded => "incremental-coded",
            Mode::IncrementalDescribed => "incremental-described",
            Mode::FixedDescribed => "fixed-described",
        }
    }

    /// Returns whether the clone comes before the writes.
    pub fn clones_first(self) -> bool {
        !matches!(self, Mode::RandomCoded | Mode::IncrementalCoded)
    }

    /// Returns the places of the `writes` of one round to a file of originally `size` bytes, in order.
    pub fn offsets(self, rng: &mut SmallRng, size: u64, writes: usize) -> Vec<u64> {
        let span = size - END;
        let start = rng.random_range(0..STEP);
        (0..writes as u64)
            .map(|i| match self {
                Mode::RandomCoded | Mode::RandomDescribed => rng.random_range(0..span),
                Mode::IncrementalCoded => rng.random_range(0..(start + i * STEP).max(1)),
                Mode::IncrementalDescribed => (start + i * STEP) % span,
                Mode::FixedDescribed => i * STEP % span,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn only_the_coded_incremental_mode_leaves_the_file() {
        let size = 1 << 20;
        let largest = |mode: Mode| mode.offsets(&mut SmallRng::seed_from_u64(1), size, 1000).into_iter().max().unwrap();
        for mode in Mode::ALL.into_iter().filter(|mode| *mode != Mode::IncrementalCoded) {
            assert!(largest(mode) < size - END, "{mode:?}");
        }
        assert!(largest(Mode::IncrementalCoded) > 30_000_000);
        let fixed = Mode::FixedDescribed.offsets(&mut SmallRng::seed_from_u64(1), size, 22);
        assert_eq!((fixed[0], fixed[1], fixed[21]), (0, 50_000, 1_050_000 % (size - END)));
    }
}
