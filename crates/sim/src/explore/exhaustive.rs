//! Every short history, every crash point, every mask of the rule.
//!
//! Two volumes of four pages; operations in sequence. Crash points inside all but the last operation belong
//! to the shorter history and are not tried again. If the budget does not suffice for all histories, the
//! short ones come first and the rest in an order that the seed draws.

use std::sync::atomic::{AtomicU64, Ordering};

use super::campaign::spread;
use super::guard;
use crate::history::{CrashPoint, Setup, Small, Stats, Violation, run_small};
use crate::rng::{Rng, mix};

/// A history and the disk it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The operations.
    pub ops: Vec<Small>,
    /// Whether the device's sectors have 4096 bytes instead of 512.
    pub large_sectors: bool,
}

impl Case {
    /// Returns its form on the command line.
    pub fn name(&self) -> String {
        let names: Vec<&str> = self.ops.iter().map(|op| op.name()).collect();
        format!("{}{}", names.join("+"), if self.large_sectors { ":4096" } else { ":512" })
    }

    /// Parses what [`name`](Self::name) returns.
    ///
    /// # Errors A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<Case, String> {
        let (ops, sector) = text.split_once(':').unwrap_or((text, "512"));
        let ops =
            ops.split('+').map(|name| Small::from_name(name).ok_or(format!("no small operation is called '{name}'")));
        Ok(Case { ops: ops.collect::<Result<_, _>>()?, large_sectors: sector == "4096" })
    }

    /// Runs it, with every crash or with one.
    pub fn run(&self, aim: Option<CrashPoint>, account: bool) -> (Stats, Option<Violation>, Vec<String>) {
        let setup = Setup::small(self.large_sectors);
        guard::catch(|| run_small(&setup, &self.ops, aim, account))
            .unwrap_or_else(|violation| (Stats::default(), Some(violation), Vec::new()))
    }
}

/// The exploration of all short histories.
pub struct Exhaustive {
    /// Crash states after which no further history is begun.
    pub budget: u64,
    /// Longest history.
    pub depth: usize,
    /// Draws the order of the longest ones.
    pub seed: u64,
    /// Threads.
    pub jobs: usize,
}

impl Exhaustive {
    /// Returns all histories, in the order in which they are run.
    pub fn cases(&self) -> Vec<Case> {
        let mut all = Vec::new();
        let mut layer: Vec<Vec<Small>> = vec![Vec::new()];
        for length in 1..=self.depth {
            layer = layer.iter().flat_map(|h| Small::ALL.iter().map(move |&op| [&h[..], &[op]].concat())).collect();
            layer.retain(|h| Small::makes_sense(h));
            let mut cases: Vec<Case> = layer
                .iter()
                .flat_map(|ops| [true, false].map(|large_sectors| Case { ops: ops.clone(), large_sectors }))
                .collect();
            if length == self.depth {
                Rng::new(mix(&[self.seed])).shuffle(&mut cases);
            }
            all.append(&mut cases);
        }
        all
    }

    /// Runs until the budget is used up. Returns the sums, the number of histories, and the failures.
    pub fn run(&self, mut progress: impl FnMut(usize, usize, &Stats)) -> (Stats, usize, Vec<(Case, Violation)>) {
        let cases = self.cases();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_close_loses_no_write_in_place() {
        let case = Case::parse("write-b+reopen+write-b+reopen").expect("a case");
        let (_, violation, account) = case.run(None, true);
        assert!(violation.is_none(), "{}", account.join("\n"));
    }

    #[test]
    fn cases_cover_all_short_histories_once() {
        let all = Exhaustive { budget: 1, depth: 2, seed: 1, jobs: 1 }.cases();
        let names: std::collections::BTreeSet<String> = all.iter().map(Case::name).collect();
        assert_eq!(names.len(), all.len());
        assert!(Small::ALL.len() >= 14 && all.len() > 2 * 14 * 10);
        for case in &all {
            assert_eq!(Case::parse(&case.name()).as_ref(), Ok(case));
        }
        assert!(Case::parse("write+dance").unwrap_err().contains("dance"));
    }
}
