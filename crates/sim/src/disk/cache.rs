//! Contents of a disk that a crash may revert: the volatile cache and the requests in flight.
//!
//! Every sector is independent: after a crash it holds its last durable value or any value written to it
//! since. A version becomes durable by a flush that was submitted after its request had completed, or with
//! its own request under FUA. Versions whose flush failed (*poisoned*) no later flush can save; only newer
//! durable contents of the same place end them.

use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use super::image::{Fill, Image, PAGE, fill_bytes};

/// What a request changes.
#[derive(Clone)]
pub(super) enum Change {
    /// These bytes are written.
    Write(Rc<[u8]>),
    /// The range is filled.
    Discard(Fill),
    /// The device gets this length.
    Len(u64),
}

/// One contiguous pending part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub offset: u64,
    pub len: usize,
    /// Its offset in the request's bytes.
    pub at: usize,
}

/// A request whose effect is not durable.
#[derive(Clone)]
pub(super) struct Entry {
    /// Number of the submission; of the landing once it has completed.
    pub order: u64,
    pub change: Change,
    pub pieces: SmallVec<[Piece; 1]>,
}

impl Entry {
    pub fn new(order: u64, change: Change, offset: u64, len: usize) -> Entry {
        Entry { order, change, pieces: smallvec![Piece { offset, len, at: 0 }] }
    }

    /// Applies one part to an image.
    pub fn apply_piece(&self, image: &mut Image, piece: Piece) {
        match &self.change {
            Change::Write(bytes) => image.write(piece.offset, &bytes[piece.at..piece.at + piece.len]),
            Change::Discard(fill) => image.fill(piece.offset, piece.len, *fill),
            Change::Len(_) => {}
        }
    }

    pub fn apply(&self, image: &mut Image) {
        for &piece in &self.pieces {
            self.apply_piece(image, piece);
        }
    }

    /// Returns in `out`, which has its length, the bytes that one part writes.
    pub fn bytes(&self, piece: Piece, out: &mut [u8]) {
        match &self.change {
            Change::Write(bytes) => out.copy_from_slice(&bytes[piece.at..piece.at + piece.len]),
            Change::Discard(fill) => fill_bytes(*fill, piece.offset, out),
            Change::Len(_) => {}
        }
    }

    pub fn touches(&self, offset: u64, len: usize) -> bool {
        self.pieces.iter().any(|p| p.offset < offset + len as u64 && offset < p.offset + p.len as u64)
    }

    /// Removes a range from what is pending.
    pub fn cut(&mut self, offset: u64, len: usize) {
        if matches!(self.change, Change::Len(_)) || !self.touches(offset, len) {
            return;
        }
        let end = offset + len as u64;
        let mut kept = SmallVec::new();
        for p in &self.pieces {
            let p_end = p.offset + p.len as u64;
            if p.offset < offset {
                kept.push(Piece { len: (p_end.min(offset) - p.offset) as usize, ..*p });
            }
            if p_end > end {
                let from = p.offset.max(end);
                kept.push(Piece { offset: from, len: (p_end - from) as usize, at: p.at + (from - p.offset) as usize });
            }
        }
        self.pieces = kept;
    }

    /// Keeps only the sectors for which `keep` returns true, called in ascending order.
    pub fn thin(&mut self, sector: usize, mut keep: impl FnMut() -> bool) {
        let mut kept: SmallVec<[Piece; 1]> = SmallVec::new();
        for unit in self.units(sector) {
            if !keep() {
                continue;
            }
            match kept.last_mut() {
                Some(last) if last.offset + last.len as u64 == unit.offset => last.len += unit.len,
                _ => kept.push(unit),
            }
        }
        self.pieces = kept;
    }

    /// Returns the parts that a crash keeps or loses individually: sectors of a write, pages of a discard.
    pub fn units(&self, sector: usize) -> Vec<Piece> {
        let step = match self.change {
            Change::Write(_) => sector,
            Change::Discard(_) => sector.max(PAGE),
            Change::Len(_) => return self.pieces.to_vec(),
        };
        let mut units = Vec::new();
        for p in &self.pieces {
            for done in (0..p.len).step_by(step) {
                units.push(Piece { offset: p.offset + done as u64, len: step.min(p.len - done), at: p.at + done });
            }
        }
        units
    }
}

