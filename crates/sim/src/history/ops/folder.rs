//! Folders as a whole: snapshots, forks, and the way back.

use forkdisk::{ForkOptions, SnapshotFlags};

use super::control::{all, control, drawn_volume, new_name};
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};
use crate::rng::Rng;

pub static SNAPSHOT_FOLDER: Operation<Volumes> = Operation {
    name: "snapshot-folder",
    weight: |profile| match profile {
        Folders => 12,
        _ => 0,
    },
    launch: snapshot_folder,
};

pub static FORK: Operation<Volumes> = Operation {
    name: "fork",
    weight: |profile| match profile {
        Folders => 16,
        _ => 0,
    },
    launch: fork,
};

pub static ROLLBACK_FOLDER: Operation<Volumes> = Operation {
    name: "rollback-folder",
    weight: |profile| match profile {
        Folders => 12,
        _ => 0,
    },
    launch: rollback_folder,
};

/// A volume gets the contents of another one, or of a snapshot of another one.
pub static ROLLBACK_TO: Operation<Volumes> = Operation {
    name: "rollback-to",
    weight: |profile| match profile {
        Folders => 16,
        _ => 0,
    },
    launch: rollback_to,
};

/// A volume gets the contents of one of its snapshots while it is written and read.
pub static ROLLBACK_LIVE: Operation<Volumes> = Operation {
    name: "rollback-live",
    weight: |profile| match profile {
        Folders => 14,
        _ => 0,
    },
    launch: rollback_live,
};

/// Two volumes or folders exchange their names.
pub static SWAP: Operation<Volumes> = Operation {
    name: "swap",
    weight: |profile| match profile {
        Folders => 10,
        _ => 0,
    },
    launch: swap,
};
/// The snapshots of a volume are kept apart, as before a file is removed on a mount.
pub static KEEP_SNAPSHOTS: Operation<Volumes> = Operation {
    name: "keep-snapshots",
    weight: |profile| match profile {
        Folders => 12,
        _ => 0,
    },
    launch: keep_snapshots,
};

/// Folder of the volumes that have kept snapshots.
const REMNANTS: &str = ".snapshots/";

fn keep_snapshots(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.wait(|o| o.class.is_control())?;
    let model = &run.known.model;
    let has_some = |&key: &Key| !place::snapshots(model, Some(key)).is_empty();
    let all: Vec<Key> = place::volumes(model).into_iter().filter(has_some).collect();
    let Some(key) = place::choose(&all, op.draws[0]) else { return Ok(()) };
    let name = model.name(key);
    let Ok(found) = run.session.pool.find(&name) else { return Ok(()) };
    let remnant = format!("{REMNANTS}{name}/~{}", found.id.0);
    let is_kept = model.volumes().any(|(_, v)| v.name == remnant);
    if name.starts_with(REMNANTS) || is_kept || has_no_room(run, 1) {
        return Ok(());
    }
    control(run, Control::KeepSnapshots(key, remnant), |run| {
        let pool = run.session.pool.clone();
        let kept = format!("keep the snapshots of {name}");
        (kept, async move {
            pool.keep_snapshots(&name, 1)?;
            pool.flush().await
        })
    })
}

/// Returns the kept snapshots of this name of what was in a folder, each with the name that the file had.
fn kept_in(run: &Run, folder: &str, snapshot: &str) -> Vec<(Key, String)> {
    let model = &run.known.model;
    let prefix = format!("{REMNANTS}{folder}/");
    let of_remnant = |(key, v): (Key, &crate::model::Volume)| {
        let (former, _) = v.name.strip_prefix(&prefix).filter(|_| v.of.is_none())?.rsplit_once("/~")?;
        let all = place::snapshots(model, Some(key));
        let kept = all.into_iter().find(|&key| model.name(key).ends_with(&format!("@{snapshot}")))?;
        Some((kept, format!("{folder}/{former}")))
    };
    model.volumes().filter_map(of_remnant).collect()
}

/// Returns a folder that has volumes, and these.
fn drawn_folder(run: &Run, op: &Op) -> Option<(String, Vec<Key>)> {
    let model = &run.known.model;
    let all = place::volumes(model);
    let within: Vec<Key> = all.iter().copied().filter(|&key| model.name(key).contains('/')).collect();
    let name = model.name(place::choose(&within, op.draws[0])?);
    let mut above: Vec<&str> = name.match_indices('/').map(|(at, _)| &name[..at]).collect();
    let folder = above.swap_remove(Rng::new(op.draws[1]).index(above.len()));
    let prefix = format!("{folder}/");
    let inside = all.into_iter().filter(|&key| model.name(key).starts_with(&prefix)).collect();
    Some((folder.to_string(), inside))
}

/// Returns the names of a snapshot that volumes of the folder have, and which volume has which.
fn drawn_snapshot(run: &Run, volumes: &[Key], draw: u64) -> Option<(String, Vec<(Key, Key)>)> {
    let model = &run.known.model;
    let short = |key: Key| model.name(key).rsplit('@').next().unwrap_or_default().to_owned();
    let all: Vec<(Key, Key)> = volumes
        .iter()
        .flat_map(|&volume| place::snapshots(model, Some(volume)).into_iter().map(move |snapshot| (volume, snapshot)))
        .collect();
    let name = short(place::choose(&all.iter().map(|&(_, snapshot)| snapshot).collect::<Vec<_>>(), draw)?);
    let of_name = all.into_iter().filter(|&(_, snapshot)| short(snapshot) == name).collect();
    Some((name, of_name))
}

/// Whether so many more volumes and snapshots are too many.
fn has_no_room(run: &Run, more: usize) -> bool {
    run.known.model.volumes().count() + more > run.setup.crowd
}

