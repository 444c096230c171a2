//! Bounds of folders: the volumes below a folder never diverge further together than its bound allows, and bounds are
//! durable. The sums of folders are compared with what is below them by every check.

use std::collections::BTreeMap;

use forkdisk::{Changes, Child, ErrorKind, ExtensionChanges, Mode};

use super::control::{control, drawn_volume, strs};
use super::delete::delete;
use super::rename::rename;
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::place::{self, PAGE};
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};
use crate::rng::Rng;

/// Bounds what the volumes below a folder may take, when nothing else is in flight.
pub static SET_FOLDER_BOUND: Operation<Volumes> = Operation {
    name: "set-folder-bound",
    weight: |profile| match profile {
        Bounds => 12,
        _ => 0,
    },
    launch: set_folder_bound,
};

/// A volume is moved into a folder or out of it.
pub static MOVE: Operation<Volumes> = Operation {
    name: "move",
    weight: |profile| match profile {
        Bounds => 8,
        _ => 0,
    },
    launch: move_volume,
};

/// Two folders with bounds exchange their names.
pub static SWAP_FOLDERS: Operation<Volumes> = Operation {
    name: "swap-folders",
    weight: |profile| match profile {
        Bounds => 2,
        _ => 0,
    },
    launch: swap_folders,
};

/// A volume with a bound of its own is deleted from a folder with one, and clones may hold what it wrote.
pub static DELETE_BELOW: Operation<Volumes> = Operation {
    name: "delete-below",
    weight: |profile| match profile {
        Bounds => 6,
        _ => 0,
    },
    launch: delete_below,
};

/// Folders that have bounds: new volumes come into the first one.
const FOLDERS: [&str; 4] = ["f", "f/x", "g", "g/x"];

/// The last bounds of folders; `None`: not known since the folder was exchanged for another one.
pub type FolderBounds = BTreeMap<&'static str, Option<FolderBound>>;

/// A folder's last bound.
#[derive(Clone, Copy)]
pub struct FolderBound {
    diverge: u64,
    quota: u64,
    /// Most bytes that may be charged below the folder: the bound, or what was charged when it was set.
    most: u64,
}

