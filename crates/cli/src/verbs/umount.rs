//! `umount`: ends a mount and waits until its pool is closed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_uring::{Config, DeviceOptions, UringDevice};

use crate::progress::Progress;

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
pub fn run(args: UmountArgs) -> Result<()> {
    let dir = args.dir.canonicalize().with_context(|| args.dir.display().to_string())?;
    let Some(pool) = mounted_pool(&dir) else { bail!("{}: no pool is mounted there", dir.display()) };
    forkdisk_fuse::unmount(&dir, args.lazy)?;
    if args.lazy {
        return Ok(());
    }
    let _progress = Progress::spinner("waiting for the pool to be closed");
    let start = Instant::now();
    while is_in_use(&pool)? {
        if start.elapsed() > PATIENCE {
            bail!("{} is unmounted, but {} is still in use", dir.display(), pool.display());
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// The pool of the mount at `dir`.
fn mounted_pool(dir: &Path) -> Option<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    table.lines().rev().find_map(|line| pool_of(line, dir))
}

/// `36 35 0:44 / /mnt rw,… - fuse.forkdisk /pool.img rw,…`
fn pool_of(line: &str, dir: &Path) -> Option<PathBuf> {
    let (place, kind) = line.split_once(" - ")?;
    let place = unescape(place.split(' ').nth(4)?);
    let mut kind = kind.split(' ');
    let is_ours = kind.next()? == "fuse.forkdisk" && Path::new(&place) == dir;
    is_ours.then(|| kind.next().map(|source| unescape(source).into())).flatten()
}

/// Blanks and the like are written as `\040`.
fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let code = (byte == b'\\').then(|| tail.get(..3)).flatten();
        let code = code.and_then(|c| u8::from_str_radix(std::str::from_utf8(c).ok()?, 8).ok());
        out.push(code.unwrap_or(byte));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&out).into_owned()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_of_a_mount_is_found() {
        let line = r"36 35 0:44 / /mnt/a\040b rw,nosuid - fuse.forkdisk /pools/x\040y.img rw,user_id=0";
        assert_eq!(pool_of(line, Path::new("/mnt/a b")), Some("/pools/x y.img".into()));
        assert_eq!(pool_of(line, Path::new("/mnt")), None);
        let other = "36 35 0:44 / /mnt rw - fuse.sshfs host: rw";
        assert_eq!(pool_of(other, Path::new("/mnt")), None);
    }
}
