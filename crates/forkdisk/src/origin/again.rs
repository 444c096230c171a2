//! Chunks that are written again and again: a file system's journal and superblock, a database's log. What they hold has
//! to be kept for every new snapshot sooner or later, and each of them would cost a commit that somebody waits for; so
//! they are kept along with the first copy that a snapshot needs.

use std::collections::VecDeque;

use super::View;

/// Chunks of which it is remembered that they have been written.
const SEEN: usize = 64;
/// Chunks that are kept along, and bytes of them at most.
const CHUNKS: usize = 16;
const BYTES: u64 = 256 << 10;
/// The longest write that counts: a stream's are longer.
const SMALL: u64 = 64 << 10;

/// Which those are, the one written last in front.
#[derive(Default)]
pub struct Again {
    /// Written once; another chunk was written since then, but for the first.
    seen: VecDeque<u64>,
    /// Written again after another chunk was.
    again: VecDeque<u64>,
    last: Option<u64>,
    /// For whom they have been kept.
    done_for: Vec<View>,
}

impl Again {
    /// Notes a write of `len` bytes that begins in `chunk`.
    pub fn note(&mut self, chunk: u64, len: u64) {
        if len > SMALL || self.last.replace(chunk) == Some(chunk) {
            return;
        }
        let taken = |list: &mut VecDeque<u64>| list.iter().position(|&c| c == chunk).and_then(|at| list.remove(at));
        let list = match taken(&mut self.again).or_else(|| taken(&mut self.seen)) {
            Some(_) => &mut self.again,
            None => &mut self.seen,
        };
        list.push_front(chunk);
        self.seen.truncate(SEEN);
        self.again.truncate(CHUNKS);
    }

    /// Those that are to be kept along with the first copy for `views`, in order; none the next time.
    pub fn due(&mut self, views: &[View], chunk_size: u64) -> Vec<u64> {
        if self.done_for == views {
            return Vec::new();
        }
        self.done_for = views.to_vec();
        let mut chunks: Vec<u64> = self.again.iter().copied().take((BYTES / chunk_size) as usize).collect();
        chunks.sort_unstable();
        chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::VolumeId;

    const CHUNK: u64 = 64 << 10;

    fn due(again: &mut Again, snapshot: u64, chunk_size: u64) -> Vec<u64> {
        again.due(&[View::chained(VolumeId(snapshot))], chunk_size)
    }

    #[test]
    fn what_is_written_again_after_something_else_is_due_once_for_each_snapshot() {
        let mut again = Again::default();
        for chunk in [9, 9, 9, 1, 9, 5, 1] {
            again.note(chunk, 4096);
        }
        assert_eq!(due(&mut again, 1, CHUNK), [1, 9]);
        assert!(due(&mut again, 1, CHUNK).is_empty());
        again.note(5, 4096);
        assert_eq!(due(&mut again, 2, CHUNK), [1, 5, 9]);
    }

    #[test]
    fn a_stream_is_not_written_again() {
        let mut again = Again::default();
        for chunk in 0..1000 {
            (0..16).for_each(|_| again.note(chunk, 4096));
        }
        for chunk in [1, 2, 1, 2] {
            again.note(chunk, SMALL + 1);
        }
        assert!(due(&mut again, 1, CHUNK).is_empty());
    }

    #[test]
    fn it_is_bounded_in_chunks_and_bytes() {
        let mut again = Again::default();
        for chunk in (0..100).chain(0..100) {
            again.note(chunk, 512);
        }
        assert!(due(&mut again, 1, 4096).is_empty(), "more than are remembered");
        for chunk in (0..40).chain(0..40) {
            again.note(chunk, 512);
        }
        assert_eq!(due(&mut again, 2, 4096), (24..40).collect::<Vec<_>>());
        assert_eq!(due(&mut again, 3, CHUNK), [36, 37, 38, 39]);
        assert!(due(&mut again, 4, 512 << 10).is_empty());
    }
}
