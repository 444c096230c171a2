//! The test of the test: planted bugs are switched on one by one, and each must be found.
//!
//! All bugs run the same histories. A bug counts as found by a history that breaks a promise with it and
//! breaks none without it.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::campaign::spread;
use super::kept::World;
use super::{Case, FEW_TABLES, OriginCase, Recipe, damage};
use crate::history::{Profile, Small, Violation};
use crate::planted::{Bug, Group, Planted, plant};
use crate::rng::{Rng, mix};

/// How a planted bug was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The bug.
    pub bug: Planted,
    /// Histories that were run.
    pub histories: u32,
    /// How long the search took.
    pub took: Duration,
    /// The promise it broke, what happened, and the flags that replay it; `None` if it was not found.
    pub how: Option<(String, String, String)>,
}

/// The search for planted bugs.
pub struct Hunt {
    /// The bugs to find.
    pub bugs: Vec<Planted>,
    /// Histories per bug.
    pub budget: u32,
    /// The seed of the histories.
    pub seed: u64,
    /// Threads.
    pub jobs: usize,
}

/// One of the histories that all bugs run.
enum Attempt {
    /// A random history.
    Random(Recipe),
    /// A short one, with every crash.
    Short(Case),
    /// Two concurrent operations on an origin, of which a flush fails, with every crash.
    Struck(OriginCase),
    /// Damaged metadata.
    Damaged(u64),
}

/// Histories that found a bug once, by its name.
const KNOWN: &str = include_str!("../../seeds/planted.txt");

/// Returns those of one bug.
fn known(bug: Planted) -> impl Iterator<Item = Attempt> {
    let lines = KNOWN.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(move |line| {
        let [name, seed, profile] = line.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        (name == bug.name()).then_some(())?;
        let World { profile, cache, lasting, retain, shared } = World::parse(profile);
        Some(Attempt::Random(Recipe {
            cache,
            lasting,
            retain,
            shared,
            ..Attempt::recipe(seed.parse().ok()?, profile?)
        }))
    })
}

/// Damages tried in one attempt.
const DAMAGES_COUNT: u64 = 400;

impl Attempt {
    /// Without a home the profiles alternate; between them come short histories and damage.
    fn new(hunt: u64, i: u32, home: Home) -> Attempt {
        let seed = mix(&[hunt, u64::from(i)]) >> 32;
        match home {
            Home::None => {}
            Home::Damage => return Attempt::Damaged(seed),
            Home::Profile(profile) => return Attempt::random(seed, profile, None),
            Home::FewTables(profile) => return Attempt::random(seed, profile, Some(FEW_TABLES)),
            Home::Lasting(profile) => return Attempt::lasting(seed, profile),
            Home::Retaining(profile) => {
                return Attempt::Random(Recipe { retain: true, ..Attempt::recipe(seed, profile) });
            }
            Home::Sharing(profile) => {
                return Attempt::Random(Recipe { shared: true, ..Attempt::recipe(seed, profile) });
            }
            Home::Struck => return Attempt::Struck(OriginCase::struck(hunt, i as usize)),
        }
        match i % 8 {
            3 | 7 => return Attempt::Short(random_case(seed)),
            5 => return Attempt::Damaged(seed),
            _ => {}
        }
        let turn = (i - i / 4 - i / 8) as usize;
        // Additional attempts of those that depend most on chance.
        let extra = [Profile::Journal, Profile::Copies];
        // The profiles behind are the homes of specific bugs.
        let all = &Profile::ALL[..15];
        let turn = turn % (all.len() + extra.len());
        Attempt::random(seed, all.get(turn).copied().unwrap_or_else(|| extra[turn - all.len()]), None)
    }

    /// With memory that outlives the process, and crashes that are kills.
    fn lasting(seed: u64, profile: Profile) -> Attempt {
        Attempt::Random(Recipe { lasting: true, ..Attempt::recipe(seed, profile) })
    }

    fn random(seed: u64, profile: Profile, cache: Option<usize>) -> Attempt {
        Attempt::Random(Recipe { cache, ..Attempt::recipe(seed, profile) })
    }

