//! Verbs that only read volumes. Long results come in parts of bounded length.

use std::collections::HashSet;

use forkdisk::{ErrorKind, Extent, VolumeInfo};

use super::selection::selection;
use crate::call::Call;
use crate::failure::Failure;
use crate::method::params;
use crate::reply::{Change, Diff, DuRecord, Piece, PieceMap, Usage, VolumeRecord};
use crate::session::Session;

/// Approximate number of runs in a part of a map or comparison.
const PART_COUNT: usize = 4096;
/// Bytes of a volume examined at a time: at most 16,384 runs.
const STEP_BYTES: u64 = 64 << 20;
/// Most bytes of holes and shared data that one part covers, so that the caller hears of the progress.
const REACH_BYTES: u64 = 1 << 46;

pub async fn list(session: &Session, p: params::List, _: &Call) -> Result<Vec<VolumeRecord>, Failure> {
    let (selection, now) = (selection!(p)?, session.now());
    let mut found = folders_with_properties(session, &p.objects);
    let has_only_bounds = |object: &String| {
        found.iter().any(|info| info.name == *object) && session.pool.volumes_in(object).is_ok_and(|all| all.is_empty())
    };
    let others: Vec<String> = p.objects.iter().filter(|object| !has_only_bounds(object)).cloned().collect();
    if p.objects.is_empty() || !others.is_empty() {
        found.extend(select(session, &others).await?);
        found.sort_by(|a, b| a.name.cmp(&b.name));
    }
    found.retain(|info| selection.has(info, now));
    // What is in use now has no older time that counts.
    found.iter_mut().filter(|info| info.in_use > 0).for_each(|info| info.last_used = now);
    Ok(found.iter().map(VolumeRecord::from).collect())
}

/// The folders with a bound or a quota that match `objects`, as [`select`] matches volumes.
fn folders_with_properties(session: &Session, objects: &[String]) -> Vec<VolumeInfo> {
    let wanted = Wanted::new(objects);
    let all = session.pool.folders_with_properties().into_iter();
    all.filter(|info| wanted.covers(&info.name, &mut HashSet::new())).collect()
}

pub async fn du(session: &Session, p: params::Du, call: &Call) -> Result<Usage, Failure> {
    let found = select(session, &p.objects).await?;
    call.say("counting");
    let names: Vec<&str> = found.iter().map(|info| info.name.as_str()).collect();
    // All counts are of one instant: each object alone, then all together.
    let mut lists: Vec<Vec<&str>> = names.iter().map(|name| vec![*name]).collect();
    lists.push(names);
    let mut freed = session.pool.freed_by_each(&lists).await?;
    let frees = freed.pop().unwrap_or_default();
    let record = |(info, exclusive): (&VolumeInfo, u64)| {
        let (name, referenced, scattered) = (info.name.clone(), info.referenced, info.scattered);
        DuRecord { name, referenced, scattered, exclusive }
    };
    Ok(Usage { volumes: found.iter().zip(freed).map(record).collect(), frees })
}

pub async fn diff(session: &Session, p: params::Diff, call: &Call) -> Result<Diff, Failure> {
    call.say("comparing");
    let part = session.pool.diff_part(&p.left, &p.right, p.from, PART_COUNT).await?;
    Ok(Diff { changes: part.runs.iter().filter_map(Change::of).collect(), next: part.next })
}

pub async fn map(session: &Session, p: params::Map, call: &Call) -> Result<PieceMap, Failure> {
    let volume = session.pool.volume(&p.object)?;
    let _using = session.using(volume.id().0, "a look at its map");
    call.say("looking up");
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut at, mut step) = (p.from, STEP_BYTES);
    while at < volume.size() && pieces.len() < PART_COUNT && at - p.from < REACH_BYTES {
        let len = step.min(volume.size() - at);
        let extents = volume.extents(at, len).await?;
        // Lookups of holes take constant time, independent of their length.
        step = if extents.iter().all(|extent| !extent.data) { (step * 2).min(REACH_BYTES) } else { STEP_BYTES };
        extents.iter().for_each(|extent| add(&mut pieces, extent));
        at += len;
        session.runtime.yield_now().await;
    }
    Ok(PieceMap { pieces, next: (at < volume.size()).then_some(at) })
}

fn add(pieces: &mut Vec<Piece>, extent: &Extent) {
    let next = Piece::from(extent);
    match pieces.last_mut() {
        Some(last) if continues(last, &next) => last.length += next.length,
        _ => pieces.push(next),
    }
}

/// Returns whether `next` continues `last` with the same properties.
fn continues(last: &Piece, next: &Piece) -> bool {
    let alike = last.data == next.data && last.offset + last.length == next.offset;
    alike && (!next.data || last.shared == next.shared && last.physical + last.length == next.physical)
}

