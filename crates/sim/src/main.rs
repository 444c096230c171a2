//! `forkdisk-sim`: runs histories, prints one summary line, replays what failed.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use forkdisk_sim::explore::Soak;
use forkdisk_sim::explore::{
    Campaign, Case, Damage, Damages, Exhaustive, ExhaustiveOrigins, Failure, Found, Hunt, OriginCase, Recipe,
    fresh as fresh_recipes, kept, parse_ranges, shrink, silence_panics,
};
use forkdisk_sim::history::{CrashPoint, Profile, Stats, Violation};
use forkdisk_sim::planted::{Planted, plant};
use forkdisk_sim::rng::mix;

/// Time for shortening a failing history.
const SHRINK: Duration = Duration::from_secs(60);

/// Runs forkdisk on a simulated disk, cuts the power everywhere, and compares every byte with a
/// reference model.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    /// Random histories to run, besides the kept ones.
    #[arg(long, default_value_t = 100)]
    seeds: usize,
    /// Leave out the kept ones.
    #[arg(long)]
    fresh: bool,
    /// Operations in each of them.
    #[arg(long, default_value_t = 2000)]
    steps: usize,
    /// First seed; the others follow from it. Drawn from the clock if not given.
    #[arg(long)]
    base: Option<u64>,
    /// Replay this one seed, with a full account if it fails.
    #[arg(long)]
    seed: Option<u64>,
    /// Replay only the crash at this step of the run.
    #[arg(long)]
    crash: Option<u64>,
    /// Replay only this mask of the crash.
    #[arg(long, requires = "crash")]
    mask: Option<u64>,
    /// Carry out only these operations of the history: 1-40,57
    #[arg(long, requires = "seed", value_parser = parse_ranges)]
    keep: Option<std::vec::Vec<u32>>,
    /// Focus of the histories (mixed, forks, full, faults, races, cuts, blocks, calm, journal, crowd, large,
    /// copies, quotas, files, ranges, gathering, hosts, heirs, names, transactions, bounds, origins,
    /// rollbacks).
    #[arg(long, value_parser = parse_profile)]
    profile: Option<Profile>,
    /// Keep this many bytes of clean metadata in memory instead of what the seed draws.
    #[arg(long, requires = "seed")]
    cache: Option<usize>,
    /// Replay it with memory that outlives the process.
    #[arg(long, requires = "seed")]
    lasting: bool,
    /// Replay it with freed space retained, so that it is discarded late.
    #[arg(long, requires = "seed")]
    retain: bool,
    /// Replay it with a small shared cache.
    #[arg(long, requires = "seed")]
    shared_cache: bool,
    /// Explore all histories of up to three operations until this many crash states.
    #[arg(long)]
    exhaustive: Option<u64>,
    /// Explore all histories of an origin of up to three operations until this many crash states.
    #[arg(long)]
    exhaustive_origins: Option<u64>,
    /// Damage the metadata of small pools in this many ways: bits flipped, pages lost, stale or misdirected.
    #[arg(long)]
    flips: Option<u64>,
    /// Replay this one damage of the pool that belongs to the seed.
    #[arg(long, requires = "seed")]
    damage: Option<u64>,
    /// Replay one short history, as in `write+snapshot:512` or `origin:snapshot,12,checkpoint@o3:512`.
    #[arg(long, value_parser = Short::parse)]
    case: Option<Short>,
    /// Run new seeds of all profiles endlessly; the next seed, the sums and the failures are kept in this
    /// directory.
    #[arg(long)]
    soak: Option<PathBuf>,
    /// End the long run after this many hours.
    #[arg(long, requires = "soak")]
    hours: Option<f64>,
    /// Name of this build in the long run.
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// Switch on a planted bug (`all`: each in turn) and check that it is found.
    #[arg(long)]
    planted: Option<String>,
    /// Histories to run per planted bug before giving up.
    #[arg(long, default_value_t = 400)]
    budget: u32,
    /// Threads.
    #[arg(long, short, default_value_t = threads())]
    jobs: usize,
    /// Stop after this many failures.
    #[arg(long, default_value_t = 8)]
    failures: usize,
    /// Print what happened in a replay that breaks no promise, too.
    #[arg(long)]
    account: bool,
    /// Do not shorten failing histories.
    #[arg(long)]
    no_shrink: bool,
}

/// A short history, of a pool or of an origin.
#[derive(Clone)]
enum Short {
    Pool(Case),
    Origin(OriginCase),
}

impl Short {
    fn parse(text: &str) -> Result<Short, String> {
        match text.starts_with("origin:") {
            true => OriginCase::parse(text).map(Short::Origin),
            false => Case::parse(text).map(Short::Pool),
        }
    }