    fn recipe(seed: u64, profile: Profile) -> Recipe {
        let (steps, every) = match profile {
            Profile::Journal => (1200, 400),
            Profile::Crowd => (300, 400),
            Profile::Origins => (300, 40),
            Profile::Rollbacks => (100, 0),
            _ => (300, 60),
        };
        // Calm has no crashes, Rollbacks draws its own.
        let dense = (profile != Profile::Calm && profile != Profile::Rollbacks).then_some((every, 3));
        Recipe { profile: Some(profile), dense, ..Recipe::new(seed, steps) }
    }

    /// Returns the violation, and the flags that replay it.
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
            Attempt::Struck(case) => {
                let v = case.run(None, false).1?;
                let aim = v.cut.map_or(String::new(), |(step, mask)| format!(" --crash {step} --mask {mask}"));
                Some((v, format!("--case {}{aim}", case.name())))
            }
            Attempt::Damaged(seed) => {
                let (damage, v) = damage::sample(*seed, DAMAGES_COUNT, 1).failures.pop()?;
                Some((v, damage.flags()))
            }
        }
    }
}

impl Hunt {
    /// Searches all of them, and calls `progress` as each search ends.
    pub fn run(&self, mut progress: impl FnMut(&Found)) -> Vec<Found> {
        let mut all = Vec::new();
        // Whether an attempt is clean without any bug: the same for all bugs that run it.
        let mut clean: HashMap<Home, Vec<OnceLock<bool>>> = HashMap::new();
        for &bug in &self.bugs {
            clean.entry(home(bug)).or_insert_with(|| (0..self.budget).map(|_| OnceLock::new()).collect());
        }
        spread(
            self.jobs,
            self.bugs.len(),
            |i| self.search(self.bugs[i], &clean[&home(self.bugs[i])]),
            |_, found| {
                progress(&found);
                all.push(found);
                true
            },
        );
        all.sort_by_key(|f| self.bugs.iter().position(|bug| bug.name() == f.bug.name()));
        all
    }

    fn search(&self, bug: Planted, clean: &[OnceLock<bool>]) -> Found {
        let (start, mut histories) = (Instant::now(), 0);
        let fresh = (0..self.budget).zip(clean).filter(|(_, clean)| clean.get() != Some(&false));
        let fresh = fresh.map(|(i, clean)| (Attempt::new(self.seed, i, home(bug)), Some(clean)));
        for (attempt, clean) in known(bug).map(|attempt| (attempt, None)).chain(fresh) {
            histories += 1;
            plant(Some(bug));
            let broken = attempt.run();
            plant(None);
            let Some((v, flags)) = broken else { continue };
            let is_clean = || attempt.run().is_none();
            if clean.map_or_else(is_clean, |clean| *clean.get_or_init(is_clean)) {
                let how = (v.promise.into(), v.what, format!("--planted {} {flags}", bug.name()));
                return Found { bug, histories, took: start.elapsed(), how: Some(how) };
            }
        }
        Found { bug, histories, took: start.elapsed(), how: None }
    }
}

/// Which of the attempts a bug runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Home {
    /// Those of all kinds.
    None,
    /// The only profile in which it shows, or the one in which it shows first.
    Profile(Profile),
    /// The same with a cache of a few tables.
    FewTables(Profile),
    /// The same with memory that outlives the process.
    Lasting(Profile),
    /// The same with freed space retained.
    Retaining(Profile),
    /// The same with a small shared cache.
    Sharing(Profile),
    /// Two concurrent operations on an origin, of which a flush fails.
    Struck,
    /// Damaged metadata.
    Damage,
}

