//! The oracle: the contents that every sector of every volume may have, at any time and after any crash.
//!
//! A sector has one or more *versions*, each written by an operation with a start and an end. A version can
//! be read unless another one started after it had ended and was itself acknowledged before the read began.
//! It can return after a crash unless another one started after it had ended and is durable: acknowledged
//! with FUA, or acknowledged before a flush was submitted that was acknowledged. Failed operations may or may
//! not have happened, permanently. Control operations happen completely or not at all and are durable once
//! acknowledged.

mod content;
mod control;
mod listing;
mod names;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use content::{Cell, Content, Rec, RecId, SECTORS_PER_PAGE, Time, Version};
pub use control::{Applied, Control, Pending};
pub use listing::{Lifetime, Listed, Listing, Properties};
pub use names::{Entry, Names, PREFIX, Tree, has_children};

use self::content::{SETTLED, settled};
use self::control::Instant;
use crate::pattern::{Blends, Found, SECTOR, Value, is_zero};

/// A volume's or snapshot's number in the model, never reused.
pub type Key = u32;

/// A volume or snapshot.
#[derive(Clone)]
pub struct Volume {
    /// Its name; a snapshot's is the short one.
    pub name: String,
    /// The volume that a snapshot was taken of.
    pub of: Option<Key>,
    /// Length in bytes, whole sectors.
    pub size: u64,
    /// Its properties, in histories that change them all at once.
    pub properties: Properties,
    /// When it expires, and its label.
    pub lifetime: Lifetime,
    /// Whether any of it may ever have been shared with another volume or snapshot.
    pub shared: bool,
    /// Itself and all volumes that it ever received contents from.
    kin: BTreeSet<Key>,
    content: Content,
    flushed: Time,
    instant: Option<usize>,
}

impl Volume {
    /// Returns the first sectors of the pages that were written, in ascending order.
    pub fn written(&self) -> Vec<u64> {
        self.content.written()
    }
}

/// What is written to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The marks of this operation.
    Mark(u32),
    /// The marks of either operation, in each sector. Whole sectors.
    Either(u32, u32),
    /// Zeroes.
    Zero,
}

/// Which versions may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// By a read that began at this time.
    Since(Time),
    /// After a crash now.
    Crash,
}

/// A sector with illegal contents.
#[derive(Clone, Debug)]
pub struct Bad {
    /// The promise that is broken.
    pub promise: &'static str,
    /// The description.
    pub what: String,
}

/// Longest range, in sectors, that is examined sector by sector.
const DENSE_SECTORS: u64 = 2048;

#[derive(Clone)]
struct RangeClone {
    rec: RecId,
    source: (Key, u64),
    target: (Key, u64),
    sectors: u64,
}

/// The model of one pool.
#[derive(Clone, Default)]
pub struct Model {
    clock: Time,
    horizon: Time,
    acks: u64,
    recs: Vec<Rec>,
    volumes: BTreeMap<Key, Volume>,
    next_key: Key,
    blends: Blends,
    ranges: Vec<RangeClone>,
    instants: Vec<Instant>,
    /// Names that are changed by calls that end at once.
    pub names: Names,
}

impl Model {
    /// Creates a pool without volumes.
    pub fn new() -> Model {
        let first = Rec { start: 0, end: 0, ok: true, durable: true };
        Model { recs: vec![first], next_key: 1, ..Model::default() }
    }

    /// Returns the time of a new event.
    pub fn tick(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }

    /// Returns the time of the last event.
    pub fn now(&self) -> Time {
        self.clock
    }

    /// Returns how many operations have been acknowledged or refused: until this increases, a crash may leave
    /// at least everything it might have left before.
    pub fn acks(&self) -> u64 {
        self.acks
    }

    /// Sets when the oldest operation in flight began: nothing older is queried any more.
    pub fn set_horizon(&mut self, oldest: Time) {
        self.horizon = oldest;
    }

    /// Returns all volumes and snapshots.
    pub fn volumes(&self) -> impl Iterator<Item = (Key, &Volume)> {
        self.volumes.iter().map(|(&key, v)| (key, v))
    }

    /// Returns one volume or snapshot, if it exists.
    pub fn get(&self, key: Key) -> Option<&Volume> {
        self.volumes.get(&key)
    }

