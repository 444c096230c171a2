//! Snapshots.

use forkdisk::SnapshotFlags;

use super::target::{any_of, is_certain, rolling, wait_for_controls};
use crate::driver::{Op, Operation, Outcome, Violation};
use crate::model::{Control, Key};
use crate::origins::ORIGIN;
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static SNAPSHOT: Operation<Origins> = Operation {
    name: "snapshot",
    weight: |focus| match focus {
        Strikes => 16,
        Plain => 14,
        Sweeps => 8,
    },
    launch: |run, op| snapshot(run, op, Sources::One),
};

/// A snapshot of the origin with separate copies.
pub static INDEPENDENT: Operation<Origins> = Operation {
    name: "independent",
    weight: |focus| match focus {
        Plain => 3,
        Strikes => 2,
        Sweeps => 1,
    },
    launch: |run, op| snapshot(run, op, Sources::Independent),
};

/// Snapshots of the origin and of a pool volume at one instant.
pub static GROUP: Operation<Origins> = Operation {
    name: "group",
    weight: |focus| match focus {
        Strikes => 4,
        Plain => 3,
        Sweeps => 1,
    },
    launch: |run, op| snapshot(run, op, Sources::Group),
};

/// What snapshots are taken of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sources {
    /// The origin, or sometimes a volume.
    One,
    /// The origin, with separate copies.
    Independent,
    /// The origin and a volume.
    Group,
}

/// Runs control operations one at a time.
pub fn start_control(
    run: &mut Run,
    control: Control,
    keys: Vec<Key>,
    text: String,
    future: impl Future<Output = Outcome> + 'static,
) {
    let pending = run.known.model.begin(control);
    run.submit_control((pending, true), keys, text, future);
}

pub fn is_crowded(run: &Run) -> bool {
    run.known.model.volumes().count() >= run.setup.crowd + 2
}

pub fn snapshot(run: &mut Run, op: &Op, of: Sources) -> Result<(), Violation> {
    if !wait_for_controls(run)? || is_crowded(run) {
        return Ok(());
    }
    let origin = run.known.origin;
    let other = any_of(run, op.draws[0], |key, v| v.of.is_none() && key != origin);
    let independent = of == Sources::Independent;
    let sources: Vec<Key> = match (of, other) {
        (Sources::Group, Some(other)) => vec![origin, other],
        (Sources::One, Some(other)) if op.draws[1].is_multiple_of(8) => vec![other],
        _ => vec![origin],
    };
    if sources.contains(&origin) && rolling(run).is_some() {
        return Ok(());
    }
    let writable = sources == [origin] && op.draws[3].is_multiple_of(3);
    let flags = SnapshotFlags::NONE
        .with_independent(independent)
        .with_droppable(op.draws[2].is_multiple_of(3))
        .with_writable(writable);
    for &key in &sources {
        if !is_certain(run, key)? {
            return Ok(());
        }
    }
    let short = format!("s{}", op.number);
    let names: Vec<String> = sources.iter().map(|&key| run.known.model.name(key)).collect();
    if flags.droppable {
        run.known.droppable.extend(names.iter().map(|name| format!("{name}@{short}")));
    }
    if writable {
        run.known.writable.insert(format!("{ORIGIN}@{short}"));
    }
    let text = format!("snapshot {names:?}@{short} {flags:?}");
    let (pool, part) = (run.session.pool.clone(), short.clone());
    let control = Control::Snapshot(sources.iter().map(|&key| (key, short.clone())).collect());
    start_control(run, control, sources, text, async move {
        let all: Vec<(&str, &str)> = names.iter().map(|name| (&name[..], &part[..])).collect();
        pool.snapshot_with(&all, flags, 1).await.map(drop).into()
    });
    Ok(())
}
