//! The published table on a volume attached on this machine: `dd` into a file on ext4, on a loop
//! device with direct I/O, on the volume's file in a mounted pool.

use std::fs::{self, File};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use forkdisk::testing::Recording;

use super::super::w5::bed::Bed;
use super::super::w5::rounds::Place as _;
use super::ext4::{LINES, Line, compare_traces};
use crate::limits::output_of;
use crate::model::Label;
use crate::mounted::Mounted;
use crate::rows::{Row, Samples};
use crate::runner::Context;

const MIB: u64 = 1 << 20;
/// Files of this many MiB are written several times: the place that ext4 chooses is worth some seeks, of 3 % each.
const SMALL: u64 = 10;
const TIMES: usize = 5;
const VOLUME: &str = "v";
const SNAPSHOT: &str = "s";

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let sizes: &[u64] = context.scale.pick(&[10], &[10, 100], &[10, 100, 1000]);
    let span = (sizes[sizes.len() - 1] * 5 / 4 + 192) * MIB;
    let attached = Attached::new(context, span)?;
    let mut rows = Vec::new();
    for &size in sizes {
        for line in &LINES {
            context.say(&format!("    {} of {size} MiB", line.name));
            let case = format!("attached/{}-{size}m", line.name);
            let label = Label { workload: "w1", case: &case, target: "forkdisk" };
            let mut times = Vec::new();
            for _ in 0..if size <= SMALL { TIMES } else { 1 } {
                let [alone, shared] = [attached.measure(line, size, false)?, attached.measure(line, size, true)?];
                let (done, in_all) = ([alone.done, shared.done], [alone.in_all, shared.in_all]);
                times.push(compare_traces(&label, done, in_all, size * MIB));
            }
            rows.extend(together(&label, &times));
        }
    }
    attached.end()?;
    Ok(rows)
}

/// Combines the rows of several runs.
fn together(label: &Label<'_>, times: &[Vec<Row>]) -> Vec<Row> {
    let Some(first) = times.first() else { return Vec::new() };
    let row = |(i, row): (usize, &Row)| {
        let samples: Samples = times.iter().filter_map(|rows| rows.get(i)?.median).collect();
        label.rows(&row.metric, &row.unit, &samples)
    };
    first.iter().enumerate().map(row).collect()
}

/// What reached the pool's device until a file was written and synced, and including later work.
struct Seen {
    done: Recording,
    in_all: Recording,
}

/// A file system on a volume. Unmounted, detached and removed when dropped.
struct Attached {
    file_system: Option<Mounted>,
    bed: Bed,
}

impl Attached {
    fn new(context: &Context<'_>, span: u64) -> Result<Attached> {
        // Room for a copy of everything, and for the file that is written while the snapshot exists.
        let bed = Bed::new(context, span * 5 / 2 + 64 * MIB)?;
        let volume =
            File::options().read(true).write(true).create_new(true).open(bed.dir().join(VOLUME)).context("a volume")?;
        volume.set_len(span)?;
        let mkfs = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"];
        let mount = ["-t", "ext4", "-o", "noatime"];
        let file_system = Mounted::new(&volume, context.disk("ext4"), &mkfs, &mount)?;
        Ok(Attached { file_system: Some(file_system), bed })
    }

    /// Writes a file of `size` MiB as `line` says, with or without a snapshot of the volume.
    fn measure(&self, line: &Line, size: u64, with_snapshot: bool) -> Result<Seen> {
        let dir = self.file_system.as_ref().context("it is mounted")?.dir();
        let file = dir.join("f");
        let sync = || -> Result<()> { Ok(rustix::fs::syncfs(File::open(dir)?)?) };
        if file.exists() {
            fs::remove_file(&file)?;
        }
        sync()?;
        if line.op == "update" {
            dd(&file, MIB, size, &["conv=fsync"])?;
        }
        sync()?;
        let snapshot = self.bed.dir().join(".snapshots").join(VOLUME).join(SNAPSHOT);
        if with_snapshot {
            fs::create_dir(&snapshot).context("a snapshot")?;
        }
        self.bed.settle()?;
        let block: u64 = line.block.parse()?;
        let conv: &[&str] = match (line.op, line.how) {
            ("create", "dd") => &[],
            ("create", "dd-fsync") => &["conv=fsync"],
            ("update", "dd") => &["conv=notrunc"],
            ("update", "dd-fsync") => &["conv=notrunc,fsync"],
            _ => bail!("a line of another kind: {}", line.name),
        };
        self.bed.record()?;
        dd(&file, block, size * MIB / block, conv)?;
        sync()?;
        let done = self.bed.recorded()?;
        self.bed.record()?;
        self.bed.settle()?;
        let later = self.bed.recorded()?;
        if with_snapshot {
            fs::remove_dir(&snapshot).context("a snapshot that is removed")?;
            self.bed.settle()?;
        }
        let requests = done.requests.iter().chain(&later.requests).copied().collect();
        Ok(Seen { done, in_all: Recording { requests } })
    }

    fn end(mut self) -> Result<()> {
        if let Some(file_system) = self.file_system.take() {
            output_of(Command::new("umount").arg(file_system.dir()))?;
            drop(file_system);
        }
        self.bed.end()
    }
}

fn dd(file: &std::path::Path, block: u64, count: u64, conv: &[&str]) -> Result<()> {
    let of = format!("of={}", file.display());
    let (bs, count) = (format!("bs={block}"), format!("count={count}"));
    output_of(Command::new("dd").args(["if=/dev/zero", "status=none", &of, &bs, &count]).args(conv)).map(drop)
}
