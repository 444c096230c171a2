//! Forks of a folder with three volumes beside a writer: how long the writer stands still, and what the pool writes.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::cases::file;
use crate::cases::pools::PoolAt;
use crate::mounted::Mounted;
use crate::rows::{Row, Samples};
use crate::runner::{Context, Scale};

use super::bed::{Direct, Disk, Served, Write, beside, file_system, overlay, pool, reflink};
use super::{OURS, QCOW2, row};

const MEMBERS: [&str; 3] = ["app/disk", "app/memory", "app/log"];
/// The member that a client writes to.
const WRITTEN: &str = MEMBERS[0];
const CHILDREN: [usize; 3] = [1, 10, 100];

/// One fork of all members into a number of children.
#[derive(Default)]
struct Measured {
    seconds: Samples,
    /// Longest write of the client during the fork.
    pause: Samples,
    flushes: Samples,
    written: Samples,
}

/// Something that is forked.
trait Target {
    /// Makes `children` durable children.
    fn fork(&mut self, children: usize) -> Result<()>;

    /// Removes them.
    fn remove(&mut self, children: usize) -> Result<()>;

    /// Returns flushes and bytes written so far.
    fn counts(&mut self) -> Result<(u64, u64)>;

    /// Runs a fork while a client writes; returns the client's longest write. `None`: nothing can write meanwhile.
    fn fork_beside(&mut self, span: u64, children: usize) -> Result<Option<f64>>;
}

type Make = fn(&Context<'_>, u64) -> Result<Box<dyn Target>>;
const PEERS: [(&str, Make); 3] = [("xfs", xfs), ("btrfs", btrfs), (QCOW2, overlays)];

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(32 << 20, 256 << 20, 1 << 30);
    let rounds = context.scale.pick(3, 9, 15);
    let peers = PEERS.iter().filter(|_| context.options.peers);
    let mut targets = Vec::new();
    for &(name, make) in [(OURS, ours as Make)].iter().chain(peers) {
        match make(context, span) {
            Ok(target) => targets.push((name, target)),
            Err(error) => context.say(&format!("  {name} cannot be measured here: {error:#}")),
        }
    }
    let mut rows = Vec::new();
    for children in CHILDREN {
        let mut all: Vec<Measured> = targets.iter().map(|_| Measured::default()).collect();
        for round in 0..rounds {
            context.say(&format!("  {children} children, round {} of {rounds}", round + 1));
            for ((name, target), measured) in targets.iter_mut().zip(&mut all) {
                // Hundreds of programs, or of clones of files in thousands of extents, take long.
                let is_long = *name == QCOW2 || children == CHILDREN[2];
                let most = if context.scale == Scale::Quick && children == CHILDREN[2] { 0 } else { 1 };
                if *name != OURS && is_long && round >= most {
                    continue;
                }
                if let Err(error) = measure(target.as_mut(), span, children, measured) {
                    context.say(&format!("    {name}: {error:#}"));
                }
            }
        }
        for ((name, _), measured) in targets.iter().zip(&all) {
            let case = format!("fork/{children}");
            let mut add = |metric: &str, unit: &str, samples: &Samples| {
                if !samples.is_empty() {
                    rows.push(row(&case, name, metric, unit, samples));
                }
            };
            add("seconds", "s", &measured.seconds);
            add("longest_write_meanwhile", "us", &measured.pause);
            add("flushes", "count", &measured.flushes);
            add("bytes_written", "bytes", &measured.written);
        }
    }
    Ok(rows)
}

/// Forks once with nothing else going on, and once beside a client that writes.
fn measure(target: &mut dyn Target, span: u64, children: usize, measured: &mut Measured) -> Result<()> {
    let before = target.counts()?;
    let start = Instant::now();
    target.fork(children)?;
    measured.seconds.push(start.elapsed().as_secs_f64());
    let after = target.counts()?;
    measured.flushes.push((after.0 - before.0) as f64);
    measured.written.push((after.1 - before.1) as f64);
    target.remove(children)?;
    if let Some(longest) = target.fork_beside(span, children)? {
        measured.pause.push(longest * 1e6);
    }
    target.remove(children)
}

fn names(children: usize) -> Vec<String> {
    (0..children).map(|i| format!("child{i}")).collect()
}

/// How long the client writes before and after the fork.
const REST: Duration = Duration::from_millis(100);

