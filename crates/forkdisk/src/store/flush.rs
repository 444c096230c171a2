//! Flushing the pool's device.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};

use super::Store;

impl<D: Device> Store<D> {
    /// Makes everything durable that the device acknowledged before this call. A failure fails the pool. Must not be
    /// dropped before it ends.
    pub async fn flush_device(&self) -> Result<()> {
        let request = self.flushes.request();
        while !self.flushes.is_done(request) {
            self.check_failed()?;
            let Some(running) = self.flushes.begin() else {
                self.flushes.wait().await;
                continue;
            };
            let flushed = self.flush_now().await;
            running.end();
            flushed?;
        }
        self.check_failed()
    }

    async fn flush_now(&self) -> Result<()> {
        self.counters.flushes.add(1);
        let once = async || self.device.flush().await.map_err(|e| Error::io("flushing the pool's device", e));
        let mut outcome = once().await;
        if planted(Bug::FailedFlushRetried) && outcome.is_err() {
            outcome = once().await;
        }
        if let Err(error) = &outcome
            && !planted(Bug::FailedFlushForgotten)
        {
            self.fail(error);
            // The state of the data that records map is unknown from here on.
            super::end_volatile(self);
        }
        outcome
    }

    /// Refuses after a failure of the pool.
    pub fn check_failed(&self) -> Result<()> {
        self.failed.borrow().as_ref().map_or(Ok(()), |e| Err(e.clone()))
    }
}
