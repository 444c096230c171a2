//! `snapshot`: takes snapshots of one or several volumes at one instant.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forkdisk_control::{VolumeRecord, params};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::address::{names, same_pool};
use crate::attach;
use crate::config::key;
use crate::freeze::{Frozen, files_of};
use crate::global::Global;
use crate::output::{print_json, print_line};
use crate::session::{Access, Caller, call, with_pool};
use crate::verbs::examples::examples;
use crate::verbs::lifetime::{NewArgs, SelectArgs, created_by};

/// Take snapshots, all of them at one instant or none
///
/// File systems mounted from attached volumes are frozen meanwhile (docs/attach.md).
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk snapshot /srv/pool.img/vm1@monday /srv/pool.img/vm2@monday",
    "forkdisk snapshot -r /srv/pool.img/team@monday",
    "forkdisk snapshot /srv/pool.img/@daily --label backup=yes --set expires=7d",
])]
pub struct SnapshotArgs {
    #[arg(required = true, value_name = "POOL/VOLUME@SNAPSHOT")]
    snapshots: Vec<String>,

    #[arg(short, long)]
    recursive: bool,

    #[arg(long)]
    independent: bool,

    #[arg(long)]
    droppable: bool,

    #[arg(long)]
    writable: bool,

    #[command(flatten)]
    new: NewArgs,

    #[command(flatten)]
    select: SelectArgs,

    #[arg(short = 'n', long)]
    dry_run: bool,

    /// Do not freeze mounted file systems of attached volumes: their snapshots are as after a crash
    #[arg(long)]
    no_freeze: bool,

    /// Longest time to freeze file systems; if the snapshots take longer, there are none
    #[arg(long, value_parser = key::time, value_name = "TIME", default_value = "60s", conflicts_with = "no_freeze")]
    freeze_limit: Duration,

    /// Run this with /bin/sh before; if it fails no snapshot is taken (docs/attach.md)
    #[arg(long, value_name = "COMMAND")]
    exec_before: Option<String>,

    /// Run this with /bin/sh after, whether the snapshots were taken or not
    #[arg(long, value_name = "COMMAND")]
    exec_after: Option<String>,
}

/// Takes all the snapshots or none.
pub fn run(args: SnapshotArgs, global: &Global) -> Result<()> {
    let addresses = args.snapshots.iter().map(|text| global.snapshot(text)).collect::<Result<Vec<_>>>()?;
    let pool = same_pool(&addresses)?;
    let pool = pool.canonicalize().with_context(|| pool.display().to_string())?;
    let SnapshotArgs { recursive, independent, droppable, writable, dry_run, .. } = args;
    let ((expires, labels), select) = (args.new.given(), args.select);
    let method = params::Snapshot {
        snapshots: names(addresses),
        recursive,
        independent,
        droppable,
        writable,
        dry_run,
        expires,
        labels,
        label: select.label,
        pattern: select.pattern,
        older_than: select.older_than,
        expires_before: select.expires_before,
        created_by: created_by(),
    };
    if dry_run {
        return show_plan(global, &call(global, &pool, Access::Read, method)?);
    }
    let names = method.snapshots.join("\n");
    let hook = |command: &Option<String>, what: &str, result: &str| match command {
        Some(command) => run_hook(command, &pool, &names, result).with_context(|| what.to_string()),
        None => Ok(()),
    };
    let limit = (!args.no_freeze).then_some(args.freeze_limit);
    let interrupted = if args.exec_after.is_some() { note_signals()? } else { Arc::default() };
    let taken = hook(&args.exec_before, "no snapshot was taken: --exec-before", "").and_then(|()| {
        ensure!(!interrupted.load(Ordering::Relaxed), "no snapshot was taken: a signal ended the verb before");
        with_pool(global, &pool, Access::Write, async |caller| take(caller, &pool, method, limit).await)
    });
    let after = hook(&args.exec_after, "--exec-after", if taken.is_ok() { "taken" } else { "failed" });
    let taken = match (taken, &after) {
        (Err(error), Err(after)) => {
            tracing::warn!("{after:#}");
            return Err(error);
        }
        (taken, _) => taken?,
    };
    global.print_if_json(&taken)?;
    after.context("the snapshots were taken")
}

