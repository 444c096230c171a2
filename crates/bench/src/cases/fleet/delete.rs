//! Many clones are deleted at once beside a client that writes and flushes.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use crate::cases::file;
use crate::load::random;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::bed::{Direct, Disk, Served, beside, durations, file_system, pool, reflink};
use super::{OURS, PAGE, row};

const IMAGE: &str = "base";
const WRITER: &str = "writer";
/// Pages that each clone has of its own.
const WRITES: usize = 8;

#[derive(Clone, Copy)]
struct Plan {
    span: u64,
    clones: usize,
    /// How long the client writes alone before.
    rest: Duration,
}

/// What one deletion of all clones measured, in seconds.
struct Measured {
    answered: f64,
    /// Until the space is free; `None` where that cannot be observed.
    freed: Option<f64>,
    alone: Samples,
    during: Samples,
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let plan = Plan {
        span: 64 << 20,
        clones: context.scale.pick(200, 1000, 1000),
        rest: Duration::from_secs_f64(context.scale.pick(1.0, 4.0, 8.0)),
    };
    let case = format!("delete/{}-clones", plan.clones);
    let mut rows = rows_of(&case, OURS, &ours(context, plan)?);
    if context.options.peers {
        match xfs(context, plan) {
            Ok(measured) => rows.extend(rows_of(&case, "xfs", &measured)),
            Err(error) => context.say(&format!("  xfs cannot be measured here: {error:#}")),
        }
    }
    Ok(rows)
}

fn rows_of(case: &str, target: &str, measured: &Measured) -> Vec<Row> {
    let one = |metric: &str, unit: &str, value: f64| row(case, target, metric, unit, &Samples::one(value));
    let mut rows = vec![one("seconds_until_answered", "s", measured.answered)];
    rows.extend(measured.freed.map(|freed| one("seconds_until_freed", "s", freed)));
    rows.extend(super::percentiles(case, target, "writer_alone", &measured.alone));
    rows.extend(super::percentiles(case, target, "writer", &measured.during));
    if let (Some(alone), Some(during)) = (measured.alone.percentile(99.0), measured.during.percentile(99.0)) {
        rows.push(one("writer_p99_ratio_to_alone", "ratio", during / alone));
    }
    rows
}

/// Returns the durations of a client's writes while nothing else happens, and while `delete` runs.
fn writes_beside<T>(
    disk: &mut dyn Disk,
    plan: Plan,
    delete: impl FnOnce() -> Result<T>,
) -> Result<(Samples, Samples, T)> {
    let (alone, ()) = beside(disk, plan.span, true, || {
        std::thread::sleep(plan.rest);
        Ok(())
    })?;
    let (during, done) = beside(disk, plan.span, true, delete)?;
    Ok((durations(&alone), durations(&during), done))
}

fn names(plan: Plan) -> Vec<String> {
    (0..plan.clones).map(|i| format!("fleet/{i}")).collect()
}

fn write_some(disk: &mut dyn Disk, plan: Plan, index: usize) -> Result<()> {
    let places = random(plan.span, PAGE, WRITES, index as u64);
    places.iter().try_for_each(|&place| disk.write(place, &[5; PAGE]))
}

fn ours(context: &Context<'_>, plan: Plan) -> Result<Measured> {
    let pool = pool(context, "delete", 2 * plan.span + (1 << 30), (&[IMAGE, WRITER], plan.span))?;
    let mut served = Served::start(context, &pool, "delete", &[])?;
    served.fork(IMAGE, &names(plan))?;
    for (index, name) in names(plan).iter().enumerate() {
        let mut client = served.nbd(name)?;
        write_some(&mut client, plan, index)?;
        client.disconnect()?;
    }
    let mut writer = served.nbd(WRITER)?;
    writer.flush()?;
    let (alone, during, (answered, freed)) = writes_beside(&mut writer, plan, || {
        let start = Instant::now();
        served.call("delete", json!({"objects": ["fleet"], "recursive": true}))?;
        let answered = start.elapsed().as_secs_f64();
        served.wait_until_freed()?;
        Ok((answered, start.elapsed().as_secs_f64()))
    })?;
    drop(writer);
    served.stop()?;
    Ok(Measured { answered, freed: Some(freed), alone, during })
}

/// XFS frees the space of removed files in the background; when it is done cannot be observed from outside.
fn xfs(context: &Context<'_>, plan: Plan) -> Result<Measured> {
    let files = file_system(context, "xfs", "delete-xfs", 2 * plan.span + (2 << 30))?;
    let dir = files.dir();
    fs::create_dir(dir.join("fleet"))?;
    [IMAGE, WRITER].iter().try_for_each(|name| file::plain(&dir.join(name), plan.span))?;
    for (index, name) in names(plan).iter().enumerate() {
        write_some(&mut reflink(&dir.join(IMAGE), &dir.join(name))?, plan, index)?;
    }
    rustix::fs::syncfs(File::open(dir)?)?;
    let mut writer = Direct::open(&dir.join(WRITER))?;
    let (alone, during, answered) = writes_beside(&mut writer, plan, || {
        let start = Instant::now();
        fs::remove_dir_all(dir.join("fleet"))?;
        rustix::fs::syncfs(File::open(dir)?)?;
        Ok(start.elapsed().as_secs_f64())
    })?;
    Ok(Measured { answered, freed: None, alone, during })
}
