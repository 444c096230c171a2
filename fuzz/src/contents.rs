//! What a disk may hold while requests overlap in time.

use std::ops::Range;

/// The bytes that are certain, and changes that were asked for since and may have happened.
pub struct Contents {
    bytes: Vec<u8>,
    pending: Vec<Change>,
    /// Where it is being found out what is there, and what was found.
    watched: Range<usize>,
    found: Vec<u8>,
}

struct Change {
    range: Range<usize>,
    /// `None`: zeroes.
    data: Option<Vec<u8>>,
}

impl Change {
    fn byte(&self, at: usize) -> Option<u8> {
        let inside = self.range.contains(&at);
        inside.then(|| self.data.as_ref().map_or(0, |data| data[at - self.range.start]))
    }
}

impl Contents {
    pub fn zeroes(size: usize) -> Contents {
        Contents { bytes: vec![0; size], pending: Vec::new(), watched: 0..0, found: Vec::new() }
    }

    /// From now on this may have happened. `None`: zeroes.
    pub fn change(&mut self, at: u64, len: u64, data: Option<Vec<u8>>) {
        if len > 0 {
            self.pending.push(Change { range: at as usize..(at + len) as usize, data });
        }
    }

    /// A read from `at` found `data`; it must be possible.
    pub fn check(&mut self, at: u64, data: &[u8]) {
        let range = at as usize..at as usize + data.len();
        if !self.watched.is_empty() {
            let at = range.start - self.watched.start;
            self.found[at..at + data.len()].copy_from_slice(data);
        }
        if self.bytes[range.clone()] == *data {
            return;
        }
        for (at, &found) in range.zip(data) {
            let possible = self.bytes[at] == found || self.pending.iter().any(|c| c.byte(at) == Some(found));
            assert!(possible, "byte {at} reads as {found}; {} was certain there", self.bytes[at]);
        }
    }

    /// Everything has been answered. The range that must be read before it is certain what it
    /// holds, because several changes met there.
    pub fn settle(&mut self) -> Option<Range<usize>> {
        let mut doubt: Option<Range<usize>> = None;
        for (i, a) in self.pending.iter().enumerate() {
            for b in &self.pending[..i] {
                let both = a.range.start.max(b.range.start)..a.range.end.min(b.range.end);
                if !both.is_empty() {
                    let hull = doubt.take().unwrap_or(both.clone());
                    doubt = Some(hull.start.min(both.start)..hull.end.max(both.end));
                }
            }
        }
        if doubt.is_none() {
            self.apply();
        }
        doubt
    }

    /// The next read is of this doubtful range.
    pub fn watch(&mut self, doubt: Range<usize>) {
        self.found = vec![0; doubt.len()];
        self.watched = doubt;
    }

    /// What was found there is certain now, and so is everything else.
    pub fn adopt(&mut self) {
        self.apply();
        let watched = std::mem::take(&mut self.watched);
        self.bytes[watched].copy_from_slice(&self.found);
    }

    fn apply(&mut self) {
        for change in self.pending.drain(..) {
            match change.data {
                Some(data) => self.bytes[change.range].copy_from_slice(&data),
                None => self.bytes[change.range].fill(0),
            }
        }
    }
}
