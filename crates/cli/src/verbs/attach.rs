//! `attach`: a volume or snapshot as a block device of the kernel.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forkdisk_control::params;
use serde::Serialize;

use crate::address::{Address, same_pool, within_a_file};
use crate::attach::{self, Attachment, Means, Owner, Target};
use crate::braces;
use crate::global::Global;
use crate::left_mount::{State, state_of};
use crate::output::{Column, TableArgs, print_json, print_line};
use crate::session::daemon;
use crate::verbs::examples::examples;

/// How long to wait for another process that has the pool open.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);

/// Attach volumes or snapshots as block devices, and print their paths
///
/// Uses the first means that this machine has: the kernel's ublk driver, its NBD client, or its
/// loop driver with direct I/O on the volume's file. Needs root. A pool that no process serves is
/// served in the background until its last device is detached. Several devices (`'kids/{1..100}'`, or `'kids/*'` for
/// all volumes with such names) are made at the same time, all of them or none.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk attach /srv/pool.img/vm1",
    "forkdisk attach '/srv/pool.img/kids/{1..4}' --mount-at '/mnt/{}'",
])]
pub struct AttachArgs {
    #[arg(required_unless_present = "list", value_name = "ADDRESS")]
    object: Vec<String>,

    /// List attached volumes and snapshots; the address may be that of a pool
    #[arg(long, conflicts_with_all = ["by", "read_only", "mount_at"])]
    list: bool,

    /// Use only this means
    #[arg(long, value_enum, value_name = "MEANS")]
    by: Option<Means>,

    #[arg(long)]
    read_only: bool,

    #[command(flatten)]
    mounted: MountAtArg,

    #[command(flatten)]
    table: TableArgs,
}

/// Where the file systems of devices are mounted.
#[derive(Args, Clone, Debug, Default)]
pub struct MountAtArg {
    /// Mount the file system of each device, in a folder that is made if it is missing: `{}` stands for the name of the
    /// volume, `{1..4}` for as many folders as there are devices
    #[arg(long, value_name = "DIR")]
    pub mount_at: Option<String>,
}

/// A device that was made.
#[derive(Serialize)]
pub struct Made {
    #[serde(flatten)]
    pub attachment: Attachment,
    /// Where its file system is mounted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mounted: Option<PathBuf>,
}

/// What is to be attached, and how.
#[derive(Default)]
pub struct Wanted {
    pub pool: PathBuf,
    pub names: Vec<String>,
    /// Patterns of further names.
    pub patterns: Vec<String>,
    pub by: Option<Means>,
    pub read_only: bool,
    pub mount_at: Option<String>,
}

/// Attaches, or lists.
pub fn run(args: AttachArgs, global: &Global) -> Result<()> {
    if args.list {
        return list(&args, global);
    }
    let (pool, names, patterns) = named(&args.object, global)?;
    let is_one = names.len() == 1 && patterns.is_empty();
    let (by, read_only, mount_at) = (args.by, args.read_only, args.mounted.mount_at);
    let made = make(Wanted { pool, names, patterns, by, read_only, mount_at }, global)?;
    match made.first() {
        Some(made) if is_one && global.output.json() => print_json(made),
        _ => print(&made, global),
    }
}

/// Prints what was made: a line for each device.
pub fn print(made: &[Made], global: &Global) -> Result<()> {
    if global.output.json() {
        return print_json(&made);
    }
    made.iter().try_for_each(|made| match &made.mounted {
        Some(dir) => print_line(&format!("{} {}", made.attachment.device.display(), dir.display())),
        None => print_line(&made.attachment.device.display().to_string()),
    })
}

/// Returns the pool, the names and the patterns that `words` stand for.
fn named(words: &[String], global: &Global) -> Result<(PathBuf, Vec<String>, Vec<String>)> {
    let (mut addresses, mut names, mut patterns) = (Vec::new(), Vec::new(), Vec::new());
    for word in words {
        let (pool, pool_len) = within_a_file(word).map_or(("", 0), |(pool, _)| (pool, pool.len()));
        let rest = word[pool_len..].trim_start_matches('/');
        if rest.contains(['*', '?', '[']) {
            let pool = if pool.is_empty() { None } else { Some(Path::new(pool)) };
            addresses.push(Address { pool: global.pool(pool)?, name: String::new() });
            patterns.push(rest.to_string());
            continue;
        }
        for name in braces::expand(word, pool_len)? {
            let address = global.object(&name)?;
            ensure!(!names.contains(&address.name), "{name} is named twice");
            names.push(address.name.clone());
            addresses.push(address);
        }
    }
    let pool = global.pool(Some(&same_pool(&addresses)?))?;
    Ok((pool, names, patterns))
}

