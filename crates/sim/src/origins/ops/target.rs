//! Volumes and places that operations work on.

use forkdisk::{ErrorKind, Volume};

use super::clone::FLATTENING;
use crate::disk::LyingDevice;
use crate::driver::{Class, Life, Violation};
use crate::model::{Control, Key};
use crate::origins::run::{Run, sync};
use crate::pattern::SECTOR;
use crate::rng::{Rng, mix};

pub fn handle(run: &Run, key: Key) -> Result<Option<Volume<LyingDevice>>, Violation> {
    let name = run.known.model.name(key);
    match run.session.pool.volume(&name) {
        Ok(volume) => Ok(Some(volume)),
        Err(e) if e.kind() == ErrorKind::NotFound && run.known.is_droppable(key) => Ok(None),
        Err(e) => Err(Violation::new("P4", format!("{name} cannot be opened: {e}"))),
    }
}

/// Waits until `key` is not being deleted; returns whether it still exists.
pub fn is_there(run: &mut Run, key: Key) -> Result<bool, Violation> {
    run.wait(|o| matches!(&o.class, Class::Control(p) if matches!(p.control, Control::Delete(_))))?;
    Ok(run.known.model.get(key).is_some() && run.known.pending.is_empty())
}

pub fn any_of(run: &Run, draw: u64, wanted: impl Fn(Key, &crate::model::Volume) -> bool) -> Option<Key> {
    let keys: Vec<Key> = run.known.model.volumes().filter(|(k, v)| wanted(*k, v)).map(|(k, _)| k).collect();
    (!keys.is_empty()).then(|| keys[(draw % keys.len() as u64) as usize])
}

pub fn wait_for_controls(run: &mut Run) -> Result<bool, Violation> {
    run.wait(|o| o.class.is_control())?;
    Ok(run.known.pending.is_empty())
}

/// Waits until `key` is not being flattened; returns whether it exists and its backing is known.
pub fn is_certain(run: &mut Run, key: Key) -> Result<bool, Violation> {
    run.wait(move |o| o.class.is(FLATTENING) && o.keys.contains(&key))?;
    Ok(run.known.model.get(key).is_some() && !run.known.flattening.contains(&key))
}

/// Whether nothing is in flight and no fault is armed.
pub fn is_quiet(run: &mut Run) -> Result<bool, Violation> {
    run.drain()?;
    sync(run)?;
    Ok(run.session.faults_hit() == 0 && run.trouble.armed.is_none() && run.known.pending.is_empty())
}

/// Returns the snapshot that the origin is being rolled back to.
pub fn rolling(run: &Run) -> Option<String> {
    run.session.pool.origins().pop().and_then(|origin| origin.rolling)
}

/// Returns a place in whole sectors, mostly near the beginning.
pub fn place(draws: [u64; 2], size: u64, ragged: bool) -> (u64, u64) {
    let mut rng = Rng::new(mix(&draws));
    let reach = (size / 4096).min(*rng.pick(&[4, 32, 1 << 20])).max(1);
    let page = rng.below(reach) * 4096;
    let (offset, len) = match rng.below(8) {
        _ if ragged => (page + rng.below(4096), *rng.pick(&[1, 100, 511, 700, 5000])),
        0..=3 => (page, 4096),
        4 => (page, 4096 * (1 + rng.below(8))),
        5 => (page, 4096 * (1 + rng.below(80))),
        _ => (page + rng.below(8) * SECTOR as u64, SECTOR as u64 * (1 + rng.below(12))),
    };
    let offset = offset.min(size - SECTOR as u64);
    (offset, len.min(size - offset))
}
