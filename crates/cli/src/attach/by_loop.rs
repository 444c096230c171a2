//! Attaching by the kernel's loop driver, with direct I/O on the volume's file in a mount.
//!
//! For a daemon's pool a private mount is made in the folder of the daemon's sockets: it is not
//! unmounted by mistake, and only root may enter it.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use forkdisk::GatherPolicy;
use forkdisk_control::runtime_dir;
use forkdisk_fuse::{MountOptions, MountPoint, mounted_at};
use forkdisk_uring::{abandon_loop, attach_loop, detach_loop, resize_loop};

use super::{Attachment, Means, Owner, Target, in_use};
use crate::left_mount::{is_dead, remove_dead};
use crate::served_mount::mount_served;

const SECTOR: u64 = 512;
const SNAPSHOTS: &str = ".snapshots";

/// Returns the directory where the daemon's pool is mounted for its devices.
pub fn private_mount(pool: &Path) -> Result<PathBuf> {
    let uuid = runtime_dir::pool_identity(pool).with_context(|| format!("{}: not a pool", pool.display()))?;
    let control = runtime_dir::own_control(&uuid).context("there is no folder for the mount")?;
    Ok(control.with_file_name("mnt"))
}

pub fn attach(owner: &mut Owner, target: &Target<'_>) -> Result<PathBuf> {
    ensure!(Path::new("/dev/loop-control").exists(), "/dev/loop-control does not exist (modprobe loop)");
    ensure!(Path::new("/dev/fuse").exists(), "/dev/fuse does not exist (modprobe fuse)");
    let dir = match owner {
        Owner::Mount(dir) => dir.clone(),
        Owner::Daemon(client, _) => {
            let dir = private_mount(target.pool)?;
            remove_dead(&dir)?;
            if !mounted_at(&dir).is_some_and(|mount| mount.is_pool()) {
                let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
                made.with_context(|| format!("{}: the mount's folder", dir.display()))?;
                let source = target.pool.display().to_string();
                mount_served(client, &dir, &MountOptions::default().with_source(source), (GatherPolicy::USUAL, false))?;
            }
            dir
        }
    };
    let path = dir.join(file_of(target.object));
    let file = File::options().read(true).write(!target.read_only).open(&path);
    let file = file.with_context(|| path.display().to_string())?;
    let len = file.metadata()?.len();
    ensure!(len >= SECTOR, "it has {len} bytes, and a block device has at least one sector of {SECTOR}");
    if len % SECTOR != 0 {
        tracing::warn!("the last {} bytes are no whole sector and no part of the device", len % SECTOR);
    }
    attach_loop(&file, target.read_only).context("the loop driver")
}

/// Returns the path of a volume's or snapshot's file in a mount.
fn file_of(object: &str) -> PathBuf {
    match object.split_once('@') {
        None => PathBuf::from(object),
        Some((volume, snapshot)) => Path::new(SNAPSHOTS).join(volume).join(snapshot),
    }
}

/// Returns the volume or snapshot of a file in a mount.
fn object_of(file: &Path) -> Option<String> {
    match file.strip_prefix(SNAPSHOTS) {
        Err(_) => Some(file.to_str()?.to_string()),
        Ok(rest) => Some(format!("{}@{}", rest.parent()?.to_str()?, rest.file_name()?.to_str()?)),
    }
}

/// Returns whether the process that served the file of a device is gone: writes to the device fail then.
pub fn is_left_behind(device: &Path) -> bool {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    let Ok(backing) = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")) else { return false };
    let mounts = forkdisk_fuse::mounts();
    let inside = mounts.iter().map(|(dir, _)| dir).filter(|dir| Path::new(&backing).starts_with(dir));
    inside.max_by_key(|dir| dir.as_os_str().len()).is_some_and(|dir| is_dead(dir))
}

pub fn detach(device: &Path) -> Result<()> {
    // The cache of a dead device cannot be written.
    let let_go = if is_left_behind(device) { abandon_loop } else { detach_loop };
    match let_go(device) {
        Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => Err(in_use(device)),
        outcome => outcome.with_context(|| device.display().to_string()),
    }
}

/// Sets a device to the length of its file. The call of `metadata` refreshes the kernel's cached
/// length, which the loop driver uses.
pub fn grow(device: &Path) -> Result<()> {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    let backing = format!("/sys/block/{name}/loop/backing_file");
    let file = fs::read_to_string(&backing).context(backing)?;
    let file = file.trim_end_matches('\n');
    fs::metadata(file).context(file.to_string())?;
    resize_loop(device).context("the loop driver")
}

/// Returns whether a loop device uses the file of this volume or snapshot below `mount`; `dir` is
/// the device's folder in /sys/block.
pub fn is_of(dir: &Path, mount: &Path, object: &str) -> bool {
    let backing = fs::read_to_string(dir.join("loop/backing_file")).unwrap_or_default();
    Path::new(backing.trim_end_matches('\n')) == mount.join(file_of(object))
}

/// Returns the attachment of device `name` if it is a loop device on a file of a mounted pool.
pub fn look(name: &str, mounts: &[(PathBuf, MountPoint)]) -> Option<Attachment> {
    let backing = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    let backing = Path::new(backing.trim_end_matches('\n'));
    // The file belongs to the innermost mount.
    let inside = mounts.iter().filter(|(dir, _)| backing.starts_with(dir));
    let (dir, mount) = inside.max_by_key(|(dir, _)| dir.as_os_str().len())?;
    let object = object_of(backing.strip_prefix(dir).ok()?)?;
    let (device, pool) = (Path::new("/dev").join(name), PathBuf::from(&mount.source));
    Some(Attachment { device, pool, object, by: Means::Loop })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_their_files_belong_together() {
        for (object, file) in [("a", "a"), ("vm/1", "vm/1"), ("vm/1@x", ".snapshots/vm/1/x"), ("a@b", ".snapshots/a/b")]
        {
            assert_eq!(file_of(object), Path::new(file));
            assert_eq!(object_of(Path::new(file)).as_deref(), Some(object));
        }
    }
}
