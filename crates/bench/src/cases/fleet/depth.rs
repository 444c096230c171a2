//! Clones of clones: random reads and first writes of 4 KiB on a clone with a long descent, as a multiple of those on a
//! clone of the image.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context as _, Result};

use crate::cases::file;
use crate::cases::pools::PoolAt;
use crate::cases::server::Server;
use crate::limits::output_of;
use crate::load::random;
use crate::mounted::{DeviceCounts, Mounted};
use crate::nbd::Nbd;
use crate::rows::{Row, Samples};
use crate::runner::{Context, Scale};

use super::bed::{Direct, Disk, Served, counted, file_system, overlay, pool, reflink};
use super::{OURS, PAGE, QCOW2, ratios, row};

const DEPTHS: [usize; 4] = [1, 10, 100, 1000];
/// The longest chain of images. Files of XFS and btrfs have it, too, except in full runs: the time of a reflink follows
/// the number of extents, and each level adds two for each page that was written.
const MOST_IMAGES: usize = 100;
/// Pages that are written on each clone before it is cloned.
const WRITES: usize = 8;
const IMAGE: &str = "base";

/// Clones that are measured, each with the number of volumes above it.
trait Target {
    fn depths(&self) -> &'static [usize];

    /// Returns a client of the clone at `depth`.
    fn client(&mut self, depth: usize) -> Result<Box<dyn Disk>>;

    /// Reads the counts of the device.
    fn counts(&self) -> Result<DeviceCounts>;
}

/// What was measured of one target at one depth, by round.
#[derive(Default)]
struct Measured {
    read: Vec<f64>,
    write: Vec<f64>,
    device_reads: Vec<f64>,
    device_written: Vec<f64>,
}

struct Plan {
    span: u64,
    rounds: usize,
    /// Reads and first writes of a round.
    count: usize,
}

type Make = fn(&Context<'_>, u64) -> Result<Box<dyn Target>>;
const PEERS: [(&str, Make); 3] = [(QCOW2, chain), ("xfs", xfs), ("btrfs", btrfs)];

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let plan = Plan {
        span: context.scale.pick(32 << 20, 64 << 20, 256 << 20),
        rounds: context.scale.pick(5, 11, 21),
        count: context.scale.pick(300, 1000, 2000),
    };
    let peers = PEERS.iter().filter(|_| context.options.peers);
    let mut targets = Vec::new();
    for &(name, make) in [(OURS, ours as Make)].iter().chain(peers) {
        context.say(&format!("  {name}: clones of clones"));
        match make(context, plan.span) {
            Ok(target) => targets.push((name, target)),
            Err(error) => context.say(&format!("    {name} cannot be measured here: {error:#}")),
        }
    }
    let mut all: Vec<Vec<Measured>> = targets.iter().map(|_| DEPTHS.map(|_| Measured::default()).into()).collect();
    let pages = random(plan.span, PAGE, (plan.span / PAGE as u64) as usize, 9);
    for round in 0..plan.rounds {
        context.say(&format!("  round {} of {}", round + 1, plan.rounds));
        for ((name, target), measured) in targets.iter_mut().zip(&mut all) {
            let depths = target.depths();
            for (&depth, measured) in depths.iter().zip(measured) {
                if let Err(error) = measure(target.as_mut(), depth, &plan, (&pages, round), measured) {
                    context.say(&format!("    {name} at depth {depth}: {error:#}"));
                }
            }
        }
    }
    Ok(targets.iter().zip(&all).flat_map(|((name, target), all)| rows_of(name, target.depths(), all)).collect())
}

