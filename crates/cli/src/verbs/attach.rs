//! `attach`: a volume or snapshot as a block device of the kernel.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forkdisk_control::params;

use crate::attach::{self, Attachment, Means, Owner, Target};
use crate::global::Global;
use crate::left_mount::{State, state_of};
use crate::output::{Column, TableArgs, print_json, print_line};
use crate::session::daemon;
use crate::verbs::examples::examples;

/// How long to wait for another process that has the pool open.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);

/// Attach a volume or snapshot as a block device, and print its path
///
/// Uses the first means that this machine has: the kernel's ublk driver, its NBD client, or its
/// loop driver with direct I/O on the volume's file. Needs root. A pool that no process serves is
/// served in the background until its last device is detached.
#[derive(Args)]
#[command(after_help = examples!["forkdisk attach /srv/pool.img/vm1"])]
pub struct AttachArgs {
    #[arg(required_unless_present = "list", value_name = "ADDRESS")]
    object: Option<String>,

    /// List attached volumes and snapshots; the address may be that of a pool
    #[arg(long, conflicts_with_all = ["by", "read_only"])]
    list: bool,

    /// Use only this means
    #[arg(long, value_enum, value_name = "MEANS")]
    by: Option<Means>,

    #[arg(long)]
    read_only: bool,

    #[command(flatten)]
    table: TableArgs,
}

/// Attaches, or lists.
pub fn run(args: AttachArgs, global: &Global) -> Result<()> {
    if args.list {
        return list(&args, global);
    }
    let address = global.object(args.object.as_deref().context("name a volume or snapshot")?)?;
    let pool = global.pool(Some(&address.pool))?;
    let pool = pool.canonicalize().with_context(|| pool.display().to_string())?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root may make block devices: without root, `forkdisk mount` shows volumes as files, and NBD clients \
         connect to `forkdisk serve`"
    );
    let _alone = attach::alone()?;
    attach::clean_up();
    let is_it = |other: &Attachment| other.pool == pool && other.object == address.name;
    if let Some(other) = attach::list().into_iter().find(is_it) {
        if other.by == Means::Ublk && attach::is_left_behind(&other) {
            return serve_again(&other, global);
        }
        if attach::is_left_behind(&other) {
            tracing::warn!(device = %other.device.display(), "its daemon was killed: detaching it");
            attach::detach(global, &other)?;
        } else {
            bail!("{} is attached already: {}", address.show(), other.device.display());
        }
    }
    attach::refresh();
    let mut owner = find_owner(global, &pool)?;
    let target =
        Target { pool: &pool, object: &address.name, read_only: args.read_only || address.snapshot().is_some() };
    let means = args.by.map_or(vec![Means::Ublk, Means::Nbd, Means::Loop], |by| vec![by]);
    let attached = exists(&mut owner, &address.name).and_then(|()| attach::attach(&mut owner, &target, &means));
    let attached = match attached {
        Ok(attached) => attached,
        Err(error) => {
            // The first error is the one to report.
            let _ = super::detach::tidy_up(global, &pool);
            return Err(error);
        }
    };
    attach::refresh();
    match global.output.json() {
        true => print_json(&attached),
        false => print_line(&attached.device.display().to_string()),
    }
}

/// Starts a daemon for the pool of a device without one; the daemon serves the device again.
fn serve_again(attachment: &Attachment, global: &Global) -> Result<()> {
    find_owner(global, &attachment.pool)?;
    let device = attachment.device.display();
    ensure!(!attach::is_left_behind(attachment), "{device} is not served again: see the log of the pool's daemon");
    ensure!(attachment.device.exists(), "{device} could not be served again and was removed");
    attach::refresh();
    match global.output.json() {
        true => print_json(attachment),
        false => print_line(&device.to_string()),
    }
}

fn exists(owner: &mut Owner, name: &str) -> Result<()> {
    if let Owner::Daemon(client, _) = owner {
        client.call(params::List { objects: vec![name.to_string()], ..params::List::default() }, None, |_| {})?;
    }
    Ok(())
}

/// Returns the process that has the pool open; starts a daemon that ends with the last device if there is none.
fn find_owner(global: &Global, pool: &Path) -> Result<Owner> {
    if let Some(owner) = daemon_of(global, pool)? {
        return Ok(owner);
    }
    // A mount counts only while a process serves it. The daemon continues a mount that a keeper holds.
    let mut mounts = forkdisk_fuse::mounts().into_iter().filter(|(_, mount)| Path::new(&mount.source) == pool);
    if let Some((dir, _)) = mounts.rfind(|(dir, _)| state_of(dir) == State::Served) {
        return Ok(Owner::Mount(dir));
    }
    let program = std::env::current_exe().context("finding this program")?;
    let start = Instant::now();
    loop {
        let mut serve = Command::new(&program);
        serve.arg("serve").arg(pool).args(["--daemon", "--until-detached"]);
        if let Some(control) = global.control() {
            serve.arg("--control").arg(control);
        }
        let served = serve.stdin(Stdio::null()).output().context("starting a daemon for the pool")?;
        if let Some(owner) = daemon_of(global, pool)? {
            return Ok(owner);
        }
        let why = String::from_utf8_lossy(&served.stderr);
        let why = why.trim().trim_start_matches("forkdisk: ");
        ensure!(!served.status.success(), "{}: its daemon does not answer", pool.display());
        // A verb has the pool open for a moment, or a daemon is ending.
        ensure!(why.contains("is in use") && start.elapsed() < PATIENCE, "{why}");
        std::thread::sleep(PAUSE);
    }
}

fn daemon_of(global: &Global, pool: &Path) -> Result<Option<Owner>> {
    let Some(mut client) = daemon(global, pool)? else { return Ok(None) };
    let status = client.call(params::Status {}, None, |_| {})?;
    Ok(Some(Owner::Daemon(Box::new(client), status.socket.map(PathBuf::from))))
}

fn list(args: &AttachArgs, global: &Global) -> Result<()> {
    let mut found = attach::list();
    if let Some(text) = &args.object {
        let address = global.address(text)?;
        let pool = address.pool.canonicalize().with_context(|| address.pool.display().to_string())?;
        found.retain(|a| a.pool == pool && (address.name.is_empty() || a.object == address.name));
    }
    if global.output.json() {
        return print_json(&found);
    }
    let header = [Column::Left("DEVICE"), Column::Left("BY"), Column::Left("ADDRESS")];
    let row = |a: &Attachment| {
        vec![a.device.display().to_string(), a.by.to_string(), format!("{}/{}", a.pool.display(), a.object)]
    };
    args.table.print(&header, &found.iter().map(row).collect::<Vec<_>>())
}
