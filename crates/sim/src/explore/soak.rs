//! The long run: new seeds over all profiles, short histories of origins and damage, batch after batch.
//!
//! A directory keeps the next seed and the sums, so that a later run continues where this one ended. The next
//! seed is stored before a batch begins: none is used twice, however the run ends.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::campaign::spread;
use super::{Damages, ExhaustiveOrigins, FEW_TABLES, Recipe};
use crate::history::{Profile, Stats};

/// Seeds of each drawn profile in a batch; of each profile with origins twice as many.
const EACH_COUNT: u64 = 2;
/// Crash states of short histories of origins in a batch.
const SHORT_COUNT: u64 = 10_000;
/// Damages in a batch.
const DAMAGES_COUNT: u64 = 2_000;

/// A long run.
pub struct Soak<'a> {
    /// Directory of the state and the failures.
    pub dir: PathBuf,
    /// Duration; `None`: endless.
    pub time: Option<Duration>,
    /// Threads.
    pub jobs: usize,
    /// Name of the build in the output.
    pub commit: String,
    /// Set to end the run.
    pub stop: &'a AtomicBool,
}

/// State between runs.
#[derive(Default)]
struct State {
    next: u64,
    seeds: u64,
    violations: u64,
    stats: Stats,
}

impl State {
    fn fields(&mut self) -> [(&'static str, &mut u64); 9] {
        let s = &mut self.stats;
        [
            ("next", &mut self.next),
            ("crash_states", &mut s.crash_states),
            ("distinct", &mut s.distinct),
            ("cuts", &mut s.cuts),
            ("faults", &mut s.faults),
            ("flips", &mut s.flips),
            ("seeds", &mut self.seeds),
            ("operations", &mut s.operations),
            ("violations", &mut self.violations),
        ]
    }

    fn parse(text: &str) -> Result<State, String> {
        let mut state = State::default();
        for (name, field) in state.fields() {
            let value = text.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            *field = value.and_then(|v| v.parse().ok()).ok_or_else(|| format!("the state does not say '{name}='"))?;
        }
        Ok(state)
    }

    fn line(&mut self) -> String {
        self.fields().map(|(name, value)| format!("{name}={value}")).join(" ")
    }
}

impl Soak<'_> {
    /// Runs batches until the end. Returns whether no promise has been broken since the state began.
    ///
    /// # Errors A sentence that says which file cannot be read or written.
    pub fn run(&self) -> Result<bool, String> {
        let file = self.dir.join("state");
        let wrong = |e: std::io::Error| format!("{}: {e}", self.dir.display());
        fs::create_dir_all(&self.dir).map_err(wrong)?;
        let mut state = match fs::read_to_string(&file) {
            Ok(text) => State::parse(&text).map_err(|e| format!("{}: {e}", file.display()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => State { next: clock() << 24, ..State::default() },
            Err(e) => return Err(wrong(e)),
        };
        let save = |state: &mut State| {
            let new = self.dir.join("state.new");
            fs::write(&new, state.line() + "\n").and_then(|()| fs::rename(&new, &file)).map_err(wrong)
        };
        let began = Instant::now();
        let ends = || self.stop.load(Ordering::Relaxed) || self.time.is_some_and(|time| began.elapsed() >= time);
        while !ends() {
            let base = state.next;
            let recipes = batch(base);
            state.next += recipes.len() as u64;
            save(&mut state)?;
            let mut failed = Vec::new();
            let work = |i: usize| (!ends()).then(|| recipes[i].run(false));
            spread(self.jobs, recipes.len(), work, |i, report| {
                if let Some(report) = report {
                    state.seeds += 1;
                    state.stats.add(&report.stats);
                    let recipe = &recipes[i];
                    failed.extend(
                        report.violation.map(|v| format!("{v}\n  replay: forkdisk-sim {}", recipe.aimed(&v).flags())),
                    );
                }
                true
            });
            if !ends() {
                let short = ExhaustiveOrigins { budget: SHORT_COUNT, depth: 3, seed: base, jobs: self.jobs };
                let (stats, _, failures) = short.run_longer();
                state.stats.add(&stats);
                failed.extend(
                    failures.iter().map(|(case, v)| format!("{v}\n  replay: forkdisk-sim --case {}", case.name())),
                );
                let damages = Damages { count: DAMAGES_COUNT, seed: base, jobs: self.jobs }.run(|_| ());
                state.stats.add(&damages.stats);
                failed.extend(
                    damages
                        .failures
                        .iter()
                        .map(|(damage, v)| format!("{v}\n  replay: forkdisk-sim {}", damage.flags())),
                );
            }
            state.violations += failed.len() as u64;
            save(&mut state)?;
            let mut all =
                fs::File::options().create(true).append(true).open(self.dir.join("failures")).map_err(wrong)?;
            for text in failed {
                println!("{text}");
                writeln!(all, "{}: {text}", self.commit).map_err(wrong)?;
            }
            println!("commit={} time={} {}", self.commit, clock(), state.line());
        }
        Ok(state.violations == 0)
    }
}

/// Returns the seconds since 1970.
fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_secs())
}

/// Returns histories of all profiles, half of them with caches of a few tables, and every other one with
/// memory that outlives the process.
fn batch(base: u64) -> Vec<Recipe> {
    let drawn = Profile::ALL.into_iter().map(|profile| (profile, EACH_COUNT, 2000));
    let origins = [(Profile::Origins, 2 * EACH_COUNT, 1000), (Profile::Rollbacks, 2 * EACH_COUNT, 100)];
    let all = drawn.chain(origins).flat_map(|(profile, n, steps)| (0..n).map(move |i| (profile, i, steps)));
    all.zip(base..)
        .map(|((profile, i, steps), seed)| {
            let cache = i.is_multiple_of(2).then_some(FEW_TABLES);
            let lasting = (seed / 2).is_multiple_of(2);
            let retain = (seed / 4).is_multiple_of(2);
            let shared = (seed / 8).is_multiple_of(2);
            Recipe { profile: Some(profile), cache, lasting, retain, shared, ..Recipe::new(seed, steps) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reads_back_as_written_and_a_batch_has_every_profile_with_both_caches() {
        let mut state = State { next: 7, violations: 2, ..State::default() };
        let mut read = State::parse(&state.line()).expect("just written");
        assert_eq!(read.line(), state.line());
        assert!(State::parse("next=1").is_err());
        let all = batch(9);
        for profile in Profile::ALL.into_iter().chain(Profile::OF_ORIGINS) {
            let of = |small: bool| all.iter().any(|r| r.profile == Some(profile) && r.cache.is_some() == small);
            assert!(of(true) && of(false), "{profile:?}");
        }
        let lasting = all.iter().filter(|recipe| recipe.lasting).count();
        assert!((all.len() / 3..all.len()).contains(&lasting), "{lasting} of {}", all.len());
    }
}
