//! How far beyond a write its old contents are copied out in advance (copy-ahead): for writes already queued
//! behind it, and for sequential writers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Streams remembered.
const MAX_STREAMS: usize = 16;
/// Largest distance of a write from the expected position of its stream, in bytes: a writer may have several
/// requests under way that arrive out of order.
const STREAM_GAP_BYTES: u64 = 1 << 20;
/// Divisor of the bytes a stream has written: that much is copied ahead if its requests come one at a time.
/// Where several were queued at once, their end is known.
const UNANNOUNCED_PART: u64 = 2;

#[derive(Clone, Copy)]
struct Stream {
    end: u64,
    /// Bytes written contiguously.
    written: u64,
    /// Writes of the stream have queued behind one that was copying.
    queued: bool,
}

/// How far a write copies ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookahead {
    /// End of what is copied along with it.
    pub end: u64,
    /// Writes that begin before this offset queue behind it and are then served together.
    pub group_end: u64,
    /// No write is queued behind it although the stream had queued writes before: they may be on their way.
    pub alone: bool,
}

impl Stream {
    fn note(&mut self, offset: u64, end: u64) {
        if end > self.end {
            *self = Stream { end, written: self.written + (end - offset), ..*self };
        }
    }
}

/// The streams of one origin, most recent first, and the queued and announced writes.
#[derive(Default)]
pub struct Streams {
    all: Vec<Stream>,
    /// End of each, by start and number.
    waiting: BTreeMap<(u64, u64), u64>,
    next: u64,
}

/// A write that is queued or announced; dropping this removes it.
pub struct QueuedRange {
    streams: Rc<RefCell<Streams>>,
    key: (u64, u64),
}

impl Drop for QueuedRange {
    fn drop(&mut self) {
        self.streams.borrow_mut().waiting.remove(&self.key);
    }
}

impl Streams {
    /// Notes a write that is queued as long as the returned value lives.
    pub fn enter(this: &Rc<RefCell<Streams>>, offset: u64, end: u64) -> QueuedRange {
        this.borrow_mut().note(offset, end);
        Streams::announce(this, offset, end)
    }

    /// Notes a write that is announced as long as the returned value lives.
    pub fn announce(this: &Rc<RefCell<Streams>>, offset: u64, end: u64) -> QueuedRange {
        let mut streams = this.borrow_mut();
        let key = (offset, streams.next);
        streams.next += 1;
        streams.waiting.insert(key, end);
        QueuedRange { streams: this.clone(), key }
    }

    fn note(&mut self, offset: u64, end: u64) {
        let near = |s: &Stream| offset.abs_diff(s.end) <= STREAM_GAP_BYTES;
        let mut stream = match self.all.iter().position(near) {
            Some(at) => self.all.remove(at),
            None => Stream { end, written: 0, queued: false },
        };
        stream.note(offset, end);
        self.all.insert(0, stream);
        self.all.truncate(MAX_STREAMS);
    }

    /// How far the write from `offset` to `end` copies ahead, at most `limit` bytes: over queued and
    /// announced writes that follow without a gap, and by a share of what its stream has written, which
    /// bounds what is copied in vain at its end.
    pub fn lookahead(&mut self, offset: u64, end: u64, limit: u64) -> Lookahead {
        let asked = self.announced_end(offset, end, limit);
        let is_its = |s: &&mut Stream| asked.abs_diff(s.end) <= STREAM_GAP_BYTES;
        let Some(stream) = self.all.iter_mut().find(is_its) else {
            let end = asked.min(end + limit);
            return Lookahead { end, group_end: end, alone: false };
        };
        let alone = asked == end && stream.queued;
        stream.queued |= asked > end;
        let reach = if stream.queued || stream.written >= STREAM_GAP_BYTES { end + limit } else { end };
        let blind = if stream.queued { 0 } else { stream.written / UNANNOUNCED_PART };
        let end = asked.max(end + blind).min(end + limit);
        Lookahead { end, group_end: reach.max(end), alone }
    }

    /// Like [`announced_end`](Self::announced_end), after followers had time to queue: if there are some,
    /// they show where the stream ends.
    pub fn followers_end(&mut self, offset: u64, end: u64, limit: u64) -> u64 {
        let asked = self.announced_end(offset, end, limit);
        if asked > end
            && let Some(stream) = self.all.iter_mut().find(|s| asked.abs_diff(s.end) <= STREAM_GAP_BYTES)
        {
            stream.queued = true;
        }
        asked
    }

    /// End of the queued and announced writes that follow the write from `offset` to `end` without a gap and
    /// begin at most `limit` behind it.
    pub fn announced_end(&self, offset: u64, end: u64, limit: u64) -> u64 {
        let mut asked = end;
        for (&(start, _), &stop) in self.waiting.range((offset, 0)..) {
            if start > asked || asked >= end + limit {
                break;
            }
            asked = asked.max(stop);
        }
        asked
    }

    /// Start of the queued and announced writes that reach `offset` without a gap, at most `limit` before it.
    pub fn announced_start(&self, offset: u64, limit: u64) -> u64 {
        let mut begin = offset;
        for (&(start, _), &stop) in self.waiting.range(..(offset, 0)).rev() {
            if stop < begin || begin + limit <= offset {
                break;
            }
            begin = start;
        }
        begin.max(offset.saturating_sub(limit))
    }

