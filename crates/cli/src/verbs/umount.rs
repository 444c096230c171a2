//! `umount`: ends a mount and waits until its pool is closed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::params;
use forkdisk_fuse::{MountPoint, mounted_at, unmount, unmount_patiently};
use forkdisk_uring::{Config, DeviceOptions, UringDevice};

use crate::attach;
use crate::cli::Global;
use crate::progress::Progress;
use crate::session::daemon;

/// How long the pool may take to be closed.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);

/// Unmount what `mount` has mounted, and wait until everything is written
#[derive(Args)]
pub struct UmountArgs {
    /// Where it is mounted
    dir: PathBuf,

    /// Also if files are open: nobody finds the mount any more, and it ends when they are closed
    #[arg(long)]
    lazy: bool,
}

/// Unmounts, then waits.
pub fn run(args: UmountArgs, global: &Global) -> Result<()> {
    let dir = place(&args.dir).with_context(|| args.dir.display().to_string())?;
    if mounted_at(&dir).filter(MountPoint::is_pool).is_none() {
        bail!("{}: no pool is mounted there", dir.display())
    }
    if args.lazy {
        return Ok(unmount(&dir, true)?);
    }
    end(global, &dir)
}

/// The folder without links. A mount whose process was killed cannot be asked: its parent is.
fn place(dir: &Path) -> std::io::Result<PathBuf> {
    if !attach::is_dead(dir) {
        return dir.canonicalize();
    }
    let dir = std::path::absolute(dir)?;
    match (dir.parent(), dir.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Ok(dir),
    }
}

/// Unmounts the pool that is mounted at `dir`, an absolute path without links, and waits until it is written.
pub fn end(global: &Global, dir: &Path) -> Result<()> {
    let Some(mount) = mounted_at(dir) else { bail!("{}: nothing is mounted there", dir.display()) };
    unmount_patiently(dir)?;
    let pool = PathBuf::from(mount.source);
    let _progress = Progress::spinner("waiting for the pool to be closed");
    let start = Instant::now();
    while is_mounted_or_open(global, &pool, dir)? {
        if start.elapsed() > PATIENCE {
            bail!("{} is unmounted, but {} is still in use", dir.display(), pool.display());
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Whether somebody still writes what came from the mount. A daemon says so; a process that did nothing but mount has
/// the pool open for as long.
fn is_mounted_or_open(global: &Global, pool: &Path, dir: &Path) -> Result<bool> {
    match daemon(global, pool)? {
        Some(mut client) => {
            let status = client.call(params::Status {}, None, |_| {})?;
            Ok(status.mounts.iter().any(|mount| Path::new(mount) == dir))
        }
        None => is_in_use(pool),
    }
}

fn is_in_use(pool: &Path) -> Result<bool> {
    let options = DeviceOptions { read_only: true, ..DeviceOptions::default() };
    let config = Config { buffers: Vec::new(), ..Config::default() };
    forkdisk_uring::block_on(config, |rt| async move {
        match UringDevice::open(&rt, pool, &options) {
            Err(e) if e.kind() == forkdisk::ErrorKind::Busy => true,
            // Whatever else is wrong with it, nobody has it any more.
            _ => false,
        }
    })
    .context("waiting for the pool")
}
