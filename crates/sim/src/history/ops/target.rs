//! Volumes that operations work on.

use super::control::touched;
use super::create::create_one;
use crate::disk::LyingDevice;
use crate::driver::{Class, Op, Violation};
use crate::history::place;
use crate::history::run::{Inflight, Run};
use crate::model::{Control, Key, Pending};

/// Whether it is a control operation on this volume.
pub fn is_control(op: &Inflight, key: Key) -> bool {
    op.class.is_control() && op.keys.contains(&key)
}

/// Control operations that data operations on volume `key` may run beside.
fn is_gentle(pending: &Pending, key: Key) -> bool {
    if let Control::RollbackTo(target, _) = pending.control {
        return target != key;
    }
    matches!(
        pending.control.inner(),
        Control::Snapshot(_)
            | Control::SnapshotFolder(_)
            | Control::Clone(..)
            | Control::CloneAll(..)
            | Control::Fork(_)
            | Control::Set(..)
            | Control::SetLifetime(..)
            | Control::SetXattr(..)
            | Control::Rollback(..)
            | Control::RollbackAll(_)
    )
}

pub fn size_of(run: &Run, key: Key) -> u64 {
    run.known.model.get(key).map_or(0, |v| v.size)
}

/// Calls `f` with a volume of the operation's choice, when no control operation blocks it. Creates a
/// volume if there is none.
pub fn with(run: &mut Run, op: &Op, f: impl FnOnce(&mut Run, Key) -> Result<(), Violation>) -> Result<(), Violation> {
    let keys = place::volumes(&run.known.model);
    with_one_of(run, op, &keys, f)
}

/// The same with one of these.
pub fn with_one_of(
    run: &mut Run,
    op: &Op,
    keys: &[Key],
    f: impl FnOnce(&mut Run, Key) -> Result<(), Violation>,
) -> Result<(), Violation> {
    match place::choose(keys, op.draws[0]) {
        Some(key) => unhindered(run, key, f),
        None => create_one(run, op),
    }
}

/// Calls `f` with a volume once no control operation blocks it, if it still exists.
pub fn unhindered(
    run: &mut Run,
    key: Key,
    f: impl FnOnce(&mut Run, Key) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let family = family(run, key);
    run.wait(|o| match &o.class {
        Class::Control(p) => !is_gentle(p, family) && o.keys.contains(&family),
        _ => false,
    })?;
    if run.known.model.get(key).is_none() || is_unsure(run, family) {
        return Ok(());
    }
    f(run, key)
}

/// Returns the volume itself, or the one a snapshot belongs to.
pub fn family(run: &Run, key: Key) -> Key {
    run.known.model.get(key).and_then(|v| v.of).unwrap_or(key)
}

/// Whether a failed control operation leaves it uncertain what this volume is.
pub fn is_unsure(run: &Run, family: Key) -> bool {
    run.known.pending.iter().any(|p| touched(run, &p.control).contains(&family))
}

pub fn handle(run: &Run, key: Key) -> Result<forkdisk::Volume<LyingDevice>, Violation> {
    let name = run.known.model.name(key);
    run.session.pool.volume(&name).map_err(|e| Violation::new("P4", format!("{name} cannot be opened: {e}")))
}
