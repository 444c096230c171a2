//! Flushes of one device: one at a time, each shared by all callers that asked before it began.
//!
//! After a failed flush it is unknown which of the data before it is durable, and a later flush may succeed
//! without writing that data again. If two flushes ran at once, the second could be trusted before the
//! failure of the first is known. So no flush begins before the last one has ended, and none begins after one
//! has failed.

use std::cell::Cell;

use super::Event;

/// State of the running flush and of the callers that wait for it.
#[derive(Default)]
pub struct Flushes {
    running: Cell<bool>,
    asked: Cell<u64>,
    done: Cell<u64>,
    changed: Event,
}

/// A running flush. It must not be dropped before it has ended: other callers wait for its end.
#[must_use]
pub struct RunningFlush<'a> {
    flushes: &'a Flushes,
    /// The last request that it covers.
    covered: u64,
}

impl Flushes {
    /// Registers a request for a flush that begins after this call; returns its number.
    pub fn request(&self) -> u64 {
        self.asked.set(self.asked.get() + 1);
        self.asked.get()
    }

    /// Whether a flush that covers this request has ended.
    pub fn is_done(&self, request: u64) -> bool {
        self.done.get() >= request
    }

    /// Begins a flush that covers all requests up to now, unless one runs. The caller has found out that none has
    /// failed.
    pub fn begin(&self) -> Option<RunningFlush<'_>> {
        let covered = self.asked.get();
        (!self.running.replace(true)).then_some(RunningFlush { flushes: self, covered })
    }

    /// Waits until the running flush ends.
    pub async fn wait(&self) {
        self.changed.wait().await;
    }
}

impl RunningFlush<'_> {
    /// The flush has ended, successfully or not; a failure has been noted.
    pub fn end(self) {
        self.flushes.running.set(false);
        self.flushes.done.set(self.covered);
        self.flushes.changed.notify();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::error::{Error, ErrorKind, Result};

    /// A flush of a device that ends when the test releases it.
    #[derive(Default)]
    struct Slow {
        begun: Cell<u32>,
        let_go: Cell<u32>,
        failed: Cell<bool>,
    }

    impl Slow {
        async fn flush(&self) -> Result<()> {
            self.begun.set(self.begun.get() + 1);
            let mine = self.begun.get();
            poll_fn(|_| if self.let_go.get() >= mine { Poll::Ready(()) } else { Poll::Pending }).await;
            self.alive()
        }

        /// A request as the users of [`Flushes`] make it.
        async fn join(&self, flushes: &Flushes) -> Result<()> {
            let request = flushes.request();
            while !flushes.is_done(request) {
                self.alive()?;
                let Some(running) = flushes.begin() else {
                    flushes.wait().await;
                    continue;
                };
                let outcome = self.flush().await;
                running.end();
                outcome?;
            }
            self.alive()
        }

        fn alive(&self) -> Result<()> {
            if self.failed.get() { Err(Error::new(ErrorKind::Failed, "broken")) } else { Ok(()) }
        }
    }

    #[test]
    fn who_asks_during_a_flush_gets_the_next_and_shares_it() {
        let (flushes, device) = (Flushes::default(), Slow::default());
        let mut cx = Context::from_waker(Waker::noop());
        let join = || device.join(&flushes);
        let (mut a, mut b, mut c) = (pin!(join()), pin!(join()), pin!(join()));
        assert!(a.as_mut().poll(&mut cx).is_pending());
        assert!(b.as_mut().poll(&mut cx).is_pending() && c.as_mut().poll(&mut cx).is_pending());
        assert_eq!(device.begun.get(), 1);
        device.let_go.set(1);
        assert!(a.as_mut().poll(&mut cx).is_ready());
        assert!(b.as_mut().poll(&mut cx).is_pending() && c.as_mut().poll(&mut cx).is_pending());
        assert_eq!(device.begun.get(), 2, "what began before they asked is not enough");
        device.let_go.set(2);
        assert!(b.as_mut().poll(&mut cx).is_ready() && c.as_mut().poll(&mut cx).is_ready());
        assert_eq!(device.begun.get(), 2, "one is enough for both");
    }

    #[test]
    fn none_begins_after_one_has_failed() {
        let (flushes, device) = (Flushes::default(), Slow::default());
        let mut cx = Context::from_waker(Waker::noop());
        let join = || device.join(&flushes);
        let (mut a, mut b) = (pin!(join()), pin!(join()));
        assert!(a.as_mut().poll(&mut cx).is_pending() && b.as_mut().poll(&mut cx).is_pending());
        device.failed.set(true);
        device.let_go.set(9);
        assert!(matches!(a.as_mut().poll(&mut cx), Poll::Ready(Err(_))));
        assert!(matches!(b.as_mut().poll(&mut cx), Poll::Ready(Err(_))));
        assert_eq!(device.begun.get(), 1);
    }
}