    /// Returns the full name: `volume` or `volume@snapshot`.
    pub fn name(&self, key: Key) -> String {
        let Some(v) = self.volumes.get(&key) else {
            return format!("#{key}");
        };
        v.of.map_or_else(|| v.name.clone(), |of| format!("{}@{}", self.name(of), v.name))
    }

    /// Returns the table of the bytes that values stand for.
    pub fn blends(&self) -> &Blends {
        &self.blends
    }

    fn start(&mut self) -> RecId {
        let start = self.tick();
        self.recs.push(Rec { start, end: Time::MAX, ok: false, durable: false });
        self.recs.len() as RecId - 1
    }

    /// Starts a write of `len` bytes (or a zeroing, for [`What::Zero`]).
    pub fn write(&mut self, key: Key, offset: u64, len: u64, what: What) -> RecId {
        let rec = self.start();
        for (sector, within) in sectors(offset, len) {
            let over = match what {
                What::Mark(op) => Value::mark(op, key, sector),
                What::Either(op, other) => {
                    self.push(key, sector, Version { value: Value::mark(other, key, sector), rec });
                    Value::mark(op, key, sector)
                }
                What::Zero => Value::ZERO,
            };
            let values = if within.len() == SECTOR { vec![over] } else { self.blend(key, sector, over, within) };
            values.into_iter().for_each(|value| self.push(key, sector, Version { value, rec }));
        }
        rec
    }

    fn blend(&mut self, key: Key, sector: u64, over: Value, within: Range<usize>) -> Vec<Value> {
        let bases = self.values(key, sector, Rule::Since(self.clock));
        bases.into_iter().map(|base| self.blends.blend(base, over, within.start, within.end)).collect()
    }

    fn push(&mut self, key: Key, sector: u64, version: Version) {
        let Some(volume) = self.volumes.get_mut(&key) else {
            return;
        };
        let cell = volume.content.cell_mut(sector);
        cell.push(version);
        if cell.len() > 4 {
            prune(cell, &self.recs, volume.flushed, self.horizon);
        }
        volume.content.mark(sector);
    }

    /// Fills `out` with the bytes of a write, for the engine.
    pub fn bytes(&self, key: Key, offset: u64, op: u32, out: &mut [u8]) {
        let mut sector_bytes = [0; SECTOR];
        let mut at = 0;
        for (sector, within) in sectors(offset, out.len() as u64) {
            let n = within.len();
            self.blends.fill(Value::mark(op, key, sector), &mut sector_bytes);
            out[at..at + n].copy_from_slice(&sector_bytes[within]);
            at += n;
        }
    }

    /// Starts a range clone. Offsets and length are whole sectors.
    pub fn clone_range(&mut self, source: (Key, u64), target: (Key, u64), len: u64) -> RecId {
        let rec = self.start();
        let s = SECTOR as u64;
        let range =
            RangeClone { rec, source: (source.0, source.1 / s), target: (target.0, target.1 / s), sectors: len / s };
        for key in [source.0, target.0] {
            self.volumes.get_mut(&key).expect("a volume").shared = true;
        }
        let kin = self.volumes[&source.0].kin.clone();
        self.volumes.get_mut(&target.0).expect("a volume").kin.extend(kin);
        self.ranges.push(range);
        self.spread();
        rec
    }

    /// Propagates what has been written meanwhile to the sources of range clones in flight.
    pub fn spread(&mut self) {
        for r in self.ranges.clone() {
            let since = Rule::Since(self.recs[r.rec as usize].start);
            for i in self.spoken_of(&r) {
                for value in self.values(r.source.0, r.source.1 + i, since) {
                    let (key, sector) = (r.target.0, r.target.1 + i);
                    let version = Version { value, rec: r.rec };
                    let known = self.volumes.get(&key).and_then(|v| v.content.cell(sector));
                    if known.is_none_or(|cell| !cell.contains(&version)) {
                        self.push(key, sector, version);
                    }
                }
            }
        }
    }

    /// Returns the sectors of a range clone of which anything is known on either side: a hole that stays one
    /// needs no version, and most of a long range is holes.
    fn spoken_of(&self, range: &RangeClone) -> Vec<u64> {
        if range.sectors <= DENSE_SECTORS {
            return (0..range.sectors).collect();
        }
        let pages = |(key, first): (Key, u64)| {
            let written = self.volumes.get(&key).map(Volume::written).unwrap_or_default();
            // Where the sides are not aligned alike, a page of one overlaps two of the other.
            let sectors = written.into_iter().flat_map(|page| page..page + SECTORS_PER_PAGE);
            sectors.filter(move |s| (first..first + range.sectors).contains(s)).map(move |s| s - first)
        };
        let all: BTreeSet<u64> = pages(range.source).chain(pages(range.target)).collect();
        all.into_iter().collect()
    }

