//! `mount`: a pool as a folder in which every volume is a file.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::WhenFull;
use forkdisk_fuse::{MountOptions, Session as Mount, SessionHandle, Volumes, VolumesOptions};
use forkdisk_uring::Signals;
use rustix::process::Signal;
use serde::Serialize;

use crate::cli::Global;
use crate::output::{print_json_line, print_line};
use crate::progress::Progress;
use crate::session::{Access, Session, with_pool_when_full};

/// How often space that was given up is brought back.
const GIVE_BACK: Duration = Duration::from_secs(5);

/// Mount a pool: every volume is a file, every snapshot a file under .snapshots/VOLUME/NAME
///
/// Runs in the foreground until `forkdisk umount DIR`, SIGTERM or SIGINT, then flushes and leaves the pool
/// clean. Without root it needs fusermount3. `cp` within the mount makes clones; `mkdir
/// DIR/.snapshots/VOLUME/NAME` takes a snapshot.
#[derive(Args)]
pub struct MountArgs {
    /// The pool, and where to mount it; with FORKDISK_POOL the folder alone is enough
    #[arg(required = true, num_args = 1..=2, value_names = ["POOL", "DIR"])]
    paths: Vec<PathBuf>,

    /// Go on in the background once it is mounted
    #[arg(long)]
    daemon: bool,

    /// Options: ro, allow_other, noexec, noatime, nodiratime, sync, dirsync
    #[arg(short = 'o', value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<String>,

    /// Part of `--daemon`: the child that goes on
    #[arg(long, hide = true)]
    detached: bool,
}

/// Said once, when it is mounted.
#[derive(Serialize)]
struct Announcement {
    pool: String,
    dir: String,
}

const KNOWN: [&str; 12] = [
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
    "nosuid",
    "nodev",
];

/// Mounts, serves and closes the pool cleanly.
pub fn run(args: MountArgs, global: &Global) -> Result<()> {
    let (pool, dir) = match &args.paths[..] {
        [pool, dir] => (global.pool(Some(pool))?, dir),
        [dir] => (global.pool(None).context("name the pool and the folder: forkdisk mount POOL DIR")?, dir),
        _ => bail!("name the pool and the folder: forkdisk mount POOL DIR"),
    };
    let unknown = args.options.iter().find(|o| !KNOWN.contains(&o.as_str()) && !o.is_empty());
    if let Some(option) = unknown {
        bail!("mount option {option:?} is not known; there are {}", KNOWN.join(", "));
    }
    let absolute = |path: &Path| std::path::absolute(path).with_context(|| path.display().to_string());
    let (pool, dir) = (absolute(&pool)?, absolute(dir)?);
    let json = global.output.json();
    if args.daemon {
        return run_detached(&args, &pool, &dir, json);
    }
    if args.detached {
        // A session of its own: what ends the terminal does not end it.
        rustix::process::setsid().context("leaving the terminal")?;
        std::env::set_current_dir("/").context("/")?;
    }
    let has = |name: &str| args.options.iter().any(|o| o == name);
    let flags = args.options.iter().filter(|o| !["ro", "rw", "allow_other", ""].contains(&o.as_str()));
    let options = MountOptions {
        source: pool.display().to_string(),
        read_only: has("ro"),
        allow_other: has("allow_other"),
        flags: flags.cloned().collect(),
    };
    let access = if options.read_only { Access::Read } else { Access::Write };
    let detached = args.detached;
    with_pool_when_full(&pool, access, WhenFull::Error, |session| serve(session, dir, options, json, detached))
}

async fn serve(session: Session, dir: PathBuf, options: MountOptions, json: bool, detached: bool) -> Result<()> {
    let signals =
        Rc::new(session.runtime.signals(&[Signal::TERM.as_raw(), Signal::INT.as_raw(), Signal::HUP.as_raw()])?);
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let shown = VolumesOptions { dir: dir.clone(), uid, gid, alone: true };
    let volumes = Volumes::new(session.pool.clone(), shown);
    let mount = Mount::mount(&session.runtime, volumes, &dir, &options).await?;
    announce(&options.source, &dir, json)?;
    if detached {
        // Nobody waits for anything more to be said.
        let nowhere = std::fs::File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
        rustix::stdio::dup2_stdin(&nowhere).context("stdin")?;
        rustix::stdio::dup2_stdout(&nowhere).context("stdout")?;
        rustix::stdio::dup2_stderr(&nowhere).context("stderr")?;
    }
    tracing::info!(dir = %dir.display(), "mounted");
    let waiting = session.runtime.spawn(stop_at_signal(signals.clone(), mount.handle()));
    let giving_back = session.runtime.spawn(give_back(session.clone(), options.read_only));
    mount.serve().await?;
    giving_back.cancel().await;
    // The signals stay taken over while the pool is closed: a second one does not tear it.
    waiting.cancel().await;
    let _progress = Progress::spinner("closing the pool");
    session.pool.flush().await?;
    tracing::info!("unmounted");
    Ok(())
}

async fn stop_at_signal(signals: Rc<Signals>, mount: SessionHandle) {
    while let Ok(signal) = signals.recv().await {
        tracing::info!(signal, "unmounting");
        mount.stop().await;
    }
}

/// What was removed is free, and a hole in the pool's file, only after a checkpoint.
async fn give_back(session: Session, read_only: bool) {
    if read_only {
        return;
    }
    loop {
        session.runtime.sleep_for(GIVE_BACK).await;
        if session.pool.info().freeing > 0
            && let Err(error) = session.pool.checkpoint().await
        {
            return tracing::error!(%error, "space cannot be given back");
        }
    }
}

fn announce(pool: &str, dir: &Path, json: bool) -> Result<()> {
    let dir = dir.display().to_string();
    if json {
        return print_json_line(&Announcement { pool: pool.to_string(), dir });
    }
    print_line(&format!("{pool} is mounted on {dir}"))
}

/// Starts the same program again in a session of its own, and waits until it says that it is mounted.
fn run_detached(args: &MountArgs, pool: &Path, dir: &Path, json: bool) -> Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command.args(["mount", "--detached"]).args(json.then_some("--json")).arg(pool).arg(dir);
    if !args.options.is_empty() {
        command.arg("-o").arg(args.options.join(","));
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("going to the background")?;
    let mut said = String::new();
    let stdout = child.stdout.take().context("the child's output")?;
    BufReader::new(stdout).read_line(&mut said).context("waiting for the child")?;
    if said.is_empty() {
        let status = child.wait().context("waiting for the child")?;
        bail!("{} was not mounted ({status})", dir.display());
    }
    print_line(said.trim_end())
}
