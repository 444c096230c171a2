//! Inputs for a fuzz target without libFuzzer: its corpus, and random mutations of it.

use std::path::{Path, PathBuf};

/// Environment variable with the number of mutated inputs per target.
const INPUTS_VARIABLE: &str = "FORKDISK_TEST_FUZZ_INPUTS";
/// Longer inputs are truncated.
const LONGEST: usize = 2048;
/// Boundary values.
const EDGES: [u8; 9] = [0, 1, 3, 7, 0x0f, 0x7f, 0x80, 0xf0, 0xff];

/// SplitMix64.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n.max(1) as u64) as usize
    }

    /// Makes one change to `input`; parts may come from `other`.
    fn mutate(&mut self, input: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(input.len());
        let len = self.below(9).min(input.len() - at);
        match self.below(7) {
            0 if len > 0 => input[at] ^= 1 << self.below(8),
            1 if len > 0 => input[at] = EDGES[self.below(EDGES.len())],
            2 if len > 0 => input[at] = self.below(256) as u8,
            3 => drop(input.drain(at..at + len)),
            4 => input.insert(at, self.below(256) as u8),
            5 => {
                let again = input[at..at + len].to_vec();
                let to = self.below(input.len());
                drop(input.splice(to..to, again));
            }
            _ => {
                let from = self.below(other.len());
                let part = &other[from..(from + self.below(64)).min(other.len())];
                drop(input.splice(at..at, part.iter().copied()));
            }
        }
        input.truncate(LONGEST);
    }
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/corpus").join(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Runs `run` with every input of the corpus `name`, and with `count` mutations unless the environment sets the number.
pub fn fuzz(name: &str, count: usize, run: impl Fn(&[u8])) {
    let corpus = corpus(name);
    assert!(corpus.len() >= 8, "the corpus of {name} has {} inputs", corpus.len());
    corpus.iter().for_each(|input| run(input));
    let count = std::env::var(INPUTS_VARIABLE).map_or(count, |text| text.parse().expect("a number of inputs"));
    let mut chance = Chance(name.len() as u64);
    for _ in 0..count {
        let mut input = corpus[chance.below(corpus.len())].clone();
        for _ in 0..=chance.below(6) {
            let other = &corpus[chance.below(corpus.len())];
            chance.mutate(&mut input, other);
        }
        run(&input);
    }
}