    /// Ends an operation that changes contents.
    pub fn end(&mut self, rec: RecId, ok: bool, fua: bool) {
        if self.ranges.iter().any(|r| r.rec == rec) {
            self.spread();
            self.ranges.retain(|r| r.rec != rec);
        }
        self.acks += 1;
        let end = self.tick();
        let r = &mut self.recs[rec as usize];
        *r = Rec { start: r.start, end, ok, durable: ok && fua };
    }

    /// Notes that a flush submitted at `start` was acknowledged, for one volume or for all.
    pub fn flushed(&mut self, key: Option<Key>, start: Time) {
        self.acks += 1;
        self.names.flushed(start);
        for (_, volume) in self.volumes.iter_mut().filter(|(k, _)| key.is_none_or(|key| key == **k)) {
            volume.flushed = volume.flushed.max(start);
            let (flushed, recs, horizon) = (volume.flushed, &self.recs, self.horizon);
            volume.content.settle(|cell| prune(cell, recs, flushed, horizon));
        }
    }

    /// Returns the values a sector may show.
    pub fn values(&self, key: Key, sector: u64, rule: Rule) -> Vec<Value> {
        let Some(volume) = self.volumes.get(&key) else {
            return vec![Value::ZERO];
        };
        let Some(cell) = volume.content.cell(sector) else {
            return vec![Value::ZERO];
        };
        self.candidates(volume, cell, rule).into_iter().map(|v| v.value).collect()
    }

    fn candidates(&self, volume: &Volume, cell: &Cell, rule: Rule) -> Cell {
        let rec = |v: &Version| &self.recs[v.rec as usize];
        let ends = |w: &Rec| match rule {
            Rule::Since(begin) => w.ok && w.end < begin,
            Rule::Crash => is_durable(w, volume.flushed),
        };
        cell.iter().filter(|v| !cell.iter().any(|w| rec(w).start > rec(v).end && ends(rec(w)))).copied().collect()
    }

