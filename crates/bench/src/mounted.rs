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

    /// Returns the loop device.
    pub fn device(&self) -> &Path {
        self.device.path()
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
