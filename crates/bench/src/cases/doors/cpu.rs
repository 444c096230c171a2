//! CPU and time per request through every door, on files in memory, all doors in turns.
//!
//! With one request at a time, client and servers share one processor. Otherwise chance decides whether a request wakes
//! a sleeping processor, which on a virtual machine takes longer than the request.

use std::fs;
use std::rc::Rc;

use anyhow::Result;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::load::{Job, random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::row;
use super::subjects::{BARE, Cost, Door, FUSE_URING, NBDKIT, OURS, QEMU, Work, open};

/// The bound of a server with rings in memory: this many times the bare loop's CPU, and this many microseconds.
const BOUND: (f64, f64) = (1.35, 0.5);

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(256 << 20, 512 << 20, 1 << 30), context.scale.pick(3, 7, 15));
    let mut doors = open(context, span);
    let everywhere = sched_getaffinity(None)?;
    let rows = measure(context, &mut doors, (span, times), &everywhere);
    sched_setaffinity(None, &everywhere)?;
    rows
}

fn measure(
    context: &Context<'_>,
    doors: &mut [Door],
    (span, times): (u64, usize),
    everywhere: &CpuSet,
) -> Result<Vec<Row>> {
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| everywhere.is_set(cpu)).unwrap_or(0);
    let mut one = CpuSet::new();
    one.set(first);
    let mut rows = Vec::new();
    for work in works(context, span) {
        context.say(&format!("  {}", work.name));
        place(doors, if work.job.depth == 1 { &one } else { everywhere })?;
        let mut costs = vec![Vec::new(); doors.len()];
        for round in 0..=times {
            for (door, costs) in doors.iter_mut().zip(&mut costs) {
                match door.subject.run(&work) {
                    Ok(cost) if round > 0 => costs.push(cost),
                    Ok(_) => {}
                    Err(error) => context.say(&format!("    {} of {}: {error:#}", door.name, door.target)),
                }
            }
        }
        rows.extend(rows_of(&work, doors, &costs, times));
    }
    Ok(rows)
}

/// Moves all threads of the servers, and this one with what it starts, to processors.
fn place(doors: &[Door], processors: &CpuSet) -> Result<()> {
    sched_setaffinity(None, processors)?;
    for server in doors.iter().filter_map(|door| door.subject.server()) {
        for thread in fs::read_dir(format!("/proc/{server}/task"))? {
            let thread = thread?.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
            // Fails if the thread has ended meanwhile.
            let _ = sched_setaffinity(thread, processors);
        }
    }
    Ok(())
}

fn works(context: &Context<'_>, span: u64) -> Vec<Work> {
    let deep = context.scale.pick(30_000, 120_000, 240_000);
    let mut works = Vec::new();
    for (name, write, len, depth, count) in [
        ("read-4k-qd1", false, 4096, 1, deep / 6),
        ("read-4k-qd32", false, 4096, 32, deep),
        ("write-4k-qd1", true, 4096, 1, deep / 6),
        ("write-4k-qd32", true, 4096, 32, deep),
        ("read-1m-seq", false, 1 << 20, 8, deep / 60),
        ("write-1m-seq", true, 1 << 20, 8, deep / 60),
    ] {
        let once = if len == 4096 { random(span, len, count, 3) } else { sequential(span, len) };
        let offsets: Rc<[u64]> = once.iter().copied().cycle().take(count).collect();
        works.push(Work { name, job: Job { write, len, depth, offsets }, span });
    }
    works
}

fn rows_of(work: &Work, doors: &[Door], costs: &[Vec<Cost>], times: usize) -> Vec<Row> {
    let of = |name: &str, target: &str| {
        let index = doors.iter().position(|door| (door.name, door.target) == (name, target))?;
        // A round that failed leaves no pairs.
        costs.get(index).filter(|costs| costs.len() == times)
    };
    let mut rows = Vec::new();
    for door in doors {
        let Some(costs) = of(door.name, door.target) else { continue };
        let case = format!("cpu/{}-{}", door.name, work.name);
        let mut add = |target: &str, metric: &str, unit: &str, samples: Samples| {
            rows.push(row(&case, target, metric, unit, &samples));
        };
        let is_served = door.name != "library";
        if is_served {
            add(door.target, "server_cpu_per_op", "us", costs.iter().map(|cost| cost.server).collect());
        }
        add(door.target, "cpu_per_op", "us", costs.iter().map(|cost| cost.all).collect());
        let time = if work.job.depth == 1 { "latency" } else { "time_per_op" };
        add(door.target, time, "us", costs.iter().map(|cost| cost.wall).collect());
        if door.target != OURS {
            continue;
        }
        if let Some(bare) = of("library", BARE) {
            let pairs = || costs.iter().zip(bare);
            match door.name {
                "library" => add(OURS, "cpu_ratio_to_bare", "ratio", pairs().map(|(a, b)| a.all / b.all).collect()),
                "vhost-user" => {
                    let bound = |cost: &Cost| BOUND.0 * cost.all + BOUND.1;
                    add(OURS, "server_cpu_of_bound", "ratio", pairs().map(|(a, b)| a.server / bound(b)).collect());
                }
                _ => {}
            }
        }
        if door.name == FUSE_URING
            && let Some(before) = of("fuse", OURS)
        {
            let ratios = costs.iter().zip(before).map(|(a, b)| a.server / b.server).collect();
            add(OURS, "server_cpu_ratio_to_dev_fuse", "ratio", ratios);
        }
        for (peer, word) in [(QEMU, "qemu_storage_daemon"), (NBDKIT, "nbdkit")] {
            let Some(theirs) = of(door.name, peer) else { continue };
            let mut ratio = |metric: &str, side: fn(&Cost) -> f64| {
                let ratios = costs.iter().zip(theirs).map(|(a, b)| side(a) / side(b)).collect();
                add(OURS, &format!("{metric}_ratio_to_{word}"), "ratio", ratios);
            };
            ratio("server_cpu", |cost| cost.server);
            ratio("cpu", |cost| cost.all);
            ratio(time, |cost| cost.wall);
        }
    }
    rows
}