    /// Checks bytes that were read from `offset` on.
    ///
    /// # Errors The first sector with illegal contents.
    pub fn check(&mut self, key: Key, offset: u64, bytes: &[u8], rule: Rule) -> Result<(), Bad> {
        self.spread();
        let mut at = 0;
        let (page, mut skip) = (SECTORS_PER_PAGE * SECTOR as u64, 0);
        for (sector, within) in sectors(offset, bytes.len() as u64) {
            let part = &bytes[at..at + within.len()];
            at += part.len();
            if sector < skip {
                continue;
            }
            let volume = &self.volumes[&key];
            let whole = sector.is_multiple_of(SECTORS_PER_PAGE)
                && part.len() == SECTOR
                && bytes.len() - at >= page as usize - SECTOR;
            if whole
                && volume.content.is_hole(sector)
                && is_zero(&bytes[at - part.len()..at - part.len() + page as usize])
            {
                skip = sector + SECTORS_PER_PAGE;
                continue;
            }
            if let Some([only]) = volume.content.cell(sector).map(|cell| &cell[..])
                && self.blends.matches(only.value, within.start, part)
            {
                continue;
            }
            let cell = volume.content.versions(sector);
            let legal = self.candidates(volume, &cell, rule);
            match legal.iter().find(|v| self.blends.matches(v.value, within.start, part)) {
                None => return Err(self.accuse(key, sector, part, &legal, rule)),
                // A snapshot, or a clone that was not written here: once read, the value stays.
                Some(v) if legal.len() > 1 && part.len() == SECTOR && cell.iter().all(|v| v.rec == SETTLED) => {
                    self.observe(key, sector, v.value)?;
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn accuse(&self, key: Key, sector: u64, part: &[u8], legal: &Cell, rule: Rule) -> Bad {
        let found = if part.len() == SECTOR { Some(self.blends.trace(part)) } else { None };
        let volume = &self.volumes[&key];
        let promise = match found {
            Some(Found::Torn(..)) => "P3",
            _ if volume.of.is_some() => "P5",
            Some(Found::Value(v)) if self.blends.comes_from(v, &volume.kin) => "P1",
            None => "P1",
            Some(Found::Value(_) | Found::Foreign(_)) => "P2",
        };
        let found = match found {
            Some(Found::Value(v)) => self.blends.explain(v),
            Some(Found::Torn(v, n)) => format!("{n} bytes of {v:?} and the rest of something else"),
            Some(Found::Foreign(bytes)) => format!("bytes that no client wrote: {bytes:02x?}…"),
            None => format!("{} bytes that fit none of them", part.len()),
        };
        let legal: Vec<String> = legal.iter().map(|v| self.blends.explain(v.value)).collect();
        let when = if rule == Rule::Crash { "after the crash" } else { "in a read" };
        let what = format!(
            "{} (volume #{key}) sector {sector} holds {found} {when}; legal: {}",
            self.name(key),
            legal.join(", or ")
        );
        Bad { promise, what }
    }

    /// Adopts the contents of a recovered pool, `bytes` from `offset` on, as the only possible ones. The
    /// bytes have been checked and are whole pages or reach to the end.
    pub fn adopt(&mut self, key: Key, offset: u64, bytes: &[u8]) {
        let blends = &self.blends;
        let volume = self.volumes.get_mut(&key).expect("a volume");
        for (i, part) in bytes.chunks(SECTOR).enumerate() {
            let sector = offset / SECTOR as u64 + i as u64;
            if volume.content.is_settled(sector) {
                continue;
            }
            let cell = volume.content.cell_mut(sector);
            if let Some(v) = cell.iter().find(|v| blends.matches(v.value, 0, part)) {
                *cell = settled(v.value);
            }
        }
    }

    /// Called after the last [`adopt`](Self::adopt): everything in flight is over.
    pub fn adopted(&mut self) {
        self.ranges.clear();
        let end = self.tick();
        self.recs.iter_mut().filter(|r| r.end == Time::MAX).for_each(|r| r.end = end);
        self.horizon = end;
        self.volumes.values_mut().for_each(|v| v.content.settle(|_| {}));
    }
}

fn is_durable(rec: &Rec, flushed: Time) -> bool {
    rec.ok && (rec.durable || rec.end < flushed)
}

/// Drops versions that neither a read nor a crash can return.
fn prune(cell: &mut Cell, recs: &[Rec], flushed: Time, horizon: Time) {
    let over = |v: &Version| {
        let rec = &recs[v.rec as usize];
        is_durable(rec, flushed) && rec.end < horizon
    };
    if cell.len() > 1 {
        let last = cell.iter().filter(|v| over(v)).map(|v| recs[v.rec as usize].start).max();
        cell.retain(|v| last.is_none_or(|last| recs[v.rec as usize].end >= last));
    }
    if cell.len() == 1 && over(&cell[0]) {
        cell[0].rec = SETTLED;
    }
}

/// Yields the sectors of a byte range, each with the part of it that is covered.
pub fn sectors(offset: u64, len: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let s = SECTOR as u64;
    let end = offset + len;
    (offset / s..end.div_ceil(s)).map(move |i| {
        let (from, to) = (offset.max(i * s), end.min((i + 1) * s));
        (i, (from - i * s) as usize..(to - i * s) as usize)
    })
}

impl Model {
    /// Returns the expected listing of the pool.
    pub fn listing(&self) -> Listing {
        self.volumes.iter().map(|(&key, v)| (self.name(key), v.listed())).collect()
    }

    /// Whether the page from this sector on certainly has exclusive space: all of it was written, none of it
    /// was zeroed or is uncertain.
    pub fn is_mapped(&self, key: Key, sector: u64) -> bool {
        let Some(volume) = self.volumes.get(&key) else {
            return false;
        };
        (sector..sector + SECTORS_PER_PAGE).all(|s| {
            let only = volume.content.cell(s).filter(|cell| cell.len() == 1);
            only.is_some_and(|cell| cell[0].value != Value::ZERO && self.recs[cell[0].rec as usize].ok)
        })
    }

    /// Returns the volumes with data that a crash now could change.
    pub fn unsettled(&self) -> BTreeSet<Key> {
        self.volumes.iter().filter(|(_, v)| !v.content.unsettled().is_empty()).map(|(&k, _)| k).collect()
    }
}

#[cfg(test)]
mod tests;
