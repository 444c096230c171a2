//! Runs histories in large numbers: random campaigns, small histories explored completely, planted bugs, and
//! the shrinking of failures.

mod campaign;
mod damage;
mod exhaustive;
mod guard;
mod hunt;
mod kept;
mod mend;
mod origins;
mod shrink;
mod soak;

use std::fmt::Write as _;

pub use campaign::{Campaign, Failure};
pub use damage::{Damage, Damages};
pub use exhaustive::{Case, Exhaustive};
pub use guard::silence_panics;
pub use hunt::{Found, Hunt};
pub use kept::{Kept, kept};
pub use origins::{ExhaustiveOrigins, OriginCase};
pub use shrink::{Shrunk, shrink};
pub use soak::Soak;

use crate::history::{CrashPoint, Op, Profile, Setup, Stats, Violation, run_history};
use crate::origins as two_disks;

/// One run by its numbers: everything a replay needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// The seed.
    pub seed: u64,
    /// Operations in the history.
    pub steps: usize,
    /// Focus of the history; `None`: drawn from the seed.
    pub profile: Option<Profile>,
    /// Numbers of the operations that are carried out; `None`: all.
    pub keep: Option<Vec<u32>>,
    /// The one side crash to try; `None`: those drawn from the seed.
    pub aim: Option<CrashPoint>,
    /// Density of side crashes instead of the one drawn from the seed (steps, masks).
    pub dense: Option<(u64, u64)>,
    /// Bytes of clean metadata kept in memory instead of those drawn from the seed.
    pub cache: Option<usize>,
    /// There is memory that outlives the process.
    pub lasting: bool,
    /// Freed space is retained, within small limits.
    pub retain: bool,
    /// There is a small shared cache.
    pub shared: bool,
}

/// A cache of so few tables that any lookup can miss (the engine keeps a few more in any case).
pub const FEW_TABLES: usize = 12 << 10;

/// Returns new histories: `n` of one profile, or of profiles drawn from their seeds and additionally some
/// with origins (a fifth and a quarter of `n`). Every other one has a cache of a few tables, every other
/// two memory that outlives the process, every other four retain freed space, and every other eight have a shared
/// cache.
pub fn fresh(profile: Option<Profile>, base: u64, n: usize, steps: usize) -> Vec<Recipe> {
    let some = |profile, n: usize, steps: usize| {
        (0..n as u64).map(move |i| {
            let (cache, lasting) =
                ((base + i).is_multiple_of(2).then_some(FEW_TABLES), ((base + i) / 2).is_multiple_of(2));
            let retain = ((base + i) / 4).is_multiple_of(2);
            let shared = ((base + i) / 8).is_multiple_of(2);
            Recipe { profile, cache, lasting, retain, shared, ..Recipe::new(base + i, steps) }
        })
    };
    let mut all: Vec<Recipe> = some(profile, n, steps).collect();
    if profile.is_none() {
        all.extend(some(Some(Profile::Origins), n.div_ceil(5), steps / 2));
        all.extend(some(Some(Profile::Rollbacks), n.div_ceil(4), steps / 20));
    }
    all
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// The statistics.
    pub stats: Stats,
    /// The violation.
    pub violation: Option<Violation>,
    /// What happened, line by line, if requested.
    pub account: Vec<String>,
}

impl Recipe {
    /// Creates the plain run of a seed.
    pub fn new(seed: u64, steps: usize) -> Recipe {
        let (profile, keep, aim, dense, cache) = (None, None, None, None, None);
        Recipe { seed, steps, profile, keep, aim, dense, cache, lasting: false, retain: false, shared: false }
    }

    fn setup(&self) -> Setup {
        let mut setup = Setup::new(self.seed, self.profile);
        if let Some((every, masks)) = self.dense {
            (setup.cut_every, setup.masks) = (every, masks);
        }
        setup.cache = self.cache.unwrap_or(setup.cache);
        (setup.lasting, setup.retain, setup.shared) = (self.lasting, self.retain, self.shared);
        setup
    }

    fn operations(&self, setup: &Setup) -> Vec<Op> {
        let mut ops = setup.operations(self.steps);
        if let Some(keep) = &self.keep {
            ops.retain(|op| keep.contains(&op.number));
        }
        ops
    }