/// Attaches what is wanted, and mounts it: all of it or nothing.
pub fn make(wanted: Wanted, global: &Global) -> Result<Vec<Made>> {
    let pool = wanted.pool.canonicalize().with_context(|| wanted.pool.display().to_string())?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root may make block devices: without root, `forkdisk mount` shows volumes as files, and NBD clients \
         connect to `forkdisk serve`"
    );
    let _alone = attach::alone()?;
    attach::clean_up();
    attach::refresh();
    // Before a daemon serves devices of a killed one again.
    let there: Vec<(Attachment, bool)> = attach::list()
        .into_iter()
        .filter(|other| other.pool == pool)
        .map(|other| (attach::is_left_behind(&other), other))
        .map(|(is_left, other)| (other, is_left))
        .collect();
    if let Some((other, _)) = there.iter().find(|(other, is_left)| !is_left && wanted.names.contains(&other.object)) {
        bail!("{}/{} is attached already: {}", pool.display(), other.object, other.device.display());
    }
    let mut owner = find_owner(global, &pool)?;
    let made = attach_new(&wanted, (&pool, &mut owner), &there, global);
    if made.is_err() {
        // The first error is the one to report.
        let _ = super::detach::tidy_up(global, &pool);
    }
    attach::refresh();
    made
}

fn attach_new(
    wanted: &Wanted,
    (pool, owner): (&Path, &mut Owner),
    there: &[(Attachment, bool)],
    global: &Global,
) -> Result<Vec<Made>> {
    let names = all_names(owner, wanted)?;
    let (mut again, mut targets, mut read_only) = (Vec::new(), Vec::new(), Vec::new());
    for name in &names {
        match there.iter().find(|(other, _)| other.object == *name) {
            Some((other, true)) if other.by == Means::Ublk => {
                check_served_again(other)?;
                again.push(other.clone());
                continue;
            }
            Some((other, true)) => {
                tracing::warn!(device = %other.device.display(), "its daemon was killed: detaching it");
                attach::detach(global, other)?;
            }
            Some((other, false)) => {
                bail!("{}/{name} is attached already: {}", pool.display(), other.device.display())
            }
            None => {}
        }
        exists(owner, name)?;
        read_only.push(wanted.read_only || name.contains('@'));
        targets.push(Target { pool, object: name, read_only: wanted.read_only || name.contains('@') });
    }
    let new: Vec<&str> = targets.iter().map(|target| target.object).collect();
    let dirs = wanted.mount_at.as_ref().map(|pattern| attach::dirs_for(pattern, &new)).transpose()?;
    let means = wanted.by.map_or(vec![Means::Ublk, Means::Nbd, Means::Loop], |by| vec![by]);
    let is_mounted_only = matches!(owner, Owner::Mount(_));
    let mount = if let Owner::Mount(dir) = owner { dir.clone() } else { PathBuf::new() };
    let another = || match is_mounted_only {
        true => Ok(Owner::Mount(mount.clone())),
        false => daemon_of(global, pool)?.context("the daemon of the pool has ended"),
    };
    let attached = attach::attach_all(global, (owner, &another), &targets, &means)?;
    if let Some(dirs) = &dirs
        && let Err(error) = attach::mount_all(&attached, dirs, &read_only)
    {
        for attachment in attached.iter().rev() {
            if let Err(error) = attach::detach(global, attachment) {
                tracing::warn!("{error:#}");
            }
        }
        return Err(error);
    }
    let dirs = dirs.unwrap_or_default().into_iter().map(Some).chain(std::iter::repeat(None));
    let again = again.into_iter().map(|attachment| Made { attachment, mounted: None });
    Ok(again.chain(attached.into_iter().zip(dirs).map(|(attachment, mounted)| Made { attachment, mounted })).collect())
}

/// Returns the names, and those that patterns match: of volumes, or of snapshots with `@` in a pattern.
fn all_names(owner: &mut Owner, wanted: &Wanted) -> Result<Vec<String>> {
    let mut names = wanted.names.clone();
    for pattern in &wanted.patterns {
        let Owner::Daemon(client, _) = owner else {
            bail!("the pool is mounted and not served: '{pattern}' cannot be looked up, name each volume")
        };
        let list = params::List { pattern: Some(pattern.clone()), ..params::List::default() };
        let found = client.call(list, None, |_| {})?;
        let is_wanted = |name: &String| name.contains('@') == pattern.contains('@');
        let found: Vec<String> = found.iter().map(|record| record.name.clone()).filter(is_wanted).collect();
        ensure!(!found.is_empty(), "no volume has a name like '{pattern}'");
        names.extend(found);
    }
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    Ok(names)
}

/// Checks that the daemon that was just started serves a device of a killed one.
fn check_served_again(attachment: &Attachment) -> Result<()> {
    let device = attachment.device.display();
    ensure!(!attach::is_left_behind(attachment), "{device} is not served again: see the log of the pool's daemon");
    ensure!(attachment.device.exists(), "{device} could not be served again and was removed");
    Ok(())
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
    if !args.object.is_empty() {
        let addresses: Vec<_> = args.object.iter().map(|text| global.address(text)).collect::<Result<_>>()?;
        let pool = same_pool(&addresses)?;
        let pool = pool.canonicalize().with_context(|| pool.display().to_string())?;
        let is_named = |object: &str| addresses.iter().any(|a| a.name.is_empty() || a.name == object);
        found.retain(|a| a.pool == pool && is_named(&a.object));
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
