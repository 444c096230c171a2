//! Sandboxes at a given rate: each is forked, used by a client and, when it is the oldest, deleted. Times count from
//! the moment at which a request was due, so that a server that stands still is charged with all that it held up.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde_json::json;

use crate::cases::pools::{MountedPool, PoolAt};
use crate::control::Control;
use crate::nbd::Nbd;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::bed::{Disk, Served, beside, clone_file, device_flush, durations, memory, open, pool};
use super::{OURS, PAGE, percentiles, row};

const IMAGE: &str = "base";
const GOLDEN: &str = "base@golden";
const NEIGHBOUR: &str = "neighbour";
/// Clients that fork and use sandboxes, and clients that delete.
const WORKERS: usize = 48;
const DELETERS: usize = 32;
/// What a verb may take beyond a flush of the device, in seconds.
const VERB_LIMIT: f64 = 0.005;
/// Flushes of the device that are timed.
const FLUSHES: usize = 300;

#[derive(Clone, Copy)]
struct Plan {
    span: u64,
    /// Sandboxes per second.
    rate: f64,
    /// Seconds of each part.
    seconds: f64,
    alive: usize,
}

impl Plan {
    fn count(&self) -> usize {
        (self.rate * self.seconds) as usize
    }

    /// The part before what is measured, after which each sandbox that is alive has been used: tables of its own are in
    /// memory, as they are from then on.
    fn before(self) -> Plan {
        Plan { seconds: self.alive as f64 / self.rate + 1.0, ..self }
    }
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let plan = Plan {
        span: 64 << 20,
        rate: context.scale.pick(200.0, 1000.0, 1000.0),
        seconds: context.scale.pick(4.0, 15.0, 60.0),
        alive: context.scale.pick(500, 10_000, 10_000),
    };
    let mut rows = over_nbd(context, plan)?;
    match over_mount(context, plan) {
        Ok(more) => rows.extend(more),
        Err(error) => context.say(&format!("  the mount cannot be measured here: {error:#}")),
    }
    Ok(rows)
}

/// Seconds of each part of a sandbox, from the moment at which it was due.
#[derive(Clone, Copy)]
struct Times {
    fork: f64,
    whole: f64,
}

/// Most seconds that a part takes, as a multiple of what it takes at the rate: beyond, what is due is left out.
const OVERRUN: f64 = 2.0;
/// Seconds beyond that.
const GRACE: f64 = 1.0;

