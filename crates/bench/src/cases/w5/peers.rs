//! The same rounds on btrfs and XFS, whose `cp` makes clones as well, on loop devices over the same disk.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use forkdisk_uring::{attach_loop, detach_loop};

use super::figures::{self, CONSTANT};
use super::label;
use super::rounds::{Counts, Place, Plan, Round, run};
use crate::limits::{LIMIT, Limited as _};
use crate::rows::{Row, Samples};
use crate::runner::Context;

/// A file system with clones.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    mkfs: &'static str,
    options: &'static [&'static str],
}

pub const KINDS: [Kind; 2] = [
    Kind { name: "btrfs", mkfs: "mkfs.btrfs", options: &["-q", "-f"] },
    Kind { name: "xfs", mkfs: "mkfs.xfs", options: &["-q", "-f", "-m", "reflink=1"] },
];

/// One of them, mounted. Gone when dropped.
struct Mounted {
    device: PathBuf,
    dir: PathBuf,
}

impl Mounted {
    fn new(context: &Context<'_>, kind: Kind, size: u64) -> Result<Mounted> {
        let (file, dir) = (context.disk(kind.name), context.disk(&format!("{}-mnt", kind.name)));
        fs::create_dir_all(&dir)?;
        let backing = File::options().read(true).write(true).create(true).truncate(true).open(&file)?;
        backing.set_len(size)?;
        let device = attach_loop(&backing, false).context("a loop device")?;
        let mounted = Mounted { device, dir };
        call(Command::new(kind.mkfs).args(kind.options).arg(&mounted.device))?;
        call(Command::new("mount").arg(&mounted.device).arg(&mounted.dir))?;
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = call(Command::new("umount").arg(&self.dir));
        let _ = detach_loop(&self.device);
    }
}

fn call(command: &mut Command) -> Result<()> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let done = command.env("PATH", path).output_within(LIMIT).with_context(|| format!("{command:?}"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}

impl Place for Mounted {
    fn dir(&self) -> &Path {
        &self.dir
    }

    /// Twice: what the first frees is told to the device with the second.
    fn settle(&self) -> Result<()> {
        for _ in 0..2 {
            rustix::fs::syncfs(File::open(&self.dir)?)?;
        }
        Ok(())
    }

    /// Nobody tells pages of metadata from others.
    fn counts(&self) -> Result<Counts> {
        let name = self.device.file_name().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(format!("/sys/block/{name}/stat"))?;
        let figures: Vec<u64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let at = |i: usize| figures.get(i).copied().unwrap_or(0);
        // Reads, writes, discards, flushes; sectors read and written.
        let requests = at(0) + at(4) + at(11) + at(15);
        Ok(Counts { requests, bytes: (at(2) + at(6)) * 512, map_pages: 0 })
    }

    fn used(&self) -> Result<Option<(u64, u64)>> {
        Ok(None)
    }
}

/// All rounds of `plan`.
pub fn measure(context: &Context<'_>, kind: Kind, plan: &Plan) -> Result<Vec<Round>> {
    let place = Mounted::new(context, kind, plan.pool_size().max(2 << 30))?;
    run(&place, plan)
}

/// The peer's rows, and by how much ours are ahead in clone and remove: the peer's figure ÷ ours, less 1.
pub fn beside(name: &str, kind: Kind, theirs: &[Round], ours: &[Row]) -> Vec<Row> {
    let mut rows: Vec<Row> = figures::rows(name, "", kind.name, theirs);
    rows.retain(|row| !row.metric.starts_with("map_pages"));
    for (part, step) in CONSTANT {
        let case = format!("{name}/{part}");
        let label = label(&case);
        let median = |values: Vec<f64>| values.into_iter().collect::<Samples>().median().unwrap_or(0.0);
        let our = |metric: &str| {
            let row = ours.iter().find(|row| row.case == case && row.metric == metric && row.target == "forkdisk");
            row.and_then(|row| row.median).unwrap_or(f64::INFINITY)
        };
        let cpu = median(theirs.iter().map(|r| step(r).cpu).collect());
        let settled = median(theirs.iter().map(|r| step(r).settled).collect());
        let bytes = median(theirs.iter().map(|r| step(r).counts.bytes as f64).collect());
        rows.push(label.row(&format!("cpu_ahead_of_{}", kind.name), "ratio", cpu / our("cpu") - 1.0));
        rows.push(label.row(
            &format!("seconds_ahead_of_{}", kind.name),
            "ratio",
            settled / our("seconds_settled") - 1.0,
        ));
        rows.push(label.row(&format!("bytes_ahead_of_{}", kind.name), "ratio", bytes / our("bytes") - 1.0));
    }
    rows
}