/// Returns the home of a bug. Without one most are found within ten attempts; those that need a rare state
/// have a home where it is not rare.
fn home(planted: Planted) -> Home {
    use Bug::*;
    let bug = match planted {
        Planted::Engine(bug) => bug,
        Planted::Device(_) if planted.group() == Group::Origins => return Home::Profile(Profile::Origins),
        Planted::Device(_) => return Home::None,
    };
    let profile = match bug {
        TornSuperblockAccepted
        | StaleIncarnationReplayed
        | EarlierRoundReplayed
        | RepairCountsOnce
        | RepairKeepsLog => return Home::Damage,
        ReleasedInSteps => return Home::FewTables(Profile::Rollbacks),
        SettledFromCopy => return Home::Struck,
        IntervalForgotten | UnflushedEndsInterval => return Home::Lasting(Profile::Cuts),
        EarlyGroupOutrunsLog | EarlyGroupErasedLate => return Home::Lasting(Profile::Races),
        VolatileForgetsAttributes | NamesOutrunVolatileLog => return Home::Lasting(Profile::Names),
        RetainedDiscardedUnguarded | RetainedOutlivesAllocation | RetainedReturnedTwice => {
            return Home::Retaining(Profile::Forks);
        }
        SharedCacheKeepsOverwritten | SharedCacheKeepsReused | SharedReadOutlivesWrite => {
            return Home::Sharing(Profile::Forks);
        }
        SharedReadDuringWrite => return Home::Sharing(Profile::Races),
        SharedCacheKeepsGathered => return Home::Sharing(Profile::Gathering),
        SharedCacheKeepsCopied | SharedCacheKeepsCloned => return Home::Sharing(Profile::Copies),
        SharedCacheKeepsFailed => return Home::Sharing(Profile::Faults),
        VolatileBelievedDurable => return Home::Lasting(Profile::Origins),
        TransactionSplitInVolatileLog => return Home::Lasting(Profile::Transactions),
        TransactionSplitOverGroups | FeatureBitAfterTransaction => Profile::Transactions,
        ForkOfSnapshotTakesVolume
        | FolderRollbackLeavesLast
        | RollbackKeepsSourceAlone
        | SwapInSteps
        | RemovalIgnoresHardLinks
        | LoadedHardLinkNotCounted
        | ForkMakesTwoFiles
        | LiveRollbackNotDurable => Profile::Folders,
        ExtensionOutlivesVolume
        | ExtensionNotCheckpointed
        | FeatureBitAfterExtension
        | CloneForgetsXattrs
        | SnapshotForgetsXattrs
        | ExpiryIgnoresRenewal
        | ExpiryIgnoresClients => Profile::Lifetimes,
        ComparesFirstSector | DropsWholeWrite | ZeroesNeitherWrittenNorUnmapped => Profile::Comparing,
        ChangedModeForgetsKind | LinkNamedBeforeWritten | KeptSnapshotStaysWithVolume => Profile::Folders,
        bug if bug.name().starts_with("volatile-") => return Home::Lasting(Profile::Cuts),
        bug if bug.group() == Group::Origins => Profile::Origins,
        GatherForgetsLosses => Profile::Heirs,
        bug if bug.name().starts_with("gather-") => Profile::Gathering,
        OrphansOutliveCrash => Profile::Names,
        DeadDiscardedBeforeDurable | DeadTablesDiscarded => Profile::Hosts,
        bug if bug.name().starts_with("quota-") => Profile::Quotas,
        bug if bug.name().starts_with("bound-") || bug.name().starts_with("reserve-") => Profile::Bounds,
        SharedTableUncounted | SharedTableRejuvenates | ReplacedTableForgotten => Profile::Ranges,
        WritesInPlaceTooEarly | CommonCountsLost => Profile::Blocks,
        PlanOutlivesPage | FullLeavesHalf => Profile::Full,
        CopyErrorSwallowed | SuperblockAfterFailedFlush => Profile::Faults,
        JournalOverwritesTail | ChosenSuperblockFirst | SuperblocksLeftDifferent => Profile::Journal,
        DiscardIgnoresWriters => Profile::Races,
        RenameNotCheckpointed => Profile::Crowd,
        SnapshotIgnoresWriters | ReplaceKeepsSourceAlone => Profile::Files,
        bug if bug.group() == Group::Copies => Profile::Copies,
        FailedWritePublished => Profile::Copies,
        _ => return Home::None,
    };
    Home::Profile(profile)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_file_names_a_mistake_and_a_history() {
        let lines = KNOWN.lines().filter(|line| !line.starts_with('#')).count();
        let found: usize = Planted::all().into_iter().map(|bug| known(bug).count()).sum();
        assert!(found == lines && lines > 0);
    }
}