    fn name(&self) -> String {
        match self {
            Short::Pool(case) => case.name(),
            Short::Origin(case) => case.name(),
        }
    }

    fn run(&self, aim: Option<CrashPoint>, account: bool) -> (Stats, Option<Violation>, Vec<String>) {
        match self {
            Short::Pool(case) => case.run(aim, account),
            Short::Origin(case) => case.run(aim, account),
        }
    }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn parse_profile(name: &str) -> Result<Profile, String> {
    Profile::from_name(name).ok_or_else(|| format!("no profile is called '{name}'"))
}

fn main() -> ExitCode {
    let args = Args::parse();
    silence_panics();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("forkdisk-sim: {message}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether all promises were kept (or all planted bugs found).
fn run(args: &Args) -> Result<bool, String> {
    let single = args.seed.is_some() || args.case.is_some();
    match args.planted.as_deref() {
        Some(name) if single => plant(Some(bug(name)?)),
        Some(name) => return hunt(args, name),
        None => {}
    }
    let aim = args.crash.map(|step| CrashPoint { step, mask: args.mask });
    if let Some(case) = &args.case {
        let (stats, violation, account) = case.run(aim, true);
        account.iter().filter(|_| args.account && violation.is_none()).for_each(|line| println!("{line}"));
        return Ok(tell(&stats, 1, violation.as_ref(), &account));
    }
    if let (Some(seed), Some(number)) = (args.seed, args.damage) {
        let (stats, violation, account) = Damage { seed, number }.run();
        account.iter().filter(|_| violation.is_none()).for_each(|line| println!("{line}"));
        return Ok(tell(&stats, 1, violation.as_ref(), &account));
    }
    if let Some(seed) = args.seed {
        let (profile, keep, cache) = (args.profile, args.keep.clone(), args.cache);
        let (lasting, retain, shared) = (args.lasting, args.retain, args.shared_cache);
        let recipe = Recipe { profile, keep, aim, cache, lasting, retain, shared, ..Recipe::new(seed, args.steps) };
        let report = recipe.run(true);
        let told = args.account && report.violation.is_none();
        report.account.iter().filter(|_| told).for_each(|line| println!("{line}"));
        return Ok(tell(&report.stats, 1, report.violation.as_ref(), &report.account));
    }
    if let Some(dir) = &args.soak {
        return soak(args, dir.clone());
    }
    if let Some(budget) = args.exhaustive {
        return Ok(exhaustive(args, budget, false));
    }
    if let Some(budget) = args.exhaustive_origins {
        return Ok(exhaustive(args, budget, true));
    }
    if let Some(count) = args.flips {
        return Ok(flips(args, count));
    }
    Ok(campaign(args))
}

fn soak(args: &Args, dir: PathBuf) -> Result<bool, String> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(|e| e.to_string())?;
    }
    let time = args.hours.map(|hours| Duration::from_secs_f64(hours * 3600.0));
    Soak { dir, time, jobs: args.jobs, commit: args.commit.clone(), stop: &stop }.run()
}

fn flips(args: &Args, count: u64) -> bool {
    let damages = Damages { count, seed: base_seed(args), jobs: args.jobs };
    println!("base seed {}", damages.seed);
    let mut meter = Meter::new();
    let outcome = damages.run(|tried| meter.show(|| format!("{tried}/{count} damages")));
    meter.clear();
    for (damage, violation) in outcome.failures.iter().take(8) {
        println!("\n{violation}\n  replay: forkdisk-sim {}", damage.flags());
    }
    println!("reported={} harmless={}", outcome.reported, outcome.stats.flips - outcome.reported);
    summary(&outcome.stats, 0, outcome.failures.len());
    outcome.failures.is_empty()
}

fn bug(name: &str) -> Result<Planted, String> {
    Planted::all().into_iter().find(|b| b.name() == name).ok_or_else(|| {
        let names: Vec<&str> = Planted::all().iter().map(|b| b.name()).collect();
        format!("no planted mistake is called '{name}'; there are: {}", names.join(", "))
    })
}

fn base_seed(args: &Args) -> u64 {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
    args.base.unwrap_or_else(|| mix(&[clock()]) >> 24)
}

fn campaign(args: &Args) -> bool {
    let base = base_seed(args);
    println!("base seed {base}");
    let kept = if args.fresh { Vec::new() } else { kept() };
    let mut recipes: Vec<Recipe> = kept.into_iter().map(|k| k.recipe).collect();
    recipes.extend(fresh_recipes(args.profile, base, args.seeds, args.steps));
    let n = recipes.len();
    let mut meter = Meter::new();
    let campaign = Campaign { recipes, jobs: args.jobs, enough: args.failures };
    let (stats, failures) = campaign.run(|ended, stats, failures| {
        meter.show(|| format!("{ended}/{n} seeds, {} cuts, {failures} failures", stats.cuts));
    });
    meter.clear();
    for failure in failures.iter().take(args.failures) {
        explain(args, failure);
    }
    summary(&stats, n, failures.len());
    failures.is_empty()
}

/// Prints a failure: what happened, how to replay it, and the shortest history that still shows it.
fn explain(args: &Args, failure: &Failure) {
    println!("\nseed {}: {}", failure.recipe.seed, failure.violation);
    println!("  replay: forkdisk-sim {}", failure.recipe.aimed(&failure.violation).flags());
    if args.no_shrink {
        return;
    }
    let shrunk = shrink(&failure.recipe, &failure.violation, 300, SHRINK);
    println!("  shortened: forkdisk-sim {}", shrunk.recipe.flags());
    for line in shrunk.recipe.run(true).account {
        println!("    {line}");
    }
}

fn exhaustive(args: &Args, budget: u64, of_origins: bool) -> bool {
    let (depth, seed, jobs) = (3, base_seed(args), args.jobs);
    println!("base seed {seed}");
    let mut meter = Meter::new();
    let progress = |ended: usize, all: usize, stats: &Stats| {
        meter.show(|| {
            format!("{ended}/{all} histories, {} crash states, {} distinct", stats.crash_states, stats.distinct)
        });
    };
    let (stats, ended, failures) = match of_origins {
        true => {
            let (stats, ended, failures) = ExhaustiveOrigins { budget, depth, seed, jobs }.run(progress);
            (stats, ended, failures.into_iter().map(|(case, v)| (Short::Origin(case), v)).collect::<Vec<_>>())
        }
        false => {
            let (stats, ended, failures) = Exhaustive { budget, depth, seed, jobs }.run(progress);
            (stats, ended, failures.into_iter().map(|(case, v)| (Short::Pool(case), v)).collect())
        }
    };
    meter.clear();
    for (case, violation) in failures.iter().take(3) {
        let aim = violation.cut.map_or(String::new(), |(step, mask)| format!(" --crash {step} --mask {mask}"));
        println!("\n{}: {violation}\n  replay: forkdisk-sim --case {}{aim}", case.name(), case.name());
        let aim = violation.cut.map(|(step, mask)| CrashPoint { step, mask: Some(mask) });
        for line in case.run(aim, true).2 {
            println!("    {line}");
        }
    }
    summary(&stats, ended, failures.len());
    failures.is_empty()
}

fn hunt(args: &Args, name: &str) -> Result<bool, String> {
    let bugs = if name == "all" { Planted::all() } else { vec![bug(name)?] };
    let hunt = Hunt { bugs, budget: args.budget, seed: args.base.unwrap_or(1), jobs: args.jobs };
    let width = hunt.bugs.iter().map(|bug| bug.name().len()).max().unwrap_or(0).max(8);
    println!("{:width$}  {:>9}  {:>7}  {:8}  replay", "mistake", "histories", "seconds", "broken");
    // Each when it ends: one that takes too long is the missing one.
    let all = hunt.run(|Found { bug, histories, took, how }| {
        let (promise, what, flags) = how.clone().unwrap_or(("-".into(), String::new(), "NOT FOUND".into()));
        println!("{:width$}  {histories:>9}  {:>7.1}  {promise:8}  {flags}", bug.name(), took.as_secs_f64());
        if name != "all" {
            println!("  {what}");
        }
    });
    let histories: u64 = all.iter().map(|f| u64::from(f.histories)).sum();
    let missed = all.iter().filter(|f| f.how.is_none()).count();
    println!("planted={} found={} missed={missed} histories={histories}", all.len(), all.len() - missed);
    Ok(missed == 0)
}

/// Prints one run's account and summary; returns whether it kept all promises.
fn tell(stats: &Stats, seeds: usize, violation: Option<&Violation>, account: &[String]) -> bool {
    if let Some(violation) = violation {
        account.iter().for_each(|line| println!("{line}"));
        println!("{violation}");
    }
    summary(stats, seeds, usize::from(violation.is_some()));
    violation.is_none()
}

fn summary(stats: &Stats, seeds: usize, violations: usize) {
    println!(
        "crash_states={} distinct={} cuts={} faults={} flips={} seeds={seeds} operations={} violations={violations}",
        stats.crash_states, stats.distinct, stats.cuts, stats.faults, stats.flips, stats.operations
    );
}

/// One line of progress on a terminal, nothing elsewhere.
struct Meter {
    terminal: bool,
}

impl Meter {
    fn new() -> Meter {
        Meter { terminal: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, text: impl FnOnce() -> String) {
        if self.terminal {
            eprint!("\r\x1b[K{}", text());
            let _ = std::io::stderr().flush();
        }
    }

    fn clear(&mut self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