/// Number of names examined before other tasks run.
const MAX_NAMES: usize = 1024;

/// Returns the volumes and snapshots that match `objects`, by name: an empty name matches everything, a
/// folder all volumes in it, a volume itself and its snapshots. An object that matches nothing is an error.
/// Takes time in proportion to what matches, or to the names in the pool if an object is a folder.
pub async fn select(session: &Session, objects: &[String]) -> Result<Vec<VolumeInfo>, Failure> {
    let wanted = Wanted::new(objects);
    let (mut found, mut hit) = (Vec::new(), HashSet::new());
    if !wanted.everything && objects.iter().all(|object| object.contains('@') || session.pool.find(object).is_ok()) {
        for piece in objects.chunks(MAX_NAMES) {
            for object in piece {
                let Ok(info) = session.pool.find(object) else { continue };
                if hit.insert(object.as_str()) && !info.is_snapshot() {
                    found.extend(session.pool.snapshots_of(object).unwrap_or_default());
                }
                found.push(info);
            }
            session.runtime.yield_now().await;
        }
    } else {
        let mut after = String::new();
        loop {
            let names = session.pool.names_after(&after, MAX_NAMES);
            let Some(last) = names.last() else { break };
            after.clone_from(last);
            let meant = names.iter().filter(|name| wanted.covers(name, &mut hit));
            found.extend(meant.filter_map(|name| session.pool.find(name).ok()));
            session.runtime.yield_now().await;
        }
    }
    if let Some(object) = objects.iter().find(|object| !object.is_empty() && !hit.contains(object.as_str())) {
        let text = format!("{object}: there is no such volume or snapshot; `forkdisk list` shows what there is");
        return Err(Failure::new(ErrorKind::NotFound, text));
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found.dedup_by(|a, b| a.id == b.id && a.name == b.name);
    Ok(found)
}

/// The objects given to a verb.
struct Wanted<'a> {
    objects: HashSet<&'a str>,
    everything: bool,
}

impl<'a> Wanted<'a> {
    /// Creates the matcher. An empty list means every volume and snapshot.
    fn new(objects: &'a [String]) -> Wanted<'a> {
        let objects: HashSet<&str> = objects.iter().map(String::as_str).collect();
        let everything = objects.is_empty() || objects.contains("");
        Wanted { objects, everything }
    }

    /// Returns whether an object matches the volume or snapshot `name`. Adds the objects that do to `hit`.
    fn covers(&self, name: &str, hit: &mut HashSet<&'a str>) -> bool {
        let ends = name.match_indices(['@', '/']).map(|(at, _)| at).chain([name.len()]);
        let known = ends.filter_map(|end| self.objects.get(&name[..end])).fold(false, |_, object| {
            hit.insert(object);
            true
        });
        known || self.everything
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_covers_itself_its_snapshots_and_its_folder() {
        for (wanted, name, is_meant) in [
            ("", "a", true),
            ("a", "a", true),
            ("a", "a@x", true),
            ("a", "a/b@x", true),
            ("a", "ab", false),
            ("a@x", "a@x", true),
            ("a@x", "a@xy", false),
            ("a@x", "a", false),
        ] {
            let objects = [wanted.to_string()];
            let mut hit = HashSet::new();
            assert_eq!(Wanted::new(&objects).covers(name, &mut hit), is_meant, "{wanted} {name}");
        }
    }

    #[test]
    fn several_objects_cover_what_each_of_them_covers() {
        let objects: Vec<String> = ["a", "b/c", "d@x", "e"].map(String::from).to_vec();
        let wanted = Wanted::new(&objects);
        let mut hit = HashSet::new();
        let names = ["a", "a@1", "a/b@1", "ab", "b", "b/c/d@9", "b/cc", "d", "d@x", "d@y"];
        let covered: Vec<&str> = names.into_iter().filter(|name| wanted.covers(name, &mut hit)).collect();
        assert_eq!(covered, ["a", "a@1", "a/b@1", "b/c/d@9", "d@x"]);
        assert_eq!(hit, HashSet::from(["a", "b/c", "d@x"]), "nothing is called e");
    }

    #[test]
    fn alike_neighbours_are_one_piece() {
        let at = |offset, data, physical| Piece { offset, length: 10, data, physical, shared: false };
        assert!(continues(&at(0, true, 100), &at(10, true, 110)));
        assert!(!continues(&at(0, true, 100), &at(10, true, 200)));
        assert!(continues(&at(0, false, 0), &at(10, false, 0)));
        assert!(!continues(&at(0, false, 0), &at(10, true, 0)));
        assert!(!continues(&at(0, true, 100), &at(20, true, 110)));
    }
}
