//! Looking at volumes without changing anything. What may be long comes in parts of bounded length.

use forkdisk::{Extent, VolumeInfo};

use super::Call;
use crate::failure::{Failure, FailureKind};
use crate::method::params;
use crate::reply::{Change, Diff, DuRecord, Piece, PieceMap, Usage, VolumeRecord};
use crate::session::Session;

/// About how many runs a part of a map or comparison has.
const PART: usize = 4096;
/// Bytes of a volume that are looked up at a time: at most 16,384 runs.
const STEP: u64 = 64 << 20;
/// How far a part goes through holes and shared data before whoever waits hears of it.
const REACH: u64 = 1 << 46;

pub fn list(session: &Session, p: params::List) -> Result<Vec<VolumeRecord>, Failure> {
    Ok(select(session, &p.objects)?.iter().map(VolumeRecord::from).collect())
}

pub async fn du(session: &Session, p: params::Du, call: &Call) -> Result<Usage, Failure> {
    let found = select(session, &p.objects)?;
    call.say("counting");
    let names: Vec<&str> = found.iter().map(|info| info.name.as_str()).collect();
    // All of one moment: each by itself, then all together.
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
    let part = session.pool.diff_part(&p.left, &p.right, p.from, PART).await?;
    Ok(Diff { changes: part.runs.iter().filter_map(Change::of).collect(), next: part.next })
}

pub async fn map(session: &Session, p: params::Map, call: &Call) -> Result<PieceMap, Failure> {
    let volume = session.pool.volume(&p.object)?;
    let _using = session.using(volume.id().0, "a look at its map");
    call.say("looking up");
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut at, mut step) = (p.from, STEP);
    while at < volume.size() && pieces.len() < PART && at - p.from < REACH {
        let len = step.min(volume.size() - at);
        let extents = volume.extents(at, len).await?;
        // Holes are found at once whatever their length.
        step = if extents.iter().all(|extent| !extent.data) { (step * 2).min(REACH) } else { STEP };
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

/// Whether `next` is alike what lies before it.
fn continues(last: &Piece, next: &Piece) -> bool {
    let alike = last.data == next.data && last.offset + last.length == next.offset;
    alike && (!next.data || last.shared == next.shared && last.physical + last.length == next.physical)
}

/// The volumes and snapshots that `objects` mean, by name: of a pool (an empty name) all of them, of a
/// folder all in it, of a volume itself and its snapshots. One that means nothing is an error.
pub fn select(session: &Session, objects: &[String]) -> Result<Vec<VolumeInfo>, Failure> {
    let mut all = session.pool.list();
    for object in objects {
        if !object.is_empty() && !all.iter().any(|info| covers(object, &info.name)) {
            let text = format!("{object}: there is no such volume or snapshot; `forkdisk list` shows what there is");
            return Err(Failure::new(FailureKind::NotFound, text));
        }
    }
    if !objects.is_empty() {
        all.retain(|info| objects.iter().any(|object| covers(object, &info.name)));
    }
    Ok(all)
}

/// Whether the object `name` is meant by `wanted`, a name, a folder or everything.
fn covers(wanted: &str, name: &str) -> bool {
    match name.strip_prefix(wanted) {
        Some(rest) => wanted.is_empty() || rest.is_empty() || rest.starts_with(['@', '/']),
        None => false,
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
            assert_eq!(covers(wanted, name), is_meant, "{wanted} {name}");
        }
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