/// Durable contents, and everything on top of them.
#[derive(Clone)]
pub(super) struct Cache {
    pub sector: usize,
    pub durable: Image,
    pub durable_len: u64,
    /// The result of a read: durable contents with every landed request applied.
    pub current: Image,
    pub len: u64,
    /// Completed, in the order of completion.
    pub landed: Vec<Entry>,
    /// Submitted and not completed, in the order of submission.
    pub flying: Vec<Entry>,
    /// Completed, and their flush has failed.
    pub poisoned: Vec<Entry>,
    /// Incremented whenever the durable contents change.
    pub generation: u64,
    /// Incremented whenever the set of possible contents after a crash may have changed.
    pub version: u64,
    order: u64,
}

impl Cache {
    pub fn new(sector: usize, image: Image, len: u64) -> Cache {
        Cache {
            sector,
            current: image.clone(),
            durable: image,
            durable_len: len,
            len,
            landed: Vec::new(),
            flying: Vec::new(),
            poisoned: Vec::new(),
            generation: 0,
            version: 0,
            order: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.order += 1;
        self.version += 1;
        self.order
    }

    /// Starts a request; the returned number identifies it until it lands.
    pub fn submit(&mut self, change: Change, offset: u64, len: usize) -> u64 {
        let order = self.tick();
        self.flying.push(Entry::new(order, change, offset, len));
        order
    }

    /// Removes a request from those in flight.
    pub fn take(&mut self, order: u64) -> Entry {
        let at = self.flying.iter().position(|e| e.order == order).expect("a request in flight");
        self.version += 1;
        self.flying.remove(at)
    }

    /// Completes a request: reads see it from now on.
    pub fn land(&mut self, mut entry: Entry, durable: bool) {
        entry.order = self.tick();
        entry.apply(&mut self.current);
        if let Change::Len(len) = entry.change {
            self.len = len;
            self.current.truncate(len);
        }
        if durable {
            for piece in &entry.pieces {
                for other in self.landed.iter_mut() {
                    other.cut(piece.offset, piece.len);
                }
            }
            self.harden(&entry);
        } else if !entry.pieces.is_empty() {
            self.landed.push(entry);
        }
    }

    fn harden(&mut self, entry: &Entry) {
        self.generation += 1;
        entry.apply(&mut self.durable);
        if let Change::Len(len) = entry.change {
            self.durable_len = len;
            self.durable.truncate(len);
        }
        for piece in &entry.pieces {
            for other in self.poisoned.iter_mut() {
                other.cut(piece.offset, piece.len);
            }
        }
    }

    /// Starts a flush; returns what it will cover.
    pub fn flush_point(&self) -> u64 {
        self.order
    }

    /// Completes a flush: what had landed at `point` is durable.
    pub fn flushed(&mut self, point: u64) {
        let covered = self.landed.partition_point(|e| e.order <= point);
        let covered: Vec<Entry> = self.landed.drain(..covered).collect();
        for entry in &covered {
            self.harden(entry);
        }
        self.version += 1;
    }

    /// Fails a flush: what it would have covered may be lost, and later flushes do not help.
    pub fn flush_failed(&mut self, point: u64) {
        let covered = self.landed.partition_point(|e| e.order <= point);
        self.poisoned.extend(self.landed.drain(..covered));
        self.version += 1;
    }

    /// Copies the result of a read that ends now. Where a write is in flight, `either` decides for each
    /// sector whether it is visible.
    pub fn read(&self, offset: u64, out: &mut [u8], mut either: impl FnMut() -> bool) {
        self.current.read(offset, out);
        let len = out.len();
        let end = offset + len as u64;
        for entry in self.flying.iter().filter(|e| e.touches(offset, len)) {
            for unit in entry.units(self.sector) {
                let (from, to) = (unit.offset.max(offset), (unit.offset + unit.len as u64).min(end));
                if from < to && either() {
                    let part =
                        Piece { offset: from, len: (to - from) as usize, at: unit.at + (from - unit.offset) as usize };
                    entry.bytes(part, &mut out[(from - offset) as usize..(to - offset) as usize]);
                }
            }
        }
    }
}