/// Returns the longest of the writes that were under way while `work` ran.
fn longest_during(disk: &mut dyn Disk, span: u64, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (writes, (start, end)) = beside(disk, span, false, || {
        std::thread::sleep(REST);
        let start = Instant::now();
        work()?;
        let end = Instant::now();
        std::thread::sleep(REST);
        Ok((start, end))
    })?;
    let during = writes.iter().filter(|write| write.start <= end && write.end >= start);
    during.map(Write::seconds).max_by(f64::total_cmp).context("a write of the client")
}

/// A folder of a served pool.
struct Ours {
    served: Served,
    _pool: PoolAt,
}

fn ours(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let pool = pool(context, "fork", 5 * span + (512 << 20), (&MEMBERS, span))?;
    let served = Served::start(context, &pool, "fork", &[])?;
    Ok(Box::new(Ours { served, _pool: pool }))
}

impl Target for Ours {
    fn fork(&mut self, children: usize) -> Result<()> {
        self.served.fork("app", &names(children))
    }

    fn remove(&mut self, children: usize) -> Result<()> {
        let objects = names(children);
        self.served.call("delete", json!({"objects": objects, "recursive": true, "until_freed": true})).map(drop)
    }

    fn counts(&mut self) -> Result<(u64, u64)> {
        let activity = self.served.activity()?;
        Ok((activity.flushes, activity.written))
    }

    fn fork_beside(&mut self, span: u64, children: usize) -> Result<Option<f64>> {
        let mut client = self.served.nbd(WRITTEN)?;
        longest_during(&mut client, span, || self.served.fork("app", &names(children))).map(Some)
    }
}

/// Files, cloned by the file system one by one.
struct Reflinks(Mounted);

fn xfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    reflinks(context, span, "xfs")
}

fn btrfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    reflinks(context, span, "btrfs")
}

fn members(dir: &Path, span: u64) -> Result<()> {
    fs::create_dir(dir.join("app"))?;
    MEMBERS.iter().try_for_each(|member| file::plain(&dir.join(member), span))?;
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

fn reflinks(context: &Context<'_>, span: u64, kind: &str) -> Result<Box<dyn Target>> {
    let files = file_system(context, kind, &format!("fork-{kind}"), 5 * span + (1 << 30))?;
    members(files.dir(), span)?;
    Ok(Box::new(Reflinks(files)))
}

fn fork_files(dir: &Path, children: usize) -> Result<()> {
    for child in names(children) {
        fs::create_dir(dir.join(&child))?;
        for member in MEMBERS {
            reflink(&dir.join(member), &dir.join(member.replace("app", &child)))?;
        }
    }
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

fn remove_files(dir: &Path, children: usize) -> Result<()> {
    names(children).iter().try_for_each(|child| fs::remove_dir_all(dir.join(child)))?;
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

fn device_counts(files: &Mounted) -> Result<(u64, u64)> {
    let counts = files.counts()?;
    Ok((counts.flushes, counts.written_bytes))
}

impl Target for Reflinks {
    fn fork(&mut self, children: usize) -> Result<()> {
        fork_files(self.0.dir(), children)
    }

    fn remove(&mut self, children: usize) -> Result<()> {
        remove_files(self.0.dir(), children)
    }

    fn counts(&mut self) -> Result<(u64, u64)> {
        device_counts(&self.0)
    }

    fn fork_beside(&mut self, span: u64, children: usize) -> Result<Option<f64>> {
        let dir = self.0.dir();
        let mut client = Direct::open(&dir.join(WRITTEN))?;
        longest_during(&mut client, span, || fork_files(dir, children)).map(Some)
    }
}

/// qcow2 overlays on raw images. A client cannot go on writing to the image that they are over.
struct Overlays(Mounted);

fn overlays(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "fork-qcow2", 5 * span + (1 << 30))?;
    members(files.dir(), span)?;
    Ok(Box::new(Overlays(files)))
}

impl Target for Overlays {
    fn fork(&mut self, children: usize) -> Result<()> {
        let dir = self.0.dir();
        for child in names(children) {
            fs::create_dir(dir.join(&child))?;
            for member in MEMBERS {
                let clone = dir.join(member.replace("app", &child));
                overlay(&dir.join(member), "raw", &clone)?;
            }
        }
        Ok(rustix::fs::syncfs(File::open(dir)?)?)
    }

    fn remove(&mut self, children: usize) -> Result<()> {
        // Forks beside a client leave none.
        if !self.0.dir().join("child0").exists() {
            return Ok(());
        }
        remove_files(self.0.dir(), children)
    }

    fn counts(&mut self) -> Result<(u64, u64)> {
        device_counts(&self.0)
    }

    fn fork_beside(&mut self, _: u64, _: usize) -> Result<Option<f64>> {
        Ok(None)
    }
}
