//! Who writes one thing behind the other: for them more is kept ahead at once.

/// Streams that are remembered.
const STREAMS: usize = 16;
/// How far a write may be from where a stream was expected to go on, in bytes: several requests of
/// one writer are under way at once, and not always in order.
const NEAR: u64 = 1 << 20;
/// What is kept ahead of a stream at first, in bytes.
const FIRST: u64 = 256 << 10;

#[derive(Clone, Copy)]
struct Stream {
    end: u64,
    hits: u32,
    ahead: u64,
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
                let goes_on = end > old.end;
                Stream { end: end.max(old.end), hits: old.hits + u32::from(goes_on), ahead: old.ahead }
            }
            None => Stream { end, hits: 0, ahead: 0 },
        };
        self.0.insert(0, stream);
        self.0.truncate(STREAMS);
    }

    /// How much is to be kept behind the write noted last, now that something has to be copied: more
    /// each time, at most `limit`.
    pub fn ahead(&mut self, limit: u64) -> u64 {
        match self.0.first_mut() {
            Some(stream) if stream.hits > 0 => {
                stream.ahead = (stream.ahead * 4).max(FIRST).min(limit);
                stream.ahead
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_gets_more_ahead_each_time_up_to_the_limit() {
        let mut streams = Streams::default();
        let mut ahead = Vec::new();
        for i in 0..5 {
            streams.note(i * 4096, 4096);
            ahead.push(streams.ahead(3 << 20));
        }
        assert_eq!(ahead, [0, 256 << 10, 1 << 20, 3 << 20, 3 << 20]);
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
