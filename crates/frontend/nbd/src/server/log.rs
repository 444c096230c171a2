//! Rate limit for warnings that clients can provoke.

use std::cell::Cell;
use std::fmt;
use std::time::{Duration, Instant};

/// Most warnings per [`WINDOW`].
const MAX_LOGGED_COUNT: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// Limits the warnings per window of time and counts the others.
#[derive(Default)]
pub(super) struct LogLimit {
    window: Cell<Option<Instant>>,
    seen: Cell<u32>,
}

impl LogLimit {
    pub(super) fn warn(&self, text: fmt::Arguments<'_>) {
        let (write, swallowed) = self.count(Instant::now());
        if swallowed > 0 {
            tracing::warn!("{swallowed} more warnings like the last ones were not written");
        }
        if write {
            tracing::warn!("{text}");
        } else {
            tracing::debug!("{text}");
        }
    }

    /// Counts a warning; returns whether it may be written, and how many were left out in the last window.
    fn count(&self, now: Instant) -> (bool, u32) {
        let fresh = self.window.get().is_none_or(|start| now.duration_since(start) >= WINDOW);
        let swallowed = if fresh { self.seen.get().saturating_sub(MAX_LOGGED_COUNT) } else { 0 };
        if fresh {
            self.window.set(Some(now));
            self.seen.set(0);
        }
        self.seen.set(self.seen.get().saturating_add(1));
        (self.seen.get() <= MAX_LOGGED_COUNT, swallowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_warnings_is_cut_and_counted() {
        let log = LogLimit::default();
        let start = Instant::now();
        let written = (0..1000).filter(|_| log.count(start).0).count();
        assert_eq!(written, MAX_LOGGED_COUNT as usize);
        assert_eq!(log.count(start + WINDOW), (true, 1000 - MAX_LOGGED_COUNT));
        assert_eq!(log.count(start + WINDOW), (true, 0));
    }
}
