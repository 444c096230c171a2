//! Which volumes and snapshots that have expired are deleted: those that nothing needs that stays.

use std::collections::BTreeSet;

use crate::format::{Lease, NO_VOLUME, VolumeRecord, VolumeState};
use crate::planted::correct;
use crate::types::VolumeId;

use super::Catalog;
use super::directory::{extensions, hard_links};

/// The volumes and snapshots that have expired at `now`, or have a lease that `has_ended`, and can be deleted together,
/// snapshots first. What is in use stays, and with it what it needs; so does a volume with a snapshot that stays, and a
/// snapshot of an origin that a volume shows which stays.
pub fn deletable_expired(
    meta: &Catalog,
    now: u64,
    has_ended: impl Fn(&Lease) -> bool,
    is_in_use: impl Fn(VolumeId) -> bool,
) -> Vec<VolumeId> {
    let mut gone = extensions::expired(&meta.directory, now, has_ended);
    gone.retain(|&id| {
        let free = |v: &super::CatalogEntry| {
            matches!(v.record.state, VolumeState::Volume | VolumeState::Snapshot) && !v.pending
        };
        meta.directory.get(id).is_some_and(free) && !correct!(is_in_use(id), Bug::ExpiryIgnoresClients => false)
    });
    if gone.is_empty() {
        return Vec::new();
    }
    let needs = needs(meta);
    loop {
        let before = gone.len();
        let stays = |id: &VolumeId| !gone.contains(id);
        let needed: BTreeSet<VolumeId> = needs.iter().filter(|(by, _)| stays(by)).map(|&(_, id)| id).collect();
        let names = |id: VolumeId| [id].into_iter().chain(hard_links::links_of(&meta.directory, id));
        let has_kept = |id: VolumeId| names(id).flat_map(|id| meta.directory.snapshots_of(id)).any(|id| stays(&id));
        let kept = |id: &VolumeId| needed.contains(id) || has_kept(*id);
        let kept: BTreeSet<VolumeId> = gone.iter().copied().filter(kept).collect();
        gone.retain(|id| !kept.contains(id));
        if gone.len() == before {
            break;
        }
    }
    let mut ids: Vec<VolumeId> = gone.into_iter().collect();
    ids.sort_by_key(|id| meta.directory.get(*id).map(|v| v.record.state != VolumeState::Snapshot));
    ids
}

/// Pairs of what shows the snapshot of an origin, or is being rolled back to it, and that snapshot.
fn needs(meta: &Catalog) -> Vec<(VolumeId, VolumeId)> {
    let rolling = |record: &VolumeRecord| record.origin_record.as_ref().map_or(NO_VOLUME, |origin| origin.rollback_to);
    let living = meta.directory.iter().map(|v| &v.record).filter(|record| record.state != VolumeState::Dead);
    let pairs = living.flat_map(|record| [(record.id, record.base), (record.id, rolling(record))]);
    pairs.filter(|(_, needed)| *needed != NO_VOLUME).collect()
}
