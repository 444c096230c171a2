//! `mount`: a pool as a folder in which every volume is a file.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forkdisk::{GatherPolicy, Pool};
use forkdisk_fuse::{MountOptions, OverIoUring, Session as Mount, SessionHandle, Volumes, VolumesOptions};
use forkdisk_uring::{Config, Rt, Signals, UringDevice};
use rustix::process::Signal;
use serde::Serialize;

use crate::daemon::{descriptors, detach, reserves, space};
use crate::global::Global;
use crate::host;
use crate::left_mount;
use crate::output::{print_json_line, print_line};
use crate::progress::Progress;
use crate::served_mount::{mount_served, over_io_uring, syscall_helper};
use crate::session::{Access, daemon, open_device, open_device_in_turn, open_pool};
use crate::verbs::examples::examples;
use crate::volatile_file::{COMMIT_INTERVAL, VolatileFile};

/// Mount a pool: every volume is a file, every snapshot a file under .snapshots/VOLUME/NAME
///
/// If a daemon serves the pool, it also serves the mount, and this returns at once. Otherwise this
/// runs in the foreground until `forkdisk umount DIR`, SIGTERM or SIGINT, then flushes and leaves
/// the pool clean. Without root it needs fusermount3. `cp` within the mount makes clones; `mkdir
/// DIR/.snapshots/VOLUME/NAME` takes a snapshot.
#[derive(Args)]
#[command(after_help = examples!["forkdisk mount /srv/pool.img /mnt/pool --daemon"])]
pub struct MountArgs {
    /// The pool, and the folder to mount it on; with FORKDISK_POOL the folder alone is enough
    #[arg(required = true, num_args = 1..=2, value_names = ["POOL", "DIR"])]
    paths: Vec<PathBuf>,

    /// Continue in the background once it is mounted
    #[arg(long)]
    daemon: bool,

    /// Options: ro, allow_other, noexec, noatime, nodiratime, sync, dirsync; gather=POLICY: when scattered
    /// pages of files created there are gathered, as in `set gather=` (default auto); max_ratio=PERCENT:
    /// share of this machine's dirty pages that may belong to this mount, 1 to 100 (root only, default 1);
    /// fuse_uring=auto|yes|no: whether requests come by io_uring (default auto: where the kernel offers it)
    #[arg(short = 'o', value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<String>,
}

/// Printed once, when the pool is mounted.
#[derive(Serialize)]
struct Announcement {
    pool: String,
    dir: String,
}

const KNOWN: [&str; 13] = [
    "ro",
    "rw",
    "allow_other",
    "noexec",
    "exec",
    "noatime",
    "atime",
    "nodiratime",
    "sync",
    "dirsync",
    SHOW_SNAPSHOTS,
    "nosuid",
    "nodev",
];

/// Lists `.snapshots` in the root.
const SHOW_SNAPSHOTS: &str = "show_snapshots";

/// Prefix of a policy's name; the next one is the prefix of a percentage.
const GATHER: &str = "gather=";
const MAX_RATIO: &str = "max_ratio=";
/// Prefix of `auto`, `yes` or `no`.
const FUSE_URING: &str = "fuse_uring=";
/// All prefixes of options with a value.
const VALUED: [&str; 3] = [GATHER, MAX_RATIO, FUSE_URING];

/// Returns whether there is a mount option of this name, with any value.
pub fn is_known(option: &str) -> bool {
    KNOWN.contains(&option) || has_value(option)
}

fn has_value(option: &str) -> bool {
    VALUED.iter().any(|name| option.starts_with(name))
}

fn percentage(text: &str) -> Result<u8> {
    let percent = text.parse().ok().filter(|percent| (1..=100).contains(percent));
    percent.with_context(|| format!("mount option {MAX_RATIO}{text}: a percentage from 1 to 100 is expected"))
}