/// Prints what snapshots would be taken.
fn show_plan(global: &Global, plan: &[VolumeRecord]) -> Result<()> {
    match global.output.json() {
        true => print_json(&plan),
        false => plan.iter().try_for_each(|record| print_line(&format!("would take {}", record.name))),
    }
}

async fn take(
    caller: &Caller,
    pool: &Path,
    method: params::Snapshot,
    limit: Option<Duration>,
) -> Result<Vec<VolumeRecord>> {
    let frozen = match limit {
        Some(limit) => freeze(caller, pool, &method, limit).await?,
        None => None,
    };
    let taken = caller.call(method, None).await;
    let Some(mut frozen) = frozen else { return Ok(taken?) };
    let not_frozen = std::mem::take(&mut frozen.not_frozen);
    let was_held = frozen.end();
    for reason in not_frozen {
        tracing::warn!("not frozen: its snapshot has the state after a crash: {reason}");
    }
    let taken = taken?;
    if !was_held {
        let objects = taken.iter().map(|record| record.name.clone()).collect();
        let delete = params::Delete { objects, ..params::Delete::default() };
        caller.call(delete, None).await.context("deleting snapshots that were taken too late")?;
        bail!("the file systems were thawed before the snapshots were taken, which were deleted: see --freeze-limit");
    }
    Ok(taken)
}

/// Freezes the file systems that are mounted from the volumes, if any is attached.
async fn freeze(caller: &Caller, pool: &Path, method: &params::Snapshot, limit: Duration) -> Result<Option<Frozen>> {
    let is_in = |object: &str, folder: &str| {
        folder.is_empty() || object.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    };
    let is_meant = |object: &str| {
        let mut sources = method.snapshots.iter().filter_map(|name| name.split('@').next());
        let is_folder = method.recursive || !method.label.is_empty() || method.pattern.is_some();
        let is_folder = is_folder || method.older_than.is_some() || method.expires_before.is_some();
        sources.any(|source| source == object || is_folder && is_in(object, source))
    };
    let attached = attach::list().into_iter().filter(|a| a.pool == pool && is_meant(&a.object));
    let devices: Vec<PathBuf> = attached.filter(|a| !attach::is_left_behind(a)).map(|a| a.device).collect();
    // Without a daemon no device can be written.
    if devices.is_empty() || matches!(caller, Caller::Idle(_)) {
        return Ok(None);
    }
    let status = caller.call(params::Status {}, None).await?;
    let needed = [vec![pool.to_path_buf()], files_of(status.pid)].concat();
    let frozen = Frozen::begin(&devices, &needed, limit);
    frozen.map(Some).context("no snapshot was taken (--no-freeze takes it as after a crash)")
}

/// Makes SIGINT, SIGTERM and SIGHUP set the returned flag instead of ending the process, so that
/// `--exec-after` runs. Started commands get the default handlers.
fn note_signals() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, flag.clone()).context("handling signals")?;
    }
    Ok(flag)
}

/// Runs a command of the user; fails if the command fails.
fn run_hook(command: &str, pool: &Path, names: &str, result: &str) -> Result<()> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).env("FORKDISK_SNAPSHOT_POOL", pool).env("FORKDISK_SNAPSHOTS", names);
    shell.env("FORKDISK_SNAPSHOT_RESULT", result).stdin(Stdio::null());
    // Standard output is reserved for the verb's result.
    shell.stdout(std::io::stderr());
    let status = shell.status().context("/bin/sh")?;
    ensure!(status.success(), "`{command}` ended with {status}");
    Ok(())
}
