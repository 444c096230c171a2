//! Instructions per break and per write in place, counted by callgrind in a separate process: the count
//! for twice as many requests less the count for once as many, so that one-time work cancels out.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use forkdisk::testing::MemoryDevice;
use forkdisk::{CreateOptions, FormatOptions, MIN_VOLATILE_BYTES, OpenOptions, Pool, VolatileLog, VolatileMemory};
use forkdisk_uring::{Config, block_on};

use crate::limits::{LIMIT, Limited as _};
use crate::load::{self, Job, sequential};
use crate::rows::Row;
use crate::runner::Context;

use super::{PAGE, label, pages};

/// Name of the part that runs in the other process.
pub const INSIDE: &str = "instructions-inside";
/// Environment variable with the work: `in-place` or `break`, with or without `-served`, and the number of requests.
const WORK: &str = "FORKDISK_BENCH_WORK";
const SPAN: u64 = 64 << 20;
const COUNT: u64 = 2000;
/// Number of the costliest functions that are listed.
const NAMED: usize = 3;

/// Instructions by function.
type Costs = BTreeMap<String, u64>;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    // By the engine alone, and with a daemon's options: a volatile log, an interval and a clock.
    for work in ["in-place", "break", "in-place-served", "break-served"] {
        let (once, twice) = (count(context, work, COUNT)?, count(context, work, 2 * COUNT)?);
        let total = |costs: &Costs| costs.values().sum::<u64>() as f64;
        let case = format!("instructions/{work}");
        let row = |metric: &str, value: f64| label(&case).row(metric, "instructions", value / COUNT as f64);
        rows.push(row("per_op", total(&twice) - total(&once)));
        let mut costs: Vec<(f64, &String)> =
            twice.iter().map(|(name, &n)| (n as f64 - once.get(name).copied().unwrap_or(0) as f64, name)).collect();
        costs.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (cost, name) in costs.into_iter().take(NAMED) {
            rows.push(row(&format!("in {name}"), cost));
        }
    }
    Ok(rows)
}

/// Counts the instructions for `count` requests, including opening and filling.
fn count(context: &Context<'_>, work: &str, count: u64) -> Result<Costs> {
    let out = context.ram(&format!("callgrind-{work}-{count}"));
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "-q"]).arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(&context.options.program).args(["bench", "w2", "--only", INSIDE, "--json", "--dir"]);
    command.arg(&context.options.dir).env(WORK, format!("{work} {count}"));
    let output = match command.output_within(LIMIT) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            bail!("valgrind is not installed (on Debian: apt-get install valgrind)")
        }
        output => output.context("starting valgrind")?,
    };
    ensure!(output.status.success(), "under valgrind: {}", String::from_utf8_lossy(&output.stderr));
    costs(&out)
}

/// Parses callgrind's file into each function's own instructions: `fn=(number) name`, then lines of
/// position and cost; the line after `calls=` holds the cost of a call and is skipped.
fn costs(path: &Path) -> Result<Costs> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let (mut names, mut costs) = (BTreeMap::new(), Costs::new());
    let (mut current, mut of_call) = (String::new(), false);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("fn=") {
            let (number, name) = rest.split_once(' ').unwrap_or((rest, ""));
            if !name.is_empty() {
                names.insert(number.to_string(), short(name));
            }
            current = names.get(number).cloned().unwrap_or_default();
        } else if let Some(rest) = line.strip_prefix("cfn=").and_then(|rest| rest.split_once(' ')) {
            names.insert(rest.0.to_string(), short(rest.1));
        } else if line.starts_with("calls=") {
            of_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            let cost = line.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
            if let Some(cost) = cost.filter(|_| !std::mem::take(&mut of_call)) {
                *costs.entry(current.clone()).or_default() += cost;
            }
        }
    }
    ensure!(!costs.is_empty(), "callgrind counted nothing");
    Ok(costs)
}

/// Returns the last parts of a function's name, without type parameters, trait and hash.
fn short(name: &str) -> String {
    let of_trait = name.strip_prefix('<').and_then(|rest| rest.split_once(" as "));
    let name = match of_trait.and_then(|(of, rest)| Some((of, rest.rsplit_once(">::")?.1))) {
        Some((of, function)) => format!("{of}::{function}"),
        None => name.to_string(),
    };
    let mut depth = 0;
    let plain: String = name
        .chars()
        .filter(|&c| {
            depth += i32::from(c == '<');
            let keep = depth == 0;
            depth -= i32::from(c == '>');
            keep
        })
        .collect();
    let is_hash = |part: &str| part.len() == 17 && part.starts_with('h');
    let parts: Vec<&str> = plain.split("::").filter(|part| !part.is_empty() && !is_hash(part)).collect();
    parts[parts.len().saturating_sub(3)..].join("::")
}

/// Runs writes of 4 KiB in random order, one at a time, on a volume that was written, and is shared
/// if they are to break sharing. In memory: no device of the kernel is involved.
pub fn run_inside(_: &Context<'_>) -> Result<Vec<Row>> {
    let work = std::env::var(WORK).with_context(|| format!("{WORK} says what is to be done"))?;
    let (what, count) = work.split_once(' ').context("what, and how often")?;
    let (shared, served, count): (_, _, u64) = (what.starts_with("break"), what.ends_with("-served"), count.parse()?);
    block_on(Config::default(), |rt| async move {
        let device = MemoryDevice::new(4 * SPAN);
        let format = FormatOptions::new(4 * SPAN, *b"forkdisk-bench-5", 0);
        Pool::format(&device, &format).await?;
        let options = if served { as_served() } else { OpenOptions::default() };
        let pool = Pool::open(device, std::rc::Rc::new(rt.clone()), options).await?;
        pool.create("v", &CreateOptions::new(SPAN, 0)).await?;
        let volume = pool.volume("v")?;
        let fill = Job { write: true, len: 1 << 20, depth: 1, offsets: sequential(SPAN, 1 << 20) };
        load::run(&rt, &pool, &volume, &fill).await?;
        pool.checkpoint().await?;
        // Without a snapshot the same work runs, except for the sharing.
        if shared {
            pool.snapshot(&[("v", "s")], 0).await?;
        } else {
            pool.flush().await?;
        }
        load::run(&rt, &pool, &volume, &pages(SPAN, count, 1, 3)).await
    })??;
    Ok(vec![label("instructions/inside").row("requests", "count", (SPAN / PAGE as u64) as f64)])
}

fn as_served() -> OpenOptions {
    let memory = VolatileMemory::new(vec![0; MIN_VOLATILE_BYTES.max(4096 + (2 << 20))]);
    let volatile = Some(VolatileLog::new(memory, [0; 32]));
    OpenOptions::default().with_volatile(volatile).with_commit_interval(Duration::from_secs(5)).with_clock(Some(|| 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_told_apart_from_what_they_call() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let text = "events: Ir\nfn=(1) a::b::<u8>::c\n10 5\n+1 3\ncfn=(2) d\ncalls=1 20\n12 100\nfn=(2)\n20 \
            100\nfn=(1)\n* 2\n";
        std::fs::write(&path, text).unwrap();
        assert_eq!(costs(&path).unwrap(), Costs::from([("a::b::c".into(), 10), ("d".into(), 100)]));
        assert_eq!(short("<forkdisk::x::Y<T> as a::Z<B>>::poll::h0123456789abcdef"), "x::Y::poll");
    }
}
