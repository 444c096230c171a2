//! The test of the test: known mistakes are switched on one by one, and each has to be found.
//!
//! All mistakes face the same histories. A mistake counts as found by a history that breaks a
//! promise with it and breaks none without it.

use std::sync::OnceLock;

use super::campaign::spread;
use super::{Case, Recipe, damage};
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
    /// The promise it broke, what happened, and the flags that replay it; `None` if it was not found.
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

/// One of the histories that all mistakes face.
enum Attempt {
    /// A random history.
    Random(Recipe),
    /// A short one, with every crash.
    Short(Case),
    /// Damaged metadata.
    Damaged(u64),
}

/// Damages tried in one attempt.
const DAMAGES: u64 = 400;

impl Attempt {
    /// The profiles take turns; between them come short histories and damage. `home`: only this profile can
    /// find what is looked for.
    fn new(hunt: u64, i: u32, home: Option<Profile>) -> Attempt {
        let seed = mix(&[hunt, u64::from(i)]) >> 32;
        if let Some(profile) = home {
            let dense = Some(if profile == Profile::Origins { (40, 3) } else { (60, 3) });
            return Attempt::Random(Recipe { profile: Some(profile), dense, ..Recipe::new(seed, 300) });
        }
        match i % 8 {
            3 | 7 => return Attempt::Short(random_case(seed)),
            5 => return Attempt::Damaged(seed),
            _ => {}
        }
        let turn = (i - i / 4 - i / 8) as usize;
        // More turns for those that need luck most.
        let extra = [Profile::Journal, Profile::Copies];
        // Those behind are the homes of their own mistakes.
        let all = &Profile::ALL[..15];
        let turn = turn % (all.len() + extra.len());
        let profile = all.get(turn).copied().unwrap_or_else(|| extra[turn - all.len()]);
        let (steps, every) = match profile {
            Profile::Journal => (1200, 400),
            Profile::Crowd => (300, 400),
            _ => (300, 60),
        };
        let dense = (profile != Profile::Calm).then_some((every, 3));
        Attempt::Random(Recipe { profile: Some(profile), dense, ..Recipe::new(seed, steps) })
    }

    /// What it breaks, and the flags that replay that.
    fn run(&self) -> Option<(Violation, String)> {
        match self {
            Attempt::Random(recipe) => {
                let v = recipe.run(false).violation?;
                let flags = recipe.aimed(&v).flags();
                Some((v, flags))
            }
            Attempt::Short(case) => {
                let v = case.run(None, false).1?;
                let aim = v.cut.map_or(String::new(), |(step, mask)| format!(" --crash {step} --mask {mask}"));
                Some((v, format!("--case {}{aim}", case.name())))
            }
            Attempt::Damaged(seed) => {
                let (damage, v) = damage::sample(*seed, DAMAGES, 1).failures.pop()?;
                Some((v, damage.flags()))
            }
        }
    }
}

impl Hunt {
    /// Looks for all of them, telling `progress` as each search ends.
    pub fn run(&self, mut progress: impl FnMut(&Found)) -> Vec<Found> {
        let mut all = Vec::new();
        // Whether an attempt is clean without any mistake: the same for all of them.
        let homes = [None, Some(Profile::Origins), Some(Profile::Gathering)];
        let clean = homes.map(|home| (home, (0..self.budget).map(|_| OnceLock::new()).collect::<Vec<_>>()));
        let of = |bug| &clean.iter().find(|(at, _)| *at == home(bug)).expect("all homes are there").1;
        spread(
            self.jobs,
            self.bugs.len(),
            |i| self.search(self.bugs[i], of(self.bugs[i])),
            |_, found| {
                progress(&found);
                all.push(found);
                true
            },
        );
        all.sort_by_key(|f| self.bugs.iter().position(|bug| bug.name() == f.bug.name()));
        all
    }

    fn search(&self, bug: Bug, clean: &[OnceLock<bool>]) -> Found {
        for (i, clean) in (0..self.budget).zip(clean) {
            if clean.get() == Some(&false) {
                continue;
            }
            let attempt = Attempt::new(self.seed, i, home(bug));
            planted::set(Some(bug));
            let broken = attempt.run();
            planted::set(None);
            let Some((v, flags)) = broken else { continue };
            if *clean.get_or_init(|| attempt.run().is_none()) {
                let how = (v.promise.into(), v.what, format!("--planted {} {flags}", bug.name()));
                return Found { bug, histories: i + 1, how: Some(how) };
            }
        }
        Found { bug, histories: self.budget, how: None }
    }
}

/// The profile without which a mistake cannot show.
fn home(bug: Bug) -> Option<Profile> {
    if bug.is_of_origins() {
        return Some(Profile::Origins);
    }
    bug.name().starts_with("gather-").then_some(Profile::Gathering)
}

fn random_case(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    loop {
        let ops: Vec<Small> = (0..4).map(|_| *rng.pick(Small::ALL)).collect();
        if Small::makes_sense(&ops) {
            return Case { ops, large_sectors: rng.one_in(2) };
        }
    }
}
