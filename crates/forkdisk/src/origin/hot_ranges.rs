//! Ranges that will probably be written soon, judged by small writes: pieces that are rewritten again and
//! again (a file system's superblock, a database's control file), and the space ahead of a log that continues
//! at its end (a journal). Every new snapshot needs copies of them sooner or later, and each would cost a
//! commit that a write waits for; so they are copied along with the first copy for a snapshot.

use std::collections::VecDeque;
use std::ops::Range;

use crate::catalog::ExceptionView;

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
