//! What will probably be written soon, and is copied out ahead: streams and hot ranges.
//!
//! How far beyond a write its old contents are copied out in advance (copy-ahead): for writes already queued
//! behind it, and for sequential writers.
//!
//! Ranges that will probably be written soon, judged by small writes: pieces that are rewritten again and
//! again (a file system's superblock, a database's control file), and the space ahead of a log that continues
//! at its end (a journal). Every new snapshot needs copies of them sooner or later, and each would cost a
//! commit that a write waits for; so they are copied along with the first copy for a snapshot.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use crate::catalog::ExceptionView;

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
    /// Bytes written in order.
    written: u64,
    /// Bytes that were left out on the way, and not written since.
    skipped: u64,
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
    fn begin(end: u64) -> Stream {
        Stream { end, written: 0, skipped: 0, queued: false }
    }

    /// Notes a write near its end. If more was left out than was written, these are writes at random places, and the
    /// stream begins anew.
    fn note(&mut self, offset: u64, end: u64) {
        if end <= self.end {
            self.skipped = self.skipped.saturating_sub(end - offset);
            return;
        }
        let skipped = self.skipped + offset.saturating_sub(self.end);
        *self = Stream { end, written: self.written + (end - offset), skipped, ..*self };
        if self.skipped > self.written {
            *self = Stream::begin(end);
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
            None => Stream::begin(end),
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

/// Pieces remembered.
const MAX_PIECES: usize = 64;
/// Shortest piece, in bytes; chunks may be larger.
const PIECE_BYTES: u64 = 64 << 10;
/// Most bytes of pieces copied along, but at least two pieces.
const MAX_HOT_BYTES: u64 = 256 << 10;
/// Largest write that counts; larger ones belong to streams.
const MAX_SMALL_WRITE_BYTES: u64 = 64 << 10;
/// Ends of small writes remembered.
const MAX_LOG_ENDS: usize = 8;
/// Continuations that make a log.
const MIN_LOG_WRITES: u32 = 2;
/// Logs that are copied ahead, and bytes ahead of each.
const MAX_LOGS: usize = 2;
const LOG_AHEAD_BYTES: u64 = 64 << 10;

/// End of a small write, and how often writes have continued there.
struct LogEnd {
    at: u64,
    times: u32,
}

/// The pieces and logs, most recent first.
#[derive(Default)]
pub struct HotRanges {
    /// Pieces written once, most recent first. All but the first have been followed by a write elsewhere.
    written_once: VecDeque<u64>,
    /// Pieces rewritten after a write elsewhere.
    rewritten: VecDeque<u64>,
    last: Option<u64>,
    ends: VecDeque<LogEnd>,
    /// Views for which they were copied.
    copied_for: Vec<ExceptionView>,
}

impl HotRanges {
    /// Notes a write.
    pub fn note(&mut self, offset: u64, len: u64, chunk: u64) {
        if len > MAX_SMALL_WRITE_BYTES {
            return;
        }
        self.note_end(offset, len);
        self.note_piece(offset / chunk.max(PIECE_BYTES));
    }

    fn note_end(&mut self, offset: u64, len: u64) {
        let known = self.ends.iter().position(|end| end.at == offset).and_then(|i| self.ends.remove(i));
        self.ends.push_front(LogEnd { at: offset + len, times: known.map_or(0, |end| end.times + 1) });
        // Scattered writes do not displace a log.
        if self.ends.len() > MAX_LOG_ENDS {
            let last = self.ends.iter().rposition(|end| end.times < MIN_LOG_WRITES).unwrap_or(MAX_LOG_ENDS);
            self.ends.remove(last);
        }
    }

    fn note_piece(&mut self, piece: u64) {
        if self.last.replace(piece) == Some(piece) {
            return;
        }
        let taken = |list: &mut VecDeque<u64>| list.iter().position(|&p| p == piece).and_then(|at| list.remove(at));
        let list = match taken(&mut self.rewritten).or_else(|| taken(&mut self.written_once)) {
            Some(_) => &mut self.rewritten,
            None => &mut self.written_once,
        };
        list.push_front(piece);
        self.written_once.truncate(MAX_PIECES);
        self.rewritten.truncate((MAX_HOT_BYTES / PIECE_BYTES) as usize);
    }

    /// Ranges of a device of `size` bytes to be copied along with the first copy for `views`: whole chunks,
    /// in ascending order; nothing for the same views again.
    pub fn due(&mut self, views: &[ExceptionView], chunk: u64, size: u64) -> Vec<Range<u64>> {
        if self.copied_for == views {
            return Vec::new();
        }
        self.copied_for = views.to_vec();
        let piece = chunk.max(PIECE_BYTES);
        let pieces =
            self.rewritten.iter().take((MAX_HOT_BYTES / piece).max(2) as usize).map(|p| p * piece..(p + 1) * piece);
        let logs = self.ends.iter().filter(|end| end.times >= MIN_LOG_WRITES).take(MAX_LOGS);
        let ahead = logs.map(|end| end.at / chunk * chunk..(end.at + LOG_AHEAD_BYTES).next_multiple_of(chunk));
        let mut all: Vec<Range<u64>> = pieces.chain(ahead).map(|r| r.start..r.end.min(size)).collect();
        all.retain(|range| !range.is_empty());
        all.sort_unstable_by_key(|range| range.start);
        all.dedup_by(|next, last| {
            let is_one = next.start <= last.end;
            if is_one {
                last.end = last.end.max(next.end);
            }
            is_one
        });
        all
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
    fn random_writes_in_a_small_space_are_no_stream() {
        let mut streams = Streams::default();
        for i in 0..500u64 {
            let at = i * 7919 % 2048 * 4096;
            streams.note(at, at + 4096);
            let end = at + 4096;
            let alone = Lookahead { end, group_end: end, alone: false };
            assert_eq!(streams.lookahead(at, end, 8 << 20), alone, "{i}");
        }
        // One that begins among them is found as if they were not there.
        let ahead = (0..4).map(|i| {
            let (at, end) = (i << 16, (i + 1) << 16);
            streams.note(at, end);
            (streams.lookahead(at, end, 1 << 20).end - end) / K
        });
        assert_eq!(ahead.collect::<Vec<_>>(), [0, 0, 32, 64]);
    }

    #[test]
    fn a_stream_that_arrives_out_of_order_is_one() {
        let mut streams = Streams::default();
        for i in [0, 1, 3, 2, 5, 4, 7, 6] {
            streams.note(i << 16, (i + 1) << 16);
        }
        assert!(streams.lookahead(7 << 16, 8 << 16, 1 << 20).end > 8 << 16);
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

#[cfg(test)]
mod hot_ranges_tests {
    use super::*;
    use crate::types::VolumeId;

    const K: u64 = 1 << 10;
    const CHUNK: u64 = 64 * K;
    const SIZE: u64 = 1 << 30;

    fn note(hot_ranges: &mut HotRanges, pieces: impl IntoIterator<Item = u64>) {
        pieces.into_iter().for_each(|piece| hot_ranges.note(piece * PIECE_BYTES, 512, CHUNK));
    }

    fn due(hot_ranges: &mut HotRanges, snapshot: u64, chunk: u64) -> Vec<(u64, u64)> {
        let due = hot_ranges.due(&[ExceptionView::chained(VolumeId(snapshot))], chunk, SIZE);
        due.iter().map(|range| (range.start / K, (range.end - range.start) / K)).collect()
    }

    #[test]
    fn what_is_written_again_after_something_else_is_due_once_for_each_snapshot() {
        let mut hot_ranges = HotRanges::default();
        note(&mut hot_ranges, [9, 9, 9, 1, 9, 5, 1]);
        assert_eq!(due(&mut hot_ranges, 1, CHUNK), [(64, 64), (576, 64)]);
        assert!(due(&mut hot_ranges, 1, CHUNK).is_empty());
        note(&mut hot_ranges, [5]);
        assert_eq!(due(&mut hot_ranges, 2, 4 * K), [(64, 64), (320, 64), (576, 64)], "pieces, not chunks of 4 KiB");
    }

    #[test]
    fn a_stream_is_not_written_again() {
        let mut hot_ranges = HotRanges::default();
        for at in (0..64 * CHUNK).step_by(128 << 10) {
            hot_ranges.note(at, 2 * CHUNK, CHUNK);
        }
        for chunk in [1, 2, 1, 2] {
            hot_ranges.note(chunk * CHUNK, MAX_SMALL_WRITE_BYTES + 1, CHUNK);
        }
        assert!(due(&mut hot_ranges, 1, CHUNK).is_empty());
    }

    #[test]
    fn it_is_bounded_in_pieces_and_bytes() {
        let mut hot_ranges = HotRanges::default();
        note(&mut hot_ranges, (0..100).chain(0..100));
        assert!(due(&mut hot_ranges, 1, CHUNK).is_empty(), "more than are remembered");
        note(&mut hot_ranges, (0..40).chain(0..40));
        assert_eq!(due(&mut hot_ranges, 2, CHUNK), [(36 * 64, 256)]);
        let mut hot_ranges = HotRanges::default();
        let large = 1 << 20;
        for i in [0, 8, 20, 0, 8, 20] {
            hot_ranges.note(i * large, 512, large);
        }
        assert_eq!(due(&mut hot_ranges, 1, large), [(8192, 1024), (20480, 1024)], "two of them however large");
    }

    #[test]
    fn ahead_of_a_log_it_is_kept_where_it_will_go_on() {
        let mut hot_ranges = HotRanges::default();
        let log = |hot_ranges: &mut HotRanges, start: u64, writes: u64| {
            (0..writes).for_each(|i| hot_ranges.note(start + i * 8192, 8192, 4 * K));
            // Writes elsewhere.
            (0..100).for_each(|i| hot_ranges.note((500 + i * 3) << 20, 512, 4 * K));
        };
        log(&mut hot_ranges, 1 << 20, 2);
        assert!(due(&mut hot_ranges, 1, 4 * K).is_empty(), "it has gone on once");
        log(&mut hot_ranges, 2 << 20, 3);
        assert_eq!(due(&mut hot_ranges, 2, 4 * K), [(2048 + 24, 64)]);
        assert_eq!(due(&mut hot_ranges, 3, CHUNK), [(2048, 128)], "whole chunks");
        log(&mut hot_ranges, SIZE - 24 * K, 3);
        assert_eq!(due(&mut hot_ranges, 4, 4 * K), [(2048 + 24, 64)], "nothing lies behind the end");
    }
}