    /// No write has queued behind the one that ends there: the writes of its stream come one at a time.
    pub fn no_follower(&mut self, end: u64) {
        if let Some(stream) = self.all.iter_mut().find(|s| end.abs_diff(s.end) <= STREAM_GAP_BYTES) {
            stream.queued = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1 << 10;

    #[test]
    fn a_stream_gets_as_much_ahead_as_it_has_written_up_to_the_limit() {
        let mut streams = Streams::default();
        let mut ahead = Vec::new();
        for i in 0..5 {
            streams.note(i << 16, (i + 1) << 16);
            ahead.push((streams.lookahead(i << 16, (i + 1) << 16, 120 * K).end - ((i + 1) << 16)) / K);
        }
        assert_eq!(ahead, [0, 32, 64, 96, 120]);
        streams.note(3 << 16, 4 << 16);
        assert_eq!(
            streams.lookahead(3 << 16, 4 << 16, 1 << 30).end / K,
            256 + 128,
            "what is written again counts once"
        );
    }

    #[test]
    fn random_writes_are_no_stream_and_do_not_end_one() {
        let mut streams = Streams::default();
        for i in 0..100u64 {
            streams.note(i * 4096, (i + 1) * 4096);
            let lookahead = streams.lookahead(i * 4096, (i + 1) * 4096, 64 * K);
            assert_eq!(lookahead.end - (i + 1) * 4096, (i * 4096 / 2).min(64 * K));
            let other = (7 + i * 977 % 1000) << 24;
            streams.note(other, other + 4096);
            assert_eq!(
                streams.lookahead(other, other + 4096, 1 << 20),
                Lookahead { end: other + 4096, group_end: other + 4096, alone: false }
            );
        }
    }

    #[test]
    fn those_that_wait_behind_are_kept_for_and_little_else() {
        let streams = Rc::new(RefCell::new(Streams::default()));
        let first = Streams::enter(&streams, 0, 64 * K);
        let others: Vec<_> = (1..8).map(|i| Streams::enter(&streams, i * 64 * K, (i + 1) * 64 * K)).collect();
        let apart = Streams::enter(&streams, 1 << 30, (1 << 30) + 4096);
        let lookahead = |offset, limit| {
            let lookahead = streams.borrow_mut().lookahead(offset, offset + 64 * K, limit);
            (lookahead.end / K, lookahead.alone)
        };
        assert_eq!((lookahead(0, 8 << 20), lookahead(0, 100 * K)), ((512, false), (164, false)));
        drop((others, apart));
        assert_eq!(streams.borrow().waiting.len(), 1);
        drop(first);
        assert!(streams.borrow().waiting.is_empty());
        // One more may be the first of several again, or they come one at a time from now on.
        let last = Streams::enter(&streams, 512 * K, 576 * K);
        assert_eq!(lookahead(512 * K, 8 << 20), (576, true));
        streams.borrow_mut().no_follower(576 * K);
        assert_eq!(lookahead(512 * K, 8 << 20), (576 + 256, false));
        drop(last);
    }

    #[test]
    fn a_stream_that_waits_begins_where_its_first_does() {
        let streams = Rc::new(RefCell::new(Streams::default()));
        let _apart = Streams::enter(&streams, 0, 64 * K);
        let first = Streams::enter(&streams, 128 * K, 192 * K);
        let _second = Streams::announce(&streams, 192 * K, 256 * K);
        let begins = |offset, limit| streams.borrow().announced_start(offset, limit) / K;
        assert_eq!((begins(256 * K, 8 << 20), begins(192 * K, 8 << 20), begins(128 * K, 8 << 20)), (128, 128, 128));
        assert_eq!((begins(256 * K, 0), begins(256 * K, 100 * K)), (256, 156));
        drop(first);
        assert_eq!(begins(256 * K, 8 << 20), 192);
    }

    #[test]
    fn those_who_come_behind_a_stream_wait_and_others_do_not() {
        let streams = Rc::new(RefCell::new(Streams::default()));
        let reach = |offset, end, limit| streams.borrow_mut().lookahead(offset, end, limit).group_end / K;
        let _first = Streams::enter(&streams, 0, 64 * K);
        assert_eq!(reach(0, 64 * K, 8 << 20), 64, "it may be the only one");
        let _second = Streams::enter(&streams, 64 * K, 128 * K);
        assert_eq!(reach(0, 64 * K, 8 << 20), 64 + 8192, "somebody comes");
        assert_eq!(reach(0, 64 * K, 0), 64);
        let lookahead = 1 << 30;
        drop(Streams::enter(&streams, lookahead, lookahead + STREAM_GAP_BYTES));
        let _long = Streams::enter(&streams, lookahead + STREAM_GAP_BYTES, lookahead + 2 * STREAM_GAP_BYTES);
        assert_eq!(
            reach(lookahead + STREAM_GAP_BYTES, lookahead + 2 * STREAM_GAP_BYTES, 8 << 20),
            (lookahead + 2 * STREAM_GAP_BYTES + (8 << 20)) / K,
            "one after the other"
        );
    }

    #[test]
    fn what_is_announced_is_kept_for_and_begins_no_stream() {
        let streams = Rc::new(RefCell::new(Streams::default()));
        let _first = Streams::enter(&streams, 0, 64 * K);
        let intent = Streams::announce(&streams, 64 * K, 192 * K);
        assert_eq!(streams.borrow_mut().lookahead(0, 64 * K, 8 << 20).end, 192 * K);
        let elsewhere = Streams::announce(&streams, 1 << 30, (1 << 30) + 64 * K);
        assert_eq!(streams.borrow().all.len(), 1);
        drop((intent, elsewhere));
        assert_eq!(streams.borrow().waiting.len(), 1);
    }
}