/// Measures one round. Its writes go to pages to which no other round writes.
fn measure(
    target: &mut dyn Target,
    depth: usize,
    plan: &Plan,
    (pages, round): (&Rc<[u64]>, usize),
    measured: &mut Measured,
) -> Result<()> {
    let reads = random(plan.span, PAGE, plan.count, 100 + round as u64);
    let writes = pages.chunks(plan.count.min(pages.len() / plan.rounds)).nth(round).context("pages for a round")?;
    let mut client = target.client(depth)?;
    let (mut page, count) = (vec![0; PAGE], reads.len() as f64);
    // What the first requests load into memory stays there.
    reads.iter().take(reads.len() / 4).try_for_each(|&offset| client.read(offset, &mut page))?;
    let (device, seconds) = counted(
        || target.counts(),
        || {
            let start = Instant::now();
            reads.iter().try_for_each(|&offset| client.read(offset, &mut page))?;
            Ok(start.elapsed().as_secs_f64())
        },
    )?;
    measured.read.push(seconds / count);
    measured.device_reads.push(device.reads as f64 / count);
    let count = writes.len() as f64;
    let (device, seconds) = counted(
        || target.counts(),
        || {
            let start = Instant::now();
            writes.iter().try_for_each(|&offset| client.write(offset, &page))?;
            let seconds = start.elapsed().as_secs_f64();
            client.flush()?;
            Ok(seconds)
        },
    )?;
    measured.write.push(seconds / count);
    measured.device_written.push(device.written_bytes as f64 / count);
    Ok(())
}

fn rows_of(target: &str, depths: &[usize], all: &[Measured]) -> Vec<Row> {
    let Some(first) = all.first() else { return Vec::new() };
    let samples = |values: &[f64], factor: f64| values.iter().map(|value| value * factor).collect::<Samples>();
    let mut rows = Vec::new();
    for (depth, measured) in depths.iter().zip(all) {
        let case = format!("depth/{depth}");
        let mut add =
            |metric: &str, unit: &str, samples: &Samples| rows.push(row(&case, target, metric, unit, samples));
        add("read", "us", &samples(&measured.read, 1e6));
        add("first_write", "us", &samples(&measured.write, 1e6));
        add("device_reads_per_read", "count", &samples(&measured.device_reads, 1.0));
        add("device_bytes_per_first_write", "bytes", &samples(&measured.device_written, 1.0));
        if *depth > 1 {
            for (metric, of) in [
                ("read_ratio_to_depth_1", (|m| &m.read) as fn(&Measured) -> &Vec<f64>),
                ("first_write_ratio_to_depth_1", |m| &m.write),
                ("device_reads_ratio_to_depth_1", |m| &m.device_reads),
                ("device_bytes_written_ratio_to_depth_1", |m| &m.device_written),
            ] {
                add(metric, "ratio", &ratios(of(measured), of(first)));
            }
        }
    }
    rows
}

/// Returns the depths that are not above `most`.
fn up_to(most: usize) -> &'static [usize] {
    &DEPTHS[..DEPTHS.partition_point(|&depth| depth <= most)]
}

fn deepest(depths: &[usize]) -> usize {
    depths.last().copied().unwrap_or(0)
}

/// Returns the places that are written on the clone number `level`.
fn places(span: u64, level: usize) -> Rc<[u64]> {
    random(span, PAGE, WRITES, level as u64)
}

fn name(level: usize) -> String {
    if level == 0 { IMAGE.into() } else { format!("c{level}") }
}

/// The clone that is measured; nothing is cloned from it.
fn tip(depth: usize) -> String {
    format!("tip{depth}")
}

/// A served pool, without a shared cache, so that every read is one of the device.
struct Ours {
    served: Served,
    pool: PoolAt,
}

fn ours(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let pool = pool(context, "depth", 4 * span + (512 << 20), (&[IMAGE], span))?;
    let mut served = Served::start(context, &pool, "depth", &["--shared-cache", "0"])?;
    for level in 1..=deepest(&DEPTHS) {
        let above = name(level - 1);
        if DEPTHS.contains(&level) {
            served.fork(&above, &[tip(level)])?;
        }
        served.fork(&above, &[name(level)])?;
        let mut client = served.nbd(&name(level))?;
        places(span, level).iter().try_for_each(|&offset| client.write(offset, &[3; PAGE]))?;
        client.disconnect()?;
    }
    Ok(Box::new(Ours { served, pool }))
}