/// Mounts, serves and closes the pool cleanly.
pub fn run(args: MountArgs, global: &Global) -> Result<ExitCode> {
    let (pool, dir) = match &args.paths[..] {
        [pool, dir] => (global.pool(Some(pool))?, dir),
        [dir] => (global.pool(None).context("name the pool and the folder: forkdisk mount POOL DIR")?, dir),
        _ => bail!("name the pool and the folder: forkdisk mount POOL DIR"),
    };
    let (valued, options): (Vec<String>, Vec<String>) = args.options.into_iter().partition(|option| has_value(option));
    let unknown = options.iter().find(|o| !is_known(o) && !o.is_empty());
    if let Some(option) = unknown {
        let known = KNOWN.join(", ");
        bail!(
            "mount option {option:?} is not known; there are {known}, {GATHER}POLICY, {MAX_RATIO}PERCENT and \
            {FUSE_URING}WORD"
        );
    }
    let value_of = |name: &str| valued.iter().filter_map(|option| option.strip_prefix(name)).next_back();
    let gather = value_of(GATHER).map_or(Ok(GatherPolicy::USUAL), str::parse)?;
    let max_ratio = value_of(MAX_RATIO).map(percentage).transpose()?;
    let fuse_uring = value_of(FUSE_URING);
    let absolute = |path: &Path| std::path::absolute(path).with_context(|| path.display().to_string());
    let (pool, dir) = (absolute(&pool)?, absolute(dir)?);
    left_mount::make_way(&dir, &pool)?;
    let has = |name: &str| options.iter().any(|o| o == name);
    let show_snapshots = has(SHOW_SNAPSHOTS);
    let flags = options.iter().filter(|o| !["ro", "rw", "allow_other", SHOW_SNAPSHOTS, ""].contains(&o.as_str()));
    let options = MountOptions::default()
        .with_source(pool.display().to_string())
        .with_read_only(has("ro"))
        .with_allow_other(has("allow_other"))
        .with_flags(flags.cloned().collect())
        .with_max_ratio(max_ratio);
    let json = global.output.json();
    if let Some(mut client) = daemon(global, &pool)? {
        ensure!(fuse_uring.is_none(), "a daemon serves the pool: its setting fuse_uring decides");
        let dir = mount_served(&mut client, &dir, &options, (gather, show_snapshots))?;
        announce(&options.source, &dir, json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let over_io_uring = over_io_uring(fuse_uring.unwrap_or("auto"))?;
    if args.daemon {
        match detach::is_detached() {
            false => return detach::start(),
            true => detach::leave_terminal()?,
        }
    }
    descriptors::raise();
    reserves::hold(&global.settings)?;
    forkdisk_uring::block_on(Config::default(), |runtime| async move {
        // Before any thread is started.
        let signals = runtime.signals(&[Signal::TERM.as_raw(), Signal::INT.as_raw(), Signal::HUP.as_raw()])?;
        let access = if options.read_only { Access::Read } else { Access::Write };
        let open = || open_device(&runtime, &pool, access);
        let (device, _lock) = open_device_in_turn(global, &runtime, open).await?;
        let volatile_file = VolatileFile::of(&pool, !options.read_only);
        let (read_only, volatile, commit_interval) = (options.read_only, volatile_file.log(), COMMIT_INTERVAL);
        // The kernel passes the time with each write to a file.
        let engine = host::open_options()
            .with_read_only(read_only)
            .with_volatile(volatile)
            .with_commit_interval(commit_interval)
            .with_clock(None);
        let open = open_pool(device, &runtime, &pool, engine).await?;
        let shown = (options, gather, show_snapshots, over_io_uring);
        let outcome = serve(&runtime, &open, dir, shown, json, Rc::new(signals)).await;
        let _progress = Progress::spinner("closing the pool");
        let closed = open.close().await.with_context(|| format!("{}: closing the pool", pool.display()));
        if closed.is_ok() && access == Access::Write {
            volatile_file.remove();
        }
        outcome?;
        closed?;
        tracing::info!("unmounted");
        Ok(ExitCode::SUCCESS)
    })?
}

async fn serve(
    runtime: &Rt,
    pool: &Pool<UringDevice>,
    dir: PathBuf,
    (options, gather, show_snapshots, over_io_uring): (MountOptions, GatherPolicy, bool, OverIoUring),
    json: bool,
    signals: Rc<Signals>,
) -> Result<()> {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let syscall_helper = Some(syscall_helper());
    let shown = VolumesOptions::new(dir.clone(), uid, gid)
        .with_alone(true)
        .with_gather(gather)
        .with_show_snapshots(show_snapshots)
        .with_over_io_uring(over_io_uring)
        .with_syscall_helper(syscall_helper);
    let volumes = Volumes::new(pool.clone(), shown);
    let mount = Mount::mount(runtime, volumes, &dir, &options).await?;
    announce(&options.source, &dir, json)?;
    if detach::is_detached() {
        detach::let_go(None, None)?;
    }
    tracing::info!(dir = %dir.display(), "mounted");
    let waiting = runtime.spawn(stop_at_signal(signals.clone(), mount.handle()));
    let giving_back = runtime.spawn(space::give_back(runtime.clone(), pool.clone(), options.read_only));
    let watching = runtime.spawn(space::watch(runtime.clone(), pool.clone()));
    mount.serve().await?;
    watching.cancel().await;
    giving_back.cancel().await;
    waiting.cancel().await;
    Ok(pool.flush().await?)
}

async fn stop_at_signal(signals: Rc<Signals>, mount: SessionHandle) {
    while let Ok(signal) = signals.recv().await {
        tracing::info!(signal, "unmounting");
        mount.stop().await;
    }
}

fn announce(pool: &str, dir: &Path, json: bool) -> Result<()> {
    let dir = dir.display().to_string();
    if json {
        return print_json_line(&Announcement { pool: pool.to_string(), dir });
    }
    print_line(&format!("{pool} is mounted on {dir}"))
}
