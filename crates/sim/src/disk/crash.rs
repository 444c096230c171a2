//! The contents of a simulated disk after a crash, by the number of a mask.

use std::hash::Hasher;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHasher};

use super::cache::{Cache, Change, Entry, Piece};
use super::host::SetAside;
use super::image::Image;
use super::masks::{self, Survivors};
use super::{Config, Volatile};
use crate::rng::mix;

/// The kind of crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Power is cut: only what was flushed and what the mask selects survives.
    Power,
    /// The process is killed: completed requests stay in the cache and may still be lost by a later power
    /// cut; the mask decides about the requests in flight.
    Kill,
}

/// A disk between two runs: what the next one finds.
#[derive(Clone)]
pub struct Medium {
    pub(super) config: Config,
    pub(super) cache: Cache,
    pub(super) set_aside: SetAside,
}

impl Medium {
    /// Creates a disk of `len` zero bytes.
    pub fn blank(config: Config, len: u64) -> Medium {
        Medium { cache: Cache::new(config.sector, Image::default(), len), config, set_aside: SetAside::default() }
    }

    /// Returns the contents of a disk at rest.
    pub fn image(&self) -> &Image {
        &self.cache.current
    }

    /// The same, for a test that damages it. Changes are durable.
    pub fn damage(&mut self, change: impl FnOnce(&mut Image)) {
        change(&mut self.cache.durable);
        self.cache.current = self.cache.durable.clone();
        self.cache.landed.clear();
        self.cache.poisoned.clear();
    }

    /// Sets its length to `len` bytes; data beyond is lost.
    pub fn truncate(&mut self, len: u64) {
        self.damage(|image| image.truncate(len));
        (self.cache.len, self.cache.durable_len) = (len, len);
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.cache.len
    }

    /// Whether it has length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A running disk at one instant, from which any number of crashes can be tried.
#[derive(Clone)]
pub struct Frozen {
    config: Config,
    cache: Cache,
    set_aside: SetAside,
    crash: Crash,
    units: Vec<Unit>,
    owner: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Unit {
    entry: usize,
    piece: Piece,
}

impl Frozen {
    pub(super) fn new(config: Config, cache: Cache, set_aside: SetAside, crash: Crash) -> Frozen {
        let mut frozen = Frozen { config, cache, set_aside, crash, units: Vec::new(), owner: Vec::new() };
        let mut units = Vec::new();
        for (entry, e) in frozen.entries().enumerate() {
            units.extend(e.units(config.sector).into_iter().map(|piece| Unit { entry, piece }));
        }
        frozen.owner = units.iter().map(|u| u.entry as u32).collect();
        frozen.units = units;
        frozen
    }

    /// Yields the entries that the mask decides about, oldest first.
    fn entries(&self) -> impl Iterator<Item = &Entry> {
        let landed: &[Entry] = if self.crash == Crash::Power { &self.cache.landed } else { &[] };
        self.cache.poisoned.iter().chain(landed).chain(&self.cache.flying)
    }

    /// Returns the number of pending sector versions.
    pub fn pending(&self) -> usize {
        self.units.len()
    }

    /// Returns the number of masks that the exploration rule enumerates here.
    pub fn masks(&self) -> u64 {
        masks::enumerated(self.pending())
    }

    fn survivors(&self, mask: u64) -> Survivors {
        masks::survivors(&self.owner, mask)
    }

    /// Describes how much of what is pending survives under `mask`.
    pub fn describe(&self, mask: u64) -> String {
        let what = if self.crash == Crash::Power { "pending" } else { "in flight" };
        format!("{} of {} sector versions {what} survive", self.survivors(mask).count(), self.pending())
    }

    /// Returns the disk after the crash under `mask`.
    pub fn crash(&self, mask: u64) -> Medium {
        let kept = self.survivors(mask);
        let entries: Vec<&Entry> = self.entries().collect();
        let mut cache = Cache::new(self.config.sector, self.cache.durable.clone(), self.cache.durable_len);
        let mut survivors: Vec<Vec<Piece>> = vec![Vec::new(); entries.len()];
        for (i, unit) in self.units.iter().enumerate() {
            if kept.has(i) {
                survivors[unit.entry].push(unit.piece);
            }
        }
        let poisoned = self.cache.poisoned.len();
        if self.crash == Crash::Kill {
            self.settle(&mut cache, &entries[..poisoned], &survivors[..poisoned], true);
            for entry in &self.cache.landed {
                cache.land(entry.clone(), self.config.cache == Volatile::No);
            }
            let durable = self.config.cache == Volatile::No;
            self.settle(&mut cache, &entries[poisoned..], &survivors[poisoned..], durable);
        } else {
            self.settle(&mut cache, &entries, &survivors, true);
            let len = cache.durable_len;
            cache.durable.truncate(len);
            cache.current = cache.durable.clone();
        }
        Medium { config: self.config, cache, set_aside: self.set_aside.clone() }
    }

    fn settle(&self, cache: &mut Cache, entries: &[&Entry], survivors: &[Vec<Piece>], durable: bool) {
        let power = self.crash == Crash::Power;
        for (entry, pieces) in entries.iter().zip(survivors) {
            if pieces.is_empty() {
                continue;
            }
            if power {
                // Directly into the image: nothing runs that could see the steps in between.
                pieces.iter().for_each(|&p| entry.apply_piece(&mut cache.durable, p));
                if let Change::Len(len) = entry.change {
                    (cache.len, cache.durable_len) = (len, len);
                }
            } else {
                let entry = Entry { pieces: pieces.iter().copied().collect(), ..(*entry).clone() };
                cache.land(entry, durable);
            }
        }
    }

    /// Returns a number that is the same for two masks (and two instants of one run) only if the disk is the
    /// same afterwards. Costs far less than creating the disk.
    pub fn fingerprint(&self, mask: u64) -> u64 {
        let kept = self.survivors(mask);
        let entries: Vec<&Entry> = self.entries().collect();
        let mut last: FxHashMap<u64, u64> = FxHashMap::default();
        let mut len = self.cache.durable_len;
        let mut bytes = [0u8; 4096];
        for (_, unit) in self.units.iter().enumerate().filter(|(i, _)| kept.has(*i)) {
            let entry = entries[unit.entry];
            if let Change::Len(new) = entry.change {
                len = new;
                continue;
            }
            let bytes = &mut bytes[..unit.piece.len];
            entry.bytes(unit.piece, bytes);
            for (i, sector) in bytes.chunks(512).enumerate() {
                let at = unit.piece.offset + 512 * i as u64;
                if self.cache.durable.holds(at, sector) {
                    last.remove(&at);
                } else {
                    last.insert(at, hash(sector));
                }
            }
        }
        let live = last.iter().filter(|&(&at, _)| at < len);
        let sum = live.fold(0u64, |sum, (&at, &h)| sum.wrapping_add(mix(&[at, h])));
        mix(&[self.cache.generation, len, sum])
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write(bytes);
    hasher.finish()
}

pub(super) fn copy(bytes: &[u8]) -> Rc<[u8]> {
    Rc::from(bytes)
}
