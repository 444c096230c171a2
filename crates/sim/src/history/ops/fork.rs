//! Snapshots and clones.

use super::control::{all, control, drawn_volume, is_crowded, names_of_one, new_name, strs};
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};
use crate::rng::Rng;

pub static SNAPSHOT: Operation<Volumes> = Operation {
    name: "snapshot",
    weight: |profile| match profile {
        Journal | Crowd => 40,
        Copies => 22,
        Forks => 14,
        Gathering => 10,
        Races => 8,
        Blocks => 7,
        Mixed | Faults | Large | Hosts => 6,
        Full | Calm | Files | Ranges | Quotas | Bounds => 5,
        Cuts | Transactions | Folders | Lifetimes | Comparing => 4,
        Names => 3,
        Heirs => 1,
        _ => 0,
    },
    launch: snapshot_one,
};

/// Snapshots of several volumes at one instant.
pub static GROUP: Operation<Volumes> = Operation {
    name: "group",
    weight: |profile| match profile {
        Forks | Crowd | Transactions | Folders | Lifetimes | Comparing => 4,
        Mixed | Races | Large | Copies => 2,
        Faults | Cuts => 1,
        _ => 0,
    },
    launch: group,
};

pub static CLONE: Operation<Volumes> = Operation {
    name: "clone",
    weight: |profile| match profile {
        Journal => 16,
        Crowd => 14,
        Forks => 10,
        Copies | Gathering => 6,
        Large => 5,
        Mixed | Faults | Blocks => 4,
        Full | Races | Cuts | Calm | Ranges | Hosts | Quotas | Bounds => 3,
        Files => 2,
        Heirs | Names => 1,
        _ => 0,
    },
    launch: clone_one,
};

/// Clones several times, all or none.
pub static CLONE_ALL: Operation<Volumes> = Operation {
    name: "clone-all",
    weight: |profile| match profile {
        Transactions | Folders | Lifetimes | Comparing => 12,
        _ => 0,
    },
    launch: clone_some,
};

fn snapshot_one(run: &mut Run, op: &Op) -> Result<(), Violation> {
    match drawn_volume(run, op) {
        Some(key) if !is_crowded(run) => {
            let name = new_name(run, "s");
            snapshot(run, vec![(key, name)])
        }
        _ => Ok(()),
    }
}

fn group(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if is_crowded(run) {
        return Ok(());
    }
    let (name, mut rng) = (new_name(run, "g"), Rng::new(op.draws[1]));
    let mut sources = place::volumes(&run.known.model);
    rng.shuffle(&mut sources);
    sources.truncate(2 + rng.index(2));
    snapshot(run, sources.into_iter().map(|key| (key, name.clone())).collect())
}

/// Takes snapshots at one instant, each with its short name.
pub fn snapshot(run: &mut Run, sources: Vec<(Key, String)>) -> Result<(), Violation> {
    control(run, Control::Snapshot(sources.clone()), |run| {
        let pool = run.session.pool.clone();
        let all: Vec<_> = sources.into_iter().map(|(key, short)| (run.known.model.name(key), short)).collect();
        let names: Vec<String> = all.iter().map(|(name, short)| format!("{name}@{short}")).collect();
        (format!("snapshot {}", names.join(" ")), async move {
            let all: Vec<(&str, &str)> = all.iter().map(|(name, short)| (name.as_str(), short.as_str())).collect();
            pool.snapshot(&all, 1).await.map(drop)
        })
    })
}

fn clone_one(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if is_crowded(run) {
        return Ok(());
    }
    let snapshots = place::snapshots(&run.known.model, None);
    let is_of_volume = Rng::new(op.draws[1]).one_in(3) || snapshots.is_empty();
    let from = if is_of_volume { place::volumes(&run.known.model) } else { snapshots };
    let Some(source) = place::choose(&from, op.draws[0]) else { return Ok(()) };
    let name = new_name(run, "c");
    clone(run, source, name)
}

pub fn clone(run: &mut Run, source: Key, name: String) -> Result<(), Violation> {
    control(run, Control::Clone(source, name.clone()), |run| {
        let (pool, source) = (run.session.pool.clone(), run.known.model.name(source));
        let text = format!("clone {source} to {name}");
        (text, async move { pool.clone_volume(&source, &name, 1).await.map(drop) })
    })
}

fn clone_some(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if is_crowded(run) {
        return Ok(());
    }
    let Some(source) = place::choose(&all(run), op.draws[0]) else { return Ok(()) };
    let names = names_of_one(run, "c", &mut Rng::new(op.draws[1]));
    control(run, Control::CloneAll(source, names.clone()), |run| {
        let (pool, source) = (run.session.pool.clone(), run.known.model.name(source));
        let text = format!("clone {source} to {}", names.join(" "));
        (text, async move { pool.clone_all(&source, &strs(&names), 1).await.map(drop) })
    })
}