    /// Runs it. A panic of the engine is a violation like any other.
    pub fn run(&self, account: bool) -> Report {
        if let Some(profile) = self.profile.filter(|profile| Profile::OF_ORIGINS.contains(profile)) {
            return self.run_origins(profile, account);
        }
        let setup = self.setup();
        let ops = self.operations(&setup);
        let ran = guard::catch(|| run_history(&setup, &ops, self.aim, account));
        let (stats, violation, account) = ran.unwrap_or_else(|v| (Stats::default(), Some(v), Vec::new()));
        Report { stats, violation, account }
    }

    /// The same with an origin on a separate disk.
    fn run_origins(&self, profile: Profile, account: bool) -> Report {
        let mut setup = two_disks::Setup::new(self.seed, profile);
        if let Some((every, masks)) = self.dense {
            (setup.cut_every, setup.masks) = (every, masks);
        }
        setup.cache = self.cache.unwrap_or(setup.cache);
        (setup.lasting, setup.retain, setup.shared) = (self.lasting, self.retain, self.shared);
        let mut ops = setup.operations(self.steps);
        if let Some(keep) = &self.keep {
            ops.retain(|op| keep.contains(&op.number));
        }
        let ran = guard::catch(|| two_disks::run_history(&setup, &ops, self.aim, account));
        let (stats, violation, account) = ran.unwrap_or_else(|v| (Stats::default(), Some(v), Vec::new()));
        Report { stats, violation, account }
    }

    /// Returns the flags that replay it.
    pub fn flags(&self) -> String {
        let mut line = format!("--seed {} --steps {}", self.seed, self.steps);
        if let Some(profile) = self.profile {
            let _ = write!(line, " --profile {}", profile.name());
        }
        if let Some(cache) = self.cache {
            let _ = write!(line, " --cache {cache}");
        }
        if self.lasting {
            line.push_str(" --lasting");
        }
        if self.retain {
            line.push_str(" --retain");
        }
        if self.shared {
            line.push_str(" --shared-cache");
        }
        if let Some(keep) = &self.keep {
            let _ = write!(line, " --keep {}", ranges(keep));
        }
        if let Some(aim) = self.aim {
            let _ = write!(line, " --crash {}", aim.step);
            if let Some(mask) = aim.mask {
                let _ = write!(line, " --mask {mask}");
            }
        }
        line
    }

    /// Returns the same run, aimed at the side crash in which `violation` showed.
    pub fn aimed(&self, violation: &Violation) -> Recipe {
        let aim = violation.cut.map(|(step, mask)| CrashPoint { step, mask: Some(mask) });
        Recipe { aim: aim.or(self.aim), ..self.clone() }
    }
}

/// Writes ascending numbers as `1-4,7,9-10`.
pub fn ranges(numbers: &[u32]) -> String {
    let mut out = String::new();
    let mut i = 0;
    while i < numbers.len() {
        let first = numbers[i];
        while i + 1 < numbers.len() && numbers[i + 1] == numbers[i] + 1 {
            i += 1;
        }
        let comma = if out.is_empty() { "" } else { "," };
        let last = numbers[i];
        let _ = if first == last { write!(out, "{comma}{first}") } else { write!(out, "{comma}{first}-{last}") };
        i += 1;
    }
    out
}

/// Parses what [`ranges`] returns.
///
/// # Errors A sentence that says what is wrong with it.
pub fn parse_ranges(text: &str) -> Result<Vec<u32>, String> {
    let number = |s: &str| s.parse::<u32>().map_err(|_| format!("'{s}' is not the number of an operation"));
    let mut out = Vec::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if last < first || last - first > 1_000_000 {
            return Err(format!("'{part}' is not a range of operations"));
        }
        out.extend(first..=last);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_read_back_as_written() {
        let numbers = [1, 2, 3, 7, 9, 10];
        assert_eq!(ranges(&numbers), "1-3,7,9-10");
        assert_eq!(parse_ranges("1-3,7,9-10").unwrap(), numbers);
        assert!(parse_ranges("3-1").is_err() && parse_ranges("x").is_err());
    }

    #[test]
    fn flags_tell_all_of_a_recipe() {
        let recipe = Recipe {
            profile: Some(Profile::Forks),
            keep: Some(vec![1, 2, 5]),
            aim: Some(CrashPoint { step: 70, mask: Some(9) }),
            cache: Some(FEW_TABLES),
            retain: true,
            shared: true,
            ..Recipe::new(4, 20)
        };
        assert_eq!(
            recipe.flags(),
            "--seed 4 --steps 20 --profile forks --cache 12288 --retain --shared-cache --keep 1-2,5 --crash 70 --mask 9"
        );
    }
}
