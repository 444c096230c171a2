//! The time at which a volume was last used: of its last open for I/O or close. It costs no write and no flush: it is
//! recorded at most once a minute, in the journal, and becomes durable with what is written next anyway.

use std::rc::Rc;

use crate::catalog::directory::extensions;
use crate::device::Device;
use crate::format::{Extension, Record, VolumeState};
use crate::space::Need;
use crate::types::VolumeId;

use super::Store;

/// Least time between two records of one volume.
const APART_SECONDS: u64 = 60;

/// Notes that a volume is used now, if it has an extension, the pool has a clock, and something else was written since
/// it was opened. On a full pool the time is lost.
pub fn note_used<D: Device>(store: &Rc<Store<D>>, id: VolumeId) {
    let Some(clock) = store.options.clock.filter(|_| store.active.get() && store.check_writable().is_ok()) else {
        return;
    };
    let Ok(mut meta) = store.meta.try_borrow_mut() else { return };
    let Some(volume) = meta.directory.get(id) else { return };
    let is_shown = !matches!(volume.record.state, VolumeState::Dead | VolumeState::Orphan);
    let Some(old) = volume.extension().filter(|_| is_shown) else { return };
    let now = u64::try_from(clock() / 1_000_000_000).unwrap_or(0);
    if now < old.last_used.saturating_add(APART_SECONDS) {
        return;
    }
    let extension = Extension { last_used: now, ..old.clone() };
    if extensions::unchanged_page_of(&meta.directory, id).is_some() && meta.reserve(Need::Step).is_err() {
        return;
    }
    extensions::set(&mut meta.directory, id, extension.clone());
    // Unordered: it says nothing of data.
    meta.journal.append_unordered(&Record::SetExtension { id, extension: Box::new(extension) });
}
