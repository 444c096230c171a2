//! Back to a clean state: a volume of which a hundredth was changed, again and again.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::cases::file;
use crate::cases::pools::PoolAt;
use crate::limits::output_of;
use crate::load::random;
use crate::mounted::Mounted;
use crate::nbd::Nbd;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::bed::{Direct, Disk, Served, file_system, open, overlay, pool, reflink, sync_folder};
use super::{OURS, PAGE, QCOW2, percentiles, row};

const VOLUME: &str = "vm";
const CLEAN: &str = "vm@clean";
/// One page of this many is changed before each reset.
const CHANGED_EVERY: u64 = 100;

/// Most resets by programs that are started for each of them.
const MOST_OF_PROGRAMS: u64 = 20;

/// Something that is changed and reset.
trait Target {
    /// Writes to the places, and makes that durable.
    fn change(&mut self, places: &[u64]) -> Result<()>;

    /// Goes back to the clean state, durably.
    fn reset(&mut self) -> Result<()>;

    /// Reads a page.
    fn look(&mut self, place: u64) -> Result<u8>;
}

type Make = fn(&Context<'_>, u64) -> Result<Box<dyn Target>>;
const KINDS: [(&str, &str, Make); 5] = [
    ("reset/offline", OURS, offline),
    ("reset/live", OURS, live),
    ("reset", "xfs", xfs),
    ("reset", "btrfs", btrfs),
    ("reset", QCOW2, overlays),
];

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(32 << 20, 256 << 20, 1 << 30), context.scale.pick(30, 100, 300));
    let mut targets = Vec::new();
    for (case, name, make) in KINDS.into_iter().filter(|(_, name, _)| context.options.peers || *name == OURS) {
        match make(context, span) {
            Ok(target) => targets.push((case, name, target, Samples::default())),
            Err(error) => context.say(&format!("  {case} of {name} cannot be measured here: {error:#}")),
        }
    }
    context.say(&format!("  {times} resets of each"));
    for time in 0..times {
        let places = random(span, PAGE, (span / PAGE as u64 / CHANGED_EVERY) as usize, time);
        for (case, name, target, seconds) in &mut targets {
            // Several programs for each reset take long, and the same time each time.
            if *name == QCOW2 && time >= MOST_OF_PROGRAMS {
                continue;
            }
            match once(target.as_mut(), &places) {
                Ok(took) => seconds.push(took),
                Err(error) => context.say(&format!("    {case} of {name}: {error:#}")),
            }
        }
    }
    let of = |name: &str| targets.iter().find(|(_, of, ..)| *of == name).and_then(|(.., seconds)| seconds.median());
    let mut rows = Vec::new();
    for (case, name, _, seconds) in &targets {
        rows.extend(percentiles(case, name, "seconds", seconds));
        if let (OURS, Some(ours), Some(theirs)) = (*name, seconds.median(), of("xfs")) {
            rows.push(row(case, name, "median_ratio_to_xfs", "ratio", &Samples::one(ours / theirs)));
        }
    }
    Ok(rows)
}

/// Changes the disk and returns the seconds that the reset takes.
fn once(target: &mut dyn Target, places: &[u64]) -> Result<f64> {
    let Some(&place) = places.first() else { return Ok(0.0) };
    target.change(places)?;
    ensure!(target.look(place)? == 1, "a write is not there");
    let start = Instant::now();
    target.reset()?;
    let took = start.elapsed().as_secs_f64();
    ensure!(target.look(place)? == 0, "a reset left what was written");
    Ok(took)
}

fn change(disk: &mut dyn Disk, places: &[u64]) -> Result<()> {
    places.iter().try_for_each(|&place| disk.write(place, &[1; PAGE]))?;
    disk.flush()
}

fn look(disk: &mut dyn Disk, place: u64) -> Result<u8> {
    let mut page = [0; PAGE];
    disk.read(place, &mut page)?;
    Ok(page[0])
}

/// A volume of a served pool: by NBD clients that go before it is rolled back, or by one that stays.
struct Ours {
    served: Served,
    client: Option<Nbd>,
    _pool: PoolAt,
}