fn snapshot_folder(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.wait(|o| o.class.is_control())?;
    let Some((folder, volumes)) = drawn_folder(run, op) else { return Ok(()) };
    if has_no_room(run, volumes.len()) {
        return Ok(());
    }
    let name = new_name(run, "g");
    let sources = volumes.into_iter().map(|key| (key, name.clone())).collect();
    control(run, Control::SnapshotFolder(sources), |run| {
        let pool = run.session.pool.clone();
        (format!("snapshot -r {folder}@{name}"), async move {
            pool.snapshot_folder(&folder, &name, SnapshotFlags::default(), 1).await.map(drop)
        })
    })
}

fn fork(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.wait(|o| o.class.is_control())?;
    let Some((folder, volumes)) = drawn_folder(run, op) else { return Ok(()) };
    let (source, pairs, kept) = match drawn_snapshot(run, &volumes, op.draws[2]) {
        Some((name, pairs)) if Rng::new(op.draws[3]).one_in(2) => {
            let kept = kept_in(run, &folder, &name);
            (format!("{folder}@{name}"), pairs, kept)
        }
        _ => (folder.clone(), volumes.iter().map(|&key| (key, key)).collect(), Vec::new()),
    };
    if has_no_room(run, pairs.len() + kept.len()) {
        return Ok(());
    }
    let target = new_name(run, "d");
    let name = |volume: Key| format!("{target}{}", &run.known.model.name(volume)[folder.len()..]);
    let kept = kept.iter().map(|(from, former)| (*from, format!("{target}{}", &former[folder.len()..])));
    let new = pairs.iter().map(|&(volume, from)| (from, name(volume))).chain(kept).collect();
    control(run, Control::Fork(new), |run| {
        let pool = run.session.pool.clone();
        (format!("fork {source} to {target}"), async move {
            pool.fork(&source, &[&target], &ForkOptions::new(1)).await.map(drop)
        })
    })
}

fn rollback_to(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = drawn_volume(run, op) else { return Ok(()) };
    let Some(source) = place::choose(&all(run), op.draws[3]).filter(|&source| source != key) else { return Ok(()) };
    control(run, Control::RollbackTo(key, source), |run| {
        let pool = run.session.pool.clone();
        let [name, source] = [key, source].map(|key| run.known.model.name(key));
        (format!("roll back {name} to {source}"), async move { pool.rollback_to(&name, &source).await })
    })
}

fn rollback_live(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let snapshot = place::choose(&place::snapshots(&run.known.model, None), op.draws[0]);
    let Some(snapshot) = snapshot else { return Ok(()) };
    let Some(volume) = run.known.model.get(snapshot).and_then(|v| v.of) else { return Ok(()) };
    control(run, Control::Rollback(volume, snapshot), |run| {
        let pool = run.session.pool.clone();
        let [name, source] = [volume, snapshot].map(|key| run.known.model.name(key));
        (format!("roll back {name} live to {source}"), async move { pool.rollback_live(&name, &source).await })
    })
}

fn swap(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.wait(|o| o.class.is_control())?;
    let volumes = place::volumes(&run.known.model);
    let name = |draw: u64| {
        let name = run.known.model.name(place::choose(&volumes, draw)?);
        let ends: Vec<usize> = name.match_indices('/').map(|(at, _)| at).chain([name.len()]).collect();
        Some(name[..ends[Rng::new(draw).index(ends.len())]].to_string())
    };
    let (Some(a), Some(b)) = (name(op.draws[0]), name(op.draws[1])) else { return Ok(()) };
    let is_in = |inner: &str, outer: &str| inner == outer || inner.starts_with(&format!("{outer}/"));
    // New volumes get names in the folder "f".
    let is_reserved = |name: &str| name == "f" || name.starts_with(".snapshots");
    if is_in(&a, &b) || is_in(&b, &a) || [&a, &b].into_iter().any(|name| is_reserved(name)) {
        return Ok(());
    }
    let renamed = |key: Key| {
        let full = run.known.model.name(key);
        let (place, name) = match full.strip_prefix(REMNANTS) {
            Some(name) => (REMNANTS, name),
            None => ("", full.as_str()),
        };
        // What is kept of earlier files stays where a volume has their name.
        let stays = |from: &String| !place.is_empty() && volumes.iter().any(|&key| run.known.model.name(key) == *from);
        let new = [(&a, &b), (&b, &a)].into_iter().find(|(from, _)| is_in(name, from) && !stays(from));
        new.map(|(from, to)| (key, format!("{place}{to}{}", &name[from.len()..])))
    };
    let new: Vec<(Key, String)> = volumes.iter().filter_map(|&key| renamed(key)).collect();
    if new.iter().any(|(_, name)| name.len() > 255) {
        return Ok(());
    }
    control(run, Control::Swap(new), |run| {
        let pool = run.session.pool.clone();
        (format!("swap {a} {b}"), async move { pool.swap(&a, &b).await })
    })
}

fn rollback_folder(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.wait(|o| o.class.is_control())?;
    let Some((folder, volumes)) = drawn_folder(run, op) else { return Ok(()) };
    let Some((name, pairs)) = drawn_snapshot(run, &volumes, op.draws[2]) else { return Ok(()) };
    control(run, Control::RollbackAll(pairs), |run| {
        let pool = run.session.pool.clone();
        let is_live = op.draws[2] & (1 << 63) != 0;
        let verb = format!("rollback -r{} {folder}@{name}", if is_live { " --live" } else { "" });
        let rolled = async move {
            match is_live {
                true => pool.rollback_folder_live(&folder, &name).await,
                false => pool.rollback_folder(&folder, &name).await,
            }
        };
        (verb, async move { rolled.await.map(drop) })
    })
}
