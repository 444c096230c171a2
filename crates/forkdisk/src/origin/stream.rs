//! How far behind a write what it is about to overwrite is kept along with it: for those who wait behind it
//! already, and for who writes one thing behind the other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Streams that are remembered.
const MAX_STREAMS: usize = 16;
/// How far a write may be from where a stream was expected to go on, in bytes: several requests of
/// one writer are under way at once, and not always in order.
const STREAM_GAP_BYTES: u64 = 1 << 20;
/// What share of what it has written is kept blindly for a stream whose requests come one by one. Where several
/// have waited at once, those tell where it ends.
const UNANNOUNCED_PART: u64 = 2;

#[derive(Clone, Copy)]
struct Stream {
    end: u64,
    /// Bytes written one behind the other.
    written: u64,
    /// Others of it have waited behind one that was copying.
    queued: bool,
}

/// How far a write has to look ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookahead {
    /// Where what is kept along with it ends.
    pub end: u64,
    /// Who comes before that waits behind it, and is kept for with all others who do, at once.
    pub group_end: u64,
    /// Nobody waits behind it, although others of its stream did: they may be on their way.
    pub alone: bool,
}

impl Stream {
    fn note(&mut self, offset: u64, end: u64) {
        if end > self.end {
            *self = Stream { end, written: self.written + (end - offset), ..*self };
        }
    }
}

/// The streams of one origin, the one written last in front, and the writes that wait or are announced.
#[derive(Default)]
pub struct Streams {
    all: Vec<Stream>,
    /// Ends by beginning and number.
    waiting: BTreeMap<(u64, u64), u64>,
    next: u64,
}

/// A write that waits until it may go on, or of which it is known that it will be made.
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
    /// Notes a write, which waits as long as what is returned is there.
    pub fn enter(this: &Rc<RefCell<Streams>>, offset: u64, end: u64) -> QueuedRange {
        this.borrow_mut().note(offset, end);
        Streams::announce(this, offset, end)
    }

    /// A write will be made; until then what is returned is kept.
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

    /// Where what is kept along with the write from `offset` to `end` ends, at most `limit` bytes behind it: with
    /// those that wait or are announced without a gap behind it; and blindly a share of what its stream has written, so that what is
    /// kept for nothing when it ends is never more than that.
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

    /// As [`announced_end`](Self::announced_end), when they have had time to come: if they have, they tell where their stream ends.
    pub fn followers_end(&mut self, offset: u64, end: u64, limit: u64) -> u64 {
        let asked = self.announced_end(offset, end, limit);
        if asked > end
            && let Some(stream) = self.all.iter_mut().find(|s| asked.abs_diff(s.end) <= STREAM_GAP_BYTES)
        {
            stream.queued = true;
        }
        asked
    }

    /// Where those end that wait or are announced without a gap behind the write from `offset` to `end`. Who begins more
    /// than `limit` behind it is not among them.
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

    /// Where those begin, at most `limit` before `offset`, that wait or are announced without a gap up to there.
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

    /// Nobody has come to wait behind the write that ends there: its stream's writes come one by one.
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
        // One more behind them may be the first of several again, or they come one by one from now on.
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
