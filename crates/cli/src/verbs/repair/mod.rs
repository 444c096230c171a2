//! `repair`: rebuilds the reference counts of a pool from its maps.
//!
//! Exit status as of `check`: 0 clean afterwards, 1 could not complete, 2 still corrupt, 3 leaks only.

mod undo;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::{PAGE_SIZE, Pool, replace_pages};
use forkdisk_control::Check;
use forkdisk_uring::Config;
use serde::Serialize;

use crate::global::Global;
use crate::output::{print_json, print_line};
use crate::session::{Access, open_device, open_device_in_turn};
use crate::size::human;
use crate::verbs::check::{examine, exit_code, print_damage};
use crate::verbs::examples::examples;

use undo::UndoFile;

/// Rebuild a pool's reference counts from its maps; no process may have the pool open
///
/// For pools in which `check` finds damaged count pages, a damaged log of counts or superblock, or leaks. Maps, data,
/// the directory of volumes and the journal are not changed. Overwritten pages are saved to an undo file first.
#[derive(Args)]
#[command(after_help = examples!["forkdisk repair /srv/pool.img"])]
pub struct RepairArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Only show what would be done
    #[arg(short = 'n', long)]
    dry_run: bool,

    /// Where overwritten pages are saved [default: forkdisk-UUID-SECONDS.undo in the current folder]
    #[arg(long, value_name = "FILE", conflicts_with = "undo")]
    undo_file: Option<PathBuf>,

    /// Undo a repair: write back the pages saved in this file, if the pool has not been changed since
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    undo: Option<PathBuf>,
}

/// Result of a repair or of its dry run.
#[derive(Serialize)]
struct Done<'a> {
    /// Result of `check` before.
    before: &'a Check,
    /// Pages written, or to be written.
    replaced: usize,
    /// File with their old contents.
    undo: Option<&'a Path>,
    /// Result of `check` afterwards.
    after: Option<&'a Check>,
}

/// Repairs and prints the result.
pub fn run(args: RepairArgs, global: &Global) -> Result<ExitCode> {
    let path = global.pool(args.pool.as_deref())?;
    if let Some(file) = &args.undo {
        take_back(&path, file, global)?;
        return Ok(ExitCode::SUCCESS);
    }
    let before = examine(global, &path)?;
    if !global.output.json() {
        print_damage(&before);
    }
    if before.status == "clean" {
        let nothing = Done { before: &before, replaced: 0, undo: None, after: None };
        if global.output.json() {
            print_json(&nothing)?;
        } else {
            print_line("clean: there is nothing to repair")?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let say = |text: String| if global.output.json() { Ok(()) } else { print_line(&text) };
    let (replaced, undo) = forkdisk_uring::block_on(Config::default(), |runtime| async move {
        let access = if args.dry_run { Access::Read } else { Access::Write };
        let open = || open_device(&runtime, &path, access);
        let (device, _lock) = open_device_in_turn(global, &runtime, open).await?;
        let plan = Pool::plan_repair(device, Rc::new(runtime)).await.context(path.display().to_string())?;
        let replaced = plan.replacements.len();
        say(format!(
            "{} volumes and snapshots refer to {} pages; {replaced} pages of {} {} to be written: counts, then both \
             superblocks",
            plan.volumes,
            plan.pages,
            human(PAGE_SIZE as u64),
            if args.dry_run { "would have" } else { "have" }
        ))?;
        if args.dry_run {
            return Ok((replaced, None));
        }
        let file = args.undo_file.unwrap_or_else(|| default_undo_file(&plan.uuid));
        UndoFile::of(plan.uuid, plan.replaced().await, &plan.replacements).write(&file)?;
        say(format!("their old contents are kept in {} (`forkdisk repair --undo`)", file.display()))?;
        plan.apply().await.context(path.display().to_string())?;
        anyhow::Ok((replaced, Some(file)))
    })??;
    let after = if undo.is_some() { Some(examine(global, &global.pool(args.pool.as_deref())?)?) } else { None };
    if global.output.json() {
        print_json(&Done { before: &before, replaced, undo: undo.as_deref(), after: after.as_ref() })?;
    } else if let Some(after) = &after {
        print_damage(after);
        print_line(&format!("now it is {}", after.status))?;
    }
    Ok(after.map_or(ExitCode::SUCCESS, |after| exit_code(&after)))
}

fn default_undo_file(uuid: &[u8; 16]) -> PathBuf {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let uuid: String = uuid[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    PathBuf::from(format!("forkdisk-{uuid}-{seconds}.undo"))
}

/// Undoes the repair that wrote this file.
fn take_back(path: &Path, file: &Path, global: &Global) -> Result<()> {
    let undo = UndoFile::read(file)?;
    forkdisk_uring::block_on(Config::default(), |runtime| async move {
        let open = || open_device(&runtime, path, Access::Write);
        let (device, _lock) = open_device_in_turn(global, &runtime, open).await?;
        for (offset, expected) in &undo.superblocks {
            let segment = forkdisk::device::Segment { offset: *offset, at: 0, len: PAGE_SIZE };
            let buf = forkdisk::Device::buffer(&device, PAGE_SIZE);
            let (result, found) = forkdisk::Device::read(&device, buf, [segment].into_iter().collect()).await;
            result.with_context(|| format!("{}: reading the superblock", path.display()))?;
            if found[..] != expected[..] {
                bail!(
                    "{} is another pool than {} was made for, or was changed since that repair, which cannot be undone \
                     any more",
                    path.display(),
                    file.display()
                );
            }
        }
        replace_pages(&device, &undo.pages).await.with_context(|| path.display().to_string())
    })?
}
