//! A file system of the kernel on a loop device.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use forkdisk_uring::{attach_loop, detach_loop};

use crate::ending::{Thing, Undoable};
use crate::limits::output_of;

/// A mounted file system. Unmounted and detached when dropped.
pub struct Mounted {
    device: PathBuf,
    dir: PathBuf,
    kind: String,
    _undoable: [Undoable; 2],
}

impl Mounted {
    /// Attaches `backing`, creates a file system with `mkfs` and mounts it at `dir` with `options`.
    pub fn new(backing: &File, dir: PathBuf, mkfs: &[&str], options: &[&str]) -> Result<Mounted> {
        fs::create_dir_all(&dir)?;
        let device = attach_loop(backing, false).context("a loop device")?;
        let undoable = [Thing::Loop(device.clone()), Thing::Mount(dir.clone())].map(Undoable::new);
        let (program, arguments) = mkfs.split_first().context("a program that makes a file system")?;
        let kind = program.trim_start_matches("mkfs.").to_string();
        let mounted = Mounted { device, dir, kind, _undoable: undoable };
        output_of(Command::new(program).args(arguments).arg(&mounted.device))?;
        output_of(Command::new("mount").args(options).arg(&mounted.device).arg(&mounted.dir))?;
        Ok(mounted)
    }

    /// Returns the loop device.
    pub fn device(&self) -> &Path {
        &self.device
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
        let _ = detach_loop(&self.device);
    }
}
