//! Target, format and rate limit of log lines.

use std::collections::HashMap;
use std::hash::Hash;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tracing::callsite::Identifier;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::dates::utc;
use crate::syslog::{Line, Lines};

/// Window in which lines of one kind are counted.
const WINDOW: Duration = Duration::from_secs(10);

/// Options of the log.
pub struct Logging {
    /// Least severe level that is written.
    pub level: LevelFilter,
    /// Write JSON objects instead of text.
    pub json: bool,
    /// Most lines of one kind within ten seconds; more are counted and left out.
    pub burst: Option<usize>,
}

impl Logging {
    /// Starts logging to stderr. A daemon without a log file later redirects the lines to the
    /// system's log when it goes to the background.
    pub fn begin(self) {
        let layer = tracing_subscriber::fmt::layer().with_writer(Lines).with_target(false).with_ansi(false);
        let limit = RateLimit { json: self.json, counts: Mutex::new(Counts::new(self.burst.unwrap_or(usize::MAX))) };
        let registry = tracing_subscriber::registry();
        match self.json {
            true => registry.with(layer.json().with_filter(limit).with_filter(self.level)).init(),
            false => registry.with(layer.with_filter(limit).with_filter(self.level)).init(),
        }
    }
}

/// Limits the lines of each kind (each place in the program) per window of time, counts those left
/// out, and logs their number.
struct RateLimit {
    json: bool,
    counts: Mutex<Counts<Identifier>>,
}

/// Numbers of lines of each kind in its current window of time.
struct Counts<K> {
    most: usize,
    seen: HashMap<K, (Instant, usize)>,
}

impl<K: Eq + Hash> Counts<K> {
    fn new(most: usize) -> Counts<K> {
        Counts { most, seen: HashMap::new() }
    }

    /// Counts a line. Returns whether it may be written, and how many lines before it were left out.
    fn count(&mut self, kind: K, now: Instant) -> (bool, usize) {
        let (since, lines) = self.seen.entry(kind).or_insert((now, 0));
        let mut left_out = 0;
        if now.duration_since(*since) >= WINDOW {
            left_out = lines.saturating_sub(self.most);
            (*since, *lines) = (now, 0);
        }
        *lines += 1;
        (*lines <= self.most, left_out)
    }
}

impl RateLimit {
    fn report(&self, left_out: usize) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let message = format!("{left_out} more lines like the next one were left out");
        let line = match self.json {
            true => {
                serde_json::json!({"timestamp": utc(now), "level": "WARN", "fields": {"message": message}}).to_string()
            }
            false => format!("{}  WARN {message}", utc(now)),
        };
        // A failure to write the log cannot be logged.
        let _ = Line::of(Level::WARN).write_all(format!("{line}\n").as_bytes());
    }
}

impl<S: Subscriber> Filter<S> for RateLimit {
    fn enabled(&self, _metadata: &Metadata<'_>, _context: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _context: &Context<'_, S>) -> bool {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (is_written, left_out) = counts.count(event.metadata().callsite(), Instant::now());
        drop(counts);
        if left_out > 0 {
            self.report(left_out);
        }
        is_written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_kind_is_cut_and_counted_and_leaves_other_kinds_alone() {
        let mut counts = Counts::new(20);
        let start = Instant::now();
        let written = (0..1000).filter(|_| counts.count("flood", start).0).count();
        assert_eq!(written, 20);
        assert_eq!(counts.count("other", start), (true, 0));
        assert_eq!(counts.count("flood", start + WINDOW), (true, 980));
        assert_eq!(counts.count("flood", start + WINDOW), (true, 0));
    }
}
