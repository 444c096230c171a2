//! Where operations go: turns raw draws into volumes, offsets and lengths.

use super::op::{Profile, Setup};
use crate::driver::Op;
use crate::model::{Key, Model};
use crate::pattern::SECTOR;
use crate::rng::{Rng, mix};

pub const PAGE: u64 = 4096;
pub const BLOCK: u64 = 1 << 20;
/// What a table of level 1 covers.
const TABLE_BYTES: u64 = 256 * BLOCK;
/// Volumes beyond this size are used only around some places.
const LARGE_BYTES: u64 = 8 << 20;

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Place {
    /// Cuts the range off at `size`; `None` if nothing is left.
    pub fn within(self, size: u64) -> Option<Place> {
        (self.offset < size).then(|| Place { len: self.len.min(size - self.offset), ..self })
    }
}

/// Returns all volumes.
pub fn volumes(model: &Model) -> Vec<Key> {
    model.volumes().filter(|(_, v)| v.of.is_none()).map(|(key, _)| key).collect()
}

/// Returns all snapshots, or those of one volume.
pub fn snapshots(model: &Model, of: Option<Key>) -> Vec<Key> {
    let wanted = |v: &crate::model::Volume| v.of.is_some() && (of.is_none() || v.of == of);
    model.volumes().filter(|(_, v)| wanted(v)).map(|(key, _)| key).collect()
}

/// Returns one of `keys` by a draw; the first ones are drawn more often, so that histories have hot volumes.
pub fn choose(keys: &[Key], draw: u64) -> Option<Key> {
    let mut rng = Rng::new(draw);
    let reach = if rng.one_in(2) { keys.len().min(2) } else { keys.len() };
    keys.get(rng.index(reach)).copied()
}

/// Returns a range for a read, write, discard or the like, in whole sectors.
pub fn range(op: &Op, size: u64) -> Option<Place> {
    let mut rng = Rng::new(mix(&[op.draws[1], op.draws[2]]));
    let sector = SECTOR as u64;
    let base = base(&mut rng, size);
    let hot = (size - base).min(*rng.pick(&[4, 16, 64, u64::MAX / PAGE]) * PAGE);
    let pages = hot.div_ceil(PAGE).max(1);
    let page = base + rng.below(pages) * PAGE;
    let place = match rng.below(16) {
        0..=5 => Place { offset: page, len: PAGE },
        6..=8 => Place { offset: page, len: PAGE * (1 + rng.below(8)) },
        9 => Place { offset: page, len: PAGE * (8 + rng.below(56)) },
        10..=13 => {
            let within = rng.below(8);
            let reach = if rng.one_in(3) { 40 } else { 8 - within };
            Place { offset: page + within * sector, len: sector * (1 + rng.below(reach)) }
        }
        14 => Place { offset: page, len: PAGE * 16 },
        _ if rng.one_in(3) => Place { offset: page / BLOCK * BLOCK, len: BLOCK },
        _ => Place { offset: page, len: PAGE * 2 },
    };
    place.within(size)
}

/// Returns the place of activity in a large volume: mostly where its blocks and tables meet.
fn base(rng: &mut Rng, size: u64) -> u64 {
    if size <= LARGE_BYTES {
        return 0;
    }
    let edge = *rng.pick(&[0, BLOCK, 2 * BLOCK, TABLE_BYTES, 2 * TABLE_BYTES, size]);
    let near = edge.saturating_sub(8 * PAGE);
    if near < size { near / PAGE * PAGE } else { 0 }
}

/// Returns a range whose ends lie within sectors.
pub fn ragged(op: &Op, size: u64) -> Option<Place> {
    let mut rng = Rng::new(mix(&[op.draws[1], op.draws[3]]));
    let hot = size.min(16 * PAGE);
    let len = *rng.pick(&[1, 7, 100, 511, 513, 700, 5000]);
    Place { offset: rng.below(hot), len }.within(size)
}

/// Returns a range of whole tables that two volumes of these sizes have, and its place in each; sometimes
/// with ragged ends. `None` if one of them is too short.
pub fn tables(draw: u64, source: u64, target: u64) -> Option<(Place, u64)> {
    let mut rng = Rng::new(draw);
    let (from, to) = (rng.below((source / TABLE_BYTES).max(1)), rng.below((target / TABLE_BYTES).max(1)));
    let most = (source / TABLE_BYTES).checked_sub(from)?.min((target / TABLE_BYTES).checked_sub(to)?);
    if most == 0 {
        return None;
    }
    let (mut offset, mut at, mut len) = (from * TABLE_BYTES, to * TABLE_BYTES, (1 + rng.below(most)) * TABLE_BYTES);
    if rng.one_in(3) {
        let before = *rng.pick(&[0, PAGE, 3 * PAGE, BLOCK, BLOCK + PAGE]).min(&offset.min(at));
        let after = *rng.pick(&[0, PAGE, BLOCK, 2 * BLOCK + PAGE]);
        (offset, at) = (offset - before, at - before);
        len = (len + before + after).min(source - offset).min(target - at);
    }
    Some((Place { offset, len }, at))
}

/// Returns the next range of a sequential writer.
pub fn stretch(op: &Op, from: u64, size: u64) -> Option<Place> {
    let mut rng = Rng::new(op.draws[1]);
    let from = if from >= size { 0 } else { from / PAGE * PAGE };
    Place { offset: from, len: PAGE * *rng.pick(&[1, 4, 16, 32, 64]) }.within(size)
}

/// Returns a new size for a volume of `now` bytes, in whole sectors: often just a little different, or at the
/// edge of a block.
pub fn resized(setup: &Setup, now: u64, draw: u64) -> u64 {
    let mut rng = Rng::new(mix(&[draw, 1]));
    let little = (1 + rng.below(12)) * SECTOR as u64;
    let size = match rng.below(8) {
        0 => now + little,
        1 | 2 => now.saturating_sub(little),
        3 => now / PAGE * PAGE,
        4 => now.next_multiple_of(BLOCK),
        5 => now / BLOCK * BLOCK + little,
        _ => size(setup, draw),
    };
    size.clamp(SECTOR as u64, setup.pages.max(1024) * 4 * PAGE)
}

/// Returns a size for a volume, in whole sectors.
pub fn size(setup: &Setup, draw: u64) -> u64 {
    let mut rng = Rng::new(draw);
    if setup.profile == Profile::Large {
        let around = *rng.pick(&[BLOCK, 3 * BLOCK, TABLE_BYTES, TABLE_BYTES, TABLE_BYTES + BLOCK, 2 * TABLE_BYTES]);
        return around - 4 * SECTOR as u64 * rng.below(8) + PAGE * rng.below(4);
    }
    if setup.profile == Profile::Ranges {
        return *rng.pick(&[TABLE_BYTES, 2 * TABLE_BYTES, 2 * TABLE_BYTES + BLOCK, 3 * TABLE_BYTES])
            + PAGE * rng.below(4);
    }
    let pages = 1 + rng.below(setup.pages * 2);
    let ragged = if rng.one_in(8) { rng.below(8) * SECTOR as u64 } else { 0 };
    pages * PAGE + ragged
}