impl Ours {
    fn new(context: &Context<'_>, span: u64, name: &str) -> Result<Ours> {
        let pool = pool(context, name, 2 * span + (256 << 20), (&[VOLUME], span))?;
        let mut served = Served::start(context, &pool, name, &[])?;
        served.call("snapshot", json!({"snapshots": [CLEAN]}))?;
        Ok(Ours { served, client: None, _pool: pool })
    }

    fn with<T>(&mut self, work: impl FnOnce(&mut Nbd) -> Result<T>) -> Result<T> {
        match &mut self.client {
            Some(client) => work(client),
            None => {
                let mut client = self.served.nbd(VOLUME)?;
                let done = work(&mut client)?;
                client.disconnect()?;
                Ok(done)
            }
        }
    }
}

fn offline(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    Ok(Box::new(Ours::new(context, span, "reset-offline")?))
}

fn live(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let mut ours = Ours::new(context, span, "reset-live")?;
    ours.client = Some(ours.served.nbd(VOLUME)?);
    Ok(Box::new(ours))
}

impl Target for Ours {
    fn change(&mut self, places: &[u64]) -> Result<()> {
        self.with(|client| change(client, places))
    }

    fn reset(&mut self) -> Result<()> {
        let live = self.client.is_some();
        self.served.call("rollback", json!({"snapshot": CLEAN, "live": live})).map(drop)
    }

    fn look(&mut self, place: u64) -> Result<u8> {
        self.with(|client| look(client, place))
    }
}

/// A file that is replaced by a clone of another one.
struct Reflinks(Mounted);

fn xfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    reflinks(context, span, "xfs")
}

fn btrfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    reflinks(context, span, "btrfs")
}

fn reflinks(context: &Context<'_>, span: u64, kind: &str) -> Result<Box<dyn Target>> {
    let files = file_system(context, kind, &format!("reset-{kind}"), 2 * span + (1 << 30))?;
    file::plain(&files.dir().join("clean"), span)?;
    reflink(&files.dir().join("clean"), &files.dir().join(VOLUME))?;
    rustix::fs::syncfs(File::open(files.dir())?)?;
    Ok(Box::new(Reflinks(files)))
}

impl Target for Reflinks {
    fn change(&mut self, places: &[u64]) -> Result<()> {
        change(&mut Direct::open(&self.0.dir().join(VOLUME))?, places)
    }

    fn reset(&mut self) -> Result<()> {
        let dir = self.0.dir();
        fs::remove_file(dir.join(VOLUME))?;
        reflink(&dir.join("clean"), &dir.join(VOLUME))?.sync_all()?;
        sync_folder(dir)
    }

    fn look(&mut self, place: u64) -> Result<u8> {
        look(&mut Direct::open(&self.0.dir().join(VOLUME))?, place)
    }
}

/// An overlay that is replaced by an empty one, by `qemu-img`. Its writes are made by `qemu-io`.
struct Overlays(Mounted);

fn overlays(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "reset-qcow2", 2 * span + (1 << 30))?;
    let dir = files.dir();
    file::plain(&dir.join("clean"), span)?;
    overlay(&dir.join("clean"), "raw", &dir.join(VOLUME))?;
    Ok(Box::new(Overlays(files)))
}

impl Overlays {
    fn run(&self, commands: impl Iterator<Item = String>) -> Result<String> {
        let mut program = Command::new("qemu-io");
        program.args(["-f", "qcow2"]);
        commands.for_each(|command| {
            program.arg("-c").arg(command);
        });
        output_of(program.arg(self.0.dir().join(VOLUME)))
    }
}

impl Target for Overlays {
    fn change(&mut self, places: &[u64]) -> Result<()> {
        let writes = places.iter().map(|place| format!("write -q -P 1 {place} {PAGE}"));
        self.run(writes.chain(["flush".into()])).map(drop)
    }

    fn reset(&mut self) -> Result<()> {
        let (dir, image) = (self.0.dir(), self.0.dir().join(VOLUME));
        fs::remove_file(&image)?;
        overlay(&dir.join("clean"), "raw", &image)?;
        open(&image)?.sync_all()?;
        sync_folder(Path::new(dir))
    }

    fn look(&mut self, place: u64) -> Result<u8> {
        let printed = self.run([format!("read -v {place} 16")].into_iter())?;
        Ok(u8::from(printed.contains("01 01 01 01")))
    }
}