/// Calls `operate` for 0, 1, … `count`, each at its time, from threads with a worker each; returns the results and the
/// seconds until the last one.
fn at_rate<W: Send, T: Send>(
    workers: Vec<W>,
    rate: f64,
    count: usize,
    operate: impl Fn(&mut W, usize, Instant) -> Result<T> + Sync,
) -> Result<(Vec<T>, f64)> {
    let (next, results, start) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(count)), Instant::now());
    let run = |mut worker: W| -> Result<()> {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count || start.elapsed().as_secs_f64() > OVERRUN * count as f64 / rate + GRACE {
                return Ok(());
            }
            let due = start + Duration::from_secs_f64(index as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let result = operate(&mut worker, index, due)?;
            results.lock().map_err(|_| anyhow!("a client panicked"))?.push(result);
        }
    };
    std::thread::scope(|scope| {
        let run = &run;
        let running: Vec<_> = workers.into_iter().map(|worker| scope.spawn(move || run(worker))).collect();
        running.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a client panicked"))))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    Ok((results.into_inner().map_err(|_| anyhow!("a client panicked"))?, seconds))
}

/// What a part of the run measured.
struct Part {
    sandboxes: Vec<Times>,
    deletions: Samples,
    /// Sandboxes per second that were completed.
    rate: f64,
}

/// Names of sandboxes that are alive, the oldest first, and the number of the next one.
struct Alive {
    names: Mutex<VecDeque<String>>,
    next: AtomicUsize,
}

impl Alive {
    fn new_name(&self) -> String {
        format!("sb/{:07}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    fn add(&self, name: String) -> Result<()> {
        self.names.lock().map_err(|_| anyhow!("a client panicked"))?.push_back(name);
        Ok(())
    }

    /// Returns the oldest one; `None` if forks lag behind so far that none is left.
    fn oldest(&self) -> Result<Option<String>> {
        Ok(self.names.lock().map_err(|_| anyhow!("a client panicked"))?.pop_front())
    }
}

/// Makes and uses sandboxes, and deletes the oldest ones at the same rate.
fn load<W: Send, D: Send>(
    plan: Plan,
    (workers, deleters): (Vec<W>, Vec<D>),
    alive: &Alive,
    sandbox: impl Fn(&mut W, &str, Instant, u64) -> Result<Times> + Sync,
    delete: impl Fn(&mut D, &str) -> Result<()> + Sync,
) -> Result<Part> {
    let one = |worker: &mut W, index: usize, due: Instant| {
        let name = alive.new_name();
        let times = sandbox(worker, &name, due, index as u64)?;
        alive.add(name)?;
        Ok(times)
    };
    let drop_one = |deleter: &mut D, _: usize, due: Instant| {
        let Some(oldest) = alive.oldest()? else { return Ok(None) };
        delete(deleter, &oldest)?;
        Ok(Some(due.elapsed().as_secs_f64()))
    };
    std::thread::scope(|scope| {
        let deleting = scope.spawn(|| at_rate(deleters, plan.rate, plan.count(), drop_one));
        let (sandboxes, seconds) = at_rate(workers, plan.rate, plan.count(), one)?;
        let (deletions, _) = deleting.join().unwrap_or_else(|_| Err(anyhow!("a client panicked")))?;
        let rate = sandboxes.len() as f64 / seconds;
        Ok(Part { sandboxes, deletions: deletions.into_iter().flatten().collect(), rate })
    })
}

/// Uses a sandbox: reads a page of the image, writes one, and makes it durable.
fn work(disk: &mut dyn Disk, span: u64, seed: u64) -> Result<()> {
    let (mut rng, mut page) = (SmallRng::seed_from_u64(seed), [0; PAGE]);
    let mut place = || rng.random_range(0..span / PAGE as u64) * PAGE as u64;
    disk.read(place(), &mut page)?;
    disk.write(place(), &[9; PAGE])?;
    disk.flush()
}

fn read_whole(disk: &mut dyn Disk, span: u64) -> Result<()> {
    let mut piece = vec![0; 1 << 20];
    (0..span >> 20).try_for_each(|mib| disk.read(mib << 20, &mut piece))
}

fn pool_of(context: &Context<'_>, plan: Plan, name: &str) -> Result<PoolAt> {
    pool(context, name, 2 * plan.span + context.scale.pick(1 << 30, 3 << 30, 6 << 30), (&[IMAGE, NEIGHBOUR], plan.span))
}

/// A worker of the control socket and the data socket.
struct OverNbd {
    control: Control,
    socket: PathBuf,
    span: u64,
}

fn sandbox_over_nbd(worker: &mut OverNbd, name: &str, due: Instant, seed: u64) -> Result<Times> {
    worker.control.call("fork", json!({"source": GOLDEN, "children": [name]}))?;
    let fork = due.elapsed().as_secs_f64();
    let mut client = Nbd::connect(&worker.socket, name)?;
    work(&mut client, worker.span, seed)?;
    client.disconnect()?;
    Ok(Times { fork, whole: due.elapsed().as_secs_f64() })
}

fn delete_by_control(control: &mut Control, name: &str) -> Result<()> {
    control.call("delete", json!({"objects": [name]})).map(drop)
}

fn over_nbd(context: &Context<'_>, plan: Plan) -> Result<Vec<Row>> {
    const CASE: &str = "open-loop/nbd";
    const NAME: &str = "open-loop";
    context.say("  nbd");
    let pool = pool_of(context, plan, NAME)?;
    let mut served = Served::start(context, &pool, NAME, &["--max-connections", "1000"])?;
    served.call("snapshot", json!({"snapshots": [GOLDEN]}))?;
    let alive = Alive { names: Mutex::default(), next: AtomicUsize::new(0) };
    let names: Vec<String> = (0..plan.alive).map(|_| alive.new_name()).collect();
    for some in names.chunks(1000) {
        served.fork(GOLDEN, some)?;
    }
    names.into_iter().try_for_each(|name| alive.add(name))?;
    let workers = |served: &Served| -> Result<(Vec<OverNbd>, Vec<Control>)> {
        let control = || Control::connect(&served.daemon.control);
        let worker = |_| Ok(OverNbd { control: control()?, socket: served.socket.clone(), span: plan.span });
        Ok(((0..WORKERS).map(worker).collect::<Result<_>>()?, (0..DELETERS).map(|_| control()).collect::<Result<_>>()?))
    };
    let flush = device_flush(context, NAME, FLUSHES)?;
    // The image, so that the shared cache has it.
    read_whole(&mut served.nbd(GOLDEN)?, plan.span)?;
    load(plan.before(), workers(&served)?, &alive, sandbox_over_nbd, delete_by_control)?;
    let process = served.daemon.process.id();
    let (before, memory_before, cpu) = (served.activity()?, memory(process)?, served.daemon.process.cpu()?);
    let part = load(plan, workers(&served)?, &alive, sandbox_over_nbd, delete_by_control)?;
    let cpu = served.daemon.process.cpu()? - cpu;
    let (after, memory_after) = (served.activity()?, memory(process)?);
    let mut neighbour = served.nbd(NEIGHBOUR)?;
    let [alone, crowded] = beside_neighbour(&mut neighbour, plan, || {
        load(plan, workers(&served)?, &alive, sandbox_over_nbd, delete_by_control)
    })?;
    let mut rows = rows_of(CASE, &part, &flush);
    let each = |value: u64| Samples::one(value as f64 / part.sandboxes.len() as f64);
    rows.push(row(CASE, OURS, "flushes_per_sandbox", "count", &each(after.flushes - before.flushes)));
    rows.push(row(CASE, OURS, "commits_per_sandbox", "count", &each(after.commits - before.commits)));
    rows.push(row(CASE, OURS, "bytes_written_per_sandbox", "bytes", &each(after.written - before.written)));
    rows.push(row(CASE, OURS, "daemon_cpu_per_sandbox", "us", &Samples::one(cpu * 1e6 / part.sandboxes.len() as f64)));
    rows.extend(memory_rows(CASE, memory_before, memory_after));
    rows.extend(neighbour_rows(CASE, &alone, &crowded));
    drop(neighbour);
    served.stop()?;
    Ok(rows)
}

/// Returns how long the writes of a neighbour take while nothing else happens, and while `load` runs.
fn beside_neighbour(disk: &mut dyn Disk, plan: Plan, load: impl FnOnce() -> Result<Part>) -> Result<[Samples; 2]> {
    let (alone, ()) = beside(disk, plan.span, true, || {
        std::thread::sleep(Duration::from_secs_f64(plan.seconds));
        Ok(())
    })?;
    let (crowded, _) = beside(disk, plan.span, true, load)?;
    Ok([durations(&alone), durations(&crowded)])
}

fn neighbour_rows(case: &str, alone: &Samples, crowded: &Samples) -> Vec<Row> {
    let mut rows = percentiles(case, OURS, "neighbour_alone", alone);
    rows.extend(percentiles(case, OURS, "neighbour", crowded));
    let ratio = crowded.percentile(99.0).zip(alone.percentile(99.0)).map(|(crowded, alone)| crowded / alone);
    rows.push(row(case, OURS, "neighbour_p99_ratio_to_alone", "ratio", &ratio.into_iter().collect()));
    rows
}

fn memory_rows(case: &str, before: u64, after: u64) -> [Row; 2] {
    let mib = Samples::one(before as f64 / (1 << 20) as f64);
    let ratio = Samples::one(after as f64 / before as f64);
    let row = |metric: &str, unit: &str, samples: &Samples| row(case, OURS, metric, unit, samples);
    [row("memory", "MiB", &mib), row("memory_ratio_end_to_begin", "ratio", &ratio)]
}

fn rows_of(case: &str, part: &Part, flush: &Samples) -> Vec<Row> {
    let forks: Samples = part.sandboxes.iter().map(|times| times.fork).collect();
    let mut rows = percentiles(case, OURS, "fork", &forks);
    rows.extend(percentiles(case, OURS, "delete", &part.deletions));
    rows.extend(percentiles(case, OURS, "sandbox", &part.sandboxes.iter().map(|times| times.whole).collect()));
    rows.extend(percentiles(case, "raw", "device_flush", flush));
    if let Some(flush) = flush.percentile(99.0) {
        for (metric, times) in [("fork_p99_of_limit", &forks), ("delete_p99_of_limit", &part.deletions)] {
            let p99 = times.percentile(99.0).map(|p99| p99 / (VERB_LIMIT + flush));
            rows.push(row(case, OURS, metric, "ratio", &p99.into_iter().collect()));
        }
    }
    rows.push(row(case, OURS, "rate", "1/s", &Samples::one(part.rate)));
    rows
}

/// The same with the files of a mount: a clone by `copy_file_range`, as `cp` makes it.
fn over_mount(context: &Context<'_>, plan: Plan) -> Result<Vec<Row>> {
    const CASE: &str = "open-loop/mount";
    const NAME: &str = "open-loop-mount";
    context.say("  mount");
    let pool = pool_of(context, plan, NAME)?;
    let mounted = MountedPool::new(context, pool.path(), (NAME, "auto"), IMAGE)?;
    fs::create_dir(mounted.file("sb"))?;
    let alive = Alive { names: Mutex::default(), next: AtomicUsize::new(0) };
    let image = mounted.file(IMAGE);
    for _ in 0..plan.alive {
        let name = alive.new_name();
        clone_file(&image, &mounted.file(&name))?;
        alive.add(name)?;
    }
    let sandbox = |_: &mut (), name: &str, due: Instant, seed: u64| {
        let mut file = clone_file(&image, &mounted.file(name))?;
        let fork = due.elapsed().as_secs_f64();
        work(&mut file, plan.span, seed)?;
        drop(file);
        Ok(Times { fork, whole: due.elapsed().as_secs_f64() })
    };
    let delete = |_: &mut (), name: &str| Ok(fs::remove_file(mounted.file(name))?);
    let workers = || (vec![(); WORKERS], vec![(); DELETERS]);
    let flush = device_flush(context, NAME, FLUSHES)?;
    read_whole(&mut open(&image)?, plan.span)?;
    load(plan.before(), workers(), &alive, sandbox, delete)?;
    let device = pool.device().context("a pool on a loop device")?;
    let (before, memory_before) = (device.counts()?, memory(mounted.process.id())?);
    let cpu = mounted.process.cpu()?;
    let part = load(plan, workers(), &alive, sandbox, delete)?;
    let cpu = mounted.process.cpu()? - cpu;
    let (counts, memory_after) = (device.counts()?.since(before), memory(mounted.process.id())?);
    let mut neighbour = open(&mounted.file(NEIGHBOUR))?;
    let [alone, crowded] = beside_neighbour(&mut neighbour, plan, || load(plan, workers(), &alive, sandbox, delete))?;
    let mut rows = rows_of(CASE, &part, &flush);
    let each = |value: u64| Samples::one(value as f64 / part.sandboxes.len() as f64);
    rows.push(row(CASE, OURS, "flushes_per_sandbox", "count", &each(counts.flushes)));
    rows.push(row(CASE, OURS, "bytes_written_per_sandbox", "bytes", &each(counts.written_bytes)));
    rows.push(row(CASE, OURS, "daemon_cpu_per_sandbox", "us", &Samples::one(cpu * 1e6 / part.sandboxes.len() as f64)));
    rows.extend(memory_rows(CASE, memory_before, memory_after));
    rows.extend(neighbour_rows(CASE, &alone, &crowded));
    drop(neighbour);
    mounted.stop()?;
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_slow_client_holds_up_counts_from_when_it_was_due() {
        let slow = Duration::from_millis(20);
        let operate = |_: &mut (), _: usize, due: Instant| {
            std::thread::sleep(slow);
            Ok(due.elapsed())
        };
        let (times, _) = at_rate(vec![()], 1000.0, 5, operate).unwrap();
        // One client that takes 20 ms for what is due every millisecond: the fifth waits for four others.
        assert_eq!(times.len(), 5);
        assert!(times.iter().max().is_some_and(|last| *last >= 5 * slow - Duration::from_millis(4)), "{times:?}");
    }
}
