//! Which requests fail, and how: the errors E and the damaged reads of corruption C.

use std::io;
use std::ops::Range;

/// A kind of device request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Request {
    /// A read.
    Read,
    /// A write, with or without FUA.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A change of the device's length.
    SetLen,
}

/// The kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadDamage {
    /// EIO; a write may have landed in any of its sectors.
    Eio,
    /// ENOSPC; nothing landed.
    Enospc,
    /// EINTR; nothing landed.
    Eintr,
    /// The request ended early; a write landed in its first part.
    Short,
    /// A read that succeeds with one bit flipped.
    BitFlip,
    /// A read that succeeds with zeroes.
    Zeroed,
    /// A read that succeeds with the contents that were durable before the last changes.
    Stale,
    /// A read that succeeds with the bytes of another place.
    Misdirected,
}

impl ReadDamage {
    /// Returns the error that the request ends with; `None` for a read that only returns damage.
    pub fn error(self) -> Option<io::Error> {
        match self {
            ReadDamage::Eio => Some(io::Error::from_raw_os_error(5)),
            ReadDamage::Enospc => Some(io::Error::from_raw_os_error(28)),
            ReadDamage::Eintr => Some(io::Error::from_raw_os_error(4)),
            ReadDamage::Short => Some(io::Error::new(io::ErrorKind::UnexpectedEof, "the request ended early")),
            _ => None,
        }
    }
}

/// Which of the matching requests are hit, counted from 1 when the fault is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Only the n-th.
    Once(u64),
    /// The n-th and all that follow.
    From(u64),
    /// Every n-th.
    Every(u64),
}

/// One armed fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of request it hits.
    pub on: Request,
    /// Its effect.
    pub harm: ReadDamage,
    /// Which of the matching requests.
    pub when: When,
    /// Only requests that touch this range of bytes; `None`: all.
    pub within: Option<Range<u64>>,
}

/// The faults that are armed, with their counters.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    armed: Vec<(Fault, u64)>,
    hits: u64,
    flush_hits: u64,
}

impl Faults {
    /// Arms one more fault.
    pub fn arm(&mut self, fault: Fault) {
        self.armed.push((fault, 0));
    }

    /// Disarms all; the counts stay.
    pub fn clear(&mut self) {
        self.armed.clear();
    }

    /// Whether a fault with this effect is armed.
    pub fn is_armed(&self, harm: ReadDamage) -> bool {
        self.armed.iter().any(|(fault, _)| fault.harm == harm)
    }

    /// Returns the number of requests hit so far.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Notes that a request was hit by something else.
    pub fn note_hit(&mut self) {
        self.hits += 1;
    }

    /// Returns the number of flushes hit so far.
    pub fn flush_hits(&self) -> u64 {
        self.flush_hits
    }

    /// Counts a request and returns its fault, if any. The first fault that matches wins.
    pub fn strike(&mut self, on: Request, offset: u64, len: u64) -> Option<ReadDamage> {
        let mut harm = None;
        for (fault, seen) in &mut self.armed {
            let touches = fault.within.as_ref().is_none_or(|r| offset < r.end && r.start < offset + len.max(1));
            if fault.on != on || !touches {
                continue;
            }
            *seen += 1;
            let hit = match fault.when {
                When::Once(n) => *seen == n,
                When::From(n) => *seen >= n,
                When::Every(n) => n > 0 && seen.is_multiple_of(n),
            };
            if hit && harm.is_none() {
                harm = Some(fault.harm);
            }
        }
        if harm.is_some() {
            self.hits += 1;
            self.flush_hits += u64::from(on == Request::Flush);
        }
        harm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(when: When) -> Vec<u64> {
        let mut faults = Faults::default();
        faults.arm(Fault { on: Request::Read, harm: ReadDamage::Eio, when, within: Some(100..200) });
        (1..=6)
            .filter(|_| {
                assert_eq!(faults.strike(Request::Write, 100, 8), None);
                assert_eq!(faults.strike(Request::Read, 200, 8), None);
                faults.strike(Request::Read, 96, 8).is_some()
            })
            .collect()
    }

    #[test]
    fn faults_hit_what_they_say() {
        assert_eq!(hits(When::Once(2)), [2]);
        assert_eq!(hits(When::From(4)), [4, 5, 6]);
        assert_eq!(hits(When::Every(3)), [3, 6]);
    }
}