impl Target for Ours {
    fn depths(&self) -> &'static [usize] {
        &DEPTHS
    }

    fn client(&mut self, depth: usize) -> Result<Box<dyn Disk>> {
        Ok(Box::new(self.served.nbd(&tip(depth))?))
    }

    fn counts(&self) -> Result<DeviceCounts> {
        self.pool.device().context("a pool on a loop device")?.counts()
    }
}

/// Files of which each is a clone of the one before, by the file system.
struct Reflinks {
    files: Mounted,
    depths: &'static [usize],
}

fn xfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    reflinks(context, span, "xfs")
}

fn btrfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    reflinks(context, span, "btrfs")
}

fn reflinks(context: &Context<'_>, span: u64, kind: &str) -> Result<Box<dyn Target>> {
    let files = file_system(context, kind, &format!("depth-{kind}"), 4 * span + (2 << 30))?;
    let dir = files.dir();
    let depths = if context.scale == Scale::Full { &DEPTHS[..] } else { up_to(MOST_IMAGES) };
    file::plain(&dir.join(IMAGE), span)?;
    for level in 1..=deepest(depths) {
        let above = dir.join(name(level - 1));
        if DEPTHS.contains(&level) {
            reflink(&above, &dir.join(tip(level)))?;
        }
        reflink(&above, &dir.join(name(level)))?;
        let mut clone = Direct::open(&dir.join(name(level)))?;
        places(span, level).iter().try_for_each(|&offset| clone.write(offset, &[3; PAGE]))?;
    }
    rustix::fs::syncfs(File::open(dir)?)?;
    Ok(Box::new(Reflinks { files, depths }))
}

impl Target for Reflinks {
    fn depths(&self) -> &'static [usize] {
        self.depths
    }

    fn client(&mut self, depth: usize) -> Result<Box<dyn Disk>> {
        Ok(Box::new(Direct::open(&self.files.dir().join(tip(depth)))?))
    }

    fn counts(&self) -> Result<DeviceCounts> {
        self.files.counts()
    }
}

/// qcow2 images of which each is an overlay on the one before, on XFS.
struct Chain {
    depths: &'static [usize],
    servers: Vec<(usize, Server, PathBuf)>,
    files: Mounted,
}

fn chain(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "depth-qcow2", 4 * span + (2 << 30))?;
    let at = |name: String| files.dir().join(format!("{name}.qcow2"));
    let image = files.dir().join(IMAGE);
    file::plain(&image, span)?;
    let mut servers = Vec::new();
    // Each level takes two programs.
    let depths = up_to(context.scale.pick(MOST_IMAGES / 10, MOST_IMAGES, MOST_IMAGES));
    for level in 1..=deepest(depths) {
        let (above, format) = if level == 1 { (image.clone(), "raw") } else { (at(name(level - 1)), "qcow2") };
        if DEPTHS.contains(&level) {
            let (tip, socket) = (at(tip(level)), context.ram(&format!("depth-{level}.sock")));
            overlay(&above, format, &tip)?;
            servers.push((level, Server::qemu_nbd_on(&tip, &["-f", "qcow2"], &socket)?, socket));
        }
        overlay(&above, format, &at(name(level)))?;
        write(&at(name(level)), &places(span, level))?;
    }
    Ok(Box::new(Chain { depths, servers, files }))
}

/// Writes pages of an image, all by one program.
fn write(image: &Path, places: &[u64]) -> Result<()> {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2"]);
    for place in places {
        command.arg("-c").arg(format!("write -q -P 3 {place} {PAGE}"));
    }
    output_of(command.arg(image)).map(drop)
}

impl Target for Chain {
    fn depths(&self) -> &'static [usize] {
        self.depths
    }

    fn client(&mut self, depth: usize) -> Result<Box<dyn Disk>> {
        let server = self.servers.iter().find(|(of, ..)| *of == depth);
        let (.., socket) = server.with_context(|| format!("an image at depth {depth}"))?;
        Ok(Box::new(Nbd::connect(socket, file::VOLUME)?))
    }

    fn counts(&self) -> Result<DeviceCounts> {
        self.files.counts()
    }
}
