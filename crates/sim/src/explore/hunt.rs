//! The test of the test: known mistakes are switched on one by one, and each has to be found.

use super::campaign::spread;
use super::{Case, Recipe};
use crate::history::{Profile, Small, Violation};
use crate::planted::{self, Bug};
use crate::rng::{Rng, mix};

/// How a planted mistake was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The mistake.
    pub bug: Bug,
    /// Histories that were run.
    pub histories: u32,
    /// The promise it broke and the flags that replay it; `None` if it was not found.
    pub how: Option<(String, String, String)>,
}

/// The search for planted mistakes.
pub struct Hunt {
    /// What to look for.
    pub bugs: Vec<Bug>,
    /// Histories per mistake.
    pub budget: u32,
    /// What the histories follow from.
    pub seed: u64,
    /// Threads.
    pub jobs: usize,
}

impl Hunt {
    /// Looks for all of them, telling `progress` as each search ends.
    pub fn run(&self, mut progress: impl FnMut(&Found)) -> Vec<Found> {
        let mut all = Vec::new();
        spread(
            self.jobs,
            self.bugs.len(),
            |i| self.search(self.bugs[i]),
            |_, found| {
                progress(&found);
                all.push(found);
                true
            },
        );
        all.sort_by_key(|f| self.bugs.iter().position(|bug| bug.name() == f.bug.name()));
        all
    }

    fn search(&self, bug: Bug) -> Found {
        let how = (0..self.budget).find_map(|i| self.attempt(bug, i).map(|how| (i + 1, how)));
        match how {
            Some((histories, how)) => Found { bug, histories, how: Some(how) },
            None => Found { bug, histories: self.budget, how: None },
        }
    }

    /// One history; the profiles take turns, and every fourth one is a short one in full. What the
    /// engine breaks without the mistake, too, does not count.
    fn attempt(&self, bug: Bug, i: u32) -> Option<(String, String, String)> {
        let seed = mix(&[self.seed, u64::from(i)]) >> 32;
        let name = bug.name();
        if i % 4 == 3 {
            let case = random_case(seed);
            let run = || case.run(None, false).1;
            let v = provoked(bug, run)?;
            let aim = v.cut.map_or(String::new(), |(step, mask)| format!(" --crash {step} --mask {mask}"));
            return Some((v.promise.into(), v.what, format!("--planted {name} --case {}{aim}", case.name())));
        }
        let profile = Profile::ALL[(i - i / 4) as usize % Profile::ALL.len()];
        let dense = (profile != Profile::Calm).then_some((60, 3));
        let recipe = Recipe { profile: Some(profile), dense, ..Recipe::new(seed, 300) };
        let v = provoked(bug, || recipe.run(false).violation)?;
        let flags = recipe.aimed(&v).flags();
        Some((v.promise.into(), v.what, format!("--planted {name} {flags}")))
    }
}

/// What `run` breaks with the mistake and does not break without it.
fn provoked(bug: Bug, run: impl Fn() -> Option<Violation>) -> Option<Violation> {
    planted::set(Some(bug));
    let broken = run();
    planted::set(None);
    broken.filter(|_| run().is_none())
}

fn random_case(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    loop {
        let ops: Vec<Small> = (0..4).map(|_| *rng.pick(Small::ALL)).collect();
        if Small::makes_sense(&ops) {
            return Case { ops, large_sectors: true };
        }
    }
}
