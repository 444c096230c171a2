//! Every short history of an origin, see `origins::small`.
//!
//! First each operation alone; then two together of which a flush fails, with each distance between them;
//! then longer histories, in an order that the seed draws.

use std::sync::atomic::{AtomicU64, Ordering};

use super::campaign::spread;
use super::guard;
use crate::history::{CrashPoint, Stats, Violation};
use crate::origins::{Setup, Small, Together, makes_sense, run_small};
use crate::rng::{Rng, mix};

/// A history and the disks it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginCase {
    /// The operations in sequence.
    pub parts: Vec<Together>,
    /// Whether the devices' sectors have 4096 bytes instead of 512.
    pub large_sectors: bool,
}

impl OriginCase {
    /// Returns its form on the command line: `origin:write+snapshot,16,checkpoint@o3:512`. The number is the
    /// steps between two operations; `@o3` means that the third flush of the origin's disk (`p`: the pool's)
    /// fails.
    pub fn name(&self) -> String {
        let part = |part: &Together| {
            let gap = format!(",{},", part.gap);
            let names: Vec<&str> = part.ops.iter().map(|op| op.name()).collect();
            let strike = part.strike.map(|(disk, n)| format!("@{}{n}", if disk == 0 { 'p' } else { 'o' }));
            names.join(&gap) + &strike.unwrap_or_default()
        };
        let parts: Vec<String> = self.parts.iter().map(part).collect();
        format!("origin:{}:{}", parts.join("+"), if self.large_sectors { 4096 } else { 512 })
    }

    /// Parses what [`name`](Self::name) returns.
    ///
    /// # Errors A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<OriginCase, String> {
        let text = text.strip_prefix("origin:").ok_or("a history of an origin begins with 'origin:'")?;
        let (parts, sector) = text.split_once(':').unwrap_or((text, "512"));
        let part = |text: &str| {
            let (ops, strike) = text.split_once('@').map_or((text, None), |(ops, strike)| (ops, Some(strike)));
            let mut together = Together { ops: Vec::new(), gap: 0, strike: None };
            for word in ops.split(',') {
                match word.parse() {
                    Ok(gap) => together.gap = gap,
                    Err(_) => together
                        .ops
                        .push(Small::from_name(word).ok_or(format!("no operation on an origin is called '{word}'"))?),
                }
            }
            if let Some(strike) = strike {
                let wrong = || format!("'{strike}' is not a flush, as in o3");
                let (disk, n) = strike.split_at_checked(1).ok_or_else(wrong)?;
                let n = n.parse().map_err(|_| wrong())?;
                together.strike = Some((usize::from(disk == "o"), n));
            }
            Ok::<_, String>(together)
        };
        let parts = parts.split('+').map(part).collect::<Result<_, _>>()?;
        Ok(OriginCase { parts, large_sectors: sector == "4096" })
    }

    /// Returns number `i` of the histories of two operations together of which a flush fails, in the order
    /// that the seed draws.
    pub fn struck(seed: u64, i: usize) -> OriginCase {
        let mut all = strikes();
        Rng::new(mix(&[seed, 43])).shuffle(&mut all);
        OriginCase { parts: vec![all.swap_remove(i % all.len())], large_sectors: false }
    }

    /// Runs it, with every crash or with one.
    pub fn run(&self, aim: Option<CrashPoint>, account: bool) -> (Stats, Option<Violation>, Vec<String>) {
        let setup = Setup::small(self.large_sectors);
        guard::catch(|| run_small(&setup, &self.parts, aim, account))
            .unwrap_or_else(|violation| (Stats::default(), Some(violation), Vec::new()))
    }
}

/// The exploration of all short histories of origins.
pub struct ExhaustiveOrigins {
    /// Crash states after which no further history is begun.
    pub budget: u64,
    /// Longest history.
    pub depth: usize,
    /// Draws the order of the longest ones.
    pub seed: u64,
    /// Threads.
    pub jobs: usize,
}

