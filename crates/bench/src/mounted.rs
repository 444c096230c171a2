//! A file system of the kernel on a loop device.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use forkdisk_uring::{abandon_loop, attach_loop, detach_loop};

use crate::ending::{Thing, Undoable};
use crate::limits::output_of;

/// A loop device. Detached when dropped.
pub struct LoopDevice {
    path: PathBuf,
    _undoable: Undoable,
}

impl LoopDevice {
    /// Attaches `backing`.
    pub fn new(backing: &File) -> Result<LoopDevice> {
        let path = attach_loop(backing, false).context("a loop device")?;
        let undoable = Undoable::new(Thing::Loop(path.clone()));
        Ok(LoopDevice { path, _undoable: undoable })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the kernel's counts of its requests.
    pub fn counts(&self) -> Result<DeviceCounts> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        Ok(DeviceCounts::parse(&fs::read_to_string(format!("/sys/block/{name}/stat"))?))
    }
}

/// Requests that a device has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    pub discards: u64,
    pub flushes: u64,
}

impl DeviceCounts {
    fn parse(stat: &str) -> DeviceCounts {
        const SECTOR: u64 = 512;
        let figures: Vec<u64> = stat.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let at = |i: usize| figures.get(i).copied().unwrap_or(0);
        DeviceCounts {
            reads: at(0),
            read_bytes: at(2) * SECTOR,
            writes: at(4),
            written_bytes: at(6) * SECTOR,
            discards: at(11),
            flushes: at(15),
        }
    }

    /// Returns what was counted since `before`.
    pub fn since(self, before: DeviceCounts) -> DeviceCounts {
        DeviceCounts {
            reads: self.reads - before.reads,
            read_bytes: self.read_bytes - before.read_bytes,
            writes: self.writes - before.writes,
            written_bytes: self.written_bytes - before.written_bytes,
            discards: self.discards - before.discards,
            flushes: self.flushes - before.flushes,
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The server of its file may have failed.
        let _ = detach_loop(&self.path).or_else(|_| abandon_loop(&self.path));
    }
}

/// A mounted file system. Unmounted and detached when dropped.
pub struct Mounted {
    device: LoopDevice,
    dir: PathBuf,
    kind: String,
    _undoable: Undoable,
}

impl Mounted {
    /// Attaches `backing`, creates a file system with `mkfs` and mounts it at `dir` with `options`.
    pub fn new(backing: &File, dir: PathBuf, mkfs: &[&str], options: &[&str]) -> Result<Mounted> {
        fs::create_dir_all(&dir)?;
        let device = LoopDevice::new(backing)?;
        let undoable = Undoable::new(Thing::Mount(dir.clone()));
        let (program, arguments) = mkfs.split_first().context("a program that makes a file system")?;
        let kind = program.trim_start_matches("mkfs.").to_string();
        let mounted = Mounted { device, dir, kind, _undoable: undoable };
        output_of(Command::new(program).args(arguments).arg(mounted.device()))?;
        output_of(Command::new("mount").args(options).arg(mounted.device()).arg(&mounted.dir))?;
        Ok(mounted)
    }

    /// Returns the path of the loop device.
    pub fn device(&self) -> &Path {
        self.device.path()
    }

    /// Reads the kernel's counts of the loop device's requests.
    pub fn counts(&self) -> Result<DeviceCounts> {
        self.device.counts()
    }

    /// Returns its type, as in `mkfs.TYPE`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns the mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = output_of(Command::new("umount").arg(&self.dir));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_a_device_are_what_the_kernel_prints() {
        let stat = "  10  1  16  5  20  2  48  9  0  33  14  3  0  80  2  7  4\n";
        let counts = DeviceCounts::parse(stat);
        let same =
            DeviceCounts { reads: 10, read_bytes: 8192, writes: 20, written_bytes: 24576, discards: 3, flushes: 7 };
        assert_eq!(counts, same);
        assert_eq!(counts.since(DeviceCounts { reads: 4, ..counts }), DeviceCounts { reads: 6, ..Default::default() });
    }
}
