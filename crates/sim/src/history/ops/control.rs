//! Operations on volumes as a whole: how they start.

use forkdisk::Error;

use super::folder_bound::forgive_folders;
use super::quota::forgive_quota;
use super::target::{family, is_unsure};
use crate::driver::{Class, Op, Violation};
use crate::history::place;
use crate::history::run::Run;
use crate::model::{Control, Key, Volume};
use crate::rng::Rng;

/// Starts a control operation once nothing blocks it. `call` returns the call of the engine, and its
/// description.
pub fn control<F: Future<Output = Result<(), Error>> + 'static>(
    run: &mut Run,
    control: Control,
    call: impl FnOnce(&Run) -> (String, F),
) -> Result<(), Violation> {
    let keys = touched(run, &control);
    let rough = !matches!(
        control.inner(),
        Control::Create(..)
            | Control::Snapshot(_)
            | Control::SnapshotFolder(_)
            | Control::Clone(..)
            | Control::Fork(_)
            | Control::Rollback(..)
            | Control::RollbackAll(_)
            | Control::RollbackTo(..)
            | Control::CreateAll(..)
            | Control::CloneAll(..)
            | Control::Set(..)
            | Control::SetLifetime(..)
            | Control::SetXattr(..)
    );
    let rollback = matches!(control, Control::Rollback(..) | Control::RollbackAll(_));
    let of_folder = control.is_of_folder();
    let target = if let Control::RollbackTo(target, _) = control { Some(target) } else { None };
    run.wait(|o| {
        // What is in the folder must be certain.
        if o.class.is_of_folder() || of_folder && o.class.is_control() {
            return true;
        }
        let near = o.keys.iter().any(|key| keys.contains(key));
        let shares = o.text.starts_with("share");
        let on_target = target.is_some_and(|target| o.keys.contains(&target));
        near && (rough || on_target || o.class.is_control() || (rollback && shares))
    })?;
    let exists = |key: &Key| run.known.model.get(*key).is_some();
    if !keys.iter().all(exists) || keys.iter().any(|&key| is_unsure(run, key)) {
        return Ok(());
    }
    if let Control::Rename(key, _) | Control::Usurp(key, _) = &control
        && run.world.bounds.contains_key(key)
    {
        forgive_folders(run);
    }
    let victims = match &control {
        Control::Delete(victims) => victims.clone(),
        Control::Usurp(_, victim) => vec![*victim],
        _ => Vec::new(),
    };
    if !victims.is_empty() {
        // A snapshot may have been taken while this had to wait.
        let left = |(key, v): (Key, &Volume)| v.of.is_some_and(|of| victims.contains(&of)) && !victims.contains(&key);
        if run.known.model.volumes().any(left) {
            return Ok(());
        }
    }
    let rolled: Vec<Key> = match &control {
        Control::Rollback(volume, _) | Control::RollbackTo(volume, _) => vec![*volume],
        Control::RollbackAll(all) => all.iter().map(|&(volume, _)| volume).collect(),
        _ => Vec::new(),
    };
    for volume in rolled {
        forgive_quota(run, volume);
        for o in run.inflight.values_mut().filter(|o| o.keys.contains(&volume)) {
            if let Class::Read { vague } = &mut o.class {
                *vague = true;
            }
        }
    }
    let (text, future) = call(run);
    let needs_space = !matches!(control, Control::Delete(_));
    let pending = run.known.model.begin(control);
    run.submit_control((pending, needs_space), keys, text, async move { future.await.into() });
    Ok(())
}

/// Returns a volume of each family that a control operation concerns.
pub fn touched(run: &Run, control: &Control) -> Vec<Key> {
    let keys = match control.inner() {
        Control::WithLifetime(..) | Control::Create(..) | Control::CreateAll(..) => Vec::new(),
        Control::CloneAll(key, _) | Control::Set(key, _) | Control::SetLifetime(key, _) | Control::SetXattr(key, _) => {
            vec![*key]
        }
        Control::Snapshot(sources) | Control::SnapshotFolder(sources) | Control::Fork(sources) => {
            sources.iter().map(|s| s.0).collect()
        }
        Control::Swap(new) => new.iter().map(|&(key, _)| key).collect(),
        Control::RollbackAll(all) => all.iter().flat_map(|&(volume, snapshot)| [volume, snapshot]).collect(),
        Control::Clone(key, _) | Control::Rename(key, _) | Control::Resize(key, _) | Control::KeepSnapshots(key, _) => {
            vec![*key]
        }
        Control::Rollback(a, b) | Control::RollbackTo(a, b) | Control::Replace(a, b) | Control::Usurp(a, b) => {
            vec![*a, *b]
        }
        Control::Delete(keys) => keys.clone(),
    };
    let mut all: Vec<Key> = keys.iter().flat_map(|&key| [key, family(run, key)]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns a name that no volume has.
pub fn new_name(run: &mut Run, letter: &str) -> String {
    run.world.names += 1;
    let folder = if letter != "s" && letter != "g" && run.world.names.is_multiple_of(4) { "f/" } else { "" };
    format!("{folder}{letter}{}", run.world.names)
}

/// Whether there are as many volumes and snapshots as the setup allows.
pub fn is_crowded(run: &Run) -> bool {
    run.known.model.volumes().count() >= run.setup.crowd
}

/// Returns a volume of the operation's choice.
pub fn drawn_volume(run: &Run, op: &Op) -> Option<Key> {
    place::choose(&place::volumes(&run.known.model), op.draws[0])
}

/// Returns all volumes and snapshots.
pub fn all(run: &Run) -> Vec<Key> {
    let mut keys = place::volumes(&run.known.model);
    keys.extend(place::snapshots(&run.known.model, None));
    keys
}

/// Names of a large verb.
const MANY_NAMES_COUNT: u64 = 80;

/// Returns the names of one verb: a few, and sometimes so many that they do not fit into the volatile log.
pub fn names_of_one(run: &mut Run, letter: &str, rng: &mut Rng) -> Vec<String> {
    let (count, longest) = if rng.one_in(24) { (MANY_NAMES_COUNT, 220) } else { (1 + rng.below(8), 40) };
    let length = rng.below(longest) as usize;
    (0..count).map(|_| format!("{}{}", new_name(run, letter), "-".repeat(length))).collect()
}

pub fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}