/// Steps between two operations that run concurrently.
const GAPS: [u32; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16];

impl ExhaustiveOrigins {
    /// Returns all histories, in the order in which they are run.
    pub fn cases(&self) -> Vec<OriginCase> {
        let case = |parts: Vec<Together>, large_sectors| OriginCase { parts, large_sectors };
        let mut all: Vec<OriginCase> = Small::ALL.iter().map(|&op| case(vec![Together::one(op)], false)).collect();
        all.extend(strikes().into_iter().map(|part| case(vec![part], false)));
        let mut layer: Vec<Vec<Together>> = Small::ALL.iter().map(|&op| vec![Together::one(op)]).collect();
        let mut longer = Vec::new();
        for _ in 2..=self.depth {
            let with = |h: &Vec<Together>, op| [&h[..], &[Together::one(op)]].concat();
            layer = layer.iter().flat_map(|h| Small::ALL.iter().map(move |&op| with(h, op))).collect();
            layer.retain(|parts| makes_sense(parts));
            longer.extend(layer.iter().flat_map(|h| [true, false].map(|large| case(h.clone(), large))));
        }
        Rng::new(mix(&[self.seed, 42])).shuffle(&mut longer);
        all.extend(longer);
        all
    }

    /// Runs until the budget is used up. Returns the sums, the number of histories, and the failures.
    pub fn run(&self, progress: impl FnMut(usize, usize, &Stats)) -> (Stats, usize, Vec<(OriginCase, Violation)>) {
        self.run_some(self.cases(), progress)
    }

    /// The same without those that come first for every seed.
    pub(super) fn run_longer(&self) -> (Stats, usize, Vec<(OriginCase, Violation)>) {
        self.run_some(self.cases().split_off(Small::ALL.len() + strikes().len()), |_, _, _| ())
    }

    fn run_some(
        &self,
        cases: Vec<OriginCase>,
        mut progress: impl FnMut(usize, usize, &Stats),
    ) -> (Stats, usize, Vec<(OriginCase, Violation)>) {
        let spent = AtomicU64::new(0);
        let (mut stats, mut ended, mut failures) = (Stats::default(), 0, Vec::new());
        let work = |i: usize| {
            let outcome = cases[i].run(None, false);
            spent.fetch_add(outcome.0.crash_states, Ordering::Relaxed);
            outcome
        };
        spread(self.jobs, cases.len(), work, |i, (added, violation, _)| {
            stats.add(&added);
            ended += 1;
            failures.extend(violation.map(|v| (cases[i].clone(), v)));
            progress(ended, cases.len(), &stats);
            spent.load(Ordering::Relaxed) < self.budget && failures.len() < 5
        });
        (stats, ended, failures)
    }
}

/// Returns pairs of operations that make flushes necessary, with one failing flush.
fn strikes() -> Vec<Together> {
    use Small::*;
    let mut all = Vec::new();
    for first in [Snapshot, Group, DeleteOldest, RollbackNewest, WriteFua] {
        for second in [Checkpoint, Volume, Flush] {
            for (disk, most) in [(1, 4), (0, 2)] {
                for n in 1..=most {
                    let with = |gap| Together { ops: vec![first, second], gap, strike: Some((disk, n)) };
                    all.extend(GAPS.map(with));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_read_back_as_written_and_come_once() {
        let all = ExhaustiveOrigins { budget: 1, depth: 2, seed: 1, jobs: 1 }.cases();
        let names: std::collections::BTreeSet<String> = all.iter().map(OriginCase::name).collect();
        assert_eq!(names.len(), all.len());
        for case in &all {
            assert_eq!(OriginCase::parse(&case.name()).as_ref(), Ok(case));
        }
        assert!(OriginCase::parse("origin:write+dance").unwrap_err().contains("dance"));
        assert!(OriginCase::parse("origin:write@o").unwrap_err().contains("'o'"));
    }
}
