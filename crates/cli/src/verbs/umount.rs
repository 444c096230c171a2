//! `umount`: ends a mount and waits until its pool is closed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::{ErrorKind, Recorded};
use forkdisk_control::{params, runtime_dir};
use forkdisk_fuse::{MountPoint, mounted_at, unmount, unmount_patiently};
use forkdisk_uring::{Config, DeviceOptions, UringDevice};

use crate::global::Global;
use crate::left_mount::{self, State};
use crate::owner::InUse;
use crate::progress::Progress;
use crate::session::daemon;
use crate::verbs::examples::examples;

/// How long the pool may take to be closed.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time of silent waiting before a message is logged.
const QUIET: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(20);

/// Unmount a pool mounted with `mount`, and wait until everything is written
#[derive(Args)]
#[command(after_help = examples!["forkdisk umount /mnt/pool"])]
pub struct UmountArgs {
    /// The mounted folder
    dir: PathBuf,

    /// Also if files are open: the mount disappears at once and ends when they are closed
    #[arg(long)]
    lazy: bool,
}

/// Unmounts, then waits.
pub fn run(args: UmountArgs, global: &Global) -> Result<()> {
    let dir = left_mount::place(&args.dir).with_context(|| args.dir.display().to_string())?;
    if mounted_at(&dir).filter(MountPoint::is_pool).is_none() {
        bail!("{}: no pool is mounted there", dir.display())
    }
    if args.lazy {
        return Ok(unmount(&dir, true)?);
    }
    end(global, &dir)
}

/// Unmounts the pool mounted at `dir`, an absolute path without links, and waits until it is written.
pub fn end(global: &Global, dir: &Path) -> Result<()> {
    let Some(mount) = mounted_at(dir) else { bail!("{}: nothing is mounted there", dir.display()) };
    let pool = PathBuf::from(mount.source);
    let keeper = keeper(global, &pool);
    if matches!(keeper, Ok(Keeper::Nobody(_))) && left_mount::state_of(dir) == State::Silent {
        bail!(left_mount::silent(dir, &pool));
    }
    // After the unmount there is no way to learn whether everything was written.
    let written_back = match keeper {
        Ok(Keeper::Silent(_) | Keeper::Process(_)) => write_back(dir),
        _ => Ok(()),
    };
    let was_killed = written_back.is_err() && left_mount::is_dead(dir);
    if let (Ok(Keeper::Silent(_)), Err(error)) = (&keeper, written_back) {
        tracing::warn!(%error, "what was written there may not be durable yet");
    }
    // Read now: the pool is closed only after the mount is gone.
    let before = runtime_dir::recorded(&pool);
    unmount_patiently(dir)?;
    let written = wait(global, &pool, dir, matches!(keeper, Ok(Keeper::Daemon { .. })))?;
    // A pool that is read-only, or whose process was killed, is never closed.
    match (keeper, written, before) {
        (Ok(Keeper::Process(_)), Written::Closed(Some(after)), Some(before))
            if was_killed || !was_closed(before.generation, after.generation, after.clean) =>
        {
            bail!(
                "{} is unmounted, but {} was not closed cleanly: nothing that was synced is lost, and the next open \
                 recovers it; the process that had it mounted reports why",
                dir.display(),
                pool.display()
            )
        }
        _ => Ok(()),
    }
}

/// The process that has the pool of a mount open.
enum Keeper {
    /// A daemon that answers, and its mount points.
    Daemon { pid: u32, mounts: Vec<String> },
    /// A daemon that is starting or ending, or whose socket is not known here. With its description.
    Silent(String),
    /// A process that closes the pool when the mount is gone. With its description.
    Process(String),
    /// No process that could change the pool.
    Nobody(Option<Recorded>),
}

/// Finds the process that has the pool at `pool` open now.
fn keeper(global: &Global, pool: &Path) -> Result<Keeper> {
    if let Some(mut client) = daemon(global, pool)? {
        let status = client.call(params::Status {}, None, |_| {})?;
        return Ok(Keeper::Daemon { pid: status.pid, mounts: status.mounts });
    }
    let options = DeviceOptions::default().with_read_only(true);
    let config = Config::default().with_buffers(Vec::new());
    forkdisk_uring::block_on(config, |rt| async move {
        match UringDevice::open(&rt, pool, &options) {
            Err(e) if e.kind() == ErrorKind::Busy => match InUse::of(pool, &e) {
                Some(by) if by.by_a_daemon() => Keeper::Silent(by.who()),
                by => Keeper::Process(by.map_or_else(|| e.to_string(), |by| by.who())),
            },
            // The pool cannot change while this process holds its lock.
            Ok(_locked) => Keeper::Nobody(runtime_dir::recorded(pool)),
            // The pool is damaged, but no process has it open.
            Err(_) => Keeper::Nobody(None),
        }
    })
    .context("waiting for the pool")
}

/// How the wait for a mount's contents ended.
enum Written {
    /// Another process still has the pool open.
    Elsewhere,
    /// No process has it open, and its superblock says this.
    Closed(Option<Recorded>),
}

/// Waits until everything from the mount is written. A daemon reports that; a process that only
/// mounts keeps the pool open until then. A daemon that answered before (`answered`) and no longer
/// does is ending, and is waited for; one that never answered goes on serving.
fn wait(global: &Global, pool: &Path, dir: &Path, answered: bool) -> Result<Written> {
    let _progress = Progress::spinner("waiting for the pool to be closed");
    let start = Instant::now();
    let mut told = false;
    loop {
        let who = match keeper(global, pool)? {
            Keeper::Daemon { mounts, .. } if !mounts.iter().any(|mount| Path::new(mount) == dir) => {
                return Ok(Written::Elsewhere);
            }
            Keeper::Daemon { pid, .. } => format!("its daemon (pid {pid}) still writes to {}", pool.display()),
            Keeper::Silent(_) if !answered => return Ok(Written::Elsewhere),
            Keeper::Silent(who) | Keeper::Process(who) => who,
            Keeper::Nobody(recorded) => return Ok(Written::Closed(recorded)),
        };
        if start.elapsed() > PATIENCE {
            bail!("{} is unmounted, but {who}: wait until it ends", dir.display());
        }
        if !told && start.elapsed() > QUIET {
            told = true;
            tracing::warn!("{} is unmounted; waiting until everything is written: {who}", dir.display());
        }
        std::thread::sleep(PAUSE);
    }
}

/// Makes the kernel write what it has cached for a mount, durably.
fn write_back(dir: &Path) -> std::io::Result<()> {
    let root = File::open(dir)?;
    rustix::fs::syncfs(&root)?;
    root.sync_all()
}

/// Returns whether a pool was closed between the superblocks of two generations, the newer of which is `clean`: a
/// close leaves it marked clean or, if space is still to be freed, writes two superblocks. (A process that wrote two
/// and then failed is not recognised.)
fn was_closed(before: u64, after: u64, clean: bool) -> bool {
    clean || after >= before + 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_not_clean_was_closed_if_it_was_written_for_that() {
        assert!(was_closed(5, 5, true), "nothing was written");
        assert!(was_closed(5, 7, true));
        assert!(was_closed(5, 7, false), "space is still given back");
        assert!(!was_closed(5, 5, false));
        assert!(!was_closed(5, 6, false), "the checkpoint succeeded, the mark did not");
    }
}
