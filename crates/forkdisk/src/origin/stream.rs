//! Who writes one thing behind the other: for them more is kept ahead at once.

/// Streams that are remembered.
const STREAMS: usize = 16;
/// How far a write may be from where a stream was expected to go on, in bytes: several requests of
/// one writer are under way at once, and not always in order.
const NEAR: u64 = 1 << 20;

#[derive(Clone, Copy)]
struct Stream {
    end: u64,
    /// Bytes written one behind the other.
    written: u64,
}

/// The streams of one origin, the one written last in front.
#[derive(Default)]
pub struct Streams(Vec<Stream>);

impl Streams {
    /// Notes a write.
    pub fn note(&mut self, offset: u64, len: u64) {
        let end = offset + len;
        let near = |s: &Stream| offset.abs_diff(s.end) <= NEAR;
        let stream = match self.0.iter().position(near) {
            Some(at) => {
                let old = self.0.remove(at);
                let more = if end > old.end { len } else { 0 };
                Stream { end: end.max(old.end), written: old.written + more }
            }
            None => Stream { end, written: 0 },
        };
        self.0.insert(0, stream);
        self.0.truncate(STREAMS);
    }

    /// How much is to be kept behind the write noted last, now that something has to be copied: as much as its
    /// stream has written one behind the other, at most `limit`. So what is kept for nothing when it ends is
    /// never more than what it wrote.
    pub fn ahead(&self, limit: u64) -> u64 {
        self.0.first().map_or(0, |stream| stream.written.min(limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_gets_as_much_ahead_as_it_has_written_up_to_the_limit() {
        let mut streams = Streams::default();
        let mut ahead = Vec::new();
        for i in 0..5 {
            streams.note(i << 16, 1 << 16);
            ahead.push(streams.ahead(200 << 10) >> 10);
        }
        assert_eq!(ahead, [0, 64, 128, 192, 200]);
        streams.note(3 << 16, 1 << 16);
        assert_eq!(streams.ahead(1 << 30) >> 10, 256, "what is written again counts once");
    }

    #[test]
    fn random_writes_are_no_stream_and_do_not_end_one() {
        let mut streams = Streams::default();
        for i in 0..100u64 {
            streams.note(i * 4096, 4096);
            streams.note((7 + i * 977 % 1000) << 24, 4096);
            assert_eq!(streams.ahead(1 << 20), 0);
            if i % 10 == 9 {
                streams.note((i + 1) * 4096, 0);
                assert!(streams.ahead(1 << 20) > 0 || i < 10, "{i}");
            }
        }
    }
}