fn is_below(run: &Run, key: Key, folder: &str) -> bool {
    run.known.model.name(key).strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

/// Whether the folder exists.
fn exists(run: &Run, folder: &str) -> bool {
    matches!(run.session.pool.child(folder), Ok(Child::Folder(..)))
}

fn set_folder_bound(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.drain()?;
    judge_folders(run)?;
    let mut rng = Rng::new(op.draws[1]);
    let folder = *rng.pick(&FOLDERS);
    let sound = run.session.disk.faults_hit() == 0 && run.session.pool.info().mode != Mode::Failed;
    if !sound || !run.known.pending.is_empty() || !exists(run, folder) {
        return Ok(());
    }
    let held = run.session.pool.find_folder(folder).map_or([0; 2], |info| [info.diverged, info.referenced]);
    let mut drawn = |held: u64| match rng.below(6) {
        0 => 0,
        1 => held.max(PAGE),
        2 => (held / 2).max(PAGE),
        3 => held + PAGE + rng.below(96 * PAGE),
        _ => held + PAGE + rng.below(1024 * PAGE),
    };
    let [diverge, quota] = held.map(&mut drawn);
    let quota = if rng.one_in(2) { quota } else { 0 };
    run.say(|| format!("set the bound of the folder {folder}, which counts {held:?} bytes, to {diverge}, {quota}"));
    let changes =
        Changes::default().with_extension(ExtensionChanges::default().with_diverge(diverge)).with_quota(quota);
    let pool = run.session.pool.clone();
    match run.session.exec.run(PATIENCE_STEPS, async move { pool.set(folder, &changes).await })? {
        Err(e) if e.kind() == ErrorKind::NoSpace => return Ok(()),
        done => done.map_err(|e| Violation::new("P4", format!("the bound of {folder}: {e}")))?,
    }
    // A first bound begins with what is charged to accounts below the folder.
    let held = run.session.pool.find_folder(folder).map_or(0, |info| info.diverged);
    let most = if diverge == 0 { u64::MAX } else { held.max(diverge) };
    run.world.folders.insert(folder, Some(FolderBound { diverge, quota, most }));
    Ok(())
}

fn move_volume(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = drawn_volume(run, op) else { return Ok(()) };
    run.world.names += 1;
    let place = *Rng::new(op.draws[1]).pick(&["", "f/", "f/x/", "f/x/", "g/"]);
    let name = format!("{place}m{}", run.world.names);
    rename(run, key, name)
}

fn swap_folders(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let (a, b) = *Rng::new(op.draws[1]).pick(&[("f/x", "g/x"), ("f", "g")]);
    run.wait(|o| o.class.is_control())?;
    if !exists(run, a) || !exists(run, b) {
        return Ok(());
    }
    let volumes = place::volumes(&run.known.model);
    let renamed = |key: Key| {
        let (from, to) = [(a, b), (b, a)].into_iter().find(|(from, _)| is_below(run, key, from))?;
        Some((key, format!("{to}{}", &run.known.model.name(key)[from.len()..])))
    };
    let new: Vec<(Key, String)> = volumes.iter().filter_map(|&key| renamed(key)).collect();
    // Those above them count what they bring along.
    run.world.folders.extend(FOLDERS.map(|folder| (folder, None)));
    control(run, Control::Swap(new), |run| {
        let pool = run.session.pool.clone();
        (format!("swap {a} {b}"), async move { pool.swap(a, b).await })
    })
}

fn delete_below(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.drain()?;
    judge_folders(run)?;
    let is_bounded = |folder: &str| matches!(run.world.folders.get(folder), Some(Some(bound)) if bound.diverge > 0);
    let folder_of = |key: Key| FOLDERS.into_iter().find(|folder| is_bounded(folder) && is_below(run, key, folder));
    let bounded: Vec<Key> = run.world.bounds.keys().copied().filter(|&key| folder_of(key).is_some()).collect();
    let Some(key) = place::choose(&bounded, op.draws[0]) else { return Ok(()) };
    let Some(folder) = folder_of(key) else { return Ok(()) };
    let mut victims = place::snapshots(&run.known.model, Some(key));
    victims.push(key);
    let names: Vec<String> = victims.iter().map(|&key| run.known.model.name(key)).collect();
    let pool = run.session.pool.clone();
    let freed = async move { pool.freed_by(&strs(&names)).await };
    let (Ok(freed), Some(before)) = (run.session.exec.run(PATIENCE_STEPS, freed)?, counted(run, folder)?) else {
        return Ok(());
    };
    delete(run, victims)?;
    run.drain()?;
    match counted(run, folder)?.filter(|_| run.known.model.get(key).is_none()) {
        Some(after) if after + freed < before => Err(Violation::new(
            "P12",
            format!("{freed} bytes became free, and the folder {folder} counts {after} bytes instead of {before}"),
        )),
        _ => Ok(()),
    }
}

/// What is charged below a folder once everything is free that can be; `None` if that is not known.
fn counted(run: &mut Run, folder: &str) -> Result<Option<u64>, Violation> {
    if run.session.pool.info().mode == Mode::Failed || !run.known.pending.is_empty() {
        return Ok(None);
    }
    let pool = run.session.pool.clone();
    let freed = run.session.exec.run(PATIENCE_STEPS, async move { pool.wait_freed().await })?;
    Ok(freed.ok().and_then(|()| run.session.pool.find_folder(folder).ok()).map(|info| info.diverged))
}

/// What volumes with bounds of their own bring along counts in the folder that they are moved to, beyond its bound.
pub fn forgive_folders(run: &mut Run) {
    run.world.folders.values_mut().flatten().for_each(|bound| bound.most = u64::MAX);
}

/// Checks that every folder has its last bound and that what is below it has not diverged further. Must be called when
/// nothing is in flight.
pub fn judge_folders(run: &mut Run) -> Result<(), Violation> {
    if run.world.folders.is_empty() || run.session.pool.info().mode == Mode::Failed || !run.known.pending.is_empty() {
        return Ok(());
    }
    // After a crash what was freed before may be charged again, until it is freed again.
    let pool = run.session.pool.clone();
    let freed = run.session.exec.run(PATIENCE_STEPS, async move { pool.wait_freed().await })?;
    if freed.is_err() {
        return Ok(());
    }
    for (folder, bound) in run.world.folders.iter().filter_map(|(folder, bound)| Some((folder, (*bound)?))) {
        let info = run.session.pool.find_folder(folder).map_err(|e| Violation::new("P4", e.to_string()))?;
        if (info.diverge, info.quota) != (bound.diverge, bound.quota) {
            let (has, was) = ((info.diverge, info.quota), (bound.diverge, bound.quota));
            let what = format!("the folder {folder} has bounds of {has:?} bytes and was given {was:?}");
            return Err(Violation::new("P4", what));
        }
        if info.diverged > bound.most {
            let what = format!("the folder {folder} has diverged by {} bytes and may by {}", info.diverged, bound.most);
            return Err(Violation::new("P12", what));
        }
    }
    Ok(())
}

/// Whether a write to one of these volumes may be refused because of the bound of the folder that the message names.
pub fn in_bounded_folder(run: &Run, keys: &[Key], message: &str) -> bool {
    let names = |folder: &str| message.contains(&format!("in the folder {folder:?}"));
    run.world.folders.keys().any(|folder| names(folder) && keys.iter().any(|&key| is_below(run, key, folder)))
}

/// Removes the folders, which are empty.
pub fn remove_folders(run: &mut Run) -> Result<(), Violation> {
    let pool = run.session.pool.clone();
    for folder in ["f/x", "f", "g/x", "g", "i"] {
        match pool.remove_folder(folder) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(Violation::new("P4", format!("the folder {folder} cannot be removed: {e}")));
            }
            _ => {}
        }
    }
    Ok(())
}
